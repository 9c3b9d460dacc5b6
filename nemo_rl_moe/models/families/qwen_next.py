# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and the text models of Qwen3.5: gated delta nets in most layers, gated attention in the others.

Norms multiply by 1 + weight, except inside gated delta nets. The stored weights are the same as in files.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import decoder, softmax_moe
from nemo_rl_moe.models.families.gated_layouts import DELTA_NET_ROWS, GatedQueryGroups, KeyHeadRows
from nemo_rl_moe.models.families.rules import (
    ConfigFields,
    ModelFamily,
    MtpTensors,
    Rule,
    RuleTable,
    Source,
    TensorLayout,
    field_names,
    rule,
)

_WHERE = "policy.model_name: config.json:"
READ_FIELDS = decoder.READ_FIELDS | field_names(
    "full_attention_interval layer_types linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads "
    "linear_num_value_heads linear_value_head_dim partial_rotary_factor"
)
FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **decoder.FIXED_FIELDS,
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    # The delta rule is computed in float32 for any format of the weights.
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("swish",),
    "use_sliding_window": (False,),
}
# Released files of dense models have `mlp_only_layers` too.
_OF_QWEN3_5 = {**FIXED_FIELDS, "mlp_only_layers": ([], None)}
# Multi-token prediction layers are kept, not computed.
WITHOUT_EFFECT = field_names("mtp_num_hidden_layers mtp_use_dedicated_embeddings num_nextn_predict_layers")
_KINDS = ("linear_attention", "full_attention")


EXPORTED_FIELDS: Mapping[str, Any] = dict.fromkeys(("mtp_num_hidden_layers", "num_nextn_predict_layers"), 0)


def num_mtp_layers(hf_config: Any) -> int:
    """Return the number of layers. It is 1 without a field, as in Qwen3-Next's released files."""
    stated = [getattr(hf_config, name, None) for name in EXPORTED_FIELDS]
    return next((int(number) for number in stated if number is not None), 1)


MTP_LAYERS = MtpTensors(
    count=num_mtp_layers,
    prefix=lambda hf_config, index: f"mtp.layers.{index}.",
    ends={
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "final_layernorm.weight": "mtp.norm.weight",
    },
)


def kept_tensors(hf_config: Any) -> tuple[str, ...]:
    """Return the pattern of the tensors of multi-token prediction layers."""
    del hf_config
    return (r"mtp\..*",)


def unused_tensors(hf_config: Any) -> Mapping[str, str]:
    del hf_config
    return {r"model\.visual\..*": "the vision tower, which a text model does not have"}


def _attention_fields(hf_config: Any) -> dict[str, Any]:
    """Return the fields of attention layers and gated delta nets."""
    kinds, layers = hf_config.layer_types, hf_config.num_hidden_layers
    if len(kinds) != layers or not set(kinds) <= {*_KINDS}:
        raise ConfigurationError(
            f"{_WHERE} layer_types: got {shortened(repr(kinds))}, expected {layers} entries of 'linear_attention' or "
            "'full_attention'"
        )
    key_heads, value_heads = hf_config.linear_num_key_heads, hf_config.linear_num_value_heads
    sizes = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_value_head_dim")
    problems = [
        f"{_WHERE} {name}: got {getattr(hf_config, name)}, expected 1 or more"
        for name in sizes
        if getattr(hf_config, name) < 1
    ]
    if not problems and (value_heads < 1 or value_heads % key_heads):
        problems.append(
            f"{_WHERE} linear_num_value_heads: got {value_heads}, expected a multiple of linear_num_key_heads "
            f"{key_heads}"
        )
    if problems:
        raise ConfigurationError(problems)
    return {
        "qk_layernorm": True,
        "attention_output_gate": True,
        "layernorm_zero_centered_gamma": True,
        "linear_attention_freq": [int(kind == _KINDS[0]) for kind in kinds],
        "linear_conv_kernel_dim": hf_config.linear_conv_kernel_dim,
        "linear_key_head_dim": hf_config.linear_key_head_dim,
        "linear_value_head_dim": hf_config.linear_value_head_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }


def qwen3_next_fields(hf_config: Any) -> dict[str, Any]:
    return (
        decoder.decoder_fields(hf_config, rotates_part=True)
        | softmax_moe.routed_expert_fields(hf_config)
        | _attention_fields(hf_config)
        | softmax_moe.shared_expert_fields(hf_config)
    )


def qwen3_5_moe_fields(hf_config: Any) -> dict[str, Any]:
    # All layers have experts, with weights that sum to 1.
    known = copy.copy(hf_config)
    known.intermediate_size, known.norm_topk_prob = hf_config.moe_intermediate_size, True
    known.mlp_only_layers, known.decoder_sparse_step = [], 1
    return (
        decoder.decoder_fields(known, rotates_part=True, has_mrope=True)
        | softmax_moe.routed_expert_fields(known)
        | _attention_fields(hf_config)
        | softmax_moe.shared_expert_fields(hf_config)
    )


def qwen3_5_fields(hf_config: Any) -> dict[str, Any]:
    return decoder.decoder_fields(hf_config, rotates_part=True, has_mrope=True) | _attention_fields(hf_config)


