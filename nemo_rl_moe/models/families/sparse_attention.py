# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's attention, restricted to tokens that an indexer chooses.

The indexer chooses the best `index_topk` tokens for each query. In sequences up to that length it chooses all tokens,
so the choice is only computed for longer sequences. The indexer's weights are not trained, only copied.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import biased_routers, decoder, deepseek
from nemo_rl_moe.models.families.decoder import rotary_base
from nemo_rl_moe.models.families.rules import ConfigFields, ModelFamily, RuleTable, field_names, rule

READ_FIELDS = (
    deepseek.ATTENTION_READ_FIELDS
    | biased_routers.READ_FIELDS
    | field_names("index_head_dim index_n_heads index_topk layer_types")
)
FIXED_FIELDS = {**deepseek.DEEPSEEK_V3_FIXED_FIELDS, "mlp_bias": (False,)}
# Settings of multi-token prediction layers, and of number formats.
WITHOUT_EFFECT = deepseek.DEEPSEEK_V3_WITHOUT_EFFECT | field_names("index_share_for_mtp_iteration moe_router_dtype")
_ROTATES_PAIRS = "indexer_rope_interleave"
# These fields determine the layers with an indexer. transformers derives `indexer_types` from the other fields.
_SHARING_FIELDS = field_names("index_skip_topk_offset index_topk_freq index_topk_pattern indexer_types")
_KINDS = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""Names of the only supported kind of layer, in transformers 5.19 and in earlier releases."""
_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
INDEXER = {
    f"{decoder.LAYER}self_attention.indexer.{name}": rule(f"{decoder.HF_LAYER}self_attn.indexer.{name}")
    for name in _INDEXER
}


def indexed_layers(hf_config: Any) -> list[int]:
    """Return the indices of the layers with an indexer. Each other layer shares the last indexer before it."""
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
    indexed_layers(hf_config)  # checks the layers
    return (
        deepseek.decoder_fields(hf_config)
        | biased_routers.group_fields(hf_config)
        | biased_routers.score_fields(hf_config, family)
    )


RULES = RuleTable({**deepseek.RULES, **biased_routers.EXPERT_BIAS, **INDEXER})
DEEPSEEK_V32 = ModelFamily(
    name="DeepSeek-V3.2",
    transformer_fields=partial(_decoder_fields, family="DeepSeek-V3.2"),
    rotary_base=rotary_base,
    rules=RULES,
    # transformers ignores the field: its rotation follows from the model type.
    config_fields=ConfigFields(
        READ_FIELDS, {**FIXED_FIELDS, _ROTATES_PAIRS: (False, None)}, WITHOUT_EFFECT, deepseek.ADVICE
    ),
    router_fields=biased_routers.ROUTER_FIELDS,
    kept_tensors=biased_routers.kept_tensors,
    exported_fields=biased_routers.EXPORTED_FIELDS,
    indexed_layers=indexed_layers,
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="GLM-5",
    transformer_fields=partial(_decoder_fields, family="GLM-5"),
    config_fields=ConfigFields(
        READ_FIELDS | _SHARING_FIELDS, {**FIXED_FIELDS, _ROTATES_PAIRS: (True, None)}, WITHOUT_EFFECT, deepseek.ADVICE
    ),
    indexer_rotates_pairs=True,
)
