# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics by lag against a second formula in float64, and against those of the whole loss."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_rl_moe.algorithms.grpo_batch import make_batch
from nemo_rl_moe.algorithms.lag_metrics import LagMetrics, LagSums, lag_table, metrics_of_all, metrics_of_table
from nemo_rl_moe.algorithms.losses.lag_sums import LagSum
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.step_metrics import training_metrics
from nemo_rl_moe.distributed.batch import per_token
from nemo_rl_moe.metrics import MetricSeries, PhaseClock, Reduction
from nemo_rl_moe.models.interfaces import LossInputs, TrainResult
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED
from nemo_rl_moe.routing.metrics.mismatch_split import gap_metrics
from nemo_rl_moe.runs.folder.by_lag import LAG_STATISTICS, LagTable
from nemo_rl_moe.token_lag import LAG_CLASSES, LOWEST_LAGS, NO_LAG, TOKEN_LAG, lag_classes
from tests.support.grpo_fakes import PAD_TOKEN, small_config, trajectory
from tests.support.grpo_inputs import with_tokens
from tests.support.quick_list import examples
from tests.unit.algorithms.policy_loss_reference import config_of, random_inputs

NAN = float("nan")
NO_AGREEMENT = np.full(len(LAG_CLASSES), NAN)


def with_lags(inputs: LossInputs, lags: Tensor) -> LossInputs:
    return replace(inputs, columns={**inputs.columns, TOKEN_LAG: per_token(lags, fill=NO_LAG)})


def random_lags(inputs: LossInputs, seed: int, highest: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, highest + 1, inputs.logprobs.shape, generator=generator, dtype=torch.int32)


def series_of(*parts: LossInputs, **changes: Any) -> dict[str, MetricSeries]:
    """Metrics of microbatches, as ranks report them."""
    loss = PolicyGradientLoss(config_of(**changes), prev_is_current=False)
    of_parts = [loss(part).metrics for part in parts]
    return {
        name: MetricSeries(tuple(float(of[name][0]) for of in of_parts), reduction)
        for name, (_, reduction) in of_parts[0].items()
    }


def sums_of(*parts: LossInputs, **changes: Any) -> LagSums:
    found = LagSums.from_series(series_of(*parts, **changes))
    assert found is not None
    return found


def table_of(sums: LagSums, of_engines: float = NAN) -> LagTable:
    return lag_table(sums, of_engines, NO_AGREEMENT)


def result_of(series: dict[str, MetricSeries], moe: dict[str, float] | None = None) -> TrainResult:
    return TrainResult(0.0, 0.0, 0.0, 1, 1, series, moe or {})


def of_class(number: int, inputs: LossInputs) -> np.ndarray[Any, Any]:
    """Trained tokens of one class, by its limits."""
    lags = inputs.columns[TOKEN_LAG].values.numpy()
    highest = [*LOWEST_LAGS[1:], math.inf][number]
    chosen: np.ndarray[Any, Any] = (lags >= LOWEST_LAGS[number]) & (lags < highest) & inputs.token_mask.numpy()
    return chosen


def gap(inputs: LossInputs) -> np.ndarray[Any, Any]:
    columns = inputs.columns
    found: np.ndarray[Any, Any] = (columns["prev_logprobs"].values - columns["generation_logprobs"].values).numpy()
    return found


def test_each_lag_has_its_class() -> None:
    lags = torch.tensor([NO_LAG, 0, 1, 2, 3, 4, 5, 6, 100], dtype=torch.int32)
    assert lag_classes(lags).tolist() == [NO_LAG, 0, 1, 2, 3, 3, 4, 4, 4]
    assert len(LAG_CLASSES) == len(LOWEST_LAGS) == 5


@pytest.mark.parametrize("seed", range(4))
def test_each_class_against_the_formulas_of_the_mismatch(seed: int) -> None:
    inputs = random_inputs(seed, sequences=12, targets=9)
    inputs = with_lags(inputs, random_lags(inputs, seed))
    found, config = table_of(sums_of(inputs)), config_of()
    ratio = (inputs.logprobs - inputs.columns["prev_logprobs"].values).detach().exp().numpy()
    advantages = inputs.columns["advantages"].values[:, None].expand(ratio.shape).numpy()
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    for number in range(len(LAG_CLASSES)):
        chosen = of_class(number, inputs)
        expected = gap_metrics(gap(inputs)[chosen])
        values = {name: values[number] for name, values in found.of.items()}
        assert values["num_valid_tokens"] == chosen.sum() > 0
        assert values["gen_kl_error"] == pytest.approx(expected["kl"], rel=1e-12)
        assert values["sampling_logp_difference"] == pytest.approx(expected["mean_abs"], rel=1e-12)
        assert values["effective_samples"] == pytest.approx(expected["effective_samples"], rel=1e-12)
        assert values["clip_fraction"] == pytest.approx(clipped[chosen].mean(), rel=1e-12)


