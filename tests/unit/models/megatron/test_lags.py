# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Updates of a real model on tokens of known versions of its weights: by lag, and in every layout the same."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.lag_metrics import LagSums, lag_table
from nemo_rl_moe.algorithms.losses.lag_sums import LagSum
from nemo_rl_moe.algorithms.losses.position_sums import QUARTERS, PositionSum, quarters_of, sum_key
from nemo_rl_moe.config.schema_grpo import GeneratingPolicyConfig
from nemo_rl_moe.distributed.batch import Destination, TokenBatch, per_token
from nemo_rl_moe.generation.interface import GenerationBatch, SamplingParameters
from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.policy.model_workers import join_metrics
from nemo_rl_moe.rollouts.training_batch import token_lags, training_batch
from nemo_rl_moe.rollouts.trajectory import NOT_SAMPLED, TokenSequence, Trajectory
from nemo_rl_moe.routing.agreement.lag_agreement import live_agreement_key
from nemo_rl_moe.routing.metrics.mismatch_split import gap_metrics
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.token_lag import LAG_CLASSES, NO_LAG, TOKEN_LAG
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_batch, tiny_grpo_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import (
    ADVANTAGES,
    NUM_LAYERS,
    TOPK,
    policy_gradient_loss,
    shard_for,
    with_advantages,
)

SETTINGS = {"activation_checkpointing": "none", "routing_replay": "none", "capture_routing": True}
NO_AGREEMENT = np.full(len(LAG_CLASSES), np.nan)


@dataclass(frozen=True)
class Version:
    """What the model is at one version: log-probabilities and experts of the whole batch."""

    logprobs: np.ndarray[Any, Any]
    routes: np.ndarray[Any, Any]


def plain_batch() -> TokenBatch:
    return with_advantages(tiny_batch(3))


def train(trainer: MegatronTrainer, batch: TokenBatch, *, on_policy: bool = True) -> Any:
    return trainer.train([shard_for(trainer, batch)], policy_gradient_loss(prev_is_current=on_policy))


def versions(policy: GeneratingPolicyConfig, number: int) -> list[Version]:
    """On one rank: the model before and after each of its first updates."""
    with tiny_trainer(policy) as trainer:
        batch, found = plain_batch(), []
        for _ in range(number):
            (logprobs,), stored = trainer.logprobs_and_routes([batch])
            routes = np.full((*batch.input_ids.shape, NUM_LAYERS, TOPK), -1, dtype=np.int16)
            for row, of_sequence in enumerate(stored):
                experts = of_sequence.pieces[0].source
                routes[row, : len(experts)] = experts
            found.append(Version(logprobs.numpy(), routes))
            train(trainer, batch)
        return found


def lags_of_batch(batch: TokenBatch, num_versions: int) -> Tensor:
    """The versions take turns, from sequence to sequence and in the middle of one."""
    rows, columns = batch.input_ids.shape
    lags = (torch.arange(rows)[:, None] + (torch.arange(columns)[None] > 8)) % num_versions
    return lags.where(batch.token_mask, NO_LAG).int()


def lagged_batch(found: list[Version]) -> TokenBatch:
    """The batch as an engine with these versions would have drawn it."""
    batch = plain_batch()
    lags = lags_of_batch(batch, len(found))
    last = len(found) - 1
    drawn_by = (last - lags.clamp(min=0)).numpy()
    logprobs = np.choose(drawn_by, [version.logprobs for version in found])
    # A row is of the pass that drew the token after it.
    row_of = np.pad(drawn_by[:, 1:], ((0, 0), (0, 1)))[..., None, None]
    routes = np.choose(row_of, [version.routes for version in found])
    return batch.with_columns(
        **{
            "generation_logprobs": per_token(torch.from_numpy(logprobs)),
            "prev_logprobs": per_token(torch.from_numpy(found[-1].logprobs)),
            TOKEN_LAG: per_token(lags, fill=NO_LAG),
            ROUTED_EXPERTS: per_token(torch.from_numpy(routes), Destination.MODEL, fill=-1),
        }
    )


def last_update(
    policy: GeneratingPolicyConfig, found: list[Version]
) -> tuple[dict[str, MetricSeries], dict[str, float]]:
    """On every rank: the updates to the last version, then one on the tokens of all of them."""
    with tiny_trainer(policy) as trainer:
        for _ in found[1:]:
            train(trainer, plain_batch())
        result = train(trainer, lagged_batch(found), on_policy=False)
        reports = trainer.coordinates.reports_loss
        return result.microbatch_metrics if reports else {}, result.moe_metrics


@pytest.fixture(scope="module")
def found() -> list[Version]:
    return run_ranks(versions, 1, tiny_grpo_policy(1, **SETTINGS), 3)[0]


