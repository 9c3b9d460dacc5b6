# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A policy, a generation engine, an environment and loggers that do nothing but keep a diary of what is asked of them.

One diary can be shared by all of them, so that a test reads in which order things happened.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.grpo_batch import dynamic_sampling
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.generation.interface import (
    GeneratedSequence,
    GenerationBatch,
    GenerationEngine,
    GenerationRequest,
    SamplingParameters,
)
from nemo_rl_moe.generation.lockstep import LockstepEngine
from nemo_rl_moe.launch.rollouts import plan_rollouts, state_at
from nemo_rl_moe.metrics import MetricSeries, PhaseClock, Reduction
from nemo_rl_moe.models.interfaces import LossFunction, TrainResult
from nemo_rl_moe.rewards.interface import BatchReward, Fault, Score, ScoringItem
from nemo_rl_moe.rollouts.dispatch.activity import EngineActivity
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups
from nemo_rl_moe.rollouts.environment import Environment, SingleTurn
from nemo_rl_moe.rollouts.failed_responses import FailureRule
from nemo_rl_moe.rollouts.loops import CallersLoop, RolloutLoop
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.rollouts.runner import AddRewards, RolloutRunner
from nemo_rl_moe.rollouts.source import PromptRounds, RolloutGroups, RolloutSource
from nemo_rl_moe.rollouts.supervisor import RolloutReports
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.routing.agreement.statistics import RoutingReport
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD, ROUTING
from tests.support.grpo_inputs import tokens_of

END_TOKEN, PAD_TOKEN = 1, 0
LEAVE_OUT = FailureRule(defaultdict(lambda: "leave_out"), fewest_of_group=2, fewest_of_step=2)
AS_ZERO = FailureRule(defaultdict(lambda: "zero"), fewest_of_group=2, fewest_of_step=2)
SAMPLING = SamplingParameters(max_new_tokens=6, temperature=0.8, top_k=5, stop_token_ids=(END_TOKEN,))

# Two prompts of three responses a step, one update, nothing optional.
SMALL_RUN = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=3",
    "grpo.max_num_steps=null",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.metric_name=null",
    "grpo.val_num_generations=2",
    "grpo.val_temperature=0.5",
    "grpo.seed=11",
    "policy.train_global_batch_size=6",
    "policy.train_micro_batch_size=3",
    "policy.generation.max_new_tokens=6",
    "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
)


def small_config(*overrides: str) -> GRPOMasterConfig:
    """Return the tiny exemplar, made smaller, with these overrides."""
    return load_grpo_config("grpo_tiny_moe.yaml", [*SMALL_RUN, *overrides], check_paths=False)


def prompts(count: int, name: str = "train") -> list[Prompt]:
    return [
        Prompt(f"{name}:{index}", f"{name} {index}", tuple(range(10, 11 + index % 3)), {"answer": str(index)})
        for index in range(count)
    ]


def trajectory(
    prompt_ids: Sequence[int] = (10,),
    response_ids: Sequence[int] = (5, END_TOKEN),
    logprobs: Sequence[float] | None = None,
    *,
    reward: float = 0.0,
    is_correct: bool = False,
    is_truncated: bool = False,
    fault: Fault | None = None,
    text: str = "text",
    sample_id: str = "sample",
    prompt_text: str = "prompt",
    rewards: Mapping[str, float] | None = None,
) -> Trajectory:
    return Trajectory(
        sample_id=sample_id,
        group_id=sample_id,
        sequences=(tokens_of(prompt_ids, response_ids, logprobs),),
        reward=reward,
        is_correct=is_correct,
        finish_reason="length" if is_truncated else "stop",
        prompt_text=prompt_text,
        response_text=text,
        fault=fault,
        fault_message="it broke" if fault else "",
        rewards=rewards or {},
    )


