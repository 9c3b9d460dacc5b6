# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Vision-language models against transformers, and one optimizer step of every layout against that of one rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.family_outputs import files_beside
from tests.support.family_reference import assert_same_tensors
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import (
    layout,
    logprobs_by_sequence,
    parallel_job,
    shard_of_rank,
    tiny_policy,
)
from tests.support.vision_models import MODELS, mixed_batch, transformers_inputs, write_vision_model

PACKED = {"sequence_packing__enabled": True}
# The last microbatch has no picture.
MICROBATCHES = ((0, 2), (3, 6), (7, 4), (1, 5))
STEPS = 4
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Trained:
    """One rank's log-probabilities before training, then losses, gradient norms and weights of the tower."""

    logprobs: dict[int, np.ndarray]
    losses: list[float]
    norms: list[float]
    tower: dict[str, np.ndarray]


def policy_of(world_size: int, **changes: Any) -> PolicyConfig:
    """With gradients that are reduced while others are computed."""
    return tiny_policy(world_size, **{"moe_aux_loss_coeff": 0.0, **changes})


def trainer_of(folder: str, policy: PolicyConfig) -> MegatronTrainer:
    return MegatronTrainer(policy, plain_config(load_hf_config(folder)), Path(folder), num_steps=STEPS)


def train(folder: str, model_type: str, policy: PolicyConfig, export: str = "") -> Trained:
    with parallel_job(policy):
        trainer = trainer_of(folder, policy)
        if export:
            trainer.save_weights(Path(export), files_beside(Path(folder)))
        batch, place = mixed_batch(model_type), trainer.coordinates
        shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size, MICROBATCHES)
        logprobs = logprobs_by_sequence(trainer, shard, batch, MICROBATCHES)
        results = [trainer.train([shard], sft_loss) for _ in range(STEPS)]
        tower = {
            name: parameter.detach().numpy().copy()
            for chunk in trainer.chunks
            for name, parameter in chunk.named_parameters()
            if name.startswith("vision.")
        }
        return Trained(
            logprobs, [result.global_loss for result in results], [result.grad_norm for result in results], tower
        )


def write_and_compute(model_type: str, folder: str) -> np.ndarray:
    """Writes the model; log-probabilities of every token given those before, by transformers."""
    from transformers import AutoModelForImageTextToText

    write_vision_model(model_type, Path(folder))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    batch = mixed_batch(model_type)
    with torch.no_grad():
        logits = model.eval()(**transformers_inputs(model_type, batch)).logits[:, :-1].log_softmax(-1)
    found: np.ndarray = logits.gather(-1, batch.input_ids[:, 1:, None])[..., 0].numpy()
    return found


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Model type, folder, transformers' log-probabilities, and training on one rank; exports beside the folder."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    (logprobs,) = run_ranks(write_and_compute, 1, request.param, str(folder))
    (one,) = run_ranks(train, 1, str(folder), request.param, policy_of(1), str(folder.parent / "exported"))
    return request.param, folder, logprobs, one


def test_logprobs_are_those_of_transformers_and_an_export_is_what_was_read(reference: Any) -> None:
    _, folder, expected, one = reference
    for row, found in one.logprobs.items():
        np.testing.assert_allclose(found[1:], expected[row, : len(found) - 1], atol=TOLERANCE)
    assert len({name.split(".")[1] for name in one.tower}) > 1
    assert_same_tensors(folder.parent / "exported", folder)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, PACKED),
        (2, PACKED | layout(tp=2)),
        (2, layout(pp=2)),
        pytest.param(1, {"activation_checkpointing": "none"}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, layout(tp=2), marks=pytest.mark.slow),
        pytest.param(2, PACKED | layout(pp=2), marks=pytest.mark.slow),
        pytest.param(2, layout(pp=2, vpp=2), marks=pytest.mark.slow),
        pytest.param(2, PACKED | layout(ep=2), marks=pytest.mark.slow),
    ],
)
def test_steps_do_not_depend_on_the_layout(reference: Any, world_size: int, changes: dict[str, Any]) -> None:
    model_type, folder, _, one = reference
    if model_type == "qwen2_5_vl" and changes.get("expert_model_parallel_size"):
        pytest.skip("the model has no experts")
    ranks = run_ranks(train, world_size, str(folder), model_type, policy_of(world_size, **changes))
    for rank in ranks:
        assert rank.losses == pytest.approx(one.losses, rel=1e-5)
        assert rank.norms == pytest.approx(one.norms, rel=1e-4)
        for row, found in rank.logprobs.items():
            np.testing.assert_allclose(found, one.logprobs[row], atol=TOLERANCE)
    with_tower = [rank for rank in ranks if rank.tower]
    assert with_tower
    for rank in with_tower:
        for name, weights in rank.tower.items():
            np.testing.assert_allclose(weights, one.tower[name], atol=1e-4, err_msg=name)
            np.testing.assert_array_equal(weights, with_tower[0].tower[name], err_msg=f"replicas of {name}")
