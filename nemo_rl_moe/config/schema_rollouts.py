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
"""Number of optimizer steps. Rollouts are ahead by few steps, since each step ahead needs memory for the groups of a
step."""


GroupSeconds = Annotated[float, Field(ge=0.1, le=100_000_000)]
"""Seconds before a group is cancelled. With less than a tenth of a second, no group could finish."""


class RolloutsConfig(StrictModel):
    """When responses are generated, and in which process the user's code for rollouts runs.

    In synchronous mode, only `mode`, `process` and `process_memory_mb` are read.
    """

    mode: Literal["synchronous", "asynchronous"]
    """synchronous: generation and training alternate. asynchronous: an engine with a copy of the weights generates
    during training."""
    process: bool
    """true: run code that drives trajectories (functions, agents' endpoint, libraries of environments) in a separate
    process for each environment. A process that ends or hangs is replaced. false: run the code in the driver's process,
    for debuggers."""
    process_memory_mb: PositiveInt | None
    """Maximum memory of such a process, in megabytes. null: half of the machine's memory."""
    order: Literal["in_order", "windowed", "ready_first"] | CustomCode
    """Order in which groups are trained on. in_order: the order of the prompts, however long each group takes.
    windowed: finished groups, with the oldest weights first. ready_first: finished groups in the order in which they
    finished. `package.module:function`: your function takes a `QueueView` and returns positions."""
    max_staleness: Lag
    """Maximum number of optimizer steps between the weights with which a group began and the weights that it trains,
    including its time in the queue. 0: train on the same tokens as a synchronous run (to the bit with the engine
    megatron)."""
    target_lag: Lag | None
    """Number of optimizer steps by which generation runs ahead as long as no group is a straggler. null:
    `max_staleness`."""
    on_stale: OnStale
    """Treatment of groups that would exceed `max_staleness`. wait: training waits until they finish. drop: they are
    dropped, and their prompts are sampled again."""
    partial: Partial
    """Treatment of unfinished groups when the weights change. continue: the next tokens are sampled with the new
    weights. restart: the group begins again, at the same position in the order. discard: the group is cancelled, and
    its prompt is sampled again."""
    group_timeout_s: GroupSeconds | None
    """Seconds after which a group is cancelled. Its prompt is sampled once more. null: no limit."""
    concurrency: PositiveInt | None
    """Maximum number of groups that are generated at the same time. null: as many as `max_staleness` allows."""
    replay_schedule: PathText | None
    """`schedule.jsonl` of an earlier run. Each step then trains on the same groups as in that run. Each group begins
    with the weights of the same step and finishes before the weights change. null: no replay."""

    @property
    def is_asynchronous(self) -> bool:
        return self.mode == "asynchronous"

    @property
    def most_lag(self) -> int:
        """Return the maximum number of optimizer steps by which responses may be older than the weights that they
        train. At least 1 with `replay_schedule`, since its groups may have any age."""
        if not self.is_asynchronous:
            return 0
        return self.max_staleness if self.replay_schedule is None else max(1, self.max_staleness)
