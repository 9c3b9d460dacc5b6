# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Nemotron-3: layers with one part each, a Mamba-2 layer, attention without rotation, experts or a dense MLP.

MLPs and experts are not gated, and square the ReLU. The larger models, whose experts work on latents, are refused.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import biased_routers, decoder
from nemo_rl_moe.models.families.gated_layouts import SectionRows
from nemo_rl_moe.models.families.rules import (
    ConfigFields,
    ModelFamily,
    QueryGroups,
    Rule,
    RuleTable,
    Source,
    field_names,
    rule,
)
from nemo_rl_moe.models.layer_kinds import LAYER_PATTERN

_WHERE = "policy.model_name: config.json:"
_NAME = "Nemotron-3 Nano"
_LETTERS: Mapping[str, str] = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "moe": "E",
    "mlp": "-",
}
"""Name of a kind of layer in transformers -> its letter. Older files have other names for mixers."""
_NO_LIMIT = 1e20
"""Files have this limit of time steps or a higher one in place of infinity."""
_SIZES = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")


def layer_pattern(hf_config: Any) -> str:
    """Return the letter of each layer's kind, as in `layer_kinds`."""
    kinds = hf_config.layers_block_type
    if not kinds or not set(kinds) <= _LETTERS.keys():
        raise ConfigurationError(
            f"{_WHERE} layers_block_type: got {shortened(repr(kinds))}, expected entries of {', '.join(_LETTERS)}"
        )
    return "".join(_LETTERS[kind] for kind in kinds)


def _mamba_fields(hf_config: Any) -> dict[str, Any]:
    problems = [
        f"{_WHERE} {name}: got {getattr(hf_config, name)}, expected 1 or more"
        for name in _SIZES
        if getattr(hf_config, name) < 1
    ]
    if not problems and hf_config.mamba_num_heads % hf_config.n_groups:
        problems.append(
            f"{_WHERE} mamba_num_heads: got {hf_config.mamba_num_heads}, expected a multiple of n_groups"
            f" {hf_config.n_groups}"
        )
    limit = getattr(hf_config, "time_step_limit", None)
    if limit is not None and not (len(limit) == 2 and limit[0] <= 0 and limit[1] >= _NO_LIMIT):
        problems.append(f"{_WHERE} time_step_limit: got {shortened(repr(limit))}, supported for {_NAME}: no limit")
    if problems:
        raise ConfigurationError(problems)
    return {
        "mamba_num_heads": hf_config.mamba_num_heads,
        "mamba_head_dim": hf_config.mamba_head_dim,
        "mamba_num_groups": hf_config.n_groups,
        "mamba_state_dim": hf_config.ssm_state_size,
        "linear_conv_kernel_dim": hf_config.conv_kernel,
    }


def nemotron_fields(hf_config: Any) -> dict[str, Any]:
    pattern = layer_pattern(hf_config)
    if not {"M", "*", "E"} <= {*pattern}:
        raise ConfigurationError(
            f"{_WHERE} layers_block_type: got {pattern!r}, expected layers with Mamba-2 (M), attention (*) and experts"
            " (E), which all models of this family have"
        )
    known = copy.copy(hf_config)
    # The rotation has no effect (`ModelFamily.rotates`).
    known.rms_norm_eps, known.rope_parameters = hf_config.layer_norm_epsilon, {"rope_theta": 1.0}
    if getattr(known, "num_hidden_layers", None) != len(pattern):
        known.num_hidden_layers = len(pattern)
    fields = (
        decoder.decoder_fields(known)
        | decoder.expert_fields(
            hf_config, num_experts=hf_config.n_routed_experts, ffn_hidden_size=hf_config.moe_intermediate_size
        )
        | biased_routers.precision_and_scale_fields(hf_config)
        | biased_routers.group_fields(hf_config)
        | biased_routers.score_fields(hf_config, _NAME)
        | _mamba_fields(hf_config)
    )
    return fields | {
        LAYER_PATTERN: pattern,
        "moe_layer_freq": [int(letter == "E") for letter in pattern],
        "moe_shared_expert_intermediate_size": hf_config.moe_shared_expert_intermediate_size,
        "gated_linear_unit": False,
        "activation_func": "relu2",
    }


def _convolved(hf_config: Any) -> list[int]:
    of_groups = hf_config.n_groups * hf_config.ssm_state_size
    return [hf_config.mamba_num_heads * hf_config.mamba_head_dim, of_groups, of_groups]


def _projected(hf_config: Any) -> list[int]:
    channels = _convolved(hf_config)
    return [channels[0], *channels, hf_config.mamba_num_heads]


