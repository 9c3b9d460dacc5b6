# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gives every Python process that sees a fake card its kernels, once it has imported torch, and then Triton or vLLM.

Python imports this module when it starts, if its folder is on PYTHONPATH. So processes have kernels that a test has not
started itself.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _enter_threads_of_actors(module: ModuleType) -> None:
    """Let each thread in which Ray (`ray._private.function_manager`) calls a method of an actor have the kernels."""
    manager = module.FunctionActorManager
    make = manager._make_actor_method_executor

    def make_in_thread(self: Any, method_name: str, method: Any) -> Any:
        execute = make(self, method_name, method)

        @functools.wraps(execute)
        def execute_in_thread(*args: Any, **kwargs: Any) -> Any:
            if "tests.fake_card.host_kernels" in sys.modules:
                sys.modules["tests.fake_card.host_kernels"].enter_thread()
            return execute(*args, **kwargs)

        return execute_in_thread

    manager._make_actor_method_executor = make_in_thread


def _plant(module: ModuleType) -> None:
    """Let engines (`nemo_rl_moe.generation.vllm.worker`) never sleep, if FAKE_CARD_FAULT says so."""
    if os.environ.get("FAKE_CARD_FAULT") == "engines never sleep":
        module.VllmWorker.sleep = lambda worker: None  # type: ignore[attr-defined]


def _call(ours: str, function: str) -> Callable[[ModuleType], None]:
    """Return a call of a function of ours, which is imported by it."""
    return lambda module: getattr(importlib.import_module(ours), function)(module)


_OF_VLLM = "tests.fake_card.vllm_hooks"
# Module -> what is called with it, once it is imported.
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch": _call("tests.fake_card.host_kernels", "enter"),
    "nemo_rl_moe.generation.vllm.worker": _plant,
    "ray._private.function_manager": _enter_threads_of_actors,
    "triton.runtime.jit": _call(_OF_VLLM, "enter_triton"),
    "vllm.engine.arg_utils": _call(_OF_VLLM, "enter_settings"),
    "vllm.utils.torch_utils": _call(_OF_VLLM, "enter_operations"),
    "vllm.v1.sample.ops.topk_topp_sampler": _call(_OF_VLLM, "enter_sampling"),
}


class _WithKernels(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_enter(module: ModuleType) -> None:
            enter = _AFTER.pop(fullname)
            execute(module)
            enter(module)

        spec.loader.exec_module = execute_and_enter  # type: ignore[method-assign]
        return spec


if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.meta_path.insert(0, _WithKernels())
