# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear attention by gated delta nets (Qwen3-Next, Qwen3.5), with Megatron-Core's parameter names.

Megatron-Core's layer needs flash-linear-attention, does not support generation, and up to 0.18 no packed sequences.
The layer of this module uses the kernel of flash-linear-attention on a GPU if it is installed, and torch otherwise.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_rl_moe.models.megatron.layers.gated_delta_rule import (
    chunked_gated_delta_rule,
    l2_normalize,
    recurrent_gated_delta_rule,
)
from nemo_rl_moe.models.megatron.layers.recurrence import segments_of
from nemo_rl_moe.models.megatron.layers.recurrent_mixer import (
    RecurrentMixer,
    RecurrentMixerSubmodules,
    RecurrentState,
    in_float32,
)
from nemo_rl_moe.models.megatron.layers.recurrent_sizes import DeltaNetSizes


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Return flash-linear-attention's kernel of the gated delta rule, or None if the package is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    found: Callable[..., tuple[Tensor, Tensor | None]] = chunk_gated_delta_rule
    return found


class GatedNorm(nn.Module):
    """RMSNorm of each head, with its output scaled by a gate.

    Every tensor-parallel rank has all weights and normalises different heads, so the weights' gradients must be summed
    over the ranks. Megatron-Core would not sum them.
    """

    def __init__(self, weight: Tensor, eps: float, *, is_shared: bool):
        super().__init__()
        self.weight = in_float32(nn.Parameter(weight))
        self.eps, self._is_shared = eps, is_shared

    def forward(self, heads: Float[Tensor, "*batch dim"], gate: Float[Tensor, "*batch dim"]) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight) if self._is_shared else self.weight
        values = heads.float()
        normalized = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return ((weight * normalized.to(heads.dtype)) * F.silu(gate.float())).to(heads.dtype)


class GatedDeltaNet(RecurrentMixer):
    """Linear attention by the gated delta rule: a causal layer that replaces self-attention."""

    sizes: DeltaNetSizes
    whole_vectors: ClassVar[tuple[str, ...]] = ("out_norm.weight",)

    def __init__(
        self,
        config: TransformerConfig,
        submodules: RecurrentMixerSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **_others: Any,
    ):
        sizes = DeltaNetSizes.of(config, config.tensor_model_parallel_size), DeltaNetSizes.of(config, 1)
        super().__init__(config, submodules, layer_number, sizes, pg_collection)

    def add_vectors(self) -> None:
        # Published checkpoints have the norm in float32, as the decays.
        weight, is_shared = torch.ones(self.sizes.value_dim, **self.precise), self.config.tensor_model_parallel_size > 1
        self.out_norm = GatedNorm(weight, self.config.layernorm_epsilon, is_shared=is_shared)

    def mix(
        self,
        mixed: Float[Tensor, "tokens rows projected"],
        *,
        boundaries: Int[Tensor, " sequences_plus_1"] | None = None,
        state: RecurrentState | None = None,
        padding: Bool[Tensor, "tokens rows 1"] | None = None,
    ) -> Float[Tensor, "tokens rows values"]:
        sizes = self.sizes
        convolved, gate, rate, decay = mixed.transpose(0, 1).split(
            [sum(sizes.convolved), sizes.values, sizes.value_heads, sizes.value_heads], dim=-1
        )
        segments = None if boundaries is None else segments_of(boundaries, mixed.shape[0])
        query, key, value = self.convolve(convolved, segments, state, padding).split(sizes.convolved, dim=-1)
        repeats = sizes.value_heads // sizes.key_heads
        query, key = (
            l2_normalize(each.unflatten(-1, (sizes.key_heads, sizes.key_dim)).float()).repeat_interleave(repeats, dim=2)
            for each in (query, key)
        )
        value = value.unflatten(-1, (sizes.value_heads, sizes.value_dim))
        log_decay = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias)
        heads = self._rule((query, key, value, log_decay, rate.sigmoid()), boundaries, segments, state)
        outputs = self.out_norm(heads, gate.unflatten(-1, (sizes.value_heads, sizes.value_dim)))
        return outputs.flatten(2).transpose(0, 1).contiguous()

    def _rule(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        boundaries: Tensor | None,
        segments: Tensor | None,
        state: RecurrentState | None,
    ) -> Float[Tensor, "rows tokens heads value_dim"]:
        query, key, value, log_decay, rate = tensors
        memory = None if state is None else state.memory
        if state is not None and query.shape[1] == 1:
            heads, state.memory = recurrent_gated_delta_rule(*tensors, state=memory)
            return heads.to(value.dtype)
        kernel = _kernel() if value.is_cuda else None
        if kernel is None:
            heads, memory = chunked_gated_delta_rule(*tensors, segments=segments, state=memory)
        else:
            heads, memory = kernel(
                query.to(value.dtype),
                key.to(value.dtype),
                value,
                g=log_decay,
                beta=rate,
                initial_state=memory,
                output_final_state=state is not None,
                cu_seqlens=None if boundaries is None else boundaries.long(),
            )
        if state is not None:
            state.memory = memory
        return heads.to(value.dtype)
