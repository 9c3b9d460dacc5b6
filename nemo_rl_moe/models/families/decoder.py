# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tables that decoder families share: configuration fields, rotary embedding and its scaling, tensors of each layer.

transformers computes scaled frequencies. YaRN's factor multiplies queries and keys, so its square multiplies the
scores.
"""

import copy
import math
from collections.abc import Collection, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families.rules import QueryGroups, Rule, Source, field_names, rule

_KNOWN_KEYS: Mapping[str, frozenset[str]] = {
    "default": field_names(""),
    "linear": field_names("factor"),
    "llama3": field_names("factor low_freq_factor high_freq_factor original_max_position_embeddings"),
    "yarn": field_names(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
    ),
}
"""`rope_type` -> keys of `rope_parameters` that have an effect, besides `_ALWAYS_KNOWN`."""
_ALWAYS_KNOWN = field_names("rope_type type rope_theta partial_rotary_factor")
# Fields of positions in time, height and width, which are equal in text.
_OF_MROPE = field_names("mrope_interleaved mrope_section")


def rotary_base(hf_config: Any) -> float:
    return float(_rope_parameters(hf_config)["rope_theta"])


def rotary_percent(hf_config: Any) -> float:
    """Return the share of each head's entries that is rotated, beginning with the first entry."""
    factor = _rope_parameters(hf_config).get("partial_rotary_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ConfigurationError(
            f"policy.model_name: config.json: rope_parameters.partial_rotary_factor: got {shortened(repr(factor))}, "
            "expected a number above 0 and up to 1"
        )
    return float(factor)


def inverse_frequencies(hf_config: Any) -> Float[Tensor, " half_head"] | None:
    """Return the inverse frequencies of a scaled rotary embedding, or None if the embedding is not scaled."""
    return _stretched(hf_config)[0]


def softmax_scale(hf_config: Any, head_dim: int) -> float | None:
    """Return the factor of the attention scores, or None for the usual `head_dim ** -0.5`."""
    factor = _stretched(hf_config)[1]
    return None if factor == 1.0 else float(factor**2 * head_dim**-0.5)


def _stretched(hf_config: Any) -> tuple[Tensor | None, float]:
    """Return the inverse frequencies (None if they are not scaled), and the factor of cosines and sines."""
    kind = _rope_parameters(hf_config)["rope_type"]
    if kind == "default":
        return None, 1.0
    # This import takes a second, and most models do not need it.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf_config = copy.copy(hf_config)
    if getattr(hf_config, "head_dim", 0) is None:
        # transformers' functions do not handle a `head_dim` of None.
        hf_config.head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    if not hasattr(hf_config, "standardize_rope_params"):
        hf_config.standardize_rope_params = lambda: None  # a plain configuration is already standardised
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config)
    return frequencies, float(factor)


