# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Start of rollouts: the order of groups, the source of a run's groups, and the state with which a resumed run
begins."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_rl_moe.algorithms.grpo_batch import dynamic_sampling
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.distributed.object_store import RAY_STORE, fetch_objects
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.rollouts.dispatch.admission import Bounds
from nemo_rl_moe.rollouts.dispatch.groups import Batch, Group
from nemo_rl_moe.rollouts.dispatch.prompts import QueueState, TicketSource, drawn_again
from nemo_rl_moe.rollouts.dispatch.saved_queue import read_queue
from nemo_rl_moe.rollouts.dispatch.schedule import (
    ReplayedFeed,
    ScheduledStep,
    line_of,
    needed_of,
    read_schedule,
    replay_policy,
)
from nemo_rl_moe.rollouts.dispatch.source import SampledGroups, feed_of_epochs, prompts_of_epochs
from nemo_rl_moe.rollouts.dispatch.staleness import StalenessPolicy, make_policy
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import PromptRounds
from nemo_rl_moe.rollouts.trajectory import sequences_of
from nemo_rl_moe.runs.folder.lines import LineFile, rewind_lines
from nemo_rl_moe.runs.folder.time_line import TimeLine

SCHEDULE_FILE = "schedule.jsonl"
"""File in the run's folder that lists the groups on which each step trained."""


@dataclass(frozen=True)
class RolloutPlan:
    """The order of a run's groups. It is checked before any worker starts.

    Attributes:
        policy: Chooses the groups of a step.
        schedule: Steps of an earlier run, whose groups this run repeats. None: no schedule.
    """

    policy: StalenessPolicy
    schedule: list[ScheduledStep] | None

    def feed(self, config: GRPOMasterConfig, loader: PromptRounds) -> TicketSource:
        """Return the source of prompts: of all epochs or, with a schedule, of its steps."""
        if self.schedule is None:
            return feed_of_epochs(loader, config.grpo.max_num_epochs, config.grpo.num_prompts_per_step)
        with _schedule_named():
            return ReplayedFeed(self.schedule, prompts_of_epochs(loader, config.grpo.max_num_epochs))

    def check(self, config: GRPOMasterConfig, loader: PromptRounds, step: int) -> None:
        """Check that the schedule, if there is one, has the run's prompts and the step after `step`."""
        if self.schedule is not None:
            feed = self.feed(config, loader)
            with _schedule_named():
                feed.restore(QueueState(step * config.updates_per_step, num_taken=0, open=(), given_up=(), queue=()))


