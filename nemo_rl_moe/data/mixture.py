# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts of several environments, mixed by weights in a reproducible order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.errors import DataError, counted


class MixtureLoader:
    """Yields the prompts of each step, taken from several environments in proportion to their weights.

    Each environment has its own order of prompts, which continues over the steps. When all its prompts have been used,
    they are used again in another order, so an environment with few prompts repeats them more often.

    The environment of the next prompt only depends on the weights: it is the environment whose number of prompts is
    furthest below its share. In a step, an environment has its share of the prompts up to rounding, and later steps
    compensate the rounding. The order only depends on the arguments, so that a run can resume.
    """

    def __init__(
        self,
        datasets: Mapping[str, Sequence[Prompt]],
        weights: Mapping[str, float],
        num_prompts_per_step: int,
        seed: int,
        *,
        shuffle: bool,
    ):
        self._num_steps = sum(map(len, datasets.values())) // num_prompts_per_step
        if not self._num_steps:
            raise DataError(
                f"grpo.num_prompts_per_step: got {num_prompts_per_step}, but the training data has only "
                f"{counted(sum(map(len, datasets.values())), 'prompt')} that can be used"
            )
        self._datasets, self._weights = datasets, weights
        self._num_prompts_per_step, self._seed, self._shuffle = num_prompts_per_step, seed, shuffle
        self._given_before = [dict.fromkeys(datasets, 0)]

    def __len__(self) -> int:
        """Return the number of steps of one epoch: the number of prompts of all environments, divided by the prompts of
        a step."""
        return self._num_steps

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step of an epoch. Epochs are counted from 0."""
        size, order_of = self._num_prompts_per_step, self._orders()
        while len(self._given_before) <= epoch_index:
            given = dict(self._given_before[-1])
            for _ in islice(environments_by_weight(self._weights, given), len(self) * size):
                pass  # only to update `given`
            self._given_before.append(given)
        given = dict(self._given_before[epoch_index])
        for _ in range(len(self)):
            chosen = []
            for name in islice(environments_by_weight(self._weights, given), size):
                number, index = divmod(given[name] - 1, len(self._datasets[name]))
                chosen.append(self._datasets[name][order_of(name, number)[index]])
            yield chosen

    def _orders(self) -> Callable[[str, int], Sequence[int]]:
        """Return a function from an environment and the number of a pass over its prompts to their order in that
        pass."""
        latest: dict[str, tuple[int, Sequence[int]]] = {}

        def order_of(name: str, number: int) -> Sequence[int]:
            if latest.get(name, (None,))[0] != number:
                size = len(self._datasets[name])
                rng = np.random.default_rng([self._seed, number, *name.encode()])
                latest[name] = number, rng.permutation(size).tolist() if self._shuffle else range(size)
            return latest[name][1]

        return order_of


def environments_by_weight(weights: Mapping[str, float], given: dict[str, int]) -> Iterator[str]:
    """Yield the environment of the next prompt, without end: the first environment that is furthest below its share.

    `given` (environment -> number of prompts used) is updated.
    """
    total = sum(weights.values())
    while True:
        number = sum(given.values()) + 1  # shares are computed from this number, so that rounding errors do not add up
        lacking = {name: weight / total * number - given[name] for name, weight in weights.items()}
        name = max(lacking, key=lacking.__getitem__)
        given[name] += 1
        yield name


def interleaved(datasets: Mapping[str, Sequence[Prompt]]) -> list[Prompt]:
    """Return the prompts of all environments, evenly mixed, so that any number of first prompts has about the same
    proportions as all prompts."""
    keyed = [
        ((index + 0.5) / len(dataset), number, prompt)
        for number, dataset in enumerate(datasets.values())
        for index, prompt in enumerate(dataset)
    ]
    return [prompt for _, _, prompt in sorted(keyed, key=lambda entry: entry[:2])]
