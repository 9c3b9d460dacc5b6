# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The refit check's mathematics: bounds, the round trip, the second refit, and who is named."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from nemo_rl_moe.errors import GenerationError, WeightSyncError
from nemo_rl_moe.generation.refit_check import (
    Bound,
    Gap,
    RefitCheck,
    coarse_bound,
    first_disagreement,
    gap_between,
    guilty_experts,
    probe_sequences,
)

SEQUENCES = [[1, 2, 3], [4, 5, 6]]


def as_scores(sequences: Sequence[Sequence[int]], offset: float) -> list[np.ndarray]:
    return [np.array(tokens[1:], dtype=np.float32) / -10 + np.float32(offset) for tokens in sequences]


@dataclass
class Engine:
    """Scores by one number for all of its weights; two copies of them.

    Attributes:
        arrives: What becomes of each set of weights that is sent: the trainer's are 0, others 1.
        offset: The weights of the second copy; the first is always right.
        dies: How often it does when it is asked for scores.
    """

    arrives: list[float]
    offset: float = 0.0
    sent: list[bool] = field(default_factory=list)
    dies: int = 0

    def refit(self, altered: bool) -> None:
        self.sent.append(altered)
        self.offset = self.arrives.pop(0)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[np.ndarray]]:
        assert temperature == 0.7
        if self.dies:
            self.dies -= 1
            raise GenerationError("it died")
        first = 1.0 if self.sent and self.sent[-1] else 0.0
        return [as_scores(sequences, first), as_scores(sequences, self.offset)]


def check_of(
    engine: Engine, *, in_float32: bool = True, bound_nats: float | None = None, refits_again: bool = False
) -> RefitCheck:
    return RefitCheck(
        SEQUENCES,
        0.7,
        lambda sequences: lambda: as_scores(sequences, 0.0),
        engine.refit,
        lambda copy: f"It is expert 3 of copy {copy}.",
        in_float32=in_float32,
        bound_nats=bound_nats,
        refits_again=refits_again,
    )


def test_the_gap_is_that_of_the_worst_token_and_of_all() -> None:
    found = [np.array([-1.0, -2.0]), np.array([-3.0])]
    expected = [np.array([-1.0, -2.5]), np.array([-2.9])]
    gap = gap_between(found, expected, copy=3)
    assert gap == Gap(pytest.approx(0.5), pytest.approx(0.2), copy=3)


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_no_bound_holds_for_scores_that_are_not_finite(wrong: float) -> None:
    gap = gap_between([np.array([wrong, 0.0])], [np.array([-1.0, 0.0])])
    assert gap == Gap(np.inf, np.inf)
    assert not Bound(np.inf, of_the_mean=False).holds(gap)
    assert not coarse_bound(gap.mean).holds(gap)


def test_a_bound_of_the_mean_and_of_the_largest() -> None:
    gap = Gap(largest=0.3, mean=0.02)
    assert Bound(0.3, of_the_mean=False).holds(gap)
    assert not Bound(0.29, of_the_mean=False).holds(gap)
    assert Bound(0.02, of_the_mean=True).holds(gap)
    assert not Bound(0.019, of_the_mean=True).holds(gap)
    assert str(Bound(1e-4, of_the_mean=False)) == "at most 0.0001 nats"
    assert str(Bound(0.25, of_the_mean=True)) == "a mean 0.25 nats"


@pytest.mark.parametrize(("mean", "nats"), [(0.0, 0.03), (0.007, 0.03), (0.02, 0.08), (0.1, 0.4), (1.3, 0.5)])
def test_the_bound_in_sixteen_bits_follows_the_start(mean: float, nats: float) -> None:
    assert coarse_bound(mean) == Bound(pytest.approx(nats), of_the_mean=True)


def test_in_float32_the_worst_copy_decides() -> None:
    engine = Engine([], offset=9e-5)
    check = check_of(engine)
    assert check.after_refit(engine).largest == pytest.approx(9e-5, rel=0.01)
    engine.offset = 1.1e-4
    with pytest.raises(WeightSyncError) as error:
        check.after_refit(engine)
    assert str(error.value) == (
        "the generation engine does not compute with the trainer's weights: the log-probs of 2 sequences differ by"
        " 0.00011 nats (mean 0.00011), expected at most 0.0001 nats (policy.generation.refit_check). It is expert 3"
        " of copy 1."
    )
    assert check.num_failed == 1


def test_the_users_bound_stands_for_the_checks_own() -> None:
    engine = Engine([], offset=0.01)
    assert check_of(engine, bound_nats=0.02).after_refit(engine).largest == pytest.approx(0.01, rel=0.01)
    with pytest.raises(WeightSyncError, match=r"expected at most 0\.005 nats"):
        check_of(engine, bound_nats=0.005).after_refit(engine)