_OURS, _THEIRS = decoder.LAYER, "backbone.layers.{layer}."
_MIXER = f"{_THEIRS}mixer."
_CONVOLUTION_ROWS, _PROJECTION_ROWS = SectionRows(_convolved), SectionRows(_projected)
# One norm, before the only part of the layer.
_NORMS = {f"{_OURS}{name}.weight": rule(f"{_THEIRS}norm.weight") for name in ("input_layernorm", "pre_mlp_layernorm")}
_MAMBA: dict[str, Rule] = {
    f"{_OURS}self_attention.in_proj.weight": rule(*[f"{_MIXER}in_proj.weight"] * 5, layout=_PROJECTION_ROWS),
    **{
        f"{_OURS}self_attention.conv1d.{name}": rule(*[f"{_MIXER}conv1d.{name}"] * 3, layout=_CONVOLUTION_ROWS)
        for name in ("weight", "bias")
    },
    **{
        f"{_OURS}self_attention.{name}": rule(f"{_MIXER}{name}")
        for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
    },
}
_ATTENTION = {
    f"{_OURS}self_attention.linear_qkv.weight": rule(
        *(f"{_MIXER}{part}_proj.weight" for part in "qkv"), layout=QueryGroups()
    ),
    f"{_OURS}self_attention.linear_proj.weight": rule(f"{_MIXER}o_proj.weight"),
}


def _mlp(ours: str, theirs: str) -> dict[str, Rule]:
    """Return the rules of an MLP without gate, whose name is `ours` in Megatron-Core and `theirs` in files."""
    return {
        f"{_OURS}{ours}.{linear}.weight": rule(f"{_MIXER}{theirs}{name}.weight")
        for linear, name in (("linear_fc1", "up_proj"), ("linear_fc2", "down_proj"))
    }


_RULES = {
    "embedding.word_embeddings.weight": rule("backbone.embeddings.weight"),
    "output_layer.weight": rule("lm_head.weight"),
    "decoder.final_layernorm.weight": rule("backbone.norm_f.weight"),
    **_NORMS,
    **_MAMBA,
    **_ATTENTION,
    **_mlp("mlp", ""),
    **_mlp("mlp.shared_experts", "shared_experts."),
    **_mlp("mlp.experts.{expert}", "experts.{expert}."),
    f"{_OURS}mlp.router.weight": rule(f"{_MIXER}gate.weight"),
    f"{_OURS}mlp.router.expert_bias": rule(f"{_MIXER}gate.e_score_correction_bias"),
}


def _as_in_memory(found: Rule) -> Rule:
    """Return a rule that also reads the names of transformers' modules, which stack the experts."""

    def renamed(source: Source) -> Source:
        name, is_expert = source.name.replace("backbone.", "model."), ".experts.{expert}." in source.name
        if is_expert:
            name = name.replace("{expert}.", "").removesuffix(".weight")
        return Source(name, is_stacked=is_expert)

    alternative = tuple(map(renamed, found.sources))
    return found if alternative == found.sources else replace(found, alternatives=(alternative,))


def kept_tensors(hf_config: Any) -> Sequence[str]:
    """Return the pattern of the tensors of multi-token prediction layers."""
    del hf_config
    return (r"mtp\..*",)


NEMOTRON_H = ModelFamily(
    name=_NAME,
    transformer_fields=nemotron_fields,
    rotary_base=lambda hf_config: 1.0,
    rotates=False,
    rules=RuleTable({name: _as_in_memory(found) for name, found in _RULES.items()}),
    config_fields=ConfigFields(
        field_names(
            "conv_kernel head_dim hidden_size hybrid_override_pattern initializer_range intermediate_size "
            "layer_norm_epsilon layer_types layers_block_type mamba_head_dim mamba_num_heads moe_intermediate_size "
            "moe_shared_expert_intermediate_size n_group n_groups n_routed_experts num_attention_heads "
            "num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts routed_scaling_factor "
            "ssm_state_size time_step_floor time_step_limit time_step_max time_step_min topk_group"
        ),
        {
            "attention_bias": (False,),
            "attention_dropout": (0.0, None),
            "hidden_dropout": (0.0, None),
            "mamba_hidden_act": ("silu",),
            "mamba_proj_bias": (False,),
            # The state is in float32 for any format of the weights.
            "mamba_ssm_cache_dtype": ("float32",),
            "mlp_bias": (False,),
            "mlp_hidden_act": ("relu2",),
            "moe_latent_size": (None,),
            "n_shared_experts": (1,),
            "norm_topk_prob": (True,),
            "residual_in_fp32": (False,),
            "sliding_window": (None,),
            "use_bias": (False,),
            "use_conv_bias": (True,),
        },
        field_names(
            "chunk_size expand moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type norm_eps "
            "num_logits_to_keep num_nextn_predict_layers partial_rotary_factor rescale_prenorm_residual rope_theta "
            "use_mamba_kernels"
        ),
        {"moe_latent_size": "expected null: experts on latents (Nemotron-3 Super and Ultra) are not supported"},
    ),
    router_fields=biased_routers.ROUTER_FIELDS,
    kept_tensors=kept_tensors,
    takes_adapters=False,
    exported_fields={"num_nextn_predict_layers": 0},
)
