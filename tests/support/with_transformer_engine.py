# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that have Transformer Engine: a stand-in for it in plain torch, under the names and with the marks of the real.

Megatron-Core looks for Transformer Engine when it is imported. The ranks of other tests have imported it without, so
these have processes of their own, which import both anew and are used again like the others.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.support.gloo_ranks import run_ranks

STAND_IN = Path(__file__).resolve().parent / "transformer_engine_stand_in"

# What knows Megatron-Core, directly or through others.
_PACKAGES = ("megatron", "nemo_rl_moe.models.megatron", "nemo_rl_moe.models.policy", "tests.support")
_KEPT = (
    "tests.support",
    "tests.support.gloo_ranks",
    "tests.support.nccl_rules",
    "tests.support.rank_state",
    "tests.support.rank_imports",
    __name__,
)


class _CudaIsTheHost(TorchFunctionMode):
    """Makes tensors on the host that are asked for on a GPU, which Megatron-Core names with fused permutation and with
    context parallelism."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if kwargs.get("device") is not None and str(kwargs["device"]).startswith("cuda"):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return function(*args, **kwargs)


def run_ranks_with_engine(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 280.0
) -> list[Any]:
    """`run_ranks` on ranks where Transformer Engine is installed and used as beside a GPU."""
    return run_ranks(function, world_size, *arguments, timeout_s=timeout_s, prepared_by=__name__)


def prepare() -> list[str]:
    """Return what a rank's process does first: imports all anew, with Transformer Engine to be found.

    Returns:
        Where it is to be found from now on.
    """
    for name in list(sys.modules):
        if name not in _KEPT and any(name == package or name.startswith(f"{package}.") for package in _PACKAGES):
            del sys.modules[name]
    sys.path.insert(0, str(STAND_IN))
    importlib.invalidate_caches()
    # A process on CPUs hides the package, but for one that is imported before.
    sys.modules.pop("transformer_engine", None)
    importlib.import_module("transformer_engine")
    from nemo_rl_moe.models.megatron.model import transformer_config

    # The configuration is that of a GPU, in every field; how Megatron-Core runs on a host stays corrected.
    transformer_config.cpu_backend = SimpleNamespace(ACTIVE=False)
    importlib.reload(importlib.import_module("tests.support.rank_imports"))
    _CudaIsTheHost().__enter__()
    return [str(STAND_IN)]
