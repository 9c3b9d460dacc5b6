# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 layers (Nemotron-3), with Megatron-Core's parameter names.

Megatron-Core's layer cannot be built without mamba_ssm, whose kernels are for GPUs. The layer of this module uses the
kernel of mamba_ssm on a GPU if it is installed, and torch otherwise.

Time steps have no limits, as in Megatron-Core's and vLLM's layers. transformers up to 5.24 raises those of training and
prompts to `time_step_min`, but not those of generated tokens.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.models.megatron.layers.recurrence import segments_of
from nemo_rl_moe.models.megatron.layers.recurrent_mixer import (
    RecurrentMixer,
    RecurrentMixerSubmodules,
    RecurrentState,
    cut_parameter,
    in_float32,
)
from nemo_rl_moe.models.megatron.layers.recurrent_sizes import MambaSizes
from nemo_rl_moe.models.megatron.layers.state_space import chunked_state_space, recurrent_state_space

_KERNEL_CHUNK = 128
"""Tokens of a chunk of the kernel, as in Megatron-Core and in published configurations."""


def _kernel_for(values: Tensor) -> Callable[..., Any] | None:
    """Return the kernel for values on this device, or None if torch computes them."""
    return _kernel() if values.is_cuda else None


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """Return mamba_ssm's kernel of the chunked state space, or None if the package is not installed."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return None
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    found: Callable[..., Any] = mamba_chunk_scan_combined
    return found


class GroupNorm(nn.Module):
    """RMSNorm of each group of channels, after the channels are scaled by the SiLU of their gates.

    Args:
        weight: Factors of this rank's channels.
        size: Number of channels of a group.
    """

    def __init__(self, weight: Tensor, size: int, eps: float):
        super().__init__()
        self.weight = cut_parameter(weight)
        self.size, self.eps = size, eps

    def forward(
        self, values: Float[Tensor, "*batch channels"], gate: Float[Tensor, "*batch channels"]
    ) -> Float[Tensor, "*batch channels"]:
        scaled = (values.float() * F.silu(gate.float())).unflatten(-1, (-1, self.size))
        normalized = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normalized.flatten(-2)).to(gate.dtype)


class Mamba2Mixer(RecurrentMixer):
    """Selective state space with a scalar decay for each head (Dao and Gu 2024, arXiv:2405.21060)."""

    sizes: MambaSizes
    sharded_vectors: ClassVar[tuple[str, ...]] = ("D", "norm.weight")

    def __init__(
        self,
        config: TransformerConfig,
        submodules: RecurrentMixerSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **_others: Any,
    ):
        sizes = MambaSizes.of(config, config.tensor_model_parallel_size), MambaSizes.of(config, 1)
        super().__init__(config, submodules, layer_number, sizes, pg_collection, has_conv_bias=True)

    def add_vectors(self) -> None:
        # In float32, as in Megatron-Core.
        self.D = in_float32(cut_parameter(torch.ones(self.sizes.heads, **self.precise)))
        weight = torch.ones(self.sizes.values, **self.options)
        self.norm = GroupNorm(weight, self.sizes.values // self.sizes.groups, self.config.layernorm_epsilon)

    def mix(
        self,
        mixed: Float[Tensor, "tokens rows projected"],
        *,
        boundaries: Int[Tensor, " sequences_plus_1"] | None = None,
        state: RecurrentState | None = None,
        padding: Bool[Tensor, "tokens rows 1"] | None = None,
    ) -> Float[Tensor, "tokens rows values"]:
        sizes = self.sizes
        gate, convolved, steps = mixed.transpose(0, 1).split([sizes.values, sum(sizes.convolved), sizes.heads], dim=-1)
        segments = None if boundaries is None else segments_of(boundaries, mixed.shape[0])
        value, into, out_of = self.convolve(convolved, segments, state, padding).split(sizes.convolved, dim=-1)
        value = value.unflatten(-1, (sizes.heads, sizes.head_dim))
        into, out_of = (each.unflatten(-1, (sizes.groups, sizes.state_dim)) for each in (into, out_of))
        heads = self._scan((value, steps, into, out_of), segments, state)
        return self.norm(heads.flatten(2), gate).transpose(0, 1).contiguous()

    def _scan(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        segments: Tensor | None,
        state: RecurrentState | None,
    ) -> Float[Tensor, "rows tokens heads head_dim"]:
        value, steps, into, out_of = tensors
        decay = -self.A_log.float().exp()
        is_one_token = state is not None and value.shape[1] == 1
        kernel = None if is_one_token else _kernel_for(value)
        memory = None if state is None else state.memory
        if kernel is not None:
            found = kernel(
                value,
                steps,
                decay,
                into,
                out_of,
                _KERNEL_CHUNK,
                D=self.D,
                dt_bias=self.dt_bias.float(),
                dt_softplus=True,
                initial_states=memory,
                seq_idx=None if segments is None else segments.int().unsqueeze(0),
                return_final_states=state is not None,
            )
            if state is None:
                return found
            heads, state.memory = found
            return heads
        steps = F.softplus(steps.float() + self.dt_bias)
        values = value.float()
        scaled, log_decay = values * steps.unsqueeze(-1), steps * decay
        if is_one_token:
            heads, memory = recurrent_state_space(scaled, log_decay, into, out_of, state=memory)
        else:
            heads, memory = chunked_state_space(scaled, log_decay, into, out_of, segments=segments, state=memory)
        if state is not None:
            state.memory = memory
        return heads + self.D[:, None] * values
