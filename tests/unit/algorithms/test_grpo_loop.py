# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop of GRPO over fakes: what it does in which order, and what it logs once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_moe.algorithms.critic import Critic
from nemo_rl_moe.algorithms.grpo import Rollouts, train_grpo, update_engine
from nemo_rl_moe.algorithms.grpo_batch import failure_rule, prev_is_current
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.role_models import RoleModels
from nemo_rl_moe.algorithms.run_observers import CheckedRefits, RoutingAnomalyWatch, RunObserver
from nemo_rl_moe.algorithms.step_recorder import RunSummary
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.errors import RoutingAnomalyError, WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.generation.refit_check import RefitCheck
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.models.interfaces import TrainResult
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rollouts.supervisor import RolloutsGivenUpError
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.agreement.statistics import RoutingReport
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from tests.support.grpo_fakes import (
    PAD_TOKEN,
    SAMPLING,
    FakeEngine,
    FakePolicy,
    FakeRewardFunction,
    ListLogger,
    make_runner,
    make_source,
    prompts,
    small_config,
)
from tests.support.loggers import DiaryOfCheckpoints, make_recorder
from tests.support.made_runs import routing_report
from tests.support.quick_list import examples

VALIDATES = ("grpo.val_at_start=true", "grpo.val_at_end=true")
TWO_UPDATES = ("policy.train_global_batch_size=3", "cluster.cpu_workers_per_node=1")
KL = ("loss_fn.reference_policy_kl_penalty=0.1",)


@dataclass
class Loop:
    """One run and all that it did. Seven prompts, two a step: three steps an epoch."""

    config: GRPOMasterConfig
    shares_weights: bool = True
    tracks_experts: bool = False
    has_validation: bool = True
    truncates: bool = False
    reward_function: FakeRewardFunction = field(default_factory=FakeRewardFunction)
    diary: list[str] = field(default_factory=list)
    loads: list[tuple[int, ExpertLoad]] = field(default_factory=list)
    samples: list[tuple[int, str, list[Trajectory]]] = field(default_factory=list)
    stop_after: int = 0
    start: LoopState = field(default_factory=LoopState)
    folder: Path | None = None
    checkpoint: Path | None = None
    captures: Mapping[int, RoutingReport] = field(default_factory=dict)
    observers: tuple[RunObserver, ...] = ()
    engine_class: type[FakeEngine] = FakeEngine
    refit_check: RefitCheck | None = None
    makes_room: bool = False
    critic: Critic | None = None
    recorded_captures: list[tuple[int, RoutingReport]] = field(default_factory=list)
    summary: RunSummary = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = DiaryOfCheckpoints(self.diary, folder=self.folder)
        self.engine = self.engine_class(self.diary, self.shares_weights, truncates=self.truncates)
        self.policy = FakePolicy(
            self.diary,
            tracks_experts=self.tracks_experts,
            updates_of_call=self.config.updates_per_step,
            captures=self.captures,
            makes_room=self.makes_room,
        )
        self.logger = ListLogger(diary=self.diary)
        self.reward_function.diary = self.diary
        seed, num_prompts = self.config.grpo.seed, self.config.grpo.num_prompts_per_step
        runner = make_runner(self.engine, self.reward_function, reward_weights=self.config.env.reward_weights)
        loader = PromptLoader(prompts(7), num_prompts, seed, shuffle=True)
        held_out = prompts(2, "val") if self.has_validation else ()
        failures = failure_rule(self.config)
        checked = [] if self.refit_check is None else [CheckedRefits(self.refit_check, self.engine)]  # type: ignore[arg-type]
        self.summary = train_grpo(
            self.config,
            self.policy,
            Rollouts(
                self.engine,
                make_source(self.config, runner, loader, self.start, self.checkpoint),
                Validator(self.config.grpo, runner, held_out, SAMPLING, failures) if held_out else None,
                PAD_TOKEN,
            ),
            make_recorder(
                self.logger,
                self.loads,
                self._log_samples,
                self.checkpoints,
                self._stop_reason,
                self.start,
                captures=self.recorded_captures,
            ),
            [*self.observers, *checked],
            RoleModels(self.critic),
        )

    def _stop_reason(self) -> str | None:
        return "SIGTERM" if len(self.policy.batches) == self.stop_after else None

    def _log_samples(self, step: int, split: str, rollouts: Sequence[Trajectory]) -> None:
        self.samples.append((step, split, list(rollouts)))

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.logger.records]


