# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cells and runs of the study of distillation: what each one changes, and in which order they come."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

_HERE = Path(__file__).parent
SECONDS_PER_RUN = 75.0
TEACHER, SHUFFLED = "teacher", "shuffled"
"""Kinds of teachers: the model after more fine-tuning; the same one with its tokens' probabilities dealt out anew."""


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        config: Settings of all its runs.
        teacher: Kind of its teacher; None: it has none.
    """

    config: Path
    teacher: str | None


METHODS = {
    "grpo": Method(_HERE / "grpo.yaml", None),
    "distillation": Method(_HERE / "distillation.yaml", TEACHER),
    "shuffled": Method(_HERE / "distillation.yaml", SHUFFLED),
}
BASELINE = "grpo"
"""Method that the others are compared with."""
LEARNING_RATES = ("3.0e-5", "1.0e-4", "3.0e-4", "1.0e-3", "3.0e-3")
"""Those tried for each method that is tuned."""
TUNED = ("grpo", "distillation")
TUNING_SEEDS = (100, 101)
"""Seeds that a learning rate is chosen with, and nothing is compared with."""


@dataclass(frozen=True)
class Run:
    """One run. Those of one seed begin with the same weights and see the same prompts in each step.

    Attributes:
        method: One of `METHODS`.
        seed: Of the prompts' order and of all sampling (`grpo.seed`).
        learning_rate: One that is tried; None: the method's own, that of its YAML file.
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
        """Return the settings of the run, over its method's."""
        seed = f"grpo.seed={self.seed}"
        if self.learning_rate is None:
            return [seed]
        return [seed, f"policy.megatron_cfg.optimizer.lr={self.learning_rate}"]


def tuning() -> list[Run]:
    """Return the runs that learning rates are chosen from, seeds outermost."""
    return [Run(method, seed, rate) for seed, rate, method in product(TUNING_SEEDS, LEARNING_RATES, TUNED)]


def comparison(methods: Sequence[str], seeds: Iterable[int]) -> list[Run]:
    """Return the runs, seeds outermost: whenever it is stopped, methods have the same seeds."""
    return [Run(method, seed) for seed, method in product(seeds, methods)]