@given(st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 4))
@settings(max_examples=examples(40), deadline=None)
def test_the_mean_over_lags_weighted_by_tokens_is_the_metric_of_the_loss(seed: int, highest: int, cut: int) -> None:
    inputs = random_inputs(seed)
    inputs = replace(inputs, global_valid_tokens=int(inputs.token_mask.sum()))
    inputs = with_lags(inputs, random_lags(inputs, seed, highest))
    halves = [
        replace(
            inputs,
            logprobs=inputs.logprobs[rows],
            token_mask=inputs.token_mask[rows],
            columns={name: replace(column, values=column.values[rows]) for name, column in inputs.columns.items()},
        )
        for rows in (slice(cut), slice(cut, None))
    ]
    whole = {name: of.reduce() for name, of in series_of(inputs).items()}
    sums = sums_of(*halves)  # of two microbatches
    table, tokens = table_of(sums).of, sums.of[LagSum.TOKENS]
    assert tokens.sum() == whole["num_valid_tokens"]
    for name in ("gen_kl_error", "sampling_logp_difference"):
        assert np.nansum(table[name] * tokens) / tokens.sum() == pytest.approx(whole[name], rel=1e-9)
    clipped = whole["clip_fraction_low"] + whole["clip_fraction_high"]
    assert np.nansum(table["clip_fraction"] * tokens) / tokens.sum() == pytest.approx(clipped, rel=1e-9, abs=1e-15)
    of_all = gap_metrics(gap(inputs)[inputs.token_mask.numpy()])
    assert metrics_of_all(sums)["by_lag/effective_samples"] == pytest.approx(of_all["effective_samples"], rel=1e-9)
    lags = inputs.columns[TOKEN_LAG].values[inputs.token_mask].double()
    assert metrics_of_all(sums)["by_lag/mean_lag"] == pytest.approx(float(lags.mean()), rel=1e-9)
    assert whole["by_lag/max_lag"] == lags.max()


def test_what_is_masked_or_not_sampled_changes_nothing() -> None:
    inputs = random_inputs(1)
    lags = random_lags(inputs, 1)
    expected = sums_of(with_lags(inputs, lags))
    columns = {name: column for name, column in inputs.columns.items() if name != "advantages"}
    spoiled = {
        name: replace(column, values=column.values.where(inputs.token_mask, NAN)) for name, column in columns.items()
    }
    masked = with_lags(replace(inputs, columns={**inputs.columns, **spoiled}), lags.where(inputs.token_mask, 99))
    for quantity, values in sums_of(masked).of.items():
        np.testing.assert_array_equal(values, expected.of[quantity])


def test_a_batch_without_lags_has_nothing_new() -> None:
    series = series_of(random_inputs(0))
    assert not any("by_lag" in name for name in series)
    assert LagSums.from_series(series) is None


def test_sums_are_not_logged() -> None:
    inputs = random_inputs(0)
    series = series_of(with_lags(inputs, random_lags(inputs, 0)))
    logged = training_metrics(result_of(series))
    assert {name for name in logged if "by_lag" in name} == {
        "train/by_lag/max_lag",
        "train/by_lag/max_unbounded_lag",
    }
    sums = [of for name, of in series.items() if "by_lag" in name and of.reduction is Reduction.PART]
    assert len(sums) == len(LAG_CLASSES) * len(LagSum)


@pytest.mark.parametrize(("correction", "bounds"), [("none", False), ("truncated", True), ("icepop", True)])
def test_only_a_loss_without_a_bound_reports_the_lag_that_nothing_bounds(correction: str, bounds: bool) -> None:
    """A20: what the alert about it reads."""
    inputs = random_inputs(0)
    series = series_of(with_lags(inputs, random_lags(inputs, 0)), importance_sampling_correction=correction)
    assert ("by_lag/max_unbounded_lag" not in series) == bounds


@pytest.mark.parametrize(("objective", "bounds"), [("clipped", True), ("reinforce", False)])
def test_a_clipped_ratio_to_generation_is_a_bound(objective: str, bounds: bool) -> None:
    inputs = random_inputs(0)
    loss = PolicyGradientLoss(config_of(objective=objective), prev_is_current=False, ratio_to_generation=True)
    metrics = loss(with_lags(inputs, random_lags(inputs, 0))).metrics
    assert ("by_lag/max_unbounded_lag" not in metrics) == bounds


