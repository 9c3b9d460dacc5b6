# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The source of sampled groups: a dispatcher has the runner generate them, in turn with training or ahead of it."""

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import numpy as np

from nemo_rl_moe.config.schema_grpo import GRPOConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.stored_rows import Fetch
from nemo_rl_moe.generation.interface import GeneratedSequence, SamplingParameters
from nemo_rl_moe.metrics import PhaseClock
from nemo_rl_moe.rollouts.dispatch.accounts import batch_metrics, wasted_tokens
from nemo_rl_moe.rollouts.dispatch.activity import RecentSteps, idle_shares
from nemo_rl_moe.rollouts.dispatch.dispatcher import Dispatcher, DynamicSampling
from nemo_rl_moe.rollouts.dispatch.groups import Batch, Cancellation, Group, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import PromptFeed, QueueState, TicketSource
from nemo_rl_moe.rollouts.dispatch.saved_queue import write_queue
from nemo_rl_moe.rollouts.dispatch.staleness import StalenessPolicy
from nemo_rl_moe.rollouts.loops import in_loop
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.source import TRAINING_SEEDS, PromptRounds, RolloutGroups, SourceState
from nemo_rl_moe.rollouts.supervisor import RolloutsGivenUpError
from nemo_rl_moe.runs.folder.time_line import StepActivity, TimeLine


def prompts_of_epochs(rounds: PromptRounds, num_epochs: int) -> Iterator[Prompt]:
    return (prompt for epoch in range(num_epochs) for prompts in rounds.epoch(epoch) for prompt in prompts)


def feed_of_epochs(rounds: PromptRounds, num_epochs: int, groups_per_step: int) -> PromptFeed:
    return PromptFeed(prompts_of_epochs(rounds, num_epochs), num_epochs * len(rounds) * groups_per_step)


def group_seeds(ticket: Ticket, seed: int, groups_per_step: int, num_generations: int) -> list[int]:
    """Return the seeds of a group's trajectories.

    They only depend on the arguments, so that a resumed run generates a group again with the same seeds.

    Args:
        seed: `grpo.seed`.
        num_generations: Number of trajectories of a group.
    """
    step, number = divmod(ticket.position, groups_per_step)
    key = [seed, TRAINING_SEEDS, step, ticket.attempt]
    seeds = np.random.SeedSequence(key).generate_state(groups_per_step * num_generations, np.uint64)
    return [int(each) for each in seeds[number * num_generations :][:num_generations]]