def _rope_parameters(hf_config: Any) -> Mapping[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", **hf_config.rope_parameters}
    kind = parameters["rope_type"]
    if kind not in _KNOWN_KEYS:
        raise ConfigurationError(
            f"policy.model_name: config.json: rope_type: got {kind!r}, supported: {', '.join(sorted(_KNOWN_KEYS))}"
        )
    base = parameters.get("rope_theta")
    if isinstance(base, bool) or not isinstance(base, int | float) or not 0 < base < math.inf:
        raise ConfigurationError(
            f"policy.model_name: config.json: rope_theta: got {shortened(repr(base))}, expected a number above 0"
        )
    _refuse_keys(parameters, parameters.keys() - _KNOWN_KEYS[kind] - _ALWAYS_KNOWN - _OF_MROPE)
    return parameters


def _refuse_keys(parameters: Mapping[str, Any], unknown: Collection[str]) -> None:
    key, kind = "policy.model_name: config.json: rope_parameters", parameters["rope_type"]
    if unknown:
        raise ConfigurationError(
            [
                f"{key}.{name}: got {parameters[name]!r}, a field that is not known for rope_type {kind!r} and could "
                "change what the model computes"
                for name in sorted(unknown)
            ]
        )


def _check_rotated_part(hf_config: Any, head_dim: int, *, rotates_part: bool) -> None:
    """Raise an error if the family does not support a partial rotation, or if YaRN would scale a part of a head."""
    factor, key = rotary_percent(hf_config), "policy.model_name: config.json: rope_parameters"
    if factor == 1.0:
        return
    if not rotates_part:
        raise ConfigurationError(
            f"{key}.partial_rotary_factor: got {factor}, expected 1.0: the family rotates whole heads"
        )
    if int(head_dim * factor) % 2 or int(head_dim * factor) == 0:
        raise ConfigurationError(
            f"{key}.partial_rotary_factor: got {factor}, expected a factor that rotates an even number of the "
            f"{head_dim} entries of a head, at least 2"
        )
    if _stretched(hf_config)[1] != 1.0:
        raise ConfigurationError(
            f"{key}: got rope_type 'yarn' with an attention factor other than 1.0 and partial_rotary_factor {factor}: "
            "the attention factor would scale only the rotated part of each head; expected another rope_type, "
            "partial_rotary_factor 1.0, or attention_factor 1.0"
        )


LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."

READ_FIELDS = field_names(
    "num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size rms_norm_eps "
    "initializer_range rope_parameters rope_theta rope_scaling"
)
"""Fields of `config.json` that `decoder_fields` and `rotary_base` read."""
FIXED_FIELDS: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_dropout": (0.0, None)}


def decoder_fields(hf_config: Any, *, rotates_part: bool = False, has_mrope: bool = False) -> dict[str, Any]:
    """Return the TransformerConfig fields that follow from Hugging Face fields, without fields of experts.

    `activation_func` is a name in `ACTIVATIONS` of `model/transformer_config.py`, because families do not import
    Megatron-Core.

    Args:
        rotates_part: Whether the family can rotate a part of each head. Its `ModelFamily` then sets `rotary_percent`.
        has_mrope: Whether the family is the text part of a family with positions in time, height and width.
    """
    if not has_mrope:
        parameters = _rope_parameters(hf_config)
        _refuse_keys(parameters, parameters.keys() & _OF_MROPE)
    heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    _check_rotated_part(hf_config, head_dim, rotates_part=rotates_part)
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_dim,
        "softmax_scale": softmax_scale(hf_config, head_dim),
        "ffn_hidden_size": hf_config.intermediate_size,
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "init_method_std": hf_config.initializer_range,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": "silu",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def expert_fields(hf_config: Any, *, num_experts: int, ffn_hidden_size: int) -> dict[str, Any]:
    """Return the TransformerConfig fields of MoE layers that most families share."""
    coefficient = float(getattr(hf_config, "router_aux_loss_coef", None) or 0.0)
    return {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": ffn_hidden_size,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss" if coefficient > 0 else "none",
        "moe_aux_loss_coeff": coefficient,
        "moe_token_dispatcher_type": "alltoall",
    }


SOFTMAX_ROUTER_FIELDS: Mapping[str, str | None] = {
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_score_function": None,
    "moe_router_pre_softmax": "norm_topk_prob",
    "moe_router_load_balancing_type": "router_aux_loss_coef",
    "moe_aux_loss_coeff": "router_aux_loss_coef",
}
"""`ModelFamily.router_fields` of a softmax router. With `norm_topk_prob` the weights of the chosen experts sum to 1."""


def stacked_swiglu_experts(
    prefix: str, *, is_transposed: bool = False
) -> tuple[list[list[Source]], list[list[Source]]]:
    """Return the sources of an expert's first and second matrix in files that stack all experts in one tensor.

    With E experts, intermediate size F and hidden size H, the shapes are `[E, 2F, H]` and `[E, H, F]`. Released
    files of some families have `[E, H, 2F]` and `[E, F, H]` (`is_transposed`). `prefix` is the Hugging Face name of
    the experts.
    """
    gate_up, down = (f"{prefix}.{name}" for name in ("gate_up_proj", "down_proj"))
    gate_and_up = [Source(gate_up, is_stacked=True, is_transposed=is_transposed)] * 2
    return [gate_and_up], [[Source(down, is_stacked=True, is_transposed=is_transposed)]]


def swiglu(ours: str, theirs: str) -> dict[str, Rule]:
    """Return the rules of a SwiGLU layer. Its name within a decoder layer is `ours` in Megatron-Core, and `theirs` in
    Hugging Face's files."""
    return {
        f"{LAYER}{ours}.linear_fc1.weight": rule(
            f"{HF_LAYER}{theirs}.gate_proj.weight", f"{HF_LAYER}{theirs}.up_proj.weight"
        ),
        f"{LAYER}{ours}.linear_fc2.weight": rule(f"{HF_LAYER}{theirs}.down_proj.weight"),
    }


ENDS: dict[str, Rule] = {
    "embedding.word_embeddings.weight": rule("model.embed_tokens.weight"),
    "output_layer.weight": rule("lm_head.weight"),
    "decoder.final_layernorm.weight": rule("model.norm.weight"),
}
LAYER_NORMS: dict[str, Rule] = {
    f"{LAYER}input_layernorm.weight": rule(f"{HF_LAYER}input_layernorm.weight"),
    f"{LAYER}pre_mlp_layernorm.weight": rule(f"{HF_LAYER}post_attention_layernorm.weight"),
}
ATTENTION: dict[str, Rule] = {
    f"{LAYER}self_attention.linear_qkv.weight": rule(
        *(f"{HF_LAYER}self_attn.{part}_proj.weight" for part in "qkv"), layout=QueryGroups()
    ),
    f"{LAYER}self_attention.linear_proj.weight": rule(f"{HF_LAYER}self_attn.o_proj.weight"),
}
QKV_BIAS: dict[str, Rule] = {
    f"{LAYER}self_attention.linear_qkv.bias": rule(
        *(f"{HF_LAYER}self_attn.{part}_proj.bias" for part in "qkv"), layout=QueryGroups()
    )
}
QK_NORMS: dict[str, Rule] = {
    f"{LAYER}self_attention.{part}_layernorm.weight": rule(f"{HF_LAYER}self_attn.{part}_norm.weight") for part in "qk"
}
DENSE_MLP = swiglu("mlp", "mlp")
ROUTER: dict[str, Rule] = {f"{LAYER}mlp.router.weight": rule(f"{HF_LAYER}mlp.gate.weight")}
_OF_FC1, _OF_FC2 = stacked_swiglu_experts(f"{HF_LAYER}mlp.experts")
EXPERTS: dict[str, Rule] = {
    f"{LAYER}mlp.experts.{{expert}}.linear_fc1.weight": rule(
        f"{HF_LAYER}mlp.experts.{{expert}}.gate_proj.weight",
        f"{HF_LAYER}mlp.experts.{{expert}}.up_proj.weight",
        alternatives=_OF_FC1,
    ),
    f"{LAYER}mlp.experts.{{expert}}.linear_fc2.weight": rule(
        f"{HF_LAYER}mlp.experts.{{expert}}.down_proj.weight", alternatives=_OF_FC2
    ),
}
DECODER = {**ENDS, **LAYER_NORMS, **ATTENTION, **DENSE_MLP}
"""Rules of a decoder without biases, norms of queries and keys, or experts."""
