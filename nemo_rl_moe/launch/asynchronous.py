# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Start of asynchronous rollouts: their order, their event loop, what they are recorded by, and their end."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.object_store import RAY_STORE, fetch_objects
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.rollouts.asynchronous.accounts import TrajectoryBatch, wasted_tokens
from nemo_rl_moe.rollouts.asynchronous.admission import Bounds
from nemo_rl_moe.rollouts.asynchronous.dispatcher import Dispatcher
from nemo_rl_moe.rollouts.asynchronous.group_maker import GroupMaker
from nemo_rl_moe.rollouts.asynchronous.loops import CallersLoop, LoopThread, RolloutLoop
from nemo_rl_moe.rollouts.asynchronous.prompts import QueueState, TicketSource, drawn_again
from nemo_rl_moe.rollouts.asynchronous.saved_queue import read_queue
from nemo_rl_moe.rollouts.asynchronous.schedule import (
    ReplayedFeed,
    ScheduledStep,
    line_of,
    needed_of,
    read_schedule,
    replay_policy,
)
from nemo_rl_moe.rollouts.asynchronous.source import AsynchronousSource, feed_of_epochs, prompts_of_epochs
from nemo_rl_moe.rollouts.asynchronous.staleness import StalenessPolicy, make_policy
from nemo_rl_moe.rollouts.source import PromptRounds
from nemo_rl_moe.rollouts.trajectory import Trajectory, sequences_of
from nemo_rl_moe.rollouts.worker import RolloutWorker
from nemo_rl_moe.runs.folder.lines import LineFile, rewind_lines
from nemo_rl_moe.runs.folder.time_line import TimeLine

SCHEDULE_FILE = "schedule.jsonl"
"""File of a run's folder: the groups that each step was trained on."""
State = QueueState[Prompt, list[Trajectory]]


@dataclass(frozen=True)
class RolloutPlan:
    """Order of the groups of an asynchronous run; checked before anything is started.

    Attributes:
        policy: Decides what is trained on next.
        schedule: Steps of an earlier run, which are repeated; None: none.
    """

    policy: StalenessPolicy
    schedule: list[ScheduledStep] | None

    def feed(self, config: GRPOMasterConfig, loader: PromptRounds) -> TicketSource[Prompt]:
        """Return the tickets of the prompts of all epochs, or of the schedule.

        Raises:
            DataError: The schedule is one of other prompts.
        """
        if self.schedule is None:
            return feed_of_epochs(loader, config.grpo.max_num_epochs, config.grpo.num_prompts_per_step)
        with _schedule_named():
            return ReplayedFeed(self.schedule, prompts_of_epochs(loader, config.grpo.max_num_epochs))

    def check(self, config: GRPOMasterConfig, loader: PromptRounds, step: int) -> None:
        """Check that a schedule is one of the run's prompts, and has the step after so many.

        Raises:
            DataError: It is not, or has not.
        """
        if self.schedule is not None:
            feed = self.feed(config, loader)
            with _schedule_named():
                feed.restore(QueueState(step * config.updates_per_step, num_taken=0, open=(), given_up=(), queue=()))