def test_a_second_refit_cures_or_ends_the_run() -> None:
    engine = Engine([0.0], offset=0.4)
    check = check_of(engine, refits_again=True)
    assert check.after_refit(engine).largest == 0.0
    assert (engine.sent, check.num_failed) == ([False], 1)
    engine = Engine([0.3], offset=0.4)
    with pytest.raises(WeightSyncError, match=r"differ by 0\.3 nats"):
        check_of(engine, refits_again=True).after_refit(engine)
    engine = Engine([], offset=0.4)
    with pytest.raises(WeightSyncError, match=r"differ by 0\.4 nats"):
        check_of(engine).after_refit(engine)
    assert engine.sent == []


def test_an_engine_that_dies_while_it_scores_gets_weights_and_scores_again() -> None:
    engine = Engine([0.0], dies=1)
    check = check_of(engine)
    assert check.after_refit(engine).largest == 0.0
    assert (engine.sent, check.num_failed) == ([False], 0)
    engine = Engine([0.0], dies=2)
    with pytest.raises(GenerationError, match="died"):
        check_of(engine).after_refit(engine)


@dataclass
class StoringEngine(Engine):
    """Says what it stores, by copies; it may lose one of them before it does.

    Attributes:
        stored: Fingerprints of each copy; those of the last are used again.
        loses: How often it dies when it is asked for them.
    """

    stored: list[list[dict[str, str]]] = field(default_factory=list)
    loses: int = 0

    def weight_fingerprints(self, number_format: str) -> list[dict[str, str]]:
        assert number_format == "bfloat16"
        if self.loses:
            self.loses -= 1
            raise GenerationError("it died")
        return self.stored.pop(0) if len(self.stored) > 1 else self.stored[0]


RIGHT = {"norm": "6 a", "experts.0": "8x6 b", "experts.1": "8x6 c", "packed": "6x6 d"}
"""The trainer's fingerprints."""
PARTLY = {"norm": "6 a", "experts.0": "8x6 b", "experts.1": "8x6 c"}
SWAPPED = {"norm": "6 a", "experts.0": "8x6 c", "experts.1": "8x6 b"}


def storing_check(engine: StoringEngine, *, refits_again: bool = False) -> RefitCheck:
    return replace(
        check_of(engine, refits_again=refits_again),
        start_fingerprints=lambda number_format: lambda: RIGHT if number_format == "bfloat16" else {},
        number_format="bfloat16",
    )


def test_tensors_that_an_engine_stores_are_compared_and_named() -> None:
    engine = StoringEngine([], stored=[[PARTLY, PARTLY], [PARTLY, SWAPPED]])
    check = storing_check(engine)
    assert check.share_compared is None
    assert check.after_refit(engine).largest == 0
    assert check.share_compared == 0.75
    with pytest.raises(WeightSyncError) as error:
        check.after_refit(engine)
    assert str(error.value) == (
        "the generation engine does not hold the trainer's weights: in copy 1 2 of 3 tensors differ: experts.0,"
        " experts.1 (policy.generation.refit_check); the log-probs of 2 sequences differ by 0 nats (mean 0)."
    )
    assert check.num_failed == 1


def test_weights_that_are_right_and_scores_that_are_not() -> None:
    engine = StoringEngine([], offset=0.4, stored=[[PARTLY, PARTLY]])
    with pytest.raises(WeightSyncError) as error:
        storing_check(engine).after_refit(engine)
    assert str(error.value) == (
        "the generation engine does not compute with the trainer's weights: the log-probs of 2 sequences differ by"
        " 0.4 nats (mean 0.4), expected at most 0.0001 nats (policy.generation.refit_check). The 3 tensors that it"
        " stores are the trainer's. It is expert 3 of copy 1."
    )


def test_a_second_refit_cures_tensors_too() -> None:
    engine = StoringEngine([0.0], stored=[[SWAPPED, PARTLY], [PARTLY, PARTLY]])
    check = storing_check(engine, refits_again=True)
    assert check.after_refit(engine).largest == 0
    assert (engine.sent, check.num_failed) == ([False], 1)


def test_an_engine_that_dies_while_it_reads_its_weights_gets_them_again() -> None:
    engine = StoringEngine([0.0], stored=[[PARTLY, PARTLY]], loses=1)
    check = storing_check(engine)
    assert check.after_refit(engine).largest == 0
    assert (engine.sent, check.num_failed) == ([False], 0)


def test_in_sixteen_bits_the_first_refit_is_a_round_trip() -> None:
    engine = Engine([1.0, 0.012], offset=0.012)
    check = check_of(engine, in_float32=False)
    assert check.after_refit(engine).mean == pytest.approx(0.012, rel=0.01)
    assert engine.sent == [True, False], "other weights, then the trainer's"
    engine.offset = 0.035
    assert check.after_refit(engine).mean == pytest.approx(0.035, rel=0.01), "below four times the start's"
    assert engine.sent == [True, False], "once"
    engine.offset = 0.1
    assert check.after_refit(engine).mean == pytest.approx(0.1, rel=0.01), "below four times that of the refit before"
    engine.offset = 0.03
    assert check.after_refit(engine).mean == pytest.approx(0.03, rel=0.01)
    engine.offset = 0.41
    with pytest.raises(WeightSyncError, match=r"expected a mean 0\.4 nats"):
        check.after_refit(engine)
    engine.offset = 0.39
    assert check.after_refit(engine).mean == pytest.approx(0.39, rel=0.01), "of a wrong refit nothing is learned"


