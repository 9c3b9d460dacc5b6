# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The section `grpo.rollouts`: rollouts that alternate with training, or run ahead of it."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_moe.config.schema_base import CustomCode, PathText, PositiveInt, StrictModel

OnStale = Literal["wait", "drop"]
"""Values of `grpo.rollouts.on_stale`."""
Partial = Literal["continue", "restart", "discard"]
"""Values of `grpo.rollouts.partial`."""
Lag = Annotated[int, Field(ge=0, le=1000)]
"""Optimizer steps. Rollouts are ahead by a few steps, and each takes the memory of a step's groups."""


GroupSeconds = Annotated[float, Field(ge=0.1, le=100_000_000)]
"""No group could finish in less than a tenth of a second."""


class RolloutsConfig(StrictModel):
    """When responses are generated, and in which process users' code of rollouts runs.

    Only `mode`, `process` and `process_memory_mb` are read in synchronous mode.
    """

    mode: Literal["synchronous", "asynchronous"]
    """synchronous: generation and training alternate. asynchronous: an engine with a copy generates during training."""
    process: bool
    """true: run code that drives trajectories (functions, agents' endpoint, libraries of environments) in a process for
    each environment, which is replaced if it ends or hangs. false: in the process of the run, for debuggers."""
    process_memory_mb: PositiveInt | None
    """Megabytes that this code may use in its process. null: half of the machine's memory."""
    order: Literal["in_order", "windowed", "ready_first"] | CustomCode
    """Order in which groups are trained on. in_order: the order of the prompts, however long each takes. windowed:
    finished groups, the oldest weights first. ready_first: finished groups in the order in which they finished.
    `package.module:function`: your function, which takes a `QueueView` and returns positions."""
    max_staleness: Lag
    """Most optimizer steps between the weights with which a group began and the weights that it trains, including its
    time in the queue. 0: as the synchronous run, to the bit on the trainer's engine."""
    target_lag: Lag | None
    """Optimizer steps by which generation runs ahead as long as no group is a straggler. null: `max_staleness`."""
    on_stale: OnStale
    """Treatment of groups that get too old. wait: training waits for them. drop: their prompts are sampled again."""
    partial: Partial
    """Treatment of unfinished groups when the weights change. continue: under the new weights, token for token.
    restart: from the beginning, at the same position. discard: they are cancelled, and their prompts are sampled
    again."""
    group_timeout_s: GroupSeconds | None
    """Seconds after which a group is cancelled. Its prompt is sampled once more. null: no limit."""
    concurrency: PositiveInt | None
    """Most groups that are generated at the same time. null: as many as the staleness allows."""
    replay_schedule: PathText | None
    """`schedule.jsonl` of an earlier run. Each step then trains on the same groups as there, which begin with the
    weights of the same step and finish before the weights change. null: no replay."""

    @property
    def is_asynchronous(self) -> bool:
        return self.mode == "asynchronous"

    @property
    def most_lag(self) -> int:
        """Return the most optimizer steps by which responses may be older than the weights that they train. At least 1
        with a schedule, whose groups may have any age."""
        if not self.is_asynchronous:
            return 0
        return self.max_staleness if self.replay_schedule is None else max(1, self.max_staleness)
