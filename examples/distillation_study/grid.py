# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cells and runs of the study of distillation: what each one changes, and in which order they come."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

_HERE = Path(__file__).parent
SECONDS_PER_RUN = 120.0
TEACHER, SHUFFLED = "teacher", "shuffled"
"""Kinds of teachers: what GRPO has left; the same model with its tokens' probabilities dealt out anew."""


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


@dataclass(frozen=True)
class Run:
    """One run. Those of one seed begin with the same weights and see the same prompts in each step.

    Attributes:
        method: One of `METHODS`.
        seed: Of the prompts' order and of all sampling (`grpo.seed`).
    """

    method: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.method}-s{self.seed:02d}"


def comparison(methods: Sequence[str], seeds: Iterable[int]) -> list[Run]:
    """Return the runs, seeds outermost: whenever it is stopped, methods have the same seeds."""
    return [Run(method, seed) for seed, method in product(seeds, methods)]
