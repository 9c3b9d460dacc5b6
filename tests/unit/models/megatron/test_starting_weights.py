# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random starting weights are those of their seed."""

import pytest

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.weights.starting_weights import initialize_weights
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import parallel_job, tiny_hf_config, tiny_policy

pytestmark = pytest.mark.megatron


def first_weights(policy: PolicyConfig, seeds: list[int]) -> list[list[float]]:
    hf_config, sampled = tiny_hf_config(), []
    with parallel_job(policy):
        config = build_transformer_config(policy, hf_config)
        chunks = build_model_chunks(policy, config, hf_config)
        for seed in seeds:
            initialize_weights(chunks, config, hf_config, seed)
            sampled.append(chunks[0].embedding.word_embeddings.weight[0].tolist())
    return sampled


def test_each_seed_draws_weights_of_its_own() -> None:
    (sampled,) = run_ranks(first_weights, 1, tiny_policy(), [1234, 1, 2, 1])
    assert sampled[1] == sampled[3]
    assert sampled[0] != sampled[1] != sampled[2] != sampled[0]
