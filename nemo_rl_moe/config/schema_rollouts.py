# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `grpo.rollouts`: rollouts that take turns with training, or run ahead of it."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_moe.config.schema_base import CustomCode, PathText, PositiveInt, StrictModel

OnStale = Literal["wait", "drop"]
"""Treatment of groups that get too old, as `grpo.rollouts.on_stale` names it."""
Partial = Literal["continue", "restart", "discard"]
"""Treatment of groups that run when weights change, as `grpo.rollouts.partial` names it."""
Lag = Annotated[int, Field(ge=0, le=1000)]
"""Optimizer steps; rollouts lead by some, and each one takes memory for a step's groups."""


GroupSeconds = Annotated[float, Field(ge=0.1, le=100_000_000)]
"""Less than a tenth of a second is a slip: no group could finish."""


class RolloutsConfig(StrictModel):
    """When responses are generated, and where users' code of rollouts runs.

    All keys but `mode`, `process` and `process_memory_mb` are read in asynchronous mode alone.
    """

    mode: Literal["synchronous", "asynchronous"]
    """synchronous: generation and training take turns; asynchronous: responses are generated while training runs, by an
    engine with a copy of the weights."""
    process: bool
    """Run code that drives trajectories (functions, agents' endpoint, libraries of environments) in a separate process
    of each environment, which is replaced if it ends or hangs; false: in the process of the run, for debuggers."""
    process_memory_mb: PositiveInt | None
    """Megabytes that this code may take in its process; null: half of the machine's memory."""
    order: Literal["in_order", "windowed", "ready_first"] | CustomCode
    """Groups that a step trains on. in_order: in the order of the prompts, whatever the time that each takes; windowed:
    finished groups, the oldest weights first; ready_first: finished groups, the first finished first; otherwise
    `package.module:function`, which takes a `QueueView` and returns positions."""
    max_staleness: Lag
    """Most optimizer steps between the weights that a group was begun with and those that it trains, its time in the
    queue included; 0: none, which is the synchronous run, to the bit on the trainer's engine."""
    target_lag: Lag | None
    """Optimizer steps that generation runs ahead, where no group waits for a straggler; null: `max_staleness`."""
    on_stale: OnStale
    """Groups that get too old. wait: training waits for them, and none is lost; drop: they are cancelled, and their
    prompts come again."""
    partial: Partial
    """Groups that run when weights change. continue: they go on under the new weights, token for token; restart: they
    begin again, and keep their place; discard: they are cancelled, and their prompts come again."""
    group_timeout_s: GroupSeconds | None
    """Seconds after which a group is cancelled; its prompt comes again once. null: no limit."""
    concurrency: PositiveInt | None
    """Most groups that are generated at the same time; null: as many as the staleness allows."""
    replay_schedule: PathText | None
    """`schedule.jsonl` of an earlier run, whose steps are trained on the same groups, each begun with the weights of
    the same step and finished before they change; null: none."""

    @property
    def is_asynchronous(self) -> bool:
        """Return whether rollouts run ahead of training."""
        return self.mode == "asynchronous"

    @property
    def most_lag(self) -> int:
        """Return the optimizer steps by which responses may be older than the weights that they train; 1 or more with a
        schedule, whose groups may have any age.
        """
        if not self.is_asynchronous:
            return 0
        return self.max_staleness if self.replay_schedule is None else max(1, self.max_staleness)