@dataclass(frozen=True)
class Reported:
    """What the last update reports."""

    sums: LagSums
    agreement: dict[str, float]  # of the routers with the rollouts, by lag
    by_position: dict[str, float]  # sums of the quarters of sequences


def run(found: list[Version], world_size: int = 1, **changes: Any) -> Reported:
    ranks = run_ranks(last_update, world_size, tiny_grpo_policy(world_size, **{**SETTINGS, **changes}), found)
    series = join_metrics([series for series, _ in ranks])
    sums = LagSums.from_series(series)
    assert sums is not None
    return Reported(
        sums,
        {name: value for name, value in ranks[0][1].items() if "_lag_" in name},
        {name: of.reduce() for name, of in series.items() if name.startswith("by_position/")},
    )


@pytest.fixture(scope="module")
def expected(found: list[Version]) -> Reported:
    return run(found)


def test_agreement_is_that_of_the_rows_that_led_to_each_class(found: list[Version], expected: Reported) -> None:
    batch = plain_batch()
    lags = lags_of_batch(batch, 3).numpy()
    last = found[-1].routes
    taken = lagged_batch(found).columns[ROUTED_EXPERTS].values.numpy()
    same = (np.sort(taken, -1) == np.sort(last, -1)).all(-1)
    metrics = {}
    for lag in range(3):
        rows = same[:, :-1][lags[:, 1:] == lag]
        metrics[live_agreement_key(LAG_CLASSES[lag])] = pytest.approx(float(rows.mean()), abs=1e-9)
    assert expected.agreement == metrics
    assert expected.agreement[live_agreement_key("0")] == 1
    assert expected.agreement[live_agreement_key("2")] < expected.agreement[live_agreement_key("1")] < 1


def test_sums_are_those_of_the_versions(found: list[Version], expected: Reported) -> None:
    lags = lags_of_batch(plain_batch(), 3).numpy()
    table = lag_table(expected.sums, 0.0, NO_AGREEMENT).of
    for lag in range(3):
        moved = (found[-1].logprobs.astype(np.float64) - found[-1 - lag].logprobs)[lags == lag]
        assert table["num_valid_tokens"][lag] == len(moved)
        assert table["gen_kl_error"][lag] == pytest.approx(gap_metrics(moved)["kl"], rel=1e-4)
        assert table["effective_samples"][lag] == pytest.approx(gap_metrics(moved)["effective_samples"], rel=1e-6)
    assert 0 == table["gen_kl_error"][0] < table["gen_kl_error"][1] < table["gen_kl_error"][2]
    assert not expected.sums.of[LagSum.TOKENS][3:].any()


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, {"sequence_packing__enabled": True}),
        (2, layout(ep=2)),
        (2, layout(pp=2)),
        pytest.param(2, layout(tp=2), marks=pytest.mark.full),
        pytest.param(2, {"activation_checkpointing": "full"}, marks=pytest.mark.full),
    ],
)
def test_every_layout_says_the_same(
    found: list[Version], expected: Reported, world_size: int, changes: dict[str, Any]
) -> None:
    reported = run(found, world_size, **changes)
    for quantity, values in reported.sums.of.items():
        np.testing.assert_allclose(values, expected.sums.of[quantity], rtol=1e-5, atol=1e-6, err_msg=quantity)
    assert reported.agreement == expected.agreement
    assert reported.by_position == pytest.approx(expected.by_position, rel=1e-5)


def test_quarters_are_those_of_whole_sequences(found: list[Version], expected: Reported) -> None:
    mask = plain_batch().token_mask[:, 1:]
    lags, quarters = lags_of_batch(plain_batch(), 3)[:, 1:].numpy(), quarters_of(mask).numpy()
    for number, name in enumerate(QUARTERS):
        of_quarter = quarters == number
        gaps = [
            np.abs(found[-1].logprobs.astype(np.float64) - found[-1 - lag].logprobs)[:, 1:][of_quarter & (lags == lag)]
            for lag in range(3)
        ]
        assert expected.by_position[sum_key(name, PositionSum.TOKENS)] == of_quarter.sum() > 0
        difference = expected.by_position[sum_key(name, PositionSum.DIFFERENCE)]
        assert difference == pytest.approx(sum(each.sum() for each in gaps), rel=1e-4)


@dataclass(frozen=True)
class Drawn:
    """A step on responses that the engine has drawn by known versions, and what each version says of them."""

    sums: LagSums
    lags: np.ndarray[Any, Any]
    logprobs: Mapping[int, np.ndarray[Any, Any]]


