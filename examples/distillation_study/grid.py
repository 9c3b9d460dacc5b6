# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cells and runs of the study of distillation: their settings and their order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

_HERE = Path(__file__).parent
SECONDS_PER_RUN = 75.0
TEACHER, SHUFFLED = "teacher", "shuffled"
"""Kinds of teachers: the model after more fine-tuning, and the same with permuted probabilities of the tokens."""


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        config: Settings of all its runs.
        teacher: Kind of its teacher, if it has one.
    """

    config: Path
    teacher: str | None


METHODS = {
    "grpo": Method(_HERE / "grpo.yaml", None),
    "distillation": Method(_HERE / "distillation.yaml", TEACHER),
    "shuffled": Method(_HERE / "distillation.yaml", SHUFFLED),
}
BASELINE = "grpo"
"""Method with which the others are compared."""
LEARNING_RATES = ("3.0e-5", "1.0e-4", "3.0e-4", "1.0e-3", "3.0e-3")
"""Tried rates of each tuned method."""
TUNED = ("grpo", "distillation")
TUNING_SEEDS = (100, 101)
"""Seeds for the choice of learning rates. The comparison has others."""


@dataclass(frozen=True)
class Run:
    """One run. Runs with the same seed begin with the same weights and see the same prompts in each step.

    Attributes:
        method: One of `METHODS`.
        seed: Seed of the prompts' order and of all sampling (`grpo.seed`).
        learning_rate: Tried rate. None for the rate in the method's YAML file.
    """

    method: str
    seed: int
    learning_rate: str | None = None

    @property
    def name(self) -> str:
        """Name of its folder."""
        rate = "" if self.learning_rate is None else f"-lr{self.learning_rate}"
        return f"{self.method}{rate}-s{self.seed:02d}"

    def overrides(self) -> list[str]:
        """Return the overrides of its method's configuration."""
        seed = f"grpo.seed={self.seed}"
        if self.learning_rate is None:
            return [seed]
        return [seed, f"policy.megatron_cfg.optimizer.lr={self.learning_rate}"]


def tuning() -> list[Run]:
    """Return the runs for the choice of learning rates, seeds outermost."""
    return [Run(method, seed, rate) for seed, rate, method in product(TUNING_SEEDS, LEARNING_RATES, TUNED)]


def comparison(methods: Sequence[str], seeds: Iterable[int]) -> list[Run]:
    """Return the runs, seeds outermost, so that methods of a stopped study have the same seeds."""
    return [Run(method, seed) for seed, method in product(seeds, methods)]
