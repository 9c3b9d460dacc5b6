# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Parts of a run as users write them, named in configurations as `tests.support.custom_parts:NAME`, and wrong ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rl.estimators.interface import EstimatorInputs
from nemo_rl_moe.rl.objectives import ObjectiveInputs
from nemo_rl_moe.runs.folder.metrics import RunOutcome
from nemo_rl_moe.runs.loggers.interface import LoggerBase

NAME = "tests.support.custom_parts"
NOT_CALLABLE = 3


class Digits:
    """Environment that wants digits; graded, and right from a number of them on."""

    def __init__(self, least: int, step: float = 0.25) -> None:
        self._least, self._step = least, step

    def score(self, item: ScoringItem) -> Score:
        number = sum(character.isdigit() for character in item.response)
        return Score(self._step * number, number >= self._least)


def from_median(step: EstimatorInputs) -> torch.Tensor:
    """Return the estimator with the group's median as baseline."""
    return step.rewards - step.rewards.median(dim=1, keepdim=True).values


def doubled(inputs: ObjectiveInputs) -> torch.Tensor:
    """Return the objective of twice PPO's loss, without a clip."""
    return -2 * inputs.ratio * inputs.advantages


class LinesLogger:
    """Logger of one JSON line a step."""

    name, run_id, announcement, seconds_to_close, last_step = "lines", None, None, 0.0, -1

    def __init__(self, run_folder: Path) -> None:
        self._file = (run_folder / "lines.jsonl").open("a")

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(json.dumps({"step": step, "keys": sorted(metrics)}) + "\n")
        self._file.flush()

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"sections": sorted(config)}) + "\n")

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        pass

    def close(self, outcome: RunOutcome = "finished") -> None:
        self._file.close()


class MisspelledLogger(LoggerBase):
    """Logger whose `log_step` has another name."""

    def __init__(self, run_folder: Path) -> None:
        pass

    def log_steps(self, step: int, metrics: Mapping[str, float]) -> None:
        pass


def two_arguments(rewards: torch.Tensor, config: Any) -> torch.Tensor:
    return rewards


def one_for_each_group(step: EstimatorInputs) -> torch.Tensor:
    return step.rewards.mean(dim=1)


def divided_by_the_spread(step: EstimatorInputs) -> torch.Tensor:
    rewards = step.rewards
    return (rewards - rewards.mean(dim=1, keepdim=True)) / rewards.std(dim=1, keepdim=True)


def raising(*arguments: Any) -> torch.Tensor:
    raise KeyError("no such key")  # raising


def raising_below(*arguments: Any) -> torch.Tensor:
    return torch.stack([torch.ones(2), torch.ones(3)])  # raising_below


def mean_loss(inputs: ObjectiveInputs) -> torch.Tensor:
    return -(inputs.ratio * inputs.advantages).mean()


def detached(inputs: ObjectiveInputs) -> torch.Tensor:
    return -inputs.ratio.detach() * inputs.advantages


def without_numbers(inputs: ObjectiveInputs) -> torch.Tensor:
    return inputs.logprobs * torch.nan


def leaving(inputs: ObjectiveInputs) -> torch.Tensor:
    raise SystemExit(3)


def makes_a_number() -> int:
    return 3