def rewards_of(loop: Loop) -> torch.Tensor:
    """The environment's rewards of a first step."""
    return torch.tensor([found.reward for found in loop.samples[0][2]]).view(2, 3)


def lengths_of(loop: Loop) -> torch.Tensor:
    return torch.tensor([float(found.num_sampled_tokens) for found in loop.samples[0][2]]).view(2, 3)


def advantages_of(loop: Loop) -> torch.Tensor:
    """The advantages of a run of one step."""
    (batch,) = loop.policy.batches
    return batch.columns["advantages"].values.view(2, 3)


def by_group(rewards: torch.Tensor) -> torch.Tensor:
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


def test_order_of_the_phases() -> None:
    assert Loop(small_config("grpo.max_num_steps=2", *VALIDATES)).diary == [
        *("generate", "score", "log 0"),
        *("generate", "score", "train", "log 1"),
        *("generate", "score", "train", "generate", "score", "save 2", "log 2", "finish"),
    ]


def test_room_is_made_before_an_engine_gets_weights_and_given_back_before_training() -> None:
    config = small_config("grpo.max_num_steps=1", "loss_fn.force_on_policy_ratio=never")
    assert Loop(config, shares_weights=False, makes_room=True).diary == [
        *("prepare_for_generation", "refit 0", "weights", "generate", "score", "prepare_for_logprobs", "logprobs"),
        *("prepare_for_training", "train", "prepare_for_generation", "refit 1", "weights", "save 1", "log 1", "finish"),
    ]


def test_without_held_out_prompts_nothing_is_validated() -> None:
    loop = Loop(small_config("grpo.max_num_steps=2", *VALIDATES), has_validation=False)
    assert loop.diary == [
        *("generate", "score", "train", "log 1"),
        *("generate", "score", "train", "save 2", "log 2", "finish"),
    ]
    assert (loop.summary.first_validation, loop.summary.last_validation) == ({}, {})


def test_order_of_the_phases_with_everything() -> None:
    config = small_config("grpo.max_num_steps=2", *VALIDATES, *TWO_UPDATES, *KL)
    assert Loop(config, shares_weights=False).diary == [
        *("refit 0", "weights", "generate", "score", "log 0"),
        *("generate", "score", "logprobs", "reference_logprobs", "train", "refit 2", "weights", "log 1"),
        *("generate", "score", "logprobs", "reference_logprobs", "train", "refit 4", "weights"),
        *("generate", "score", "save 2", "log 2", "finish"),
    ]


def test_a_copy_of_the_weights_is_never_older_than_the_policy() -> None:
    loop = Loop(small_config(*VALIDATES, "grpo.val_period=1", *TWO_UPDATES), shares_weights=False)
    assert loop.engine.received == [[f"weights of step {step}"] for step in range(4)]
    assert all("timing/refit/seconds" in metrics for step, metrics in loop.logger.records if step)
    versions = {(step, split): {found.weight_version for found in rollouts} for step, split, rollouts in loop.samples}
    assert versions == {
        **{(step, "val"): {2 * step} for step in range(4)},
        # Step n is generated by the weights that step n - 1 left.
        **{(step, "train"): {2 * (step - 1)} for step in range(1, 4)},
    }


class ScoringFake(FakeEngine):
    """Scores as it is reported to."""

    can_score = True
    gap = 0.0

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[np.ndarray]]:
        self.diary.append("score weights")
        return [[np.full(len(tokens) - 1, self.gap) for tokens in sequences]]


def check_of_two(diary: list[str], trainers_scores: float = 0.0) -> RefitCheck:
    """A check of two sequences in float32."""
    return RefitCheck(
        [[1, 2], [3, 4]],
        0.8,
        lambda sequences: diary.append("trainer begins") or (lambda: [np.full(1, trainers_scores)] * 2),  # type: ignore[func-returns-value]
        lambda altered: None,
        lambda copy: f"It is copy {copy}.",
        in_float32=True,
        bound_nats=None,
        refits_again=False,
    )


