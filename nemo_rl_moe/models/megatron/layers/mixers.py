# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Layer specs with other mixers than attention, or with one part of a layer alone."""

import dataclasses
from collections.abc import Mapping, Sequence

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from nemo_rl_moe.models.layer_kinds import Mixer
from nemo_rl_moe.models.megatron.layers.gated_delta_net import GatedDeltaNet
from nemo_rl_moe.models.megatron.layers.mamba import Mamba2Mixer
from nemo_rl_moe.models.megatron.layers.recurrent_mixer import RecurrentMixer, RecurrentMixerSubmodules

_CLASSES: Mapping[Mixer, type[RecurrentMixer]] = {Mixer.DELTA_NET: GatedDeltaNet, Mixer.MAMBA: Mamba2Mixer}
_WITHOUT_MIXER = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
_WITHOUT_MLP = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}


def use_mixers(
    block: TransformerBlockSubmodules, mixers: Sequence[Mixer | None], have_mlp: Sequence[bool]
) -> TransformerBlockSubmodules:
    """Return a copy of a block's layer specs, which have attention and an MLP, with the parts of each layer.

    Args:
        mixers: Mixer of each layer, None for a layer without one.
        have_mlp: Whether each layer has an MLP or experts.
    """
    parts = zip(block.layer_specs, mixers, have_mlp, strict=True)
    return dataclasses.replace(block, layer_specs=[_with_parts(*each) for each in parts])


def _with_parts(layer_spec: ModuleSpec, mixer: Mixer | None, has_mlp: bool) -> ModuleSpec:
    """Return a layer spec with a mixer built from attention's linear layers (with Transformer Engine, the first of
    them contains the norm)."""
    layer = layer_spec.submodules
    if mixer is None:
        layer = dataclasses.replace(layer, **_WITHOUT_MIXER)
    elif mixer in _CLASSES:
        attention = layer.self_attention.submodules
        linears = RecurrentMixerSubmodules(in_proj=attention.linear_qkv, out_proj=attention.linear_proj)
        layer = dataclasses.replace(layer, self_attention=ModuleSpec(module=_CLASSES[mixer], submodules=linears))
    if not has_mlp:
        layer = dataclasses.replace(layer, **_WITHOUT_MLP)
    return dataclasses.replace(layer_spec, submodules=layer)
