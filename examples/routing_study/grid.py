# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cells and runs of the routing study: their settings, order and duration."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from nemo_rl_moe.errors import ConfigurationError

METHODS: dict[str, tuple[str, ...]] = {
    "none": (),
    "r2": ("policy.megatron_cfg.routing_replay=old_policy",),
    "r3": ("policy.megatron_cfg.routing_replay=rollout",),
    "tis": ("loss_fn.importance_sampling_correction=truncated",),
    "icepop": ("loss_fn.importance_sampling_correction=icepop",),
    # Bounds of arXiv:2507.18071, section 5.1, since a mean over a sequence changes much less than a token's ratio.
    "gspo": (
        "loss_fn.sequence_level_importance_ratios=true",
        "loss_fn.token_level_loss=false",
        "loss_fn.ratio_clip_min=3.0e-4",
        "loss_fn.ratio_clip_max=4.0e-4",
    ),
}
"""Name to the overrides of `study.yaml`. `none` is the baseline."""
BASELINE = "none"
UPDATES = (1, 2, 4, 8)
DTYPES = ("float32", "bfloat16")
MODELS = ("small", "deep")


@dataclass(frozen=True, order=True)
class Condition:
    """Common settings of compared methods.

    Attributes:
        model: One of `MODELS`.
        dtype: Number format of the rollouts. Training is in float32.
        updates: Number of optimizer steps per step.
    """

    model: str
    dtype: str
    updates: int


@dataclass(frozen=True)
class Run:
    """One run: a condition, a method and a seed.

    Runs with the same condition and seed are paired: they begin with the same weights, and have the same prompts in the
    same order and, until their weights differ, the same responses.

    Attributes:
        method: One of `METHODS`.
        seed: Seed of the prompts' order and of all sampling (`grpo.seed`).
    """

    condition: Condition
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        place = self.condition
        return f"{place.model}-{place.dtype}-u{place.updates}-{self.method}-s{self.seed:02d}"

    def overrides(self, responses_per_step: int, micro_batch_size: int) -> list[str]:
        """Return the overrides of `study.yaml`.

        Args:
            responses_per_step: Responses of all prompts.
            micro_batch_size: The largest size.

        Raises:
            ConfigurationError: The responses of a step cannot be divided among its updates.
        """
        size, rest = divmod(responses_per_step, self.condition.updates)
        if rest:
            raise ConfigurationError(
                f"--updates: got {self.condition.updates}, expected a divisor of the {responses_per_step} responses of"
                " a step (grpo.num_prompts_per_step x grpo.num_generations_per_prompt)"
            )
        return [
            f"grpo.seed={self.seed}",
            f"policy.train_global_batch_size={size}",
            f"policy.train_micro_batch_size={min(size, micro_batch_size)}",
            f"policy.generation.vllm.dtype={self.condition.dtype}",
            *METHODS[self.method],
        ]


def plan(
    model: str, methods: Sequence[str], dtypes: Iterable[str], updates: Iterable[int], seeds: Iterable[int]
) -> list[Run]:
    """Return the runs, seeds outermost, so that almost all cells of a stopped study have the same seeds.

    R2 is skipped if a step has one update, since it changes only later updates.
    """
    conditions = [Condition(model, dtype, number) for dtype, number in product(dtypes, updates)]
    return [
        Run(condition, method, seed)
        for seed in seeds
        for condition in conditions
        for method in methods
        if method != "r2" or condition.updates > 1
    ]


def hours_left(pending: Sequence[Run], measured: Mapping[str, Sequence[float]], jobs: int) -> float:
    """Estimate the hours of runs by medians, since the first run of a session starts the engines and takes longer.

    Args:
        pending: Incomplete runs.
        measured: Seconds of each complete run, by model.
        jobs: Number of parallel runs.
    """
    seconds = 0.0
    for run in pending:
        known = measured.get(run.condition.model)
        seconds += statistics.median(known) if known else SECONDS_PER_RUN[run.condition.model]
    return seconds / 3600 / jobs


SECONDS_PER_RUN = {"small": 35.0, "deep": 70.0}
"""Estimate until a run is complete: seconds with eight updates per step, on a core of a busy machine."""
