# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Models whose indexers choose the tokens that attention sees, in sequences longer than `index_topk`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from nemo_rl_moe.config.schema_grpo import RolloutMegatronConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.flops import IndexerFlops

_KEY = "policy.megatron_cfg."
_POSITION_BYTES = 4


def chooses_tokens(policy: PolicyConfig, hf_config: Any) -> bool:
    """Return whether sequences of a run may be so long that indexers do not choose all tokens."""
    has_indexers = bool(family_of(hf_config).indexed_layers(hf_config))
    return has_indexers and policy.max_total_sequence_length > hf_config.index_topk


def indexer_flops(policy: PolicyConfig, hf_config: Any) -> IndexerFlops | None:
    """Return the operations of indexers in a forward pass, or None if they would choose all tokens of a run."""
    if not chooses_tokens(policy, hf_config):
        return None
    layers = len(family_of(hf_config).indexed_layers(hf_config))
    heads, dim, hidden = hf_config.index_n_heads, hf_config.index_head_dim, hf_config.hidden_size
    projections = heads * dim * hf_config.q_lora_rank + (dim + heads) * hidden
    # A product for each head, and their weighted sum.
    return IndexerFlops(hf_config.index_topk, 2 * layers * projections, 2 * layers * heads * (dim + 1))


class ChoiceBytes(NamedTuple):
    """Bytes that a choice of tokens adds for each token. All are 0 without a choice.

    Attributes:
        mask: Mask that a layer's attention keeps for its backward pass, which torch converts to the type of the
            queries, for a sequence of the maximum length.
        key: Key that a layer's indexer caches.
        positions: Positions that a layer's indexer chose, which generation captures and training replays. 0 without
            replay.
    """

    mask: int = 0
    key: int = 0
    positions: int = 0


def choice_bytes(policy: PolicyConfig, hf_config: Any, itemsize: int) -> ChoiceBytes:
    """Return the bytes that a choice of tokens adds, with keys and queries of `itemsize` bytes a number."""
    if not chooses_tokens(policy, hf_config):
        return ChoiceBytes()
    positions = hf_config.index_topk * _POSITION_BYTES if _replays(policy) else 0
    return ChoiceBytes(policy.max_total_sequence_length * itemsize, hf_config.index_head_dim * itemsize, positions)


def _replays(policy: PolicyConfig) -> bool:
    megatron = policy.megatron_cfg
    return isinstance(megatron, RolloutMegatronConfig) and megatron.indexer_replay != "none"


def problems_with_choices(
    policy: PolicyConfig, hf_config: Any, layers_of_stages: Sequence[Sequence[Sequence[int]]]
) -> list[str]:
    """Return the settings that the choice of tokens does not support, or that need a choice if there is none.

    Args:
        layers_of_stages: Layers of each model chunk of each pipeline stage.
    """
    megatron = policy.megatron_cfg
    if not chooses_tokens(policy, hf_config):
        if not _replays(policy):
            return []
        has_indexers = bool(family_of(hf_config).indexed_layers(hf_config))
        return [
            f"{_KEY}indexer_replay: got rollout, expected none: "
            + (
                f"indexers choose all tokens of sequences of up to index_topk ({hf_config.index_topk}) tokens"
                if has_indexers
                else "the model has no indexers"
            )
        ]
    why = (
        f"in sequences longer than index_topk ({hf_config.index_topk} tokens), indexers choose the tokens of attention"
    )
    problems = []
    if (size := megatron.context_parallel_size) > 1:
        problems.append(f"{_KEY}context_parallel_size: got {size}, expected 1: {why}, among tokens of one rank")
    if policy.shared_prefix is not False:
        got = str(policy.shared_prefix).lower()
        problems.append(f"policy.shared_prefix: got {got}, expected false for a model with a choice of tokens: {why}")
    indexed = family_of(hf_config).indexed_layers(hf_config)
    firsts = [layers[0] for chunks in layers_of_stages for layers in chunks if layers]
    if wrong := [first for first in firsts if first not in indexed]:
        problems.append(
            f"{_KEY}pipeline_model_parallel_size: got {megatron.pipeline_model_parallel_size}, with which"
            f" layer {wrong[0]} (from 0) begins a stage, but has no indexer: {why}, and choices do not pass between"
            " stages; expected stages that begin with a layer of indexer_types 'full'"
        )
    return problems
