# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cells and runs of the staleness study: what each one changes, and in which order they come."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

CORRECTIONS: dict[str, tuple[str, ...]] = {
    "clipped": (),
    "tis": ("loss_fn.importance_sampling_correction=truncated",),
    # The bounds of arXiv:2507.18071, section 5.1: a mean over a sequence moves much less than a token.
    "gspo": (
        "loss_fn.sequence_level_importance_ratios=true",
        "loss_fn.token_level_loss=false",
        "loss_fn.ratio_clip_min=3.0e-4",
        "loss_fn.ratio_clip_max=4.0e-4",
    ),
    "cispo": ("loss_fn.objective=cispo",),
}
"""Name to the overrides of a task's settings. But for `tis`, the ratio is one to the weights that sampled a token."""
REPLAYS: dict[str, tuple[str, ...]] = {"none": (), "r3": ("policy.megatron_cfg.routing_replay=rollout",)}
LAGS = (0, 1, 2, 4, 8)
SECONDS_PER_RUN = 95.0
"""Median of 39 runs on a core of a busy machine, of 47 to 266 s; until runs are done."""


@dataclass(frozen=True, order=True)
class Method:
    """What a lag is studied for.

    Attributes:
        correction: One of `CORRECTIONS`.
        replay: One of `REPLAYS`.
    """

    correction: str
    replay: str

    def __str__(self) -> str:
        return self.correction if self.replay == "none" else f"{self.correction}+{self.replay}"


@dataclass(frozen=True)
class Run:
    """One run. Those of one method and seed begin with the same weights and train on the same prompts in each step.

    Attributes:
        method: Correction and replay.
        lag: Optimizer steps between the weights that sample a response and those that it trains, from step `lag` on;
            earlier steps have what there is.
        seed: Of the prompts' order and of all sampling (`grpo.seed`).
    """

    method: Method
    lag: int
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.method.correction}-{self.method.replay}-lag{self.lag}-s{self.seed:02d}"

    def overrides(self, schedule: str) -> list[str]:
        """Return the settings of the run, over its task's."""
        return [
            f"grpo.seed={self.seed}",
            f"grpo.rollouts.replay_schedule={schedule}",
            *CORRECTIONS[self.method.correction],
            *REPLAYS[self.method.replay],
        ]


def plan(corrections: Sequence[str], replays: Sequence[str], lags: Iterable[int], seeds: Iterable[int]) -> list[Run]:
    """Return the runs of a study, seeds outermost: whenever it is stopped, almost all cells have the same seeds."""
    methods = [Method(correction, replay) for replay, correction in product(replays, corrections)]
    return [Run(method, lag, seed) for seed, lag, method in product(seeds, sorted(lags), methods)]
