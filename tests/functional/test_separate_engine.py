# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core workers beside the trainer as engine: the trainer's responses, scores and weights."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.object_store import fetch_objects
from nemo_rl_moe.errors import GenerationError, WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence
from nemo_rl_moe.generation.lockstep import LockstepEngine, generate_batches
from nemo_rl_moe.generation.refit import refit
from nemo_rl_moe.generation.refit_check import gap_between, probe_sequences
from nemo_rl_moe.launch.refit import start_scores
from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.models.policy.separate_engine import SeparateEngine
from nemo_rl_moe.weight_sync.fingerprints import compare_fingerprints
from tests.functional.separate_engines import GREEDY, ROUNDING, SAMPLED, configuration, requests, sequences, started
from tests.support.tiny_model import tiny_batch

pytestmark = pytest.mark.shared_ray


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MegatronPolicy, SeparateEngine]]:
    with started(configuration(tmp_path_factory.mktemp("both"), 2)) as (policy, engine, copies):
        descriptions = copies.call_all(MegatronModel.describe, {})
        assert [each.coordinates.data_parallel_size for each in descriptions] == [1, 1], "each is a job of its own"
        yield policy, engine


def routes_of(sequence: GeneratedSequence) -> np.ndarray:
    """Experts of the tokens, `[rows, layers, topk]`."""
    assert sequence.routed_experts is not None
    ((source, first, _, num_rows),) = sequence.routed_experts.pieces
    (array,) = fetch_objects([source])
    assert array is not None
    return array[first : first + num_rows]


def assert_same(found: Sequence[GeneratedSequence], expected: Sequence[GeneratedSequence]) -> None:
    for own, other in zip(expected, found, strict=True):
        assert other.token_ids.tolist() == own.token_ids.tolist()
        assert (other.is_truncated, other.weight_version) == (own.is_truncated, own.weight_version)
        np.testing.assert_allclose(other.logprobs, own.logprobs, rtol=0, atol=ROUNDING)
        np.testing.assert_array_equal(routes_of(other), routes_of(own))


def test_responses_are_those_of_the_trainers_engine_before_and_after_updates(
    both: tuple[MegatronPolicy, SeparateEngine],
) -> None:
    policy, engine = both
    trainers = LockstepEngine(partial(generate_batches, policy.generate))
    with pytest.raises(GenerationError, match="no weights yet"):
        sequences(engine, requests(GREEDY))
    seen = []
    for version in (0, 2):
        refit(engine, policy)
        for sampling in (GREEDY, SAMPLED):
            expected = sequences(trainers, requests(sampling))
            assert {each.weight_version for each in expected} == {version}
            assert_same(sequences(engine, requests(sampling)), expected)
            seen.append([each.token_ids.tolist() for each in expected])
        for _ in range(2):
            policy.train(tiny_batch(4, vocabulary_size=45), sft_loss)
    assert seen[:2] != seen[2:], "the weights have changed"
    # Not before the engine has them: what it generates is of the weights that it got last.
    assert {each.weight_version for each in sequences(engine, requests(SAMPLED))} == {2}


def test_a_response_does_not_depend_on_what_shares_its_batch(both: tuple[MegatronPolicy, SeparateEngine]) -> None:
    policy, engine = both
    refit(engine, policy)
    asked = requests(SAMPLED)
    together = sequences(engine, asked)
    assert_same(sequences(engine, asked[::-1])[::-1], together)
    assert_same([sequences(engine, [each])[0] for each in asked], together)


def test_each_copy_holds_and_scores_by_the_trainers_weights(both: tuple[MegatronPolicy, SeparateEngine]) -> None:
    policy, engine = both
    refit(engine, policy)
    expected = policy.start_fingerprints("float32")()
    for found in engine.weight_fingerprints("float32"):
        compared = compare_fingerprints(found, expected)
        assert (compared.share_compared, compared.different) == (1.0, [])
    probes = probe_sequences(3, 20, 45)
    for scores in engine.score(probes, 1.0):
        assert gap_between(scores, start_scores(policy, probes)()).largest < ROUNDING
    refit(engine, policy, altered=True)
    for found in engine.weight_fingerprints("float32"):
        assert len(compare_fingerprints(found, expected).different) == len(expected), "other weights are seen"
    refit(engine, policy)


def test_a_transfer_that_fails_leaves_an_engine_without_weights(both: tuple[MegatronPolicy, SeparateEngine]) -> None:
    policy, engine = both
    problem = pytest.raises(
        WeightSyncError, match=f"it has the weights of version {policy.weight_version}, expected 99"
    )
    with problem, policy.weight_transport() as transport:
        engine.update_weights(transport, 99)
    with pytest.raises(GenerationError, match="no weights yet"):
        sequences(engine, requests(GREEDY))
    refit(engine, policy)
    assert len(sequences(engine, requests(GREEDY))) == 12
