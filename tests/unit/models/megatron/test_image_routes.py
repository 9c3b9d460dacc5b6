# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routes of image tokens: captured in generation, replayed in training; and an image token that a response samples."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import GenerationBatch
from nemo_rl_moe.models.images import IS_IMAGE
from nemo_rl_moe.models.megatron.training.router_hooks import RouterHooks
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, logprobs_by_sequence, parallel_job, tiny_grpo_policy
from tests.support.vision_models import IMAGE, mixed_batch, transformers_inputs, vision_batch, write_vision_model
from tests.unit.models.megatron.test_generation_images import GREEDY, as_request, rows_of, trainer_of
from tests.unit.models.megatron.test_router_replay import _OfTheLastMicrobatch
from tests.unit.models.megatron.tiny_trainers import shard_for, with_random_routes

MODELS = ["internvl", pytest.param("qwen3_vl_moe", marks=pytest.mark.slow)]
SPECS = ("auto", "local")
"""The engine's own cached forward pass, and Megatron-Core's cache."""
MICROBATCHES = ((0, 2), (3, 6), (7, 4), (1, 5))
SAMPLED = dataclasses.replace(GREEDY, temperature=1.0, stop_token_ids=())
TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True)
class Answered:
    """A response: what the engine, the trainer and transformers say of it.

    `is_image` is of the whole sequence, and so are the routes, of all tokens that are fed.
    """

    prompt: list[int]
    tokens: list[int]
    generated: np.ndarray
    trained: np.ndarray
    expected: np.ndarray
    is_image: np.ndarray
    capture: np.ndarray
    routes: np.ndarray


