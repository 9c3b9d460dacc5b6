# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V2) for DeepSeek's checkpoints, also without Transformer Engine."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import SDPAttention
from nemo_rl_moe.models.megatron.training.prefix_tree import TreeSeqParams

LATENT_NORM_EPS = 1e-6
"""Epsilon of the latents' norms. `modeling_deepseek_v3.py` ignores `rms_norm_eps` for them."""

# Norms, or Transformer Engine's linear layers with a norm inside.
_MODULES_WITH_LATENT_NORM = ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj")
_DOWN_PROJECTIONS = ("linear_q_down_proj", "linear_kv_down_proj")

if not isinstance(multi_latent_attention.TELinear, type):
    # Without Transformer Engine, Megatron-Core 0.16.1 passes a mock of its class to `isinstance`, which fails.
    multi_latent_attention.HAVE_TE = False


class DuplicatedLinear(torch.nn.Module):
    """Linear layer without bias, replicated on every tensor-parallel rank."""

    def __init__(self, weight: Tensor, *, sequence_parallel: bool):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        return F.linear(inputs, self.weight), None


class LatentSelfAttention(MLASelfAttention):
    """`MLASelfAttention` with three differences.

    - The latents' norms have the epsilon of the checkpoints.
    - Down-projections to the latents are replicated on every tensor-parallel rank, as with Transformer Engine. With
      Megatron-Core's column split, the gradient of the keys' rotary part, which all heads share, would only include
      the heads of the own rank.
    - Rotary positions follow the prefix tree of a microbatch that has one.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        modules = dict(self.named_children())
        for name in _MODULES_WITH_LATENT_NORM:
            if hasattr(modules.get(name), "eps"):
                modules[name].eps = LATENT_NORM_EPS
        for name in _DOWN_PROJECTIONS:
            linear = modules.get(name)
            if isinstance(linear, ColumnParallelLinear):
                weight = linear.weight.new_empty(linear.output_size, linear.input_size)
                setattr(self, name, DuplicatedLinear(weight, sequence_parallel=config.sequence_parallel))
        self._position_ids: Tensor | None = None
        self.rotary_pos_emb.register_forward_hook(self._at_positions)

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
        """Attend, with the rotary positions of a prefix tree if there is one."""
        if isinstance(packed_seq_params, TreeSeqParams):
            self._position_ids = packed_seq_params.position_ids
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self._position_ids = None

    def _at_positions(self, _: torch.nn.Module, __: Any, found: Tensor | tuple[Tensor, float]) -> Any:
        """Return the angles of the tokens of a prefix tree. YaRN's embedding also returns a factor."""
        if self._position_ids is None:
            return found
        angles, *factor = found if isinstance(found, tuple) else (found,)
        angles = angles.index_select(0, self._position_ids)
        return (angles, *factor) if factor else angles

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return name -> module of the latents' norms and of the projections next to them, unchanged from `submodules`.

        Later releases of Megatron-Core call this to choose the modules. Here they keep the choice of release 0.16.
        """
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def use_latent_attention(block: TransformerBlockSubmodules) -> TransformerBlockSubmodules:
    """Return a copy of a block's layer specs with `LatentSelfAttention`."""
    return dataclasses.replace(block, layer_specs=[_with_latent_attention(layer) for layer in block.layer_specs])


def _with_latent_attention(layer_spec: ModuleSpec) -> ModuleSpec:
    layer = layer_spec.submodules
    submodules = layer.self_attention.submodules
    # MLASelfAttention accepts ColumnParallelLinear, but none of its subclasses.
    changes: dict[str, type] = {name: ColumnParallelLinear for name in _DOWN_PROJECTIONS if _is_cut(submodules, name)}
    if submodules.core_attention is DotProductAttention:
        # DotProductAttention supports one head size, but keys are longer than values.
        changes["core_attention"] = SDPAttention
    attention = dataclasses.replace(
        layer.self_attention, module=LatentSelfAttention, submodules=dataclasses.replace(submodules, **changes)
    )
    return dataclasses.replace(layer_spec, submodules=dataclasses.replace(layer, self_attention=attention))


def _is_cut(submodules: Any, name: str) -> bool:
    module = getattr(submodules, name)
    return isinstance(module, type) and issubclass(module, ColumnParallelLinear)
