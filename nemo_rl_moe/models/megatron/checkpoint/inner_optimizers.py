# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizers inside Megatron-Core's: torch's or Transformer Engine's Adam, or a `HybridDeviceOptimizer`.

`HybridDeviceOptimizer` has several inner optimizers, for updates on the host. It copies their parameters and state
after each step. It passes its own parameters and state to them only after a full state has been loaded.
"""

import inspect
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the parts of a chained optimizer, without stubs that have no parameters."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def inner_optimizers(part: Any) -> list[Any]:
    """Return the optimizers that update the parameters of a part."""
    outer = part.optimizer
    return list(outer.sub_optimizers) if isinstance(outer, HybridDeviceOptimizer) else [outer]


def device_optimizers(part: Any) -> list[Any]:
    """Return the optimizers of a part with tensors on the device."""
    outer = part.optimizer
    if not isinstance(outer, HybridDeviceOptimizer):
        return [outer]
    return [] if outer.gpu_optimizer is None else [outer.gpu_optimizer]


def counts_for_each_parameter(inner: Any) -> bool:
    """Return True for torch's Adam, which counts updates by parameter. Other optimizers count them by group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def make_state(part: Any) -> None:
    """Create the state of a part that has not taken a step. Existing state stays."""
    is_hybrid = isinstance(part.optimizer, HybridDeviceOptimizer)
    for inner in inner_optimizers(part):
        if hasattr(inner, "initialize_state"):
            _make_state_of_fused_adam(inner)
        elif is_hybrid:
            _make_moments(inner)
        else:
            part.init_state_fn(inner, part.config)
        _count_from_zero(inner)
    if is_hybrid:
        part.optimizer._sync_sub_optimizers_state_to_hdo()


def _make_state_of_fused_adam(inner: Any) -> None:
    """Create the state of Transformer Engine's Adam, whose newer releases need an argument that Megatron-Core omits."""
    wants_remainders = len(inspect.signature(inner.initialize_state).parameters) > 1
    for group in inner.param_groups:
        for parameter in group["params"]:
            if not inner.state[parameter]:
                inner.initialize_state(parameter, *([False] if wants_remainders else []))


def _make_moments(inner: Any) -> None:
    for group in inner.param_groups:
        for parameter in group["params"]:
            state = inner.state[parameter]
            state.update({kind: torch.zeros_like(parameter.data) for kind in MOMENTS if kind not in state})


def masters_from_weights(optimizer: MegatronOptimizer) -> None:
    """Set float32 masters to the model's weights, including the masters inside Transformer Engine's optimizer."""
    optimizer.reload_model_params()
    for part in optimizer_parts(optimizer):
        if not hasattr(part.optimizer, "set_scaled_state"):
            continue
        for parameter, state in part.optimizer.state.items():
            if "master_param" in state:
                part.optimizer.set_scaled_state(parameter, "master_param", parameter.detach().float())


def _count_from_zero(inner: Any) -> None:
    """Create torch's counts of updates, which Adam does not create if it finds moments."""
    if counts_for_each_parameter(inner):
        for parameter, state in inner.state.items():
            if "step" not in state:
                state["step"] = step_count(parameter, 0)


def step_count(parameter: Tensor, num_updates: int) -> Tensor:
    """Return the number of updates as torch's Adam stores it: on the parameter's GPU, for the fused kernel."""
    device = parameter.device if parameter.is_cuda else torch.device("cpu")
    return torch.tensor(float(num_updates), dtype=torch.float32, device=device)