def write_model_that_draws(model_type: str, folder: Path) -> None:
    """Writes a model that often answers with the image token."""
    from transformers import AutoModelForImageTextToText

    write_vision_model(model_type, folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[IMAGE] *= -6
    model.save_pretrained(folder)


def by_transformers(model: Any, inputs: Mapping[str, Any], tokens: list[int]) -> np.ndarray:
    """Log-probabilities of a response. Only its prompt comes with images: a token behind them is a word."""
    model.model.rope_deltas = None  # a prompt without images would keep those of the one before
    with torch.no_grad():
        prompt = model(**inputs, use_cache=True)
        more = model(input_ids=torch.tensor([tokens[:-1]]), past_key_values=prompt.past_key_values)
    logits = torch.cat([prompt.logits[:, -1:], more.logits], 1).log_softmax(-1)
    found: np.ndarray = logits[0, torch.arange(len(tokens)), torch.tensor(tokens)].numpy()
    return found


def answered(trainer: MegatronTrainer, model: Any, model_type: str) -> list[Answered]:
    """Answers to prompts with and without images."""
    whole = vision_batch(rows_of(model_type))
    request: GenerationBatch = as_request(whole, SAMPLED)
    batches, found = [], []
    for row, sequence in enumerate(trainer.generate(request, None)):
        prompt, tokens = list(request.prompts[row]), sequence.token_ids.tolist()
        assert sequence.routed_experts is not None
        (piece,) = sequence.routed_experts.pieces
        ids = torch.tensor([[*prompt, *tokens]])
        in_response = torch.arange(ids.shape[1])[None] >= len(prompt)
        bare = TokenBatch(ids, torch.tensor([ids.shape[1]]), in_response, ("one",))
        batches.append(bare.with_inputs([request.model_inputs[row]]))
        logprobs, routes = trainer.logprobs_and_routes(batches[-1:])
        found.append(
            Answered(
                prompt,
                tokens,
                sequence.logprobs,
                logprobs[0][0, len(prompt) :].numpy(),
                by_transformers(model, transformers_inputs(model_type, whole.select([row])), tokens),
                batches[-1].columns[IS_IMAGE].values[0].numpy(),
                piece.source,
                routes[0].pieces[0].source,
            )
        )
    return found


def answers(policies: Mapping[str, PolicyConfig], model_type: str, folder: Path) -> dict[str, list[Answered]]:
    """Answers of each engine of one rank, with the same weights."""
    from transformers import AutoModelForImageTextToText

    write_model_that_draws(model_type, folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for spec, policy in policies.items():
        with parallel_job(policy):
            found[spec] = answered(trainer_of(policy, folder), model, model_type)
    return found


@pytest.fixture(scope="module", params=MODELS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answered]]:
    folder = tmp_path_factory.mktemp(request.param)
    policies = {spec: tiny_grpo_policy(1, layer_spec=spec) for spec in SPECS}
    (of_rank,) = run_ranks(answers, 1, policies, request.param, folder)
    return of_rank


@pytest.mark.parametrize("spec", SPECS)
def test_an_image_token_that_a_response_samples_is_a_token_as_any_other(
    found: dict[str, list[Answered]], spec: str
) -> None:
    sampled = [IMAGE in each.tokens[:-1] for each in found[spec]]
    with_images = [IMAGE in each.prompt for each in found[spec]]
    assert {pair for pair in zip(sampled, with_images, strict=True) if pair[0]} == {(True, True), (True, False)}
    for each in found[spec]:
        np.testing.assert_array_equal(each.is_image[: len(each.prompt)], np.array(each.prompt) == IMAGE)
        assert not each.is_image[len(each.prompt) :].any()
        np.testing.assert_allclose(each.trained, each.expected, atol=TOLERANCE)
        np.testing.assert_allclose(each.generated, each.expected, atol=TOLERANCE)


@pytest.mark.parametrize("spec", SPECS)
def test_a_capture_has_the_routes_of_image_tokens(found: dict[str, list[Answered]], spec: str) -> None:
    for each in found[spec]:
        num_fed = len(each.prompt) + len(each.tokens) - 1
        assert (each.capture[:num_fed] >= 0).all()
        np.testing.assert_array_equal(each.capture[:num_fed], each.routes[:num_fed])
    of_images = np.concatenate(
        [each.capture[: len(each.prompt)][each.is_image[: len(each.prompt)]] for each in found[spec]]
    )
    assert len(np.unique(of_images.reshape(len(of_images), -1), axis=0)) > 4, "images differ"


@dataclasses.dataclass(frozen=True)
class Step:
    """Numbers of one rank's step under replay."""

    logprobs: dict[int, np.ndarray]
    loss: float
    grad_norm: float
    usable: float | None


def replayed(policy: PolicyConfig, model_type: str, folder: Path, hooks: type[RouterHooks] = RouterHooks) -> Step:
    """A step with experts that no router would choose, for image tokens too; within a job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_rl_moe.models.megatron.training.router_hooks.RouterHooks", hooks)
        trainer = trainer_of(policy, folder)
        batch = with_random_routes(mixed_batch(model_type))
        shard = shard_for(trainer, batch, MICROBATCHES)
        logprobs = logprobs_by_sequence(trainer, shard, batch, MICROBATCHES)
        result = trainer.train([shard], sft_loss)
        return Step(logprobs, result.global_loss, result.grad_norm, result.moe_metrics.get("routing/rows_usable_share"))


def replays(policies: list[PolicyConfig], model_type: str, folder: Path, with_fault: bool) -> list[Step]:
    """Return the steps of each policy, all of one layout; and of the last one with routes that recomputation loses."""
    with parallel_job(policies[0]):
        if not folder.exists():
            write_vision_model(model_type, folder)
        steps = [replayed(policy, model_type, folder) for policy in policies]
        return [*steps, replayed(policies[-1], model_type, folder, _OfTheLastMicrobatch)] if with_fault else steps


def policy_of(world_size: int, **changes: Any) -> PolicyConfig:
    return tiny_grpo_policy(world_size, **{"routing_replay": "rollout", "moe_aux_loss_coeff": 0.0, **changes})


@pytest.mark.full
@pytest.mark.parametrize("model_type", MODELS)
def test_stages_that_recompute_replay_the_routes_of_images(model_type: str, tmp_path: Path) -> None:
    alone = [policy_of(1, activation_checkpointing="none", routing_replay=replay) for replay in ("rollout", "none")]
    staged = [policy_of(2, **layout(pp=2), activation_checkpointing=how) for how in ("moe", "full")]
    folder = tmp_path / "model"
    ((one, own),) = run_ranks(replays, 1, alone, model_type, folder, False)
    ranks = run_ranks(replays, 2, staged, model_type, folder, True)
    *right, lost = ranks[0]
    assert abs(own.grad_norm / one.grad_norm - 1) > 0.01, "other routes, another gradient"
    for step in right:
        assert step.usable == 1
        assert step.loss == pytest.approx(one.loss, rel=1e-5)
        assert step.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    logprobs = {row: values for rank in ranks for row, values in rank[1].logprobs.items()}
    for row, values in one.logprobs.items():
        np.testing.assert_allclose(logprobs[row], values, atol=TOLERANCE)
    assert lost.loss == pytest.approx(one.loss, rel=1e-5)
    assert abs(lost.grad_norm / one.grad_norm - 1) > 0.01
