# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Temporary values in a model's adapters, to check that an engine uses them.

An adapter begins as zero, so an engine without it would compute the same at first. Values other than zero reveal a
missing adapter before the run depends on it.
"""

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nemo_rl_moe.models.megatron.lora.adapter import adapters_in
from nemo_rl_moe.models.megatron.lora.transfer import factor_parts

_SHARE_OF_WEIGHTS = 0.5
"""Root mean square of an adapter's output relative to its inputs, approximately."""


class AdapterProbe:
    """Temporary replacement of the values in a model's adapters, to check that an engine uses the adapters."""

    def __init__(self, chunks: Sequence[nn.Module]):
        self._chunks = chunks
        self._kept: list[Tensor] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Give every factor random values, the same in every layout, and keep the original values on the host."""
        assert not self._kept
        scale = max(adapter.scale for adapter in adapters_in(self._chunks))
        for part in factor_parts(self._chunks):
            self._kept.append(part.local.detach().to("cpu", copy=True))
            rows, columns = part.shape
            deviation = columns**-0.5
            if ".lora_B." in part.name:
                deviation = _SHARE_OF_WEIGHTS / (scale * math.sqrt(columns))
            generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
            part.local.copy_(part.slice_of(torch.randn(rows, columns, generator=generator) * deviation))

    @torch.no_grad()
    def end(self) -> None:
        """Restore the original values bit by bit."""
        for part, kept in zip(factor_parts(self._chunks), self._kept, strict=True):
            part.local.copy_(kept)
        self._kept = []
