# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random starting weights are those of their seed, in every layout."""

from pathlib import Path

import pytest
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.weights.starting_weights import initialize_weights
from tests.support.family_reference import assert_same_tensors, tensors_in
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import layout, parallel_job, tiny_hf_config, tiny_policy
from tests.support.training_run import tiny_trainer

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


def write_first_weights(name: str, policy: PolicyConfig, folder: str) -> None:
    with tiny_trainer(policy, name) as trainer:
        trainer.save_weights(Path(folder), {})


@pytest.mark.parametrize("name", [full("qwen3_next"), "nemotron_h"])
def test_recurrent_layers_start_alike_in_every_layout(name: str, tmp_path: Path) -> None:
    run_ranks(write_first_weights, 1, name, tiny_policy(), str(tmp_path / "one"))
    for kind in ("tp", "pp"):
        run_ranks(write_first_weights, 2, name, tiny_policy(2, **layout(**{kind: 2})), str(tmp_path / kind))
        assert_same_tensors(tmp_path / kind, tmp_path / "one")


def test_decays_and_time_steps_of_mamba_start_as_in_transformers(tmp_path: Path) -> None:
    run_ranks(write_first_weights, 1, "nemotron_h", tiny_policy(), str(tmp_path))
    tensors = tensors_in(tmp_path)
    prefix = "backbone.layers.0.mixer."
    torch.testing.assert_close(tensors[f"{prefix}A_log"].exp(), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert torch.equal(tensors[f"{prefix}D"], torch.ones(4))
    steps = torch.nn.functional.softplus(tensors[f"{prefix}dt_bias"])
    # `time_step_min` and `time_step_max`.
    assert bool(((steps > 0.001) & (steps < 0.1)).all())
    assert len(steps.unique()) == 4
