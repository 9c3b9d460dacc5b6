# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the few keys of a step that a backend rejects, so that the others are not lost."""

from collections.abc import Callable, Mapping, Sequence

Write = Callable[[Mapping[str, float]], None]


def write_what_is_accepted(write: Write, metrics: Mapping[str, float], failure: Exception) -> dict[str, Exception]:
    """Writes a step that was refused as a whole, in parts.

    Three single keys tell a backend that is out of order from one that minds some of the keys; what is left is halved
    until the keys stand alone, so that one bad key among n takes about 2 log2(n) writes.

    Args:
        write: Writes a part of the step; raises for a part that holds a rejected key.
        metrics: The step.
        failure: What the write of the whole step raised.

    Returns:
        The rejected keys, and what each raised.

    Raises:
        Exception: `failure`, where none of the single keys was taken: the backend fails in general.
    """
    keys = list(metrics)
    rejected: dict[str, Exception] = {}
    probes = list(dict.fromkeys((keys[0], keys[len(keys) // 2], keys[-1]))) if keys else []
    for key in probes:
        try:
            write({key: metrics[key]})
        except Exception as error:
            rejected[key] = error
    if len(rejected) == len(probes):
        raise failure
    _halve(write, metrics, [key for key in keys if key not in probes], rejected)
    return rejected


def _halve(write: Write, metrics: Mapping[str, float], keys: Sequence[str], rejected: dict[str, Exception]) -> None:
    if not keys:
        return
    try:
        write({key: metrics[key] for key in keys})
    except Exception as error:
        if len(keys) == 1:
            rejected[keys[0]] = error
        else:
            _halve(write, metrics, keys[: len(keys) // 2], rejected)
            _halve(write, metrics, keys[len(keys) // 2 :], rejected)