def test_staleness_is_what_older_tokens_have_beyond_those_without_lag() -> None:
    inputs = random_inputs(0, sequences=12, targets=9)
    sums = sums_of(with_lags(inputs, random_lags(inputs, 3, highest=2)))
    divergence = sums.mean(LagSum.DIVERGENCE)
    found = table_of(sums, of_engines=divergence[0]).of["kl_staleness"]
    np.testing.assert_allclose(found[1:3], divergence[1:3] - divergence[0], rtol=1e-12)
    assert np.isnan(found[[0, 3, 4]]).all()


def test_the_divergence_of_engines_adds_to_that_of_moved_weights_where_they_are_independent() -> None:
    """Every move meets every difference of the engines, and the mean ratio of the moves is 1, as over samples."""
    moves, differences = torch.tensor([0.3, -0.4, 0.1], dtype=torch.float64), torch.tensor([0.05, -0.08, 0.02, 0.11])
    moves = moves - moves.exp().mean().log()
    both = (moves[:, None] + differences.double()[None]).flatten()
    lags = torch.tensor([1] * len(both) + [0] * len(differences), dtype=torch.int32)[:, None]
    prev = torch.cat([both, differences.double()])[:, None] - 2.0
    inputs = replace(
        random_inputs(0),
        logprobs=prev,
        token_mask=torch.ones_like(prev, dtype=torch.bool),
        columns={
            "advantages": per_token(torch.zeros_like(prev)),
            "prev_logprobs": per_token(prev),
            "generation_logprobs": per_token(torch.full_like(prev, -2.0)),
        },
    )
    sums = sums_of(with_lags(inputs, lags))
    part = table_of(sums, sums.mean(LagSum.DIVERGENCE)[0]).of["kl_staleness"][1]
    assert part == pytest.approx(gap_metrics(moves.numpy())["kl"], rel=1e-12)


class Kept:
    def __init__(self) -> None:
        self.found: list[tuple[str, LagTable]] = []

    def __call__(self, name: str, table: LagTable) -> None:
        self.found.append((name, table))


def test_the_observer_knows_the_engines_from_earlier_steps() -> None:
    kept, inputs, clock = Kept(), random_inputs(0), PhaseClock()
    observer = LagMetrics(kept)
    only_old = series_of(with_lags(inputs, torch.full(inputs.logprobs.shape, 2, dtype=torch.int32)))
    assert "by_lag/2/kl_staleness" not in observer.after_update(result_of(only_old), clock)

    plain = {"gen_kl_error": MetricSeries((0.001, 0.002), Reduction.SHARE)}
    assert observer.after_update(result_of(plain), clock) == {}
    agreement = {"routing/live_agreement_lag_2": 0.75}
    metrics = observer.after_update(result_of(only_old, agreement), clock)
    assert metrics["by_lag/2/kl_staleness"] == pytest.approx(metrics["by_lag/2/gen_kl_error"] - 0.003)
    assert not any("live_agreement" in name for name in metrics)
    assert {name.split("/")[1] for name in metrics} == {"2", "mean_lag", "effective_samples"}

    assert [name for name, _ in kept.found] == ["by_lag", "by_lag"]
    table = kept.found[1][1].of
    assert set(table) == set(LAG_STATISTICS)
    np.testing.assert_array_equal(table["live_agreement"], [NAN, NAN, 0.75, NAN, NAN])
    assert metrics_of_table(kept.found[1][1]).items() <= metrics.items()


def test_a_batch_has_lags_where_a_token_is_older_than_the_weights() -> None:
    old, mixed = trajectory(response_ids=(5, 6, 1)), trajectory((10, 11), response_ids=(7, 8, 1))
    versions = np.array([NOT_SAMPLED, NOT_SAMPLED, 2, 4, 5])
    mixed = with_tokens(mixed, replace(mixed.sequences[0], weight_versions=versions))
    groups = RolloutGroups([old, mixed], [old, mixed], num_generations=2, num_filled=0)
    config = small_config("grpo.num_generations_per_prompt=2", "grpo.num_prompts_per_step=3")
    lags = make_batch(config, groups, PAD_TOKEN, 5).columns[TOKEN_LAG]
    assert lags.values.tolist() == [[NO_LAG, 5, 5, 5, NO_LAG], [NO_LAG, NO_LAG, 3, 1, 0]]
    fresh = RolloutGroups([old, old], [old, old], num_generations=2, num_filled=0)
    assert TOKEN_LAG not in make_batch(config, fresh, PAD_TOKEN, 0).columns
