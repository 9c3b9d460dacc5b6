# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefix caches of real vLLM engines: what they save, and which weights their keys and values belong to."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.vllm.config import PrefixCaching
from nemo_rl_moe.generation.vllm.engine import VllmEngine
from tests.support.vllm_engines import (
    Trainer,
    generated,
    generated_across_an_update,
    requests,
    start_engine,
    vllm_tests,
)

pytestmark = vllm_tests()

BLOCK = 128
"""Tokens of a block on CPUs; a cache has whole ones."""
LONG = SamplingParameters(max_new_tokens=90)
COMMON_PROMPT = tuple(np.random.default_rng(0).integers(3, 60, BLOCK + 10).tolist())


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "model")


@pytest.fixture
def engine(vllm_cluster: RayCluster, trainer: Trainer, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    prefix_caching: PrefixCaching = request.param
    engine = start_engine(vllm_cluster, trainer, max_tokens=320, prefix_caching=prefix_caching)
    trainer.refit(engine)
    yield engine
    engine.shutdown()


def of_one_prompt(count: int) -> list[GenerationRequest]:
    """Return requests for several responses to one prompt."""
    return [replace(request, token_ids=COMMON_PROMPT) for request in requests(count, LONG)]


def gaps(trainer: Trainer, found: list[GeneratedSequence]) -> list[float]:
    """Return the largest difference of a token's log-probability from the trainer's, of each answer."""
    scores = trainer.scores([[*COMMON_PROMPT, *sequence.token_ids.tolist()] for sequence in found])
    return [
        float(np.abs(score[-len(sequence.token_ids) :] - sequence.logprobs).max())
        for score, sequence in zip(scores, found, strict=True)
    ]


@pytest.mark.parametrize(("engine", "stays"), [("reset", False), ("keep", True)], indirect=["engine"])
def test_keys_and_values_of_old_weights_are_used_where_they_are_kept_alone(
    engine: VllmEngine, trainer: Trainer, stays: bool
) -> None:
    first, second = generated(engine, of_one_prompt(1)), generated(engine, of_one_prompt(3))
    assert [each.num_cached_tokens for each in (*first, *second)] == [0, BLOCK, BLOCK, BLOCK]
    assert max(gaps(trainer, first + second)) < 2e-5, "the same, computed once"
    trainer.move()
    trainer.refit(engine)
    (found,) = generated(engine, of_one_prompt(1))
    assert found.num_cached_tokens == (BLOCK if stays else 0)
    assert (gaps(trainer, [found])[0] > 1e-3) is stays
    probes = [list(COMMON_PROMPT)]
    (scores,) = engine.score(probes, 1.0)
    np.testing.assert_allclose(scores[0], trainer.scores(probes)[0], atol=2e-5, err_msg="no cache is read")


@pytest.mark.parametrize(("engine", "stays"), [("reset", False), ("keep", True)], indirect=["engine"])
def test_responses_that_an_update_interrupts_go_on_with_new_or_old_keys_and_values(
    engine: VllmEngine, trainer: Trainer, stays: bool, tmp_path: Path
) -> None:
    old = Trainer(tmp_path / "old")
    generated(engine, of_one_prompt(1))
    found = generated_across_an_update(engine, trainer, of_one_prompt(48), num_steps=15)
    interrupted = [each for each in found if set(np.broadcast_to(each.weight_version, 90).tolist()) == {0, 1}]
    assert interrupted
    for sequence in interrupted:
        ids = [[*COMMON_PROMPT, *sequence.token_ids.tolist()]]
        is_new = np.asarray(sequence.weight_version) == 1
        by_old, by_new = (of.scores(ids)[0][-len(is_new) :] for of in (old, trainer))
        np.testing.assert_allclose(sequence.logprobs[~is_new], by_old[~is_new], atol=2e-5)
        assert bool(np.abs(sequence.logprobs - by_new)[is_new].max() > 1e-3) is stays
    assert max(each.num_cached_tokens or 0 for each in interrupted) >= (2 * BLOCK if stays else BLOCK)
