# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sections of a mixture's environments, completed from the section that they share."""

from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.config.files import merge

_OF_DATA = ("train", "validation", "prompt_key", "prompt_template", "answer_key")
_MERGED = ("tool_limits", "train", "validation")
"""Sections of which an environment may set single keys; others, such as `parameters`, are replaced as a whole."""


def with_mixtures(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in which each environment of `env.mixture` and `data.environments` has all its keys."""
    found = dict(values)
    env, data = found.get("env"), found.get("data")
    if isinstance(env, Mapping):
        found["env"] = _completed(env, "mixture", {key: value for key, value in env.items() if key != "mixture"})
    if isinstance(data, Mapping):
        found["data"] = _completed(data, "environments", {key: data[key] for key in _OF_DATA if key in data})
    return found


def _completed(section: Mapping[str, Any], name: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    entries = section.get(name)
    if not isinstance(entries, Mapping):
        return dict(section)
    return {**section, name: {key: _over(shared, entry) for key, entry in entries.items()}}


def _over(shared: Mapping[str, Any], entry: Any) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    own = {
        key: merge(shared[key], value)
        if key in _MERGED and isinstance(value, Mapping) and isinstance(shared.get(key), Mapping)
        else value
        for key, value in entry.items()
    }
    return {**shared, **own}