def test_a_resumed_run_whose_engine_has_other_weights_generates_nothing() -> None:
    diary: list[str] = []
    with pytest.raises(WeightSyncError, match="does not compute with the trainer's weights"):
        Loop(
            small_config("grpo.max_num_steps=4", *VALIDATES),
            shares_weights=False,
            diary=diary,
            start=LoopState(step=2, batches_taken=2),
            engine_class=ScoringFake,
            refit_check=check_of_two(diary, trainers_scores=0.01),
        )
    assert diary == ["refit 0", "weights", "trainer begins", "score weights"]


def test_each_refit_is_checked_and_its_gap_is_a_metric() -> None:
    engine, policy, clock = ScoringFake(shares_weights=False), FakePolicy(), PhaseClock()
    check = check_of_two(policy.diary)
    checked = [CheckedRefits(check, engine)]
    engine.gap = 5e-5
    assert update_engine(engine, policy, clock, checked) == {  # type: ignore[arg-type]
        "refit/bytes": 24.0,
        "refit/logprob_gap": pytest.approx(5e-5),
        "refit/checks_failed": 0.0,
    }
    assert engine.diary == ["refit 0", "score weights"]
    assert policy.diary == ["weights", "trainer begins"], "while the engine still loads"
    assert {"refit", "refit_check"} <= {key.split("/")[1] for key in clock.metrics()}
    check.share_compared = 0.75
    assert update_engine(engine, policy, clock, checked)["refit/weights_compared"] == 0.75  # type: ignore[arg-type]
    assert update_engine(engine, policy, clock) == {"refit/bytes": 24.0}  # type: ignore[arg-type]
    engine.gap = 2e-4
    with pytest.raises(WeightSyncError, match="It is copy 0"):
        update_engine(engine, policy, clock, checked)  # type: ignore[arg-type]
    engine.shares_weights = True
    assert update_engine(engine, policy, clock, checked) == {}  # type: ignore[arg-type]


@dataclass
class Diary(RunObserver):
    """Writes down what it sees."""

    name: str
    diary: list[str]

    def before_update(
        self, step: int, batch: TokenBatch, trajectories: Sequence[Trajectory], clock: PhaseClock
    ) -> dict[str, float]:
        assert len(trajectories) == len(batch)
        return self._seen(f"before {step}")

    def after_update(self, result: TrainResult, clock: PhaseClock) -> dict[str, float]:
        return self._seen("after")

    def during_refit(self) -> None:
        self._seen("during refit")

    def after_refit(self, clock: PhaseClock) -> dict[str, float]:
        return self._seen("refit")

    def _seen(self, what: str) -> dict[str, float]:
        self.diary.append(f"{self.name} {what}")
        return {f"moe/{self.name} {what}": float(len(self.diary))}


def test_observers_see_each_phase_in_their_order() -> None:
    diary: list[str] = []
    observers = Diary("a", diary), Diary("b", diary)
    loop = Loop(small_config("grpo.max_num_steps=1"), shares_weights=False, diary=diary, observers=observers)
    seen = [entry for entry in diary if entry.split()[0] in ("a", "b", "generate", "train", "log")]
    of_refit = ["a during refit", "b during refit", "a refit", "b refit"]
    assert seen == [
        *(*of_refit, "generate", "a before 1", "b before 1", "train", "a after", "b after"),
        *(*of_refit, "log 1"),
    ]
    assert {f"train/moe/{name} {what}" for name in "ab" for what in ("before 1", "after", "refit")} <= {
        *loop.logger.records[0][1]
    }


