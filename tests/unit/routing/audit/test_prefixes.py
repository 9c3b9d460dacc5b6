# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of the same beginnings at different steps: an engine that follows training, stands still, or runs ahead."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nemo_rl_moe.routing.audit.prefixes import PrefixCollector, PrefixHistory
from nemo_rl_moe.routing.findings.engine_signal import EngineSignal
from nemo_rl_moe.runs.folder.captured_sequences import CapturedRows

LAYERS, EXPERTS, TOPK = 3, 16, 2
PROMPT, LENGTH, NUM_PROMPTS, STEPS = 12, 24, 8, 12
Weights = Callable[[int], float]
"""From a step to how far the weights have moved: the mean change of a logit."""


def logits(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Scores of each prompt's tokens at first, and the direction in which training moves them."""
    shape = (NUM_PROMPTS, LENGTH, LAYERS, EXPERTS)
    return generator.standard_normal(shape), generator.standard_normal(shape)


def steps(engine: Weights, *, noise: float = 0.002, cached: bool = False, seed: int = 0) -> Iterator[dict[str, float]]:
    """Metrics of a run whose engine has weights of its own. `cached`: beginnings alone are computed with them."""
    generator = np.random.default_rng(seed)
    first, direction = logits(generator)
    history = PrefixHistory()
    for step in range(1, STEPS + 1):
        live, behind = (first + moved * direction for moved in (0.05 * step, engine(step)))
        if cached:
            behind = np.concatenate([behind[:, :PROMPT], live[:, PROMPT:]], axis=1)
        sides = [of + noise * generator.standard_normal(of.shape) for of in (behind, live)]
        rollout, training = (of.argsort(-1)[..., -TOPK:].reshape(-1, LAYERS, TOPK).astype(np.int16) for of in sides)
        ids = np.arange(NUM_PROMPTS)[:, None] * 100 + np.arange(LENGTH)
        ids[:, PROMPT:] = generator.integers(1000, size=(NUM_PROMPTS, LENGTH - PROMPT))
        columns = {
            "token_ids": ids.reshape(-1),
            "loss_mask": np.tile(np.arange(LENGTH) >= PROMPT, NUM_PROMPTS),
            "rollout_experts": rollout,
            "training_experts": training,
        }
        names = tuple(map(str, range(NUM_PROMPTS)))
        collector = PrefixCollector()
        collector.add(CapturedRows(step, names, np.full(NUM_PROMPTS, LENGTH), columns, None))
        yield {f"train/{key}": value for key, value in history.compared(step, collector.finished()).items()}


def found(engine: Weights, *, noise: float = 0.002, cached: bool = False, seed: int = 0) -> tuple[int, str, str] | None:
    """First step with a finding, its kind and text."""
    signal = EngineSignal(2)
    for step, metrics in enumerate(steps(engine, noise=noise, cached=cached, seed=seed), start=1):
        for kind, _, text in signal.observe(step, metrics):
            return step, kind, text
    return None


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.02])
@pytest.mark.parametrize("behind", [0, 1, 2])
def test_an_engine_that_follows_has_no_finding(noise: float, behind: int) -> None:
    for seed in range(5):
        assert found(lambda step: 0.05 * max(step - behind, 1), noise=noise, seed=seed) is None


@pytest.mark.parametrize(
    ("engine", "cached", "kind", "text"),
    [
        (lambda step: 0.05, False, "pinned_engine", "the engine's routes have stood still since step"),
        (lambda step: 0.05 * min(step, 6), False, "pinned_engine", "the engine's routes have stood still since step"),
        (lambda step: 0.05 * min(step, 2), True, "stale_prefix_cache", "the engine's routes of prefixes have stood"),
        (lambda step: 0.05 + 0.1 * (step - 1), False, "engine_moves_too_far", "the engine's routes have moved"),
    ],
)
def test_an_engine_without_the_weights_is_found(engine: Weights, cached: bool, kind: str, text: str) -> None:
    result = found(engine, cached=cached)
    assert result is not None
    assert (result[1], result[2][: len(text)]) == (kind, text)


def test_the_same_weights_may_have_the_same_routes() -> None:
    """Tokens of a version that was there before say nothing about an engine that stands still."""
    collector, history = PrefixCollector(), PrefixHistory()
    generator = np.random.default_rng(0)
    ids = np.arange(LENGTH)
    for step in (1, 2):
        routes = generator.random((2, LENGTH, LAYERS, EXPERTS)).argsort(-1)[..., :TOPK].astype(np.int16)
        if step == 1:
            routes[1] = kept = routes[0]
        columns = {
            "token_ids": ids,
            "loss_mask": ids >= 20,
            "rollout_experts": kept,
            "training_experts": routes[1],
            "weight_versions": np.full(LENGTH, 5),
        }
        collector = PrefixCollector()
        collector.add(CapturedRows(step, ("a",), np.array([LENGTH]), columns, None))
        assert history.compared(step, collector.finished()) == {}


def test_the_history_of_a_long_run_stays_small() -> None:
    history = PrefixHistory()
    ids = np.arange(4)
    columns = {"token_ids": ids, "rollout_experts": np.zeros((4, 1, 1)), "training_experts": np.zeros((4, 1, 1))}
    for step in range(1, 2001):
        collector = PrefixCollector()
        collector.add(CapturedRows(step, ("a",), np.array([4]), columns, None))
        history.compared(step, collector.finished())
    assert len(history._earlier) <= 40
    assert history._earlier[0][0] == 1
