# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of vLLM and Triton for the fake card. Each function takes the module that its docstring names."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.fake_card import host_kernels
from tests.fake_card.vllm_kernels import TRITON


def enter_operations(module: ModuleType) -> None:
    """Let operations that vLLM registers from now on (`vllm.utils.torch_utils`) run with the card's kernels inside."""
    register = module.direct_register_custom_op

    def registered(op_name: str, op_func: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        host_kernels.PARTS[f"vllm::{op_name}"] = op_func
        register(op_name, op_func, *args, **kwargs)

    module.direct_register_custom_op = registered  # type: ignore[attr-defined]


def enter_triton(module: ModuleType) -> None:
    """Let the host compute vLLM's kernels of Triton (`triton.runtime.jit`), which are not compiled."""
    launch = module.JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not kernel.fn.__module__.startswith("vllm."):
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        given, options = tree_map_only(Tensor, host_kernels.host_alias, (args, options))
        if kernel.fn.__name__ == "kernel":
            options["num_programs"] = grid[0]
        return host_kernels.kernel_named(TRITON, kernel.fn.__qualname__)(*given, **options)

    module.JITFunction.run = run


def enter_sampling(module: ModuleType) -> None:
    """Let vLLM (`vllm.v1.sample.ops.topk_topp_sampler`) cut distributions by torch's operations."""
    module.HAS_TRITON = False  # type: ignore[attr-defined]


def enter_settings(module: ModuleType) -> None:
    """Let engines (`vllm.engine.arg_utils`) run without what the host does not compute.

    These are CUDA graphs, whose replay runs nothing on the host, and vLLM's own all-reduce, which NCCL replaces.
    """
    create = module.EngineArgs.create_engine_config

    def create_eager(arguments: Any, *args: Any, **kwargs: Any) -> Any:
        arguments.enforce_eager = arguments.disable_custom_all_reduce = True
        return create(arguments, *args, **kwargs)

    module.EngineArgs.create_engine_config = create_eager