@settings(max_examples=examples(25), deadline=None)
@given(
    period=st.integers(0, 4),
    at_start=st.booleans(),
    at_end=st.booleans(),
    epochs=st.integers(1, 2),
    max_steps=st.none() | st.integers(1, 7),
    dynamic=st.booleans(),
)
def test_one_record_a_step_one_save_and_when_it_validates(
    period: int, at_start: bool, at_end: bool, epochs: int, max_steps: int | None, dynamic: bool
) -> None:
    loop = Loop(
        small_config(
            f"grpo.val_period={period}",
            f"grpo.val_at_start={str(at_start).lower()}",
            f"grpo.val_at_end={str(at_end).lower()}",
            f"grpo.max_num_epochs={epochs}",
            f"grpo.max_num_steps={'null' if max_steps is None else max_steps}",
            f"grpo.use_dynamic_sampling={str(dynamic).lower()}",
        )
    )
    last = loop.summary.num_steps
    assert loop.steps == list(range(0 if at_start else 1, last + 1))
    assert last == min(3 * epochs, max_steps or 99) or dynamic
    assert [state.step for state in loop.checkpoints.states] == [last]
    assert loop.diary[-3:] == [f"save {last}", f"log {last}", "finish"]
    due = {0} if at_start else set()
    due |= set(range(period, last + 1, period)) if period else set()
    due |= {last} if at_end else set()  # however the last step comes about
    validated = [step for step, split, _ in loop.samples if split == "val"]
    assert validated == loop.logger.steps_with("val/accuracy") == sorted(due)
    assert loop.logger.steps_with("timing/validation/seconds") == validated
    assert [step for step, split, _ in loop.samples if split == "train"] == list(range(1, last + 1))
    assert loop.logger.steps_with("train/loss") == list(range(1, last + 1))
    assert dynamic or loop.diary.count("generate") == last + len(due)


