# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the layers share: how parameters are made and marked, and the extra state that a checkpoint is offered."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class TransformerEngineBaseModule(nn.Module):
    """A module with an extra state, which without 8-bit formats is an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing."""

    def get_extra_state(self) -> Tensor:
        """Return the empty bytes."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Nothing, where there are no 8-bit formats."""
        if state is not None and state.numel():
            raise NotImplementedError("no 8-bit formats without a GPU")


def mark_as_cut(parameter: nn.Parameter, dimension: int) -> None:
    """Set the attributes that Megatron-Core knows a tensor-parallel parameter by."""
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = dimension  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]


def new_parameter(
    *shape: int,
    dtype: torch.dtype,
    device: Any,
    init_method: Callable[[Tensor], Any],
    get_rng_state_tracker: Callable[[], Any] | None,
    rng_tracker_name: str | None,
) -> nn.Parameter:
    """Return a parameter with its first values, drawn from the random state that the caller names."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    names = () if rng_tracker_name is None else (rng_tracker_name,)
    tracked = contextlib.nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork(*names)
    with tracked, torch.no_grad():
        init_method(parameter)
    return parameter


def get_workspace() -> None:
    """Memory for a product, which torch takes itself."""


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a tensor in the place of a gradient that was added up elsewhere."""
    return torch.zeros(shape, dtype=dtype)