_OURS, _THEIRS = f"{decoder.LAYER}self_attention.", f"{decoder.HF_LAYER}linear_attn."
GATED_ATTENTION = {
    f"{_OURS}linear_qkv.weight": rule(
        *(f"{decoder.HF_LAYER}self_attn.{part}_proj.weight" for part in "qkv"), layout=GatedQueryGroups()
    ),
    f"{_OURS}linear_proj.weight": rule(f"{decoder.HF_LAYER}self_attn.o_proj.weight"),
}


def _delta_net(*projections: str, layout: TensorLayout) -> dict[str, Rule]:
    convolution = f"{_THEIRS}conv1d.weight"
    return {
        f"{_OURS}in_proj.weight": rule(*(f"{_THEIRS}in_proj_{name}.weight" for name in projections), layout=layout),
        f"{_OURS}conv1d.weight": rule(convolution, convolution, convolution, layout=DELTA_NET_ROWS),
        f"{_OURS}A_log": rule(f"{_THEIRS}A_log"),
        f"{_OURS}dt_bias": rule(f"{_THEIRS}dt_bias"),
        f"{_OURS}out_norm.weight": rule(f"{_THEIRS}norm.weight"),
        f"{_OURS}out_proj.weight": rule(f"{_THEIRS}out_proj.weight"),
    }


_ATTENTION = {**decoder.ENDS, **decoder.LAYER_NORMS, **GATED_ATTENTION, **decoder.QK_NORMS}
QWEN3_5_DELTA_NET = _delta_net("qkv", "qkv", "qkv", "z", "b", "a", layout=DELTA_NET_ROWS)
QWEN3_NEXT_RULES = {
    **_ATTENTION,
    **_delta_net("qkvz", "ba", layout=KeyHeadRows()),
    **decoder.DENSE_MLP,
    **decoder.ROUTER,
    **decoder.EXPERTS,
    **softmax_moe.SHARED_EXPERT,
}


def _also_as_part(rules: Mapping[str, Rule]) -> RuleTable:
    """Return the rule table of a text model whose files may use the names of a vision-language model."""

    def moved(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        return tuple(replace(each, name=each.name.replace("model.", "model.language_model.", 1)) for each in sources)

    def both(found: Rule) -> Rule:
        forms = [found.sources, *found.alternatives]
        as_part = [moved(form) for form in forms if moved(form) != form]
        return replace(found, alternatives=(*found.alternatives, *as_part))

    return RuleTable({name: both(found) for name, found in rules.items()})


QWEN3_5_MOE_RULES = {
    **_ATTENTION,
    **QWEN3_5_DELTA_NET,
    **decoder.ROUTER,
    **decoder.EXPERTS,
    **softmax_moe.SHARED_EXPERT,
}
QWEN3_5_RULES = {**_ATTENTION, **QWEN3_5_DELTA_NET, **decoder.DENSE_MLP}

QWEN3_NEXT = ModelFamily(
    name="Qwen3-Next",
    transformer_fields=qwen3_next_fields,
    rotary_base=decoder.rotary_base,
    rotary_percent=decoder.rotary_percent,
    rules=RuleTable(QWEN3_NEXT_RULES),
    config_fields=ConfigFields(
        READ_FIELDS
        | field_names(
            "decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok "
            "num_local_experts router_aux_loss_coef shared_expert_intermediate_size"
        ),
        FIXED_FIELDS,
        WITHOUT_EFFECT,
    ),
    router_fields=decoder.SOFTMAX_ROUTER_FIELDS,
    unused_tensors=unused_tensors,
    kept_tensors=kept_tensors,
    mtp_layers=MTP_LAYERS,
    exported_fields=EXPORTED_FIELDS,
)
QWEN3_5_MOE_TEXT = ModelFamily(
    name="Qwen3.5-MoE (text)",
    transformer_fields=qwen3_5_moe_fields,
    rotary_base=decoder.rotary_base,
    rotary_percent=decoder.rotary_percent,
    rules=_also_as_part(QWEN3_5_MOE_RULES),
    config_fields=ConfigFields(
        (READ_FIELDS - {"intermediate_size"})
        | field_names(
            "moe_intermediate_size num_experts num_experts_per_tok num_local_experts router_aux_loss_coef "
            "shared_expert_intermediate_size"
        ),
        {**_OF_QWEN3_5, "norm_topk_prob": (True,)},
        # A field of dense layers, which this family lacks.
        WITHOUT_EFFECT | {"intermediate_size"},
    ),
    router_fields={**decoder.SOFTMAX_ROUTER_FIELDS, "moe_router_pre_softmax": None},
    unused_tensors=unused_tensors,
    kept_tensors=kept_tensors,
    mtp_layers=MTP_LAYERS,
    exported_fields=EXPORTED_FIELDS,
)
QWEN3_5_TEXT = ModelFamily(
    name="Qwen3.5 (text)",
    transformer_fields=qwen3_5_fields,
    rotary_base=decoder.rotary_base,
    rotary_percent=decoder.rotary_percent,
    rules=_also_as_part(QWEN3_5_RULES),
    config_fields=ConfigFields(READ_FIELDS, _OF_QWEN3_5, WITHOUT_EFFECT),
    unused_tensors=unused_tensors,
    kept_tensors=kept_tensors,
    mtp_layers=MTP_LAYERS,
    exported_fields=EXPORTED_FIELDS,
)