@dataclass
class FakeEngine(LockstepEngine):
    """Responds with the seed's last digits: two to five tokens from 5 up, then the end token.

    Attributes:
        diary: Gets `generate` and `refit`.
        shares_weights: As a real engine's.
        weight_version: Of the last refit.
        truncates: Every other response is cut off, by its seed.
        requests: All of them.
        received: Names of the weights of each refit.
    """

    diary: list[str] = field(default_factory=list)
    shares_weights: bool = True
    weight_version: int = 0
    truncates: bool = False
    requests: list[GenerationBatch] = field(default_factory=list)
    received: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(lambda requests: self.answers(requests))

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        self.diary.append("generate")
        (sampling,) = {request.sampling for request in requests}
        prompts, seeds = [request.token_ids for request in requests], [request.seed for request in requests]
        self.requests.append(GenerationBatch(tuple(prompts), tuple(seeds), sampling))
        yield from enumerate(map(self._respond, seeds))

    def update_weights(self, transport: "FakeTransport", version: int) -> None:
        assert not self.shares_weights
        self.diary.append(f"refit {version}")
        transport.send()
        self.received.append(transport.spec)
        self.weight_version = version

    def shutdown(self) -> None:
        raise AssertionError("stopping the engine is not the loop's")

    def _respond(self, seed: int) -> GeneratedSequence:
        token_ids = [*(5 + seed // 10**place % 10 for place in range(2 + seed % 4)), END_TOKEN]
        is_truncated = self.truncates and seed % 8 < 4
        logprobs = np.full(len(token_ids), -0.25)
        return GeneratedSequence(np.array(token_ids), logprobs, is_truncated, self.weight_version)


@dataclass
class FakeRewardFunction:
    """Rewards by a function of the item; by default whether the response's first token is odd.

    Attributes:
        reward: What a response is worth; it is correct from 1 up.
        diary: Gets `score`.
        items: All that was scored.
    """

    reward: Callable[[ScoringItem], float] = lambda item: float(item.response.split()[0] in ["5", "7", "9", "11", "13"])
    diary: list[str] = field(default_factory=list)
    items: list[ScoringItem] = field(default_factory=list)

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        self.diary.append("score")
        self.items += items
        return [Score(reward, reward >= 1) for reward in map(self.reward, items)]


@dataclass
class FakeTransport:
    """Names of weights, and a note in the diary when they are sent."""

    spec: list[str]
    send: Callable[[], None]
    num_bytes: int = 24


@dataclass
class FakePolicy:
    """A policy whose numbers are known beforehand, and that learns nothing.

    Attributes:
        diary: Gets the name of every call.
        batches: What was trained on.
        losses: The loss function of each `train` call.
        updates_of_call: Optimizer steps of each `train` call.
        captures: What is reported of the capture of a step.
        makes_room: The diary gets the calls that prepare for what comes next, too.
    """

    diary: list[str] = field(default_factory=list)
    batches: list[TokenBatch] = field(default_factory=list)
    losses: list[LossFunction] = field(default_factory=list)
    tracks_experts: bool = False
    updates_of_call: int = 1
    captures: Mapping[int, RoutingReport] = field(default_factory=dict)
    makes_room: bool = False

    @property
    def weight_version(self) -> int:
        return len(self.batches) * self.updates_of_call

    def train(self, batch: TokenBatch, loss_function: LossFunction) -> TrainResult:
        self.diary.append("train")
        self.batches.append(batch)
        self.losses.append(loss_function)
        step = len(self.batches)
        artifacts: dict[str, Any] = {}
        if self.tracks_experts:
            artifacts[EXPERT_LOAD.name] = ExpertLoad((0,), torch.tensor([[step, step]]))
        if step in self.captures:
            artifacts[ROUTING.name] = self.captures[step]
        return TrainResult(
            global_loss=1 / step,
            grad_norm=2.0,
            lr=1e-3,
            num_microbatches=2,
            num_tokens=int(batch.lengths.sum()),
            microbatch_metrics={"probs_ratio": MetricSeries((0.5, 0.5), Reduction.SHARE)},
            moe_metrics={"load_balancing_loss": 1.5} if self.tracks_experts else {},
            artifacts=artifacts,
        )

    def evaluate(self, batch: TokenBatch, loss_function: LossFunction) -> dict[str, MetricSeries]:
        raise AssertionError("GRPO validates by generation")

    def prepare_for_generation(self, clock: PhaseClock) -> None:
        if self.makes_room:
            self.diary.append("prepare_for_generation")

    def prepare_for_logprobs(self, clock: PhaseClock) -> None:
        if self.makes_room:
            self.diary.append("prepare_for_logprobs")

    def prepare_for_training(self, clock: PhaseClock) -> None:
        if self.makes_room:
            self.diary.append("prepare_for_training")

    def logprobs(self, batch: TokenBatch) -> Tensor:
        self.diary.append("logprobs")
        return torch.full(batch.input_ids.shape, -1.0)

    def reference_logprobs(self, batch: TokenBatch) -> Tensor:
        self.diary.append("reference_logprobs")
        return torch.full(batch.input_ids.shape, -2.0)

    def score_norms(self, batch: TokenBatch) -> Tensor:
        self.diary.append("score_norms")
        return batch.input_ids.double() / 100

    @contextmanager
    def weight_transport(
        self, *, altered: bool = False, whole: bool = False, then: Callable[[], object] = lambda: None
    ) -> Iterator[FakeTransport]:
        def send() -> None:
            self.diary.append("weights")
            then()

        name = f"{'other ' if altered else ''}weights of step {len(self.batches)}"
        yield FakeTransport([name], send)

    def save_weights(self, directory: Path) -> list[str]:
        raise AssertionError("saving is the launcher's")

    def shutdown(self) -> None:
        raise AssertionError("stopping the workers is the launcher's")


@dataclass
class ListLogger:
    name: str = "list"
    diary: list[str] = field(default_factory=list)
    records: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.diary.append(f"log {step}")
        self.records.append((step, dict(metrics)))

    def log_config(self, config: Mapping[str, Any]) -> None:
        raise AssertionError("the configuration is the launcher's")

    def close(self) -> None:
        raise AssertionError("closing is the launcher's")

    def steps_with(self, key: str) -> list[int]:
        return [step for step, metrics in self.records if key in metrics]


def as_numbers(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def from_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def make_runner(
    engine: GenerationEngine,
    reward_function: BatchReward,
    environment: Environment | None = None,
    max_tokens: int = 100,
    *,
    loop: RolloutLoop | None = None,
    reports: RolloutReports | None = None,
    add_rewards: AddRewards | None = None,
    activity: EngineActivity | None = None,
    **settings: Any,
) -> RolloutRunner:
    """Return a rollout runner over fakes, with one environment.

    Args:
        loop: None: one that runs while its caller waits.
        settings: Further fields of a `RunEnvironment`.
    """
    environments = {"": RunEnvironment(environment or SingleTurn(), reward_function, **settings)}
    return RolloutRunner(
        engine,
        environments,
        as_numbers,
        from_numbers,
        max_tokens,
        loop or CallersLoop(),
        reports=reports,
        add_rewards=add_rewards,
        activity=activity,
    )


def make_source(
    config: GRPOMasterConfig,
    runner: RolloutRunner,
    rounds: PromptRounds,
    loop: LoopState | None = None,
    checkpoint: Path | None = None,
    **more: Any,
) -> SampledGroups:
    """Return the source of a run that begins, or goes on after so many steps.

    Args:
        checkpoint: Has the queue; None: nothing has.
    """
    plan = plan_rollouts(config)
    return SampledGroups(
        config.grpo,
        runner,
        plan.feed(config, rounds),
        plan.policy,
        SAMPLING,
        len(rounds),
        dynamic_sampling=dynamic_sampling(config),
        state=state_at(config, loop or LoopState(), checkpoint, rounds),
        **more,
    )


def groups_of_step(source: RolloutSource, step: int, clock: PhaseClock | None = None) -> RolloutGroups:
    """Return the groups of a step, whose weights an engine gets before."""
    source.update_pending(step)
    source.updated(step)
    return source.next(step, clock or PhaseClock())
