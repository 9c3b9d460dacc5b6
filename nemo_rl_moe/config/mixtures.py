# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Fills in missing keys: of a mixture's environments from `env` and `data`, and of driver and reward from the defaults
of their kinds."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from nemo_rl_moe.config.files import KIND_KEY, KINDS_NAME, exemplars_folder, merge, read_with_defaults

_SECTIONS = ("driver", "reward", "limits", "train", "validation")
"""Sections of which an environment may set single keys. Other mappings, such as `parameters`, are replaced as one
value."""
_OF_DATA = ("train", "validation", "prompt_key", "prompt_template", "answer_key")


def with_mixtures(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration's values with complete sections of environments (`env.mixture`, `data.environments`).

    A key that is missing in such a section gets the value of `env` or `data`. A key that is missing in a section with a
    `kind` gets the default of that kind.
    """
    found = dict(values)
    env, data = found.get("env"), found.get("data")
    if isinstance(env, Mapping):
        completed = _completed(env, "mixture", {key: value for key, value in env.items() if key != "mixture"})
        if isinstance(mixture := completed.get("mixture"), Mapping):
            completed["mixture"] = {name: _with_kinds(entry) for name, entry in mixture.items()}
        found["env"] = _with_kinds(completed)
    if isinstance(data, Mapping):
        found["data"] = _completed(data, "environments", {key: data[key] for key in _OF_DATA if key in data})
    return found


def _completed(section: Mapping[str, Any], name: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    entries = section.get(name)
    if not isinstance(entries, Mapping):
        return dict(section)
    return {**section, name: {key: _over(shared, entry) for key, entry in entries.items()}}


def _over(shared: Any, entry: Any) -> Any:
    """Return an environment's entry merged over the shared section, but replace mappings that are not `_SECTIONS`."""
    if not (isinstance(shared, Mapping) and isinstance(entry, Mapping)):
        return entry
    if KIND_KEY in entry and entry[KIND_KEY] != shared.get(KIND_KEY):
        return entry
    own = {key: _over(shared.get(key), value) if key in _SECTIONS else value for key, value in entry.items()}
    return {**shared, **own}


def _with_kinds(env: Any) -> Any:
    """Return the section of an environment merged over the defaults of its driver and of its reward."""
    if not isinstance(env, Mapping):
        return env
    kinds = {
        name: merge(defaults.get(str(section.get(KIND_KEY)), {}), section)
        for name, defaults in _defaults_of_kinds().items()
        if isinstance(section := env.get(name), Mapping)
    }
    return {**env, **kinds}


@lru_cache(maxsize=1)
def _defaults_of_kinds() -> Mapping[str, Mapping[str, Any]]:
    return read_with_defaults(exemplars_folder() / KINDS_NAME)