def plan_rollouts(config: GRPOMasterConfig) -> RolloutPlan:
    """Return the order of a run's groups. In a synchronous run, this is the order of the prompts."""
    rollouts = config.grpo.rollouts
    if not rollouts.is_asynchronous:
        bounds = Bounds(config.grpo.num_prompts_per_step, updates_per_step=config.updates_per_step)
        return RolloutPlan(make_policy("grpo.rollouts.order", "in_order", bounds, "wait"), None)
    bounds = Bounds(
        config.grpo.num_prompts_per_step,
        rollouts.max_staleness,
        rollouts.concurrency,
        rollouts.target_lag,
        config.updates_per_step,
    )
    if rollouts.replay_schedule is None:
        return RolloutPlan(make_policy("grpo.rollouts.order", rollouts.order, bounds, rollouts.on_stale), None)
    path = Path(rollouts.replay_schedule)
    with _schedule_named():
        try:
            schedule = read_schedule(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        return RolloutPlan(replay_policy(schedule, bounds), schedule)


@contextmanager
def _schedule_named() -> Iterator[None]:
    """In this context, errors about the schedule begin with its key."""
    try:
        yield
    except DataError as error:
        raise DataError(f"grpo.rollouts.replay_schedule: {error}") from None


@contextmanager
def running_source(
    config: GRPOMasterConfig,
    plan: RolloutPlan,
    runner: RolloutRunner,
    loader: PromptRounds,
    sampling: SamplingParameters,
    folder: Path,
    state: QueueState,
    warn: Callable[[str], None],
    message: Callable[[str], None],
    record: Callable[[TimeLine], None] = lambda time_line: None,
) -> Iterator[SampledGroups]:
    """Run the source of a run's groups within this context, and yield it. When the runner ends, it cancels the source's
    groups.

    Args:
        folder: The run's folder. An asynchronous run writes its schedule there.
        state: State from which the source continues.
        warn: Called with a line on each prompt that is given up, and on a schedule that cannot be written.
        message: Called with a line when the schedule can be written again.

    Raises:
        CheckpointError: The prompts differ from the prompts in `state`.
    """
    schedule: LineFile | None = None
    if config.grpo.rollouts.is_asynchronous:
        path = folder / SCHEDULE_FILE
        if path.is_file():
            rewind_lines(path, state.version // config.updates_per_step)
        schedule = LineFile(path, warn, message)
    source = SampledGroups(
        config.grpo,
        runner,
        plan.feed(config, loader),
        plan.policy,
        sampling,
        len(loader),
        dynamic_sampling=dynamic_sampling(config) if plan.schedule is None else None,
        state=state if plan.schedule is None else needed_of(plan.schedule, state),
        runs_ahead=runs_ahead(config),
        fetch=fetch_objects,
        observe=partial(_observe, schedule, config.updates_per_step, warn),
        record=record,
    )
    try:
        yield source
    finally:
        if schedule is not None:
            schedule.close()


def runs_ahead(config: GRPOMasterConfig) -> bool:
    """Return whether groups are generated during training. The trainer's own engine cannot do that."""
    return config.grpo.rollouts.is_asynchronous and not config.policy.generation.engine.shares_weights


def state_at(
    config: GRPOMasterConfig,
    loop: LoopState,
    checkpoint: Path | None,
    loader: PromptRounds,
    *,
    with_optimizer: bool = True,
) -> QueueState:
    """Return the state from which rollouts continue: the checkpoint's queue or, without a queue, the number of prompts
    that were used.

    Args:
        checkpoint: Folder of the checkpoint. None: the run starts from the beginning.
        with_optimizer: Whether the checkpoint has the optimizer's state, which contains the number of its steps.
            Without it, steps are counted from 0 again, the age of the queue's tokens is unknown, and they are sampled
            again.

    Raises:
        CheckpointError: The checkpoint's queue is damaged, or belongs to other prompts.
    """
    version = loop.step * config.updates_per_step
    if checkpoint is not None:
        prompts = prompts_of_epochs(loader, config.grpo.max_num_epochs)
        if (found := read_queue(checkpoint, prompts, RAY_STORE)) is not None:
            is_usable = partial(_can_be_trained_on, config) if with_optimizer else lambda group: False
            return drawn_again(found, version, is_usable)
    num_taken = loop.batches_taken * config.grpo.num_prompts_per_step
    return QueueState(version, num_taken, open=(), given_up=(), queue=())


def _can_be_trained_on(config: GRPOMasterConfig, group: Group) -> bool:
    """Return whether this run can train on a group of the checkpoint. The checkpoint may have been saved with other
    settings."""
    sequences = sequences_of(group)
    return (
        len(group) == config.grpo.num_generations_per_prompt
        and (config.loss_fn.sampling_mask == "none" or all(each.kept_tokens is not None for each in sequences))
        and (
            config.policy.megatron_cfg.routing_replay != "rollout"
            or all(each.routed_experts is not None for each in sequences)
        )
        and (
            config.policy.megatron_cfg.indexer_replay == "none"
            or all(each.indexer_positions is not None for each in sequences)
        )
    )


def _observe(schedule: LineFile | None, updates_per_step: int, warn: Callable[[str], None], batch: Batch) -> None:
    """Write a batch to the schedule of an asynchronous run, and warn of prompts that are given up."""
    if schedule is None:
        return
    schedule.append([line_of(ScheduledStep.of(batch), batch.version // updates_per_step + 1)])
    for each in batch.cancelled:
        if each.is_given_up:
            warn(f"{each.sample_id} is given up after {each.attempt + 1} attempts ({each.reason}): {each.message}")
