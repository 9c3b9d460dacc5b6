# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cells and runs of the staleness study: their settings and their order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

CORRECTIONS: dict[str, tuple[str, ...]] = {
    "clipped": (),
    "tis": ("loss_fn.importance_sampling_correction=truncated",),
    # Bounds of arXiv:2507.18071, section 5.1, since a mean over a sequence changes much less than a token's ratio.
    "gspo": (
        "loss_fn.sequence_level_importance_ratios=true",
        "loss_fn.token_level_loss=false",
        "loss_fn.ratio_clip_min=3.0e-4",
        "loss_fn.ratio_clip_max=4.0e-4",
    ),
    "cispo": ("loss_fn.objective=cispo",),
}
"""Name to the overrides of a task's settings. Except for `tis`, the ratio is to the weights that sampled a token."""
REPLAYS: dict[str, tuple[str, ...]] = {"none": (), "r3": ("policy.megatron_cfg.routing_replay=rollout",)}
LAGS = (0, 1, 2, 4, 8)
SECONDS_PER_RUN = 95.0
"""Estimate until a run is complete: median of 39 runs of 47 to 266 s on a core of a busy machine."""


@dataclass(frozen=True, order=True)
class Method:
    """One of `CORRECTIONS` and one of `REPLAYS`."""

    correction: str
    replay: str

    def __str__(self) -> str:
        return self.correction if self.replay == "none" else f"{self.correction}+{self.replay}"


@dataclass(frozen=True)
class Run:
    """One run. Runs with the same method and seed have the same initial weights, and the same prompts in each step.

    Attributes:
        lag: Optimizer steps between the weights that sample a response and the weights that it trains, from step `lag`
            on. Earlier steps have a smaller lag.
        seed: Seed of the prompts' order and of all sampling (`grpo.seed`).
    """

    method: Method
    lag: int
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.method.correction}-{self.method.replay}-lag{self.lag}-s{self.seed:02d}"

    def overrides(self, schedule: str) -> list[str]:
        """Return the overrides of its task's configuration."""
        return [
            f"grpo.seed={self.seed}",
            f"grpo.rollouts.replay_schedule={schedule}",
            *CORRECTIONS[self.method.correction],
            *REPLAYS[self.method.replay],
        ]


def plan(corrections: Sequence[str], replays: Sequence[str], lags: Iterable[int], seeds: Iterable[int]) -> list[Run]:
    """Return the runs, seeds outermost, so that almost all cells of a stopped study have the same seeds."""
    methods = [Method(correction, replay) for replay, correction in product(replays, corrections)]
    return [Run(method, lag, seed) for seed, lag, method in product(seeds, sorted(lags), methods)]
