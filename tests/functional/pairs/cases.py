# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The cases: triples by name, and an array in which each two values that can be combined meet."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from allpairspy import AllPairs

from tests.functional.pairs.refusals import refused
from tests.functional.pairs.settings import PARAMETERS, SIMPLEST, Setting

Pair = frozenset[tuple[str, str]]
_KNOWN_BY_VALUE = ("algorithm", "rollouts", "environment", "batching", "layout", "precision")


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        name: Its name in the table.
        setting: A value of each parameter.
    """

    name: str
    setting: Setting

    def described(self) -> str:
        """Return the values that are not the simplest, some with their parameter."""
        values = {name: value for name, value in self.setting.items() if value != SIMPLEST[name]}
        return ", ".join(value if name in _KNOWN_BY_VALUE else f"{name}={value}" for name, value in values.items())


def pairs_of(settings: Iterable[Setting]) -> set[Pair]:
    """Return each two values that meet in one of the settings."""
    return {frozenset(pair) for setting in settings for pair in combinations(setting.items(), 2)}


def possible_pairs() -> set[Pair]:
    """Return each two values of different parameters that can be combined."""
    values = [(name, value) for name, own in PARAMETERS.items() for value in own]
    pairs = (pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0])
    return {frozenset(pair) for pair in pairs if refused(dict(pair)) is None}


def covering_array(seed: int) -> list[Case]:
    """Return settings in which each possible pair meets at least once.

    Args:
        seed: Shuffles the values of each parameter: other seeds give other combinations of three and more.
    """
    chance = random.Random(seed)
    values = {name: chance.sample(list(own), len(own)) for name, own in PARAMETERS.items()}
    # The larger come first: the array is as short as the product of the two largest allows.
    names = sorted(PARAMETERS, key=lambda name: -len(PARAMETERS[name]))
    rows = AllPairs(
        [values[name] for name in names],
        filter_func=lambda row: refused(dict(zip(names, row, strict=False))) is None,
    )
    settings: list[Setting] = [dict(zip(names, row, strict=True)) for row in rows]
    # The filter sees a row from its beginning, and a pair that leaves no value for a later parameter is lost there.
    for pair in sorted(map(sorted, possible_pairs() - pairs_of(settings))):
        if not pairs_of(settings) >= {frozenset(pair)}:
            settings.append(_completed(dict(pair), chance))
    in_order = _varied([{name: setting[name] for name in PARAMETERS} for setting in settings], chance)
    return [Case(f"{seed}-{number}", setting) for number, setting in enumerate(in_order)]


def _varied(settings: Sequence[Setting], chance: random.Random) -> list[Setting]:
    """Return the settings with other values where no pair needs theirs: alike ones would meet nothing new."""
    times = Counter(pair for setting in settings for pair in pairs_of([setting]))
    found = []
    for setting in settings:
        for name in chance.sample(list(PARAMETERS), len(PARAMETERS)):
            changed = {**setting, name: chance.choice(list(PARAMETERS[name]))}
            lost = pairs_of([setting]) - pairs_of([changed])
            if refused(changed) is None and all(times[pair] > 1 for pair in lost):
                times.subtract(lost)
                times.update(pairs_of([changed]) - pairs_of([setting]))
                setting = changed
        found.append(setting)
    return found


def _completed(values: Setting, chance: random.Random) -> Setting:
    """Return a setting with these values; the others are drawn until nothing of it is refused."""
    while True:
        drawn = {name: values.get(name, chance.choice(list(own))) for name, own in PARAMETERS.items()}
        if refused(drawn) is None:
            return drawn


def _simple(name: str, **values: str) -> Case:
    return Case(name, dict(SIMPLEST) | values)


TRIPLES: tuple[Case, ...] = (
    _simple("agent-asynchronous-validation", environment="agent", rollouts="staleness_1", engine="separate"),
    _simple("lora-tp2-trainer", lora="on", layout="tp2"),
    _simple(
        "replay-asynchronous-staleness2", replay="rollout", rollouts="staleness_2", engine="separate", updates="two"
    ),
    _simple("tools-validation-resume", environment="tools", layout="dp2"),
)
"""Combinations of three that have met a fault, or were near to one."""

OF_EACH_CHANGE: tuple[Case, ...] = (
    _simple(
        "agent",
        algorithm="ppo",
        engine="separate",
        rollouts="staleness_1",
        environment="agent",
        lora="adapter",
        layout="ep2",
        sampling_mask="replay",
        reward_shaping="on",
        kl_penalty="loss",
        precision="bfloat16",
    ),
    _simple(
        "several-sequences",
        rollouts="staleness_0",
        environment="several_sequences",
        lora="on",
        replay="rollout",
        batching="packed",
        layout="tp2",
        sampling_mask="replay",
        objective="dppo",
        precision="bfloat16",
        optimizer="not_saved",
    ),
    _simple(
        "function",
        algorithm="ppo",
        engine="separate",
        rollouts="staleness_2",
        environment="function",
        lora="on",
        replay="rollout",
        layout="dp2",
        updates="two",
        kl_penalty="loss",
        validation="off",
        optimizer="not_saved",
    ),
    _simple(
        "tools",
        algorithm="distillation",
        rollouts="staleness_0",
        environment="tools",
        replay="old_policy",
        batching="packed",
        updates="two",
        objective="clip_cov",
        reward_shaping="on",
        kl_penalty="reward",
        precision="bfloat16",
    ),
    _simple(
        "mixture",
        algorithm="distillation",
        environment="mixture",
        batching="dynamic",
        layout="ep2",
        objective="dppo",
        dynamic_sampling="on",
        validation="off",
    ),
    _simple(
        "single-turn",
        engine="separate",
        lora="adapter",
        replay="old_policy",
        batching="dynamic",
        layout="pp2",
        updates="two",
        sampling_mask="replay",
        dynamic_sampling="on",
        reward_shaping="on",
        kl_penalty="reward",
        validation="off",
        optimizer="not_saved",
    ),
)
"""Six that have the triples and 59% of all pairs, for each change."""


WITH_VLLM: tuple[Case, ...] = (
    _simple("vllm-merged", engine="vllm", lora="on", replay="rollout", layout="ep2"),
    _simple(
        "vllm-adapter",
        engine="vllm",
        lora="adapter",
        rollouts="staleness_1",
        environment="tools",
        replay="rollout",
        layout="tp2",
        precision="bfloat16",
    ),
    _simple("vllm-adapter-ppo", algorithm="ppo", engine="vllm", lora="adapter", batching="packed", layout="pp2"),
)
"""Adapters with the engine that the array leaves out."""


def all_cases(seed: int) -> list[Case]:
    """Return the six, the triples, and the array of a seed."""
    return [*OF_EACH_CHANGE, *TRIPLES, *covering_array(seed)]
