# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The refit check: after each refit, verify that an engine computes with the trainer's weights.

Transports verify that all tensors arrive. They cannot detect an engine that still computes with old or half-written
weights, such as experts in packed kernels (vllm#42821, NeMo-RL#3659). A refit is followed by two checks:

- Stored weights: if the engine returns fingerprints of the weights that it stores, they must equal the trainer's, in
  every number format.
- Scores: engine and trainer score the same tokens, and their log-probabilities are compared, because an engine may
  compute with other weights than it stores. In float32 the bound is 1e-4 nats. Smaller faults pass, such as all weights
  off by 1e-6, or one step old at a learning rate of 1e-6. In 16 bits rounding hides more, and the bound follows the
  correct refits of the run.

In 16 bits, and with adapters in every format, the run starts with a round trip: the engine gets other weights and then
the first weights again. Its scores must then be bitwise equal to those before. The scores of an engine of several ranks
may differ by rounding. Adapters start at zero, so the trainer gives them other values for the round trip.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from nemo_rl_moe.distributed.batch import ModelInput
from nemo_rl_moe.errors import GenerationError, WeightSyncError
from nemo_rl_moe.generation.interface import GenerationEngine, ModuleOutputs, Scores, TokenSequence
from nemo_rl_moe.weight_sync.fingerprints import Fingerprints, WeightComparison, compare_fingerprints

Answer = TypeVar("Answer")

FLOAT32_BOUND = 1e-4
"""Largest allowed difference of two log-probs in float32, in nats. Correct refits stay below 2e-5."""
SMALLEST_COARSE_BOUND, LARGEST_COARSE_BOUND = 0.03, 0.5
COARSE_FACTOR = 4.0
"""Ratio of the bound in 16 bits to the largest mean difference of the run's refits so far. In 400 correct refits of ten
model shapes the mean was up to 2.7 times that of the first refit, as rounding sends tokens to other experts."""
UNMOVED = 0.01
"""Mean difference, in nats, below which two scorings count as made with the same weights."""


@dataclass(frozen=True)
class Bound:
    nats: float
    of_the_mean: bool

    def holds(self, gap: "Gap") -> bool:
        """Return whether scores count as equal. Non-finite scores never do."""
        return bool(np.isfinite(gap.largest)) and (gap.mean if self.of_the_mean else gap.largest) <= self.nats

    def __str__(self) -> str:
        return f"{'a mean' if self.of_the_mean else 'at most'} {self.nats:.2g} nats"


@dataclass(frozen=True)
class Gap:
    """Largest and mean difference of two scorings of the same tokens, in nats: infinite if a score is not finite."""

    largest: float
    mean: float
    copy: int = 0


@dataclass(frozen=True)
class Finding:
    gap: Gap
    weights: Sequence[WeightComparison] = ()

    @property
    def wrong_copy(self) -> int | None:
        return next((copy for copy, each in enumerate(self.weights) if each.different), None)


def gap_between(found: Scores, expected: Scores, copy: int = 0) -> Gap:
    """Return the largest and mean difference of the log-probs of all tokens.

    `copy` is the index of the copy of the weights that computed `found`.
    """
    difference = np.abs(np.concatenate(found).astype(np.float64) - np.concatenate(expected))
    if not np.isfinite(difference).all():
        return Gap(np.inf, np.inf, copy)
    return Gap(float(difference.max()), float(difference.mean()), copy)


def coarse_bound(noise: float) -> Bound:
    nats = float(np.clip(COARSE_FACTOR * noise, SMALLEST_COARSE_BOUND, LARGEST_COARSE_BOUND))
    return Bound(nats, of_the_mean=True)


def probe_sequences(count: int, length: int, vocabulary_size: int) -> list[list[int]]:
    """Return the tokens to score, `[count][length]`: uniform, so that they reach many experts, and always the same."""
    tokens: NDArray[np.int64] = np.random.default_rng(20).integers(vocabulary_size, size=(count, length))
    return [list(map(int, row)) for row in tokens]


@dataclass
class RefitCheck:
    """The refit check of one run: whether an engine computes with the trainer's weights.

    In 16 bits or with adapters, the first check includes a round trip: the engine gets other weights, and then the
    trainer's weights again.

    Attributes:
        start_trainer: Starts scoring with the trainer's current weights; returns a function that waits for the scores.
        refit: Sends the trainer's weights (False), or weights that differ from the trainer's in every tensor (True).
        in_float32: Whether engine and trainer both hold the weights in float32.
        bound_nats: Largest allowed difference of two log-probs; None for the bound of the number format.
        refits_again: Whether to send the weights once more before giving up.
        repeats_bits: Whether two scorings by the engine are bitwise equal. They may differ if ranks sum by NCCL. If
            False, the scores of the round trip must only agree within rounding.
        start_fingerprints: Starts the trainer's fingerprints; returns a function that waits for them. None: the engine
            returns no fingerprints.
        probe_adapters: Gives the trainer's adapters other values (True), or their own again (False). None: no adapters.
        refit_whole: Sends all weights, including frozen ones. None: `refit` does so.
        share_compared: Fraction of the trainer's tensors whose fingerprints the last check compared; None before it.
    """

    sequences: Sequence[TokenSequence]
    temperature: float
    start_trainer: Callable[[Sequence[TokenSequence]], Callable[[], Scores]]
    refit: Callable[[bool], object]
    explain: Callable[[int], str]
    in_float32: bool
    bound_nats: float | None
    refits_again: bool
    model_inputs: Sequence[Mapping[str, ModelInput]] = ()
    start_fingerprints: Callable[[str], Callable[[], Fingerprints]] | None = None
    number_format: str = "float32"
    probe_adapters: Callable[[bool], object] | None = None
    repeats_bits: bool = True
    refit_whole: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        fixed = FLOAT32_BOUND if self.bound_nats is None and self.in_float32 else self.bound_nats
        self._fixed_bound = None if fixed is None else Bound(fixed, of_the_mean=False)
        self._noise = 0.0
        self._is_first = True
        self._expected: Callable[[], Scores] | None = None
        self._expected_weights: Callable[[], Fingerprints] | None = None
        self.num_failed = 0
        self.share_compared: float | None = None

    def begin(self) -> None:
        """Start computing the trainer's scores and fingerprints for the next check. This needs no engine."""
        if self.start_fingerprints is not None:
            self._expected_weights = self.start_fingerprints(self.number_format)
        self._expected = self.start_trainer(self.sequences)

    def after_refit(self, engine: GenerationEngine) -> Gap:
        """Check the engine's current weights, and return the difference of scores.

        The first check includes the round trip (see the class).

        Raises:
            WeightSyncError: The engine's weights differ from the trainer's, or earlier weights still have an effect.
        """
        if self._is_first and not self.in_float32 and self.probe_adapters is None:
            self._with_copies(lambda: self._make_round_trip(engine))
        found = self._examine(engine)
        problem = self._problem(found)
        if problem is not None:
            self.num_failed += 1
            if self.refits_again:
                if self.refit_whole is None:
                    self.refit(False)
                else:
                    self.refit_whole()
                found = self._examine(engine)
                problem = self._problem(found)
        if problem is not None:
            raise WeightSyncError(f"{problem}{self._explanation(found)}")
        self._noise = max(self._noise, found.gap.mean)
        if self._is_first and self.probe_adapters is not None:
            self._try_adapters(engine, self.probe_adapters)
        self._is_first = False
        return found.gap

    def _try_adapters(self, engine: GenerationEngine, probe: Callable[[bool], object]) -> None:
        """Check the engine with other values of the adapters, and then again with the trainer's own values."""
        first = self._score(engine)
        probe(True)
        try:
            self.begin()
            self.refit(False)
            found = self._examine(engine)
        finally:
            probe(False)
        if (problem := self._problem(found)) is not None:
            raise WeightSyncError(
                f"the engine does not use changed adapters: after a refit with other adapters, {problem}"
                f"{self._explanation(found)}"
            )
        self.refit(False)
        self._require_same(first, self._score(engine))

    def _examine(self, engine: GenerationEngine) -> Finding:
        if self._expected is None:
            self.begin()
        assert self._expected is not None  # begun
        stored, scores = self._with_copies(lambda: (self._stored(engine), self._score(engine)))
        weights: list[WeightComparison] = []
        if self._expected_weights is not None and stored:
            of_trainer, self._expected_weights = self._expected_weights(), None
            weights = [compare_fingerprints(of_copy, of_trainer) for of_copy in stored]
            self.share_compared = min(each.share_compared for each in weights)
        expected, self._expected = self._expected(), None
        gaps = [gap_between(found, expected, copy) for copy, found in enumerate(scores)]
        worst = max(gaps, key=lambda gap: gap.largest)
        return Finding(replace(worst, mean=max(gap.mean for gap in gaps)), weights)

    def _with_copies(self, ask: Callable[[], Answer]) -> Answer:
        """Return the answer of an engine. If a copy of the weights is lost, replace it by a refit, and ask again."""
        try:
            return ask()
        except GenerationError:
            self.refit(False)
            return ask()

    def _stored(self, engine: GenerationEngine) -> Sequence[Fingerprints]:
        return () if self.start_fingerprints is None else engine.weight_fingerprints(self.number_format)

    def _score(self, engine: GenerationEngine) -> Sequence[Scores]:
        return engine.score(self.sequences, self.temperature, *self.model_inputs)

    def _problem(self, found: Finding) -> str | None:
        gap = found.gap
        bound = self._fixed_bound or coarse_bound(self._noise or gap.mean)
        scores = (
            f"the log-probs of {len(self.sequences)} sequences differ by {gap.largest:.2g} nats (mean {gap.mean:.2g})"
        )
        if (copy := found.wrong_copy) is not None:
            return (
                f"the generation engine does not hold the trainer's weights: in copy {copy} {found.weights[copy]}"
                f" (policy.generation.refit_check); {scores}."
            )
        if bound.holds(gap):
            return None
        return (
            f"the generation engine does not compute with the trainer's weights: {scores}, expected {bound}"
            f" (policy.generation.refit_check)."
        )

    def _explanation(self, found: Finding) -> str:
        """Return a description of the tensors that disagree, unless the fingerprints have named them."""
        if found.wrong_copy is not None:
            return ""
        num_right = found.weights[found.gap.copy].num_compared if found.weights else 0
        stored = f" The {num_right} tensors that it stores are the trainer's." if num_right else ""
        return f"{stored} {self.explain(found.gap.copy)}"

    def _make_round_trip(self, engine: GenerationEngine) -> None:
        first = self._score(engine)
        self.refit(True)
        other = self._score(engine)
        self.refit(False)
        again = self._score(engine)
        for copy, (before, between) in enumerate(zip(first, other, strict=True)):
            if gap_between(before, between).mean < UNMOVED:
                raise WeightSyncError(f"a refit with other weights does not change copy {copy} of the engine's weights")
        self._require_same(first, again)

    def _require_same(self, first: Sequence[Scores], again: Sequence[Scores]) -> None:
        for copy, (before, after) in enumerate(zip(first, again, strict=True)):
            gap = gap_between(after, before, copy)
            is_equal = all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
            if not (is_equal or (not self.repeats_bits and gap.mean < UNMOVED)):
                expected = "0" if self.repeats_bits else f"a mean below {UNMOVED:g}"
                raise WeightSyncError(
                    f"the generation engine (copy {copy}) keeps something of earlier weights: it got other weights"
                    f" and then the first ones again, and its log-probs differ by {gap.largest:.2g} nats, expected"
                    f" {expected}. {self.explain(gap.copy)}"
                )


def first_disagreement(
    found: ModuleOutputs,
    expected: ModuleOutputs,
    tolerance: float,
) -> tuple[str, Int[np.ndarray, " tokens"]] | None:
    """Return the first module, in forward order, whose output differs from the reference, and the tokens that differ.

    Args:
        tolerance: Largest difference, as a share of the root mean square of the reference's output.
    """
    for name, output in expected.items():
        theirs = found.get(name)
        if theirs is None or theirs.shape != output.shape:
            continue
        scale = float(np.sqrt(np.mean(np.square(output)))) or 1.0
        off = ~(np.abs(theirs - output).max(1) <= tolerance * scale)
        if off.any():
            return name, np.flatnonzero(off)
    return None


def guilty_experts(
    routes: Int[np.ndarray, "tokens topk"], wrong_tokens: Int[np.ndarray, " tokens"], num_tokens: int
) -> Iterator[int]:
    """Return the experts that computed a wrong token and no right one."""
    right = np.setdiff1d(np.arange(num_tokens), wrong_tokens)
    suspected = np.setdiff1d(routes[wrong_tokens], routes[right])
    return (int(expert) for expert in suspected)