class SampledGroups:
    """A `RolloutSource` of groups from the runner. A policy of staleness bounds their age.

    If the source runs ahead, the first call of `updated` starts the first groups, as the engine has weights then.
    Otherwise groups begin when `next` is called.

    Args:
        config: The `grpo` section.
        policy: Selects the groups of a step, and rejects stale groups.
        dynamic_sampling: Replaces uninformative groups. If None, they are trained on.
        state: State of the run that is resumed. None at the start of a run.
        runs_ahead: Whether groups are generated while the trainer works.
        observe: Called with each batch.
        fetch: Fetches routed experts by their handles, for checkpoints.
        record: Receives the time line of each step if the source runs ahead.

    Attributes:
        steps_per_epoch: Number of steps of one pass over the prompts.
    """

    def __init__(
        self,
        config: GRPOConfig,
        runner: RolloutRunner,
        feed: TicketSource,
        policy: StalenessPolicy,
        sampling: SamplingParameters,
        steps_per_epoch: int,
        *,
        dynamic_sampling: DynamicSampling | None = None,
        state: QueueState | None = None,
        runs_ahead: bool = False,
        observe: Callable[[Batch], object] = lambda batch: None,
        fetch: Fetch = list,
        record: Callable[[TimeLine], object] = lambda time_line: None,
    ):
        self._config, self._runner, self._sampling = config, runner, sampling
        self._run = runner.run
        self.steps_per_epoch, self._runs_ahead = steps_per_epoch, runs_ahead
        self._observe, self._fetch, self._record = observe, fetch, record
        self._num_tokens: dict[tuple[int, int], int] = {}
        self._arrived_version, self._pause_s = 0, 0.0
        self._recent_steps, self._has_begun = RecentSteps(), False
        self.dispatcher = Dispatcher(
            self._make_group,
            feed,
            policy,
            partial=config.rollouts.partial,
            deadline_s=config.rollouts.group_timeout_s if config.rollouts.is_asynchronous else None,
            state=state,
            ends_the_run=lambda error: True,
            dynamic_sampling=dynamic_sampling,
        )
        runner.stop_groups = self.dispatcher.stop

    @property
    def is_used_up(self) -> bool:
        # Asked in the loop's thread, because only between steps of the loop each group is counted exactly once.
        return self._run(in_loop(lambda: self.dispatcher.is_used_up))

    def next(self, step: int, clock: PhaseClock) -> RolloutGroups:
        """Return the groups of the next step. Requires that the source is not used up.

        Args:
            step: Number of completed steps.
            clock: Gets the phase `generation` while training waits, or the runner's phases if the source does not run
                ahead.

        Raises:
            RolloutsGivenUpError: The source was stopped, or its last prompts were given up.
        """
        batch = self._next_ahead(step, clock) if self._runs_ahead else self._next_in_turn(step, clock)
        if batch is None:
            raise RolloutsGivenUpError("rollouts were stopped, or their last prompts failed")
        trained = list(chain.from_iterable(found.group for found in batch.groups))
        generated = [*chain.from_iterable(batch.replaced), *trained]
        self._runner.observe(generated)
        self._observe(batch)
        return RolloutGroups(
            trained,
            generated,
            self._config.num_generations_per_prompt,
            num_filled=batch.num_filled,
            is_on_policy=batch.is_on_policy,
            metrics=self._metrics_of(batch),
        )

    def update_pending(self, step: int) -> None:
        """Prepare for the weights after a step: pause the engine."""
        began_s = time.perf_counter()
        self._runner.trainer.update()
        self._run(self._prepare(self._version(step)))
        self._pause_s = time.perf_counter() - began_s

    def updated(self, step: int) -> None:
        self._arrived_version = self._version(step)
        if not self._has_begun:
            self._take_activity()  # drops the time before the first weights: it belongs to no step
            self._has_begun = True
        if self._runs_ahead:
            self._run(in_loop(self._go_on))
        self._runner.trainer.train()

    def stop(self) -> tuple[Cancellation, ...]:
        """Cancel all groups. Return the cancellations that no batch has reported."""
        return self._run(self.dispatcher.stop())

    def state(self, step: int) -> SourceState:
        """Return the state for a checkpoint: the number of trained batches, and the queue."""
        queue = self.queue_state(step)
        consumed = self._run(in_loop(lambda: self.dispatcher.admission.consumed))
        batches_taken = consumed // self.dispatcher.bounds.groups_per_step
        return SourceState(batches_taken, lambda folder: write_queue(folder, queue, self._fetch))

    def queue_state(self, step: int) -> QueueState:
        return self._run(in_loop(lambda: self.dispatcher.state(self._version(step))))

    async def _make_group(self, ticket: Ticket) -> Group:
        size, key = self.dispatcher.bounds.groups_per_step, (ticket.position, ticket.attempt)
        seeds = group_seeds(ticket, self._config.seed, size, self._config.num_generations_per_prompt)

        def count(sequence: GeneratedSequence) -> None:
            self._num_tokens[key] = self._num_tokens.get(key, 0) + len(sequence.token_ids)

        group_id = f"{ticket.prompt.sample_id}#{ticket.position % size}"
        return await self._runner.make_group(ticket.prompt, group_id, seeds, self._sampling, count)

    def _next_ahead(self, step: int, clock: PhaseClock) -> Batch | None:
        self._runner.trainer.wait()
        try:
            with clock.phase("generation"):
                return self._run(self.dispatcher.next_batch(self._version(step)))
        finally:
            self._runner.trainer.train()

    def _next_in_turn(self, step: int, clock: PhaseClock) -> Batch | None:
        self._runner.clock = clock
        self._run(in_loop(self._go_on))
        batch = self._run(self.dispatcher.next_batch(self._version(step)))
        self._run(self._runner.settled())
        self._runner.engine.sleep()  # the trainer takes over, and new weights follow
        return batch

    def _metrics_of(self, batch: Batch) -> Mapping[str, float]:
        wasted, found = wasted_tokens(batch, self._num_tokens), self._take_activity()
        if not self._config.rollouts.is_asynchronous:
            return {}
        metrics = batch_metrics(batch) | {"rollouts/pause_s": self._pause_s} | wasted
        if not self._runs_ahead:  # then the engine works exactly while training waits
            return metrics
        self._record(self._recent_steps.add(found))
        return metrics | idle_shares(found)

    def _version(self, step: int) -> int:
        """Return the number of optimizer steps after a training step, skipped ones included."""
        return step * self.dispatcher.bounds.updates_per_step

    def _take_activity(self) -> StepActivity:
        return StepActivity(self._runner.trainer.take(), self._run(in_loop(self._runner.activity.take)))

    async def _prepare(self, version: int) -> None:
        await self.dispatcher.update_pending(version)
        await self._runner.pause()

    def _go_on(self) -> None:
        self._runner.resume()
        self.dispatcher.updated(self._arrived_version)
