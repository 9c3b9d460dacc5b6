# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Cells and runs of the study of adapters: their settings and their order."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        config: Settings of all its runs.
        overrides: Overrides of these.
        rates: Tried learning rates, ascending.
        rate: The rate with the highest mean accuracy over `RATE_SEEDS`.
    """

    config: Path
    overrides: tuple[str, ...]
    rates: tuple[float, ...]
    rate: float


METHODS = {
    "full": Method(_HERE / "full.yaml", (), (3e-5, 1e-4, 3e-4), 1e-4),
    "frozen_router": Method(
        _HERE / "full.yaml", ("policy.megatron_cfg.freeze_moe_router=true",), (3e-5, 1e-4, 3e-4), 1e-4
    ),
    "lora": Method(_HERE / "lora.yaml", (), (3e-4, 1e-3, 3e-3), 1e-3),
}
BASELINE = "full"
"""Method with which the others are compared."""
RATE_SEEDS = range(100, 103)
"""Seeds for the choice of rates. The comparison has others."""
SECONDS_PER_RUN = 60.0


@dataclass(frozen=True)
class Run:
    """One run. Runs with the same seed begin with the same weights and train on the same prompts in each step.

    Attributes:
        method: One of `METHODS`.
        rate: Learning rate.
        seed: Seed of the prompts' order and of all sampling (`grpo.seed`).
    """

    method: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.method}-lr{self.rate:.0e}-s{self.seed:02d}"

    def overrides(self) -> list[str]:
        """Return the overrides of its method's configuration."""
        return [
            f"grpo.seed={self.seed}",
            f"policy.megatron_cfg.optimizer.lr={self.rate}",
            *METHODS[self.method].overrides,
        ]


def comparison(methods: Sequence[str], seeds: Iterable[int]) -> list[Run]:
    """Return the runs at the chosen rates, seeds outermost, so that methods of a stopped study have the same seeds."""
    return [Run(method, METHODS[method].rate, seed) for seed, method in product(seeds, methods)]


def choice_of_rates(methods: Sequence[str], seeds: Iterable[int]) -> list[Run]:
    """Return the runs for the choice of rates, seeds outermost."""
    return [Run(method, rate, seed) for seed in seeds for method in methods for rate in METHODS[method].rates]