@pytest.mark.parametrize(
    ("arrives", "problem"),
    [
        ([0.012, 0.012], "a refit with other weights does not change copy 1 of the engine's weights"),
        ([1.0, 0.0120001], r"\(copy 1\) keeps something of earlier weights: .* It is expert 3 of copy 1"),
        ([1.0, 1.0], r"keeps something of earlier weights: .* differ by 0\.99 nats, expected 0\."),
    ],
)
def test_a_round_trip_that_does_not_come_back_is_reported(arrives: list[float], problem: str) -> None:
    engine = Engine(arrives, offset=0.012)
    with pytest.raises(WeightSyncError, match=problem):
        check_of(engine, in_float32=False).after_refit(engine)


@pytest.mark.parametrize(("offset_again", "is_reported"), [(0.013, False), (0.03, True)])
def test_ranks_that_add_up_by_nccl_come_back_within_rounding(offset_again: float, is_reported: bool) -> None:
    engine = Engine([1.0, offset_again], offset=0.012)
    check = replace(check_of(engine, in_float32=False), repeats_bits=False)
    if is_reported:
        with pytest.raises(WeightSyncError, match=r"keeps something of .* a mean below 0\.01"):
            check.after_refit(engine)
    else:
        check.after_refit(engine)


def test_a_wrong_start_in_sixteen_bits_is_reported() -> None:
    """It comes back to the bit, and is wrong each time: a router's rows in another order, say."""
    engine = Engine([1.0, 0.6], offset=0.6)
    with pytest.raises(WeightSyncError, match=r"expected a mean 0\.5 nats"):
        check_of(engine, in_float32=False).after_refit(engine)


def test_the_tokens_are_always_the_same() -> None:
    one, other = probe_sequences(4, 32, 50), probe_sequences(4, 32, 50)
    assert one == other
    assert [len(tokens) for tokens in one] == [32] * 4
    assert {token for tokens in one for token in tokens} <= set(range(50))
    assert len({token for tokens in one for token in tokens}) > 40


def outputs(**rows: list[float]) -> dict[str, np.ndarray]:
    """Two features of each token, alike."""
    return {name: np.stack([np.array(values)] * 2, axis=1) for name, values in rows.items()}


def test_the_first_module_that_disagrees() -> None:
    expected = outputs(embedding=[1, 2, 3], norm=[2, 2, 2], mlp=[10, 10, 10], head=[1, 1, 1])
    found = outputs(embedding=[1, 2, 3], norm=[2, 2.001, 2], mlp=[10, 11, 12], head=[9, 9, 9])
    name, tokens = first_disagreement(found, expected, 0.01) or ("", np.array([]))
    assert (name, tokens.tolist()) == ("mlp", [1, 2])
    name, tokens = first_disagreement(found, expected, 1e-4) or ("", np.array([]))
    assert (name, tokens.tolist()) == ("norm", [1])
    assert first_disagreement(expected, expected, 0.0) is None


def test_a_module_that_one_side_lacks_or_cuts_is_passed_over() -> None:
    expected = outputs(alone=[1, 2], cut=[1, 2], mlp=[1, 2])
    found = {"cut": np.zeros((2, 1)), "mlp": np.full((2, 2), np.nan)}
    name, tokens = first_disagreement(found, expected, 0.1) or ("", np.array([]))
    assert (name, tokens.tolist()) == ("mlp", [0, 1]), "not-a-numbers disagree"
    assert first_disagreement({}, expected, 0.1) is None


def test_zeros_are_compared_too() -> None:
    assert first_disagreement(outputs(mlp=[0, 0]), outputs(mlp=[0, 0]), 0.1) is None
    name, _ = first_disagreement(outputs(mlp=[0, 0.2]), outputs(mlp=[0, 0]), 0.1) or ("", None)
    assert name == "mlp"


def test_guilty_experts_serve_no_right_token() -> None:
    routes = np.array([[0, 1], [1, 2], [3, 0], [2, 0]])
    assert list(guilty_experts(routes, np.array([2]), 4)) == [3]
    assert list(guilty_experts(routes, np.array([1, 3]), 4)) == [2]
    assert list(guilty_experts(routes, np.array([0, 1, 2, 3]), 4)) == [0, 1, 2, 3]
    assert list(guilty_experts(routes, np.array([0]), 4)) == [], "its experts serve right tokens too"
