# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Recorder of routes for a worker process of vLLM on a GPU, imported before a model is loaded (`worker_extension_cls`).

The recorder must exist when CUDA graphs are captured, which happens before an engine takes any call.
"""

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nemo_rl_moe.generation.vllm.routes import RouteRecorder


class WorkerExtension:
    """An empty extension, by which vLLM imports this module. The import installs the recorder of routed experts."""


def _with_recorder(load_model: Any) -> Any:
    def load(runner: Any, *args: Any, **kwargs: Any) -> None:
        load_model(runner, *args, **kwargs)
        runner.route_recorder = RouteRecorder(runner, reports=runner.parallel_config.rank == 0)

    return load


GPUModelRunner.load_model = _with_recorder(GPUModelRunner.load_model)