def test_each_epoch_takes_each_prompt_at_most_once_in_an_order_of_its_own() -> None:
    batches = [batch.sample_ids for batch in Loop(small_config("grpo.max_num_epochs=2")).policy.batches]
    epochs = [[name for batch in batches[start : start + 3] for name in batch[::3]] for start in (0, 3)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_same_seed_gives_the_same_run() -> None:
    def trained(*overrides: str) -> list[list[list[int]]]:
        return [batch.input_ids.tolist() for batch in Loop(small_config(*overrides)).policy.batches]

    assert trained() == trained()
    assert trained() == trained(*VALIDATES, "grpo.val_period=1"), "validation changes nothing of the training"
    assert trained() != trained("grpo.seed=12")


class RewardFunctionOfTwo(FakeRewardFunction):
    """Two rewards by name."""

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        first = [float(item.response.split()[0]) for item in items]
        return [Score.named({"a": value % 2, "b": value % 3}, is_correct=False) for value in first]


def test_rewards_by_name_are_weighed_and_compared_each_apart() -> None:
    named = (
        *("env.reward.kind=callable", "env.reward.function=package.module:function", "grpo.max_num_steps=1"),
        *("env.reward_weights={a: 1.0, b: 0.5}", "grpo.advantage_clip_high=1.2"),
    )
    loops = {
        name: Loop(small_config(*named, f"grpo.adv_estimator.name={name}"), reward_function=RewardFunctionOfTwo())
        for name in ("grpo", "gdpo")
    }
    for loop in loops.values():
        metrics = dict(loop.logger.records)[1]
        assert metrics["train/reward"] == pytest.approx(
            metrics["train/rewards/a/mean"] + 0.5 * metrics["train/rewards/b/mean"]
        )
    trajectories = loops["gdpo"].samples[0][2]
    a, b = (torch.tensor([found.rewards[name] for found in trajectories]).double().view(2, 3) for name in "ab")
    assert a.std(1).max() > 0
    assert b.std(1).max() > 0

    found = {name: advantages_of(loop).double() for name, loop in loops.items()}
    torch.testing.assert_close(found["grpo"], by_group(a + 0.5 * b).clamp(max=1.2), rtol=1e-5, atol=1e-6)
    decoupled = by_group(a) + 0.5 * by_group(b)
    expected = (decoupled / (decoupled.std() + 1e-6)).clamp(max=1.2)
    torch.testing.assert_close(found["gdpo"], expected, rtol=1e-5, atol=1e-6)


def test_what_is_trained_on() -> None:
    loop = Loop(small_config("grpo.max_num_steps=1"))
    (batch,) = loop.policy.batches
    assert batch.columns.keys() == {"advantages", "generation_logprobs"}, "on policy, no pass over log-probabilities"
    assert rewards_of(loop).std(1).max() > 0
    torch.testing.assert_close(advantages_of(loop), by_group(rewards_of(loop)))
    (loss,) = loop.policy.losses
    assert isinstance(loss, PolicyGradientLoss)
    assert (loss.config, loss.prev_is_current) == (loop.config.loss_fn, True)


@pytest.mark.parametrize(
    ("overrides", "updates", "is_one"),
    [
        ((), 1, True),
        (("loss_fn.force_on_policy_ratio=always",), 1, True),
        (("loss_fn.force_on_policy_ratio=never",), 1, False),
        (TWO_UPDATES, 2, False),
        ((*TWO_UPDATES, "loss_fn.force_on_policy_ratio=never"), 2, False),
    ],
)
def test_when_log_probabilities_are_asked_for(overrides: tuple[str, ...], updates: int, is_one: bool) -> None:
    config = small_config("grpo.max_num_steps=1", *overrides)
    assert (config.updates_per_step, prev_is_current(config)) == (updates, is_one)
    loop = Loop(config)
    assert ("logprobs" in loop.diary) is not is_one
    assert "reference_logprobs" not in loop.diary
    (batch,), (loss,) = loop.policy.batches, loop.policy.losses
    assert isinstance(loss, PolicyGradientLoss)
    assert loss.prev_is_current is is_one
    assert ("prev_logprobs" in batch.columns) is not is_one
    assert ("timing/logprobs/seconds" in loop.logger.records[-1][1]) is not is_one
    if not is_one:
        assert torch.equal(batch.columns["prev_logprobs"].values, torch.full(batch.input_ids.shape, -1.0))


def test_a_penalty_asks_for_the_reference() -> None:
    loop = Loop(small_config("grpo.max_num_steps=1", *KL))
    (batch,) = loop.policy.batches
    assert torch.equal(batch.columns["reference_logprobs"].values, torch.full(batch.input_ids.shape, -2.0))
    assert "prev_logprobs" not in batch.columns
    assert "timing/reference_logprobs/seconds" in loop.logger.records[-1][1]


def test_a_penalty_in_the_reward() -> None:
    """Every token costs a nat: the policy gives each e^-1, the reference e^-2."""
    in_reward = ("loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_type=k1")
    estimator = ("grpo.adv_estimator.normalize_rewards=false",)
    loop = Loop(small_config("grpo.max_num_steps=1", *KL, *in_reward, *estimator))
    assert loop.diary.index("logprobs") < loop.diary.index("reference_logprobs") < loop.diary.index("train")
    assert lengths_of(loop).std(1).min() > 0
    rewards = rewards_of(loop) - 0.1 * lengths_of(loop)
    torch.testing.assert_close(advantages_of(loop), rewards - rewards.mean(1, keepdim=True))
    metrics = loop.logger.records[-1][1]
    assert metrics["train/kl_penalty"] == 1.0
    assert metrics["train/reward"] == pytest.approx(float(rewards_of(loop).mean())), "the environment's"


def test_responses_left_out_of_the_loss_pay_for_their_divergence_too() -> None:
    settings = ("loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_type=k1", "grpo.overlong_filtering=true")
    loop = Loop(small_config("grpo.max_num_steps=1", *KL, *settings), truncates=True)
    assert any(found.is_truncated for found in loop.samples[0][2])
    assert loop.logger.records[-1][1]["train/kl_penalty"] == 1.0
    expected = by_group(rewards_of(loop) - 0.1 * lengths_of(loop))
    torch.testing.assert_close(advantages_of(loop), expected, rtol=1e-4, atol=1e-5)


def test_what_a_step_logs() -> None:
    loop = Loop(small_config("grpo.max_num_steps=1", "grpo.val_at_end=true"), tracks_experts=True)
    ((step, metrics),) = loop.logger.records
    assert step == 1
    timings = {name for name in metrics if name.startswith("timing/")}
    speeds = {f"timing/{name}/tokens_per_second" for name in ("generation", "train", "validation")}
    phases = ("step", "generation", "rewards", "train", "validation", "checkpoint")
    assert timings == speeds | {f"timing/{name}/seconds" for name in phases}
    assert all(metrics[name] > 0 for name in timings)
    inside = sum(metrics[f"timing/{name}/seconds"] for name in ("generation", "rewards", "train"))
    assert inside <= metrics["timing/step/seconds"]
    training = {name.removeprefix("train/") for name in metrics if name.startswith("train/")}
    assert training == {
        *("loss", "grad_norm", "lr", "num_microbatches", "num_tokens", "probs_ratio", "moe/load_balancing_loss"),
        "skipped_updates",
        *("reward", "reward_std", "accuracy", "mean_gen_tokens_per_sample", "max_gen_tokens_per_sample"),
        *("truncation_rate", "frac_zero_std_groups", "env/num_errors", "env/num_timeouts", "env/num_died"),
        *("env/failed_share", "env/num_groups_left_out", "truncation_rate_unscored"),
        *("advantages/mean", "advantages/min", "advantages/max"),
    }
    assert all(name.split("/")[0] in ("train", "val", "timing") for name in metrics)
    assert metrics["train/probs_ratio"] == 1.0
    assert metrics["train/reward"] == pytest.approx(
        sum(found.reward for _, split, rollouts in loop.samples if split == "train" for found in rollouts) / 6
    )


def test_expert_loads_arrive_once_a_step() -> None:
    loads = Loop(small_config(), tracks_experts=True).loads
    assert [(step, load.counts.tolist()) for step, load in loads] == [(step, [[step, step]]) for step in (1, 2, 3)]
    assert Loop(small_config()).loads == []


def test_a_capture_is_recorded_before_it_may_end_the_run() -> None:
    healthy, wrong = (
        routing_report([0]),
        routing_report([0], anomalies=[RoutingAnomaly("token", "routes are one token late")]),
    )
    recorded: list[tuple[int, RoutingReport]] = []
    diary: list[str] = []
    with pytest.raises(RoutingAnomalyError, match="routes are one token late"):
        Loop(
            small_config(),
            diary=diary,
            captures={1: healthy, 2: wrong, 3: healthy},
            observers=(RoutingAnomalyWatch(),),
            recorded_captures=recorded,
        )
    assert recorded == [(1, healthy), (2, wrong)]
    assert diary[-1] == "train", "the step is neither logged nor saved"
    reported = Loop(small_config(), captures={2: wrong})
    assert (reported.recorded_captures, reported.steps) == ([(2, wrong)], [1, 2, 3])


def test_dynamic_sampling_that_uses_up_the_prompts_ends_the_run_as_any_other() -> None:
    dynamic = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_groups=4")
    loop = Loop(
        small_config(*dynamic, "grpo.val_at_end=true"),
        reward_function=FakeRewardFunction(reward=lambda _: 0.0),
        tracks_experts=True,
    )
    # Three rounds of prompts: the first step takes two of them, the second the last one.
    assert loop.summary.num_steps == len(loop.policy.batches) == 2
    assert loop.steps == [1, 2]
    assert loop.logger.steps_with("val/accuracy") == [2]
    assert [state.step for state in loop.checkpoints.states] == [2]
    assert loop.logger.records[0][1]["train/dynamic_sampling/num_gen_batches"] == 2
    assert loop.logger.records[1][1]["train/dynamic_sampling/num_filled_groups"] == 2
    assert not loop.policy.batches[0].columns["advantages"].values.any()


def test_long_responses_are_punished() -> None:
    shaping = "grpo.reward_shaping={enabled: true, overlong_buffer_length: 4, overlong_buffer_penalty: 1.0}"
    loop = Loop(small_config("grpo.max_num_steps=1", shaping), reward_function=FakeRewardFunction(reward=lambda _: 1.0))
    assert len(set(lengths_of(loop).flatten().tolist())) > 1
    differs = (1 - (lengths_of(loop) - 2).clamp(0, 4) / 4).std(1) > 0
    assert torch.equal(advantages_of(loop).abs().amax(1) > 0, differs), "shaped rewards make the advantages"
    assert loop.logger.records[0][1]["train/reward"] == 1.0, "the reward that is reported is the environment's"


@pytest.mark.parametrize("filters", [True, False])
def test_cut_responses_are_left_out_where_asked_for(filters: bool) -> None:
    loop = Loop(small_config(f"grpo.overlong_filtering={str(filters).lower()}"), truncates=True)
    cut = [found.is_truncated for _, _, rollouts in loop.samples for found in rollouts]
    assert {True, False} == set(cut)
    is_trained = [trained for batch in loop.policy.batches for trained in batch.token_mask.any(dim=1).tolist()]
    assert is_trained == [not (filters and was_cut) for was_cut in cut]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_a_run_that_is_stopped_and_resumed_does_what_one_that_never_stopped_does(
    stop_after: int, dynamic: bool, tmp_path: Path
) -> None:
    config = small_config(
        "grpo.max_num_epochs=4", "grpo.max_num_steps=5", *VALIDATES, f"grpo.use_dynamic_sampling={str(dynamic).lower()}"
    )
    whole = Loop(config)
    first = Loop(config, stop_after=stop_after, folder=tmp_path)
    assert (first.summary.num_steps, first.summary.stopped_for) == (stop_after, "SIGTERM")
    assert first.diary[-3:] == [f"save {stop_after}", f"log {stop_after}", "finish"]
    second = Loop(config, start=first.checkpoints.states[-1], checkpoint=tmp_path / f"step_{stop_after}")
    assert second.steps == list(range(stop_after + 1, 6)), "the start is not validated again"
    batches = [*first.policy.batches, *second.policy.batches]
    assert [batch.input_ids.tolist() for batch in batches] == [b.input_ids.tolist() for b in whole.policy.batches]
    assert second.summary.first_validation == whole.summary.first_validation


def loop_given_up_at(generation: int, *overrides: str, start: LoopState | None = None) -> Loop:
    """A loop that is asked to stop, and whose rollouts hang, at a generation counted from 1, validations included."""

    asked: list[str] = []

    class GivenUp(FakeEngine):
        def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
            if len(self.requests) + 1 == generation:
                asked.append("SIGTERM")
                raise RolloutsGivenUpError("SIGTERM: they hang")
            yield from super().answers(requests)

    class Stopped(Loop):
        def _stop_reason(self) -> str | None:
            return asked[-1] if asked else None

    config = small_config("grpo.max_num_epochs=4", "grpo.max_num_steps=5", *overrides)
    return Stopped(config, engine_class=GivenUp, start=start or LoopState())


def test_a_step_that_is_given_up_leaves_the_one_before_it_saved() -> None:
    loop = loop_given_up_at(3)
    assert loop.diary[-3:] == ["log 2", "save 2", "finish"]
    assert (loop.summary.num_steps, loop.summary.stopped_for) == (2, "SIGTERM")
    whole = Loop(loop.config)
    rest = Loop(loop.config, start=loop.checkpoints.states[-1])
    batches = [*loop.policy.batches, *rest.policy.batches]
    assert [batch.input_ids.tolist() for batch in batches] == [b.input_ids.tolist() for b in whole.policy.batches]


def test_a_step_whose_validation_is_given_up_is_recorded_without_it() -> None:
    loop = loop_given_up_at(3, "grpo.val_period=2")
    assert loop.steps == [1, 2]
    assert loop.logger.steps_with("val/reward") == []
    assert [(step, split) for step, split, _ in loop.samples] == [(1, "train"), (2, "train")]
    assert loop.diary[-3:] == ["save 2", "log 2", "finish"]


@pytest.mark.parametrize("generation", [1, 2])
def test_before_the_first_step_nothing_is_saved(generation: int) -> None:
    loop = loop_given_up_at(generation, "grpo.val_at_start=true")
    assert (loop.summary.num_steps, loop.summary.stopped_for) == (0, "SIGTERM")
    assert not loop.policy.batches
    assert not loop.checkpoints.states


def test_what_a_run_has_gone_on_from_is_not_saved_again() -> None:
    loop = loop_given_up_at(1, start=LoopState(step=2, batches_taken=2))
    assert (loop.summary.num_steps, loop.summary.stopped_for) == (2, "SIGTERM")
    assert not loop.checkpoints.states