@contextmanager
def weights_of(trainer: MegatronTrainer, kept: Mapping[str, Tensor]) -> Iterator[None]:
    """While open, the model has earlier weights."""
    parameters = dict(trainer.chunks[0].named_parameters())
    now = {name: value.detach().clone() for name, value in parameters.items()}
    with torch.no_grad():
        for name, value in kept.items():
            parameters[name].copy_(value)
        yield
        for name, value in now.items():
            parameters[name].copy_(value)


@dataclass
class Responses:
    """Responses on their way: tokens, log-probabilities by the engine, and the version that drew each token."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    versions: list[list[int]]

    @classmethod
    def begun(cls, prompts: list[list[int]]) -> "Responses":
        return cls(prompts, [[0.0] * len(each) for each in prompts], [[NOT_SAMPLED] * len(each) for each in prompts])

    def go_on(self, trainer: MegatronTrainer, rows: range, num_tokens: int) -> None:
        """Have the weights as they are draw the next tokens."""
        begun = tuple(tuple(self.tokens[row]) for row in rows)
        seeds = tuple(100 * trainer.num_updates + row for row in rows)
        sampling = SamplingParameters(max_new_tokens=num_tokens, temperature=1.0)
        answers = trainer.generate(GenerationBatch(begun, seeds, sampling), None)
        for row, answer in zip(rows, answers, strict=True):
            assert answer.weight_version == trainer.num_updates
            self.tokens[row] = [*self.tokens[row], *answer.token_ids.tolist()]
            self.logprobs[row] = [*self.logprobs[row], *answer.logprobs.tolist()]
            self.versions[row] = [*self.versions[row], *[trainer.num_updates] * num_tokens]

    @property
    def trajectories(self) -> list[Trajectory]:
        parts = zip(self.tokens, self.logprobs, self.versions, strict=True)
        return [made(row, *of_row) for row, of_row in enumerate(parts)]


def drawn_by_versions(policy: GeneratingPolicyConfig) -> Drawn:
    """Eight responses: 0 to 2 by version 0, 3 to 5 begun by version 0 and ended by version 1, 6 and 7 by version 2."""
    with tiny_trainer(policy) as trainer:
        responses = Responses.begun([[3 + row, 7, 11] for row in range(8)])
        kept: dict[int, dict[str, Tensor]] = {}
        for parts in ([(range(3), 24), (range(3, 6), 12)], [(range(3, 6), 12)], [(range(6, 8), 24)]):
            for rows, num_tokens in parts:
                responses.go_on(trainer, rows, num_tokens)
            weights = trainer.chunks[0].named_parameters()
            kept[trainer.num_updates] = {name: value.detach().clone() for name, value in weights}
            if trainer.num_updates < 2:
                train(trainer, plain_batch())
        found = responses.trajectories
        lags = token_lags(found, trainer.num_updates)
        batch = training_batch(found, torch.tensor(ADVANTAGES).view(4, 2), 0, leave_out_truncated=False)
        logprobs = {}
        for version, earlier in kept.items():
            with weights_of(trainer, earlier):
                logprobs[version] = trainer.logprobs([batch])[0]
        batch = batch.with_columns(**{TOKEN_LAG: per_token(lags, fill=NO_LAG), "prev_logprobs": per_token(logprobs[2])})
        sums = LagSums.from_series(train(trainer, batch, on_policy=False).microbatch_metrics)
        assert sums is not None
        return Drawn(sums, lags.numpy(), {version: of.double().numpy() for version, of in logprobs.items()})


def made(row: int, tokens: list[int], logprobs: list[float], drawn_by: list[int]) -> Trajectory:
    versions = np.array(drawn_by)
    return Trajectory(
        sample_id=f"prompt {row // 2}",
        group_id=f"prompt {row // 2}",
        sequences=(TokenSequence(np.array(tokens), versions != NOT_SAMPLED, np.array(logprobs), versions),),
        reward=0.0,
        is_correct=False,
        finish_reason="length",
    )


def test_the_staleness_part_is_the_difference_of_the_two_versions() -> None:
    """The parts are computed from what engine and trainer reported; the difference, from the two versions' weights."""
    policy = tiny_grpo_policy(1, **SETTINGS, generation__temperature=1.0)
    (step,) = run_ranks(drawn_by_versions, 1, policy)
    of_engines = float(step.sums.mean(LagSum.DIVERGENCE)[0])
    table = lag_table(step.sums, of_engines, NO_AGREEMENT).of
    assert table["num_valid_tokens"].tolist() == [48, 36, 108, 0, 0]
    for lag in (1, 2):
        moved = (step.logprobs[2] - step.logprobs[2 - lag])[step.lags == lag]
        direct = gap_metrics(moved)["kl"]
        assert table["kl_staleness"][lag] == pytest.approx(direct, rel=1e-3)
        assert direct > 100 * abs(of_engines), "one engine draws and trains"
