# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks of the reasoning-gym library: scoring by their verifiers, and sampling of prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nemo_rl_moe.config.environments.rewards import ReasoningGymConfig
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.rewards.interface import Score, ScoringItem

FULL_SCORE = 1.0

SEED_STRIDE = 10_000_000
"""Factor by which the seed of a set of items is multiplied, because the library samples item i with seed + i. Otherwise
sets with neighbouring seeds would have nearly the same items."""
DRAWS_PER_ITEM = 4
SPARE_DRAWS = 100
FROM_DATA_SECTION = {"seed": "data.*.seed", "size": "data.*.num_items"}


class ReasoningGymReward:
    """Reward function that scores by the verifier of a reasoning-gym task.

    The record needs the task's `answer` and `metadata`. A verifier may give a partial score, for example for a text
    that only contains the answer. A response is right only with the full score.
    """

    def __init__(self, config: ReasoningGymConfig):
        self._task = make_task(config)
        self._partial_credit = config.partial_credit

    def score(self, item: ScoringItem) -> Score:
        entry = {
            "question": item.record.get("question", item.prompt),
            "answer": item.record["answer"],
            "metadata": item.record["metadata"],
        }
        value = float(self._task.score_answer(item.response.strip(), entry))
        is_correct = value >= FULL_SCORE
        return Score(value if self._partial_credit else float(is_correct), is_correct)


@dataclass(frozen=True)
class SampledItems:
    """Sampled items of a task.

    Attributes:
        items: Items with different questions. Each has its number in the order of sampling.
        num_repeated: Number of items that were dropped because their question had been sampled before.
    """

    items: tuple[tuple[int, Mapping[str, Any]], ...]
    num_repeated: int


def draw_items(config: ReasoningGymConfig, num_items: int, seed: int) -> SampledItems:
    """Sample and return items with different questions. There are fewer than `num_items` if the task runs out of new
    questions.

    Items of different seeds are different, except by chance.
    """
    most = DRAWS_PER_ITEM * num_items + SPARE_DRAWS
    task = make_task(config, seed=SEED_STRIDE * seed, size=most)
    items: dict[str, tuple[int, Mapping[str, Any]]] = {}
    num_repeated = 0
    for index in range(most):
        try:
            item = task[index]
        except Exception as error:  # a task may raise any error
            raise ConfigurationError(
                f"env.reward: {config.task} cannot make item {index} of seed {seed}: {one_line(error)}"
            ) from error
        if item["question"] in items:
            num_repeated += 1
            continue
        items[item["question"]] = (index, item)
        if len(items) == num_items:
            break
    return SampledItems(tuple(items.values()), num_repeated)


def make_task(config: ReasoningGymConfig, seed: int = 0, size: int = 1) -> Any:
    """Return a task of the library as a data set of `size` items, which are sampled with `seed`, `seed + 1`, ..."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigurationError(
            f"env.reward.kind: reasoning_gym cannot be imported ({error}); pip install reasoning-gym"
        ) from error
    if config.task not in DATASETS:
        hint = did_you_mean(nearest(config.task, DATASETS)) or f"; they are: {', '.join(sorted(DATASETS))}"
        raise ConfigurationError(f"env.reward.task: reasoning-gym has no task {config.task!r}{hint}")
    if problems := _parameter_problems(config, [field.name for field in fields(DATASETS[config.task][1])]):
        raise ConfigurationError(problems)
    try:
        return reasoning_gym.create_dataset(config.task, **config.parameters, seed=seed, size=size)
    except Exception as error:  # assertions and any other errors of a task
        raise ConfigurationError(
            f"env.reward.parameters: {config.task} refuses these values: {one_line(error)}"
        ) from error


def _parameter_problems(config: ReasoningGymConfig, known: list[str]) -> list[str]:
    problems = []
    for name in config.parameters:
        key = f"env.reward.parameters.{name}"
        if name in FROM_DATA_SECTION:
            problems.append(f"{key}: is set by {FROM_DATA_SECTION[name]}; leave it out here")
        elif name not in known:
            allowed = ", ".join(other for other in known if other not in FROM_DATA_SECTION)
            hint = did_you_mean(nearest(name, known))
            problems.append(f"{key}: {config.task} has no such parameter; its parameters: {allowed}{hint}")
    return problems
