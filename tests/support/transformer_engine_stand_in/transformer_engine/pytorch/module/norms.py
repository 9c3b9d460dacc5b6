# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms, computed in float32."""

from typing import Any

import torch
from torch import Tensor, nn


def normalize(
    kind: str, inputs: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered_gamma: bool
) -> Tensor:
    """`kind` is LayerNorm or RMSNorm; inputs `[..., hidden]`, in whose number format the result is."""
    scale = weight.float() + 1.0 if zero_centered_gamma else weight.float()
    wide = inputs.float()
    if kind == "LayerNorm":
        wide = wide - wide.mean(-1, keepdim=True)
    found = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * scale
    return (found if bias is None else found + bias.float()).to(inputs.dtype)


class RMSNorm(nn.Module):
    """A norm of its own. It offers a checkpoint an extra state, empty, as all fusible operations do."""

    kind = "RMSNorm"

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = None,
    ):
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("one of normalized_shape and hidden_size, its old name")
        width = normalized_shape if hidden_size is None else hidden_size
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(fill(width, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.register_parameter("bias", None)

    def get_extra_state(self) -> Tensor:
        """Return the empty bytes."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Nothing."""

    def forward(self, inputs: Tensor) -> Tensor:
        """`[..., hidden]`."""
        return normalize(self.kind, inputs, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    """With a mean taken off and a bias."""

    kind = "LayerNorm"

    def __init__(self, *args: Any, sequence_parallel: bool = False, **kwargs: Any):
        super().__init__(*args, sequence_parallel=sequence_parallel, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))
        self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
