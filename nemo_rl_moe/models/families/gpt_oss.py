# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: a bias in every layer, attention sinks, a sliding window in some layers, experts with a clamped SwiGLU."""

from typing import Any

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import decoder
from nemo_rl_moe.models.families.decoder import HF_LAYER, LAYER
from nemo_rl_moe.models.families.rules import (
    ConfigFields,
    InterleavedRows,
    ModelFamily,
    Rule,
    RuleTable,
    Source,
    field_names,
    rule,
)

READ_FIELDS = decoder.READ_FIELDS | field_names(
    "layer_types num_experts num_experts_per_tok num_local_experts router_aux_loss_coef sliding_window swiglu_limit"
)
FIXED_FIELDS = {
    **decoder.FIXED_FIELDS,
    "attention_bias": (True,),
    "quantization_config": (None,),
    # The constant of quick_gelu. Megatron-Core supports no other value.
    "swiglu_alpha": (1.702,),
}
ADVICE = {
    "quantization_config": "weights in 4 bits (MXFP4) are not read: write the checkpoint in bfloat16 first "
    "(transformers: from_pretrained with Mxfp4Config(dequantize=True), then save_pretrained) and take "
    "quantization_config out of its config.json"
}
# Other programs' names of num_experts_per_tok and of a field of rope_scaling.
WITHOUT_EFFECT = field_names("experts_per_token initial_context_length")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def window_fields(hf_config: Any) -> dict[str, Any]:
    kinds, window = hf_config.layer_types, hf_config.sliding_window
    key = "policy.model_name: config.json: "
    if unknown := sorted(set(kinds) - set(_LAYER_TYPES)):
        raise ConfigurationError(f"{key}layer_types: got {unknown[0]!r}, supported: {' or '.join(_LAYER_TYPES)}")
    if len(kinds) != hf_config.num_hidden_layers:
        raise ConfigurationError(
            f"{key}layer_types: got {len(kinds)} entries, expected one for each of {hf_config.num_hidden_layers} layers"
        )
    if "sliding_attention" not in kinds:
        return {}
    if not window or window < 1:
        raise ConfigurationError(
            f"{key}sliding_window: got {window!r}, expected 1 or more: layer_types has 'sliding_attention'"
        )
    return {
        # Megatron-Core counts the keys before and after a query's own.
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in kinds],
    }


def transformer_fields(hf_config: Any) -> dict[str, Any]:
    experts = decoder.expert_fields(
        hf_config, num_experts=hf_config.num_local_experts, ffn_hidden_size=hf_config.intermediate_size
    )
    return (
        decoder.decoder_fields(hf_config)
        | experts
        | window_fields(hf_config)
        | {
            "add_bias_linear": True,
            "add_qkv_bias": True,
            # Experts: quick_gelu(gate) * (up + 1), with gate and up clamped.
            "activation_func": "quick_gelu",
            "activation_func_clamp_value": hf_config.swiglu_limit,
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
            "moe_router_pre_softmax": False,
        }
    )


def _expert(linear: str, kind: str, source: Source, *, gated: bool) -> dict[str, Rule]:
    layout = InterleavedRows() if gated else None
    return {f"{LAYER}mlp.experts.{{expert}}.{linear}.{kind}": rule(source, layout=layout)}


_EXPERTS = f"{HF_LAYER}mlp.experts."
RULES: dict[str, Rule] = {
    **decoder.ENDS,
    **decoder.LAYER_NORMS,
    **decoder.ATTENTION,
    **decoder.QKV_BIAS,
    f"{LAYER}self_attention.linear_proj.bias": rule(f"{HF_LAYER}self_attn.o_proj.bias"),
    f"{LAYER}self_attention.core_attention.softmax_offset": rule(f"{HF_LAYER}self_attn.sinks"),
    f"{LAYER}mlp.router.weight": rule(f"{HF_LAYER}mlp.router.weight"),
    f"{LAYER}mlp.router.bias": rule(f"{HF_LAYER}mlp.router.bias"),
    **_expert(
        "linear_fc1", "weight", Source(f"{_EXPERTS}gate_up_proj", is_stacked=True, is_transposed=True), gated=True
    ),
    **_expert("linear_fc1", "bias", Source(f"{_EXPERTS}gate_up_proj_bias", is_stacked=True), gated=True),
    **_expert("linear_fc2", "weight", Source(f"{_EXPERTS}down_proj", is_stacked=True, is_transposed=True), gated=False),
    **_expert("linear_fc2", "bias", Source(f"{_EXPERTS}down_proj_bias", is_stacked=True), gated=False),
}
GPT_OSS = ModelFamily(
    name="gpt-oss",
    transformer_fields=transformer_fields,
    rotary_base=decoder.rotary_base,
    rules=RuleTable(RULES),
    config_fields=ConfigFields(READ_FIELDS, FIXED_FIELDS, WITHOUT_EFFECT, ADVICE),
    router_fields={**decoder.SOFTMAX_ROUTER_FIELDS, "moe_router_pre_softmax": None},
)
