# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 and GLM-5, whose attention is DeepSeek-V3's to the tokens that an indexer chooses.

It chooses the best `index_topk` of each query: up to so many tokens all of them, and nothing of it has to be computed.
Longer sequences are refused. The indexer's weights have no gradient; they pass from folder to folder.
"""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import biased_routers, decoder, deepseek
from nemo_rl_moe.models.families.decoder import rotary_base
from nemo_rl_moe.models.families.rules import ConfigFields, ModelFamily, RuleTable, SequenceLimit, field_names, rule

READ_FIELDS = (
    deepseek.ATTENTION_READ_FIELDS
    | biased_routers.READ_FIELDS
    | field_names("index_head_dim index_n_heads index_topk layer_types")
)
FIXED_FIELDS = {**deepseek.DEEPSEEK_V3_FIXED_FIELDS, "mlp_bias": (False,)}
# How an indexer rotates its queries and keys, and what layers that predict further tokens share.
WITHOUT_EFFECT = deepseek.DEEPSEEK_V3_WITHOUT_EFFECT | field_names(
    "index_share_for_mtp_iteration indexer_rope_interleave moe_router_dtype"
)
# They say which layers have an indexer; transformers makes `indexer_types` of the others.
_SHARING_FIELDS = field_names("index_skip_topk_offset index_topk_freq index_topk_pattern indexer_types")
_DEFAULT_TOPK = 2048
_KINDS = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""Names of the one kind of layer: that of transformers 5.19, and that of earlier releases."""
_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
INDEXER = {
    f"{decoder.LAYER}self_attention.indexer.{name}": rule(f"{decoder.HF_LAYER}self_attn.indexer.{name}")
    for name in _INDEXER
}


def sequence_limit(config_json: Mapping[str, Any]) -> SequenceLimit:
    why = "of longer sequences an indexer chooses the tokens that attention sees, which is not computed here"
    return SequenceLimit(config_json.get("index_topk", _DEFAULT_TOPK), "tokens of index_topk", why)


def indexed_layers(hf_config: Any) -> list[int]:
    """Return the layers with an indexer of their own; the others share that of the last one before them."""
    kinds = getattr(hf_config, "indexer_types", None) or ["full"] * hf_config.num_hidden_layers
    if len(kinds) != hf_config.num_hidden_layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise ConfigurationError(
            f"{biased_routers.WHERE} indexer_types: got {shortened(repr(kinds))}, expected 'full' or 'shared' for each "
            f"of {hf_config.num_hidden_layers} layers, 'full' for the first"
        )
    return [index for index, kind in enumerate(kinds) if kind == "full"]


def _decoder_fields(hf_config: Any, family: str) -> dict[str, Any]:
    kinds = getattr(hf_config, "layer_types", None)
    if kinds is not None and not set(kinds) <= _KINDS:
        raise ConfigurationError(
            f"{biased_routers.WHERE} layer_types: got {shortened(repr(kinds))}, supported: 'indexed_attention'"
        )
    indexed_layers(hf_config)  # refuses what it does not understand
    return (
        deepseek.decoder_fields(hf_config)
        | biased_routers.group_fields(hf_config)
        | biased_routers.score_fields(hf_config, family)
    )


def deepseek_v32_fields(hf_config: Any) -> dict[str, Any]:
    return _decoder_fields(hf_config, "DeepSeek-V3.2")


def glm_moe_dsa_fields(hf_config: Any) -> dict[str, Any]:
    return _decoder_fields(hf_config, "GLM-5")


RULES = RuleTable({**deepseek.RULES, **biased_routers.EXPERT_BIAS, **INDEXER})
DEEPSEEK_V32 = ModelFamily(
    name="DeepSeek-V3.2",
    transformer_fields=deepseek_v32_fields,
    rotary_base=rotary_base,
    rules=RULES,
    config_fields=ConfigFields(READ_FIELDS, FIXED_FIELDS, WITHOUT_EFFECT, deepseek.ADVICE),
    router_fields=biased_routers.ROUTER_FIELDS,
    unused_tensors=biased_routers.unused_tensors,
    exported_fields=biased_routers.EXPORTED_FIELDS,
    indexed_layers=indexed_layers,
    sequence_limit=sequence_limit,
)
GLM_MOE_DSA = ModelFamily(
    name="GLM-5",
    transformer_fields=glm_moe_dsa_fields,
    rotary_base=rotary_base,
    rules=RULES,
    config_fields=ConfigFields(READ_FIELDS | _SHARING_FIELDS, FIXED_FIELDS, WITHOUT_EFFECT, deepseek.ADVICE),
    router_fields=biased_routers.ROUTER_FIELDS,
    unused_tensors=biased_routers.unused_tensors,
    exported_fields=biased_routers.EXPORTED_FIELDS,
    indexed_layers=indexed_layers,
    sequence_limit=sequence_limit,
)