def plan_rollouts(config: GRPOMasterConfig) -> RolloutPlan | None:
    """Return the order of an asynchronous run; None of a synchronous one.

    Raises:
        ConfigurationError: There is no such order.
        DataError: The schedule cannot be read, has no steps, or steps of another size.
    """
    rollouts = config.grpo.rollouts
    if not rollouts.is_asynchronous:
        return None
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
    """Name the key of the schedule in errors about it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"grpo.rollouts.replay_schedule: {error}") from None


@contextmanager
def running_source(
    config: GRPOMasterConfig,
    plan: RolloutPlan,
    worker: RolloutWorker,
    loader: PromptRounds,
    sampling: SamplingParameters,
    folder: Path,
    state: State,
    warn: Callable[[str], None],
    message: Callable[[str], None],
    record: Callable[[TimeLine], None] = lambda time_line: None,
) -> Iterator[AsynchronousSource]:
    """Start asynchronous rollouts, and end all that runs, whatever happens.

    Args:
        plan: Order of the groups.
        worker: Makes trajectories.
        loader: The prompts of each epoch.
        sampling: How tokens are sampled.
        folder: The run's folder, which gets the schedule.
        state: Where the run goes on.
        warn: Receives a line on each prompt that is given up, and on a schedule that cannot be written.
        message: Receives a line when the schedule can be written again.
        record: Gets the time line of each step.

    Raises:
        CheckpointError: The prompts are others than those of the state.
        DataError: The schedule is one of other prompts.
    """
    loop_config, rollouts = config.grpo, config.grpo.rollouts
    maker = GroupMaker(
        worker,
        sampling,
        seed=loop_config.seed,
        groups_per_step=loop_config.num_prompts_per_step,
        num_generations=loop_config.num_generations_per_prompt,
    )
    dispatcher = Dispatcher(
        maker.make_group,
        plan.feed(config, loader),
        plan.policy,
        partial=rollouts.partial,
        deadline_s=rollouts.group_timeout_s,
        state=state if plan.schedule is None else needed_of(plan.schedule, state),
        ends_the_run=lambda error: True,
    )
    path = folder / SCHEDULE_FILE
    if path.is_file():
        rewind_lines(path, state.version // config.updates_per_step)
    schedule = LineFile(path, warn, message)
    loop: RolloutLoop = CallersLoop() if worker.engine.shares_weights else LoopThread()
    source = AsynchronousSource(
        dispatcher,
        loop.run,
        len(loader),
        loop_config.num_generations_per_prompt,
        pause=maker.pause,
        rest=maker.rest,
        resume=maker.resume,
        runs_when_asked=worker.engine.shares_weights,
        fetch=fetch_objects,
        observe=_observer(worker, maker, schedule, config.updates_per_step, warn),
        # An engine that shares the weights works when training does not.
        engines=None if worker.engine.shares_weights else maker.activity,
        record=record,
    )
    try:
        yield source
    finally:
        if not loop.close(_ended(dispatcher, maker)):
            warn("env.driver: code that blocks the thread of all rollouts is left behind at the end of the run")
        schedule.close()


async def _ended(dispatcher: Dispatcher[Prompt, list[Trajectory]], maker: GroupMaker) -> None:
    await dispatcher.stop()
    await maker.close()


def state_at(
    config: GRPOMasterConfig,
    loop: LoopState,
    checkpoint: Path | None,
    loader: PromptRounds,
    *,
    with_optimizer: bool = True,
) -> State:
    """Return where a run goes on: with the queue of its checkpoint, or behind the prompts of so many steps.

    Args:
        loop: State of the loop.
        checkpoint: Folder of the checkpoint; None: the run begins.
        loader: The prompts of each epoch.
        with_optimizer: The checkpoint has the optimizer, and so the count of its steps. Without it they begin at 0
            again, so that nobody can tell how old the tokens of the queue are: they are drawn again.

    Raises:
        CheckpointError: The queue is damaged, or one of other prompts.
    """
    version = loop.step * config.updates_per_step
    if checkpoint is not None:
        prompts = prompts_of_epochs(loader, config.grpo.max_num_epochs)
        if (found := read_queue(checkpoint, prompts, RAY_STORE)) is not None:
            is_usable = partial(_can_be_trained_on, config) if with_optimizer else lambda group: False
            return drawn_again(found, version, is_usable)
    num_taken = loop.batches_taken * config.grpo.num_prompts_per_step
    return QueueState(version, num_taken, open=(), given_up=(), queue=())


def _can_be_trained_on(config: GRPOMasterConfig, group: list[Trajectory]) -> bool:
    """Return whether a group that another run may have drawn has what this one trains on."""
    sequences = sequences_of(group)
    return (
        len(group) == config.grpo.num_generations_per_prompt
        and (config.loss_fn.sampling_mask == "none" or all(each.kept_tokens is not None for each in sequences))
        and (
            config.policy.megatron_cfg.routing_replay != "rollout"
            or all(each.routed_experts is not None for each in sequences)
        )
    )


def _observer(
    worker: RolloutWorker,
    maker: GroupMaker,
    schedule: LineFile,
    updates_per_step: int,
    warn: Callable[[str], None],
) -> Callable[[TrajectoryBatch], Mapping[str, float]]:
    """Return what sees each batch: its failures, its schedule, prompts that are given up, tokens in vain."""

    def observe(batch: TrajectoryBatch) -> Mapping[str, float]:
        worker.watch([trajectory for found in batch.groups for trajectory in found.group])
        schedule.append([line_of(ScheduledStep.of(batch), batch.version // updates_per_step + 1)])
        for each in batch.cancelled:
            if each.is_given_up:
                warn(f"{each.sample_id} is given up after {each.attempt + 1} groups ({each.reason}): {each.message}")
        return wasted_tokens(batch, maker.num_tokens)

    return observe
