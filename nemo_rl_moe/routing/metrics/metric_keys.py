# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of the MoE metrics, and the only function that adds the `moe/` prefix. Imports no other module."""

import re
from collections.abc import Iterable, Mapping

MOE_PREFIX = "moe/"
OUTLIER_PREFIX = "moe_expert_utilization/"
WHAT_IF_PREFIX = "what_if/"
ROLLOUT_PREFIX = "rollout/moe/"
"""Prefix of the load in the rollout, under verl's keys. They get no other prefix."""


def outlier_key(layer: int, expert: int) -> str:
    return f"{OUTLIER_PREFIX}layer_{layer}_expert_{expert}"


def with_moe_prefix(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under their logged keys, `moe/{key}`.

    Keys of single experts keep their prefix `moe_expert_utilization/`, so that one chart shows all experts.
    """
    return {key if key.startswith(OUTLIER_PREFIX) else MOE_PREFIX + key: value for key, value in metrics.items()}


def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that orders the numbers in a name by value: `layers.2` comes before `layers.10`."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def number_in_name(name: str) -> int | None:
    """Return the number in a module path: the first component that is a number, otherwise the first digits, or None."""
    component = next((part for part in name.split(".") if part.isdecimal()), None)
    if component is not None:
        return int(component)
    found = re.search(r"\d+", name)
    return int(found.group()) if found else None


def indices_of_layers(layers: Iterable[int | str]) -> dict[int | str, int]:
    """Return layer -> its index `i` in the keys of the metrics, in the order of the indices.

    A layer that is a number is its own index. The index of a module name is the number in the name, which also counts
    dense layers. If numbers are missing or repeated, all names get their position in natural order.

    Raises:
        TypeError: Some layers are numbers and some are names.
    """
    layers = list(layers)
    numbers = [layer for layer in layers if isinstance(layer, int)]
    names = [layer for layer in layers if isinstance(layer, str)]
    if len(numbers) == len(layers):
        return {number: number for number in sorted(numbers)}
    if len(names) != len(layers):
        raise TypeError("layers must be all indices or all module names, got both kinds (or others) in one mapping")
    in_order = sorted(names, key=natural_order)
    found = {name: number_in_name(name) for name in in_order}
    distinct = {number for number in found.values() if number is not None}
    if len(distinct) < len(in_order):
        return {name: position for position, name in enumerate(in_order)}
    return dict(sorted(((name, number) for name, number in found.items() if number is not None), key=lambda x: x[1]))
