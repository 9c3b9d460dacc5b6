# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Command-line overrides and `${...}` interpolations of a configuration."""

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException
from yaml import YAMLError

from nemo_rl_moe.config.algorithm import ALGORITHM_KEY
from nemo_rl_moe.config.files import KIND_KEY, SECTIONS_OF_KINDS, parse_value, traps, value_at, yaml_problem
from nemo_rl_moe.config.suggestions import did_you_mean, nearest_key, quoted, shortened
from nemo_rl_moe.config.unknown_keys import unknown_key
from nemo_rl_moe.masking import masked_assignment

_FORM = re.compile(r"(?P<add>\+?)(?P<key>[^=+~\s]+)=(?P<value>.*)", re.DOTALL)
_REMOVAL = re.compile(r"~(?P<key>[^=+~\s]+)")


@dataclass(frozen=True)
class Override:
    """One override. With `remove`, the override has no value and removes the key. With `add`, the key may be new."""

    key: tuple[str, ...]
    value: Any = None
    add: bool = False
    remove: bool = False


def parse_override(text: str) -> Override:
    """Parse one override. Its value is YAML.

    Raises:
        ValueError: The text is no override, or its value is not YAML. The message is for the user.
    """
    if removal := _REMOVAL.fullmatch(text):
        return Override(tuple(removal["key"].split(".")), remove=True)
    form = _FORM.fullmatch(text)
    if form is None or not all(form["key"].split(".")):
        shown = shortened(masked_assignment(text))
        raise ValueError(f"override {shown!r}: expected section.key=value, +section.key=value or ~section.key")
    key, written = shortened(form["key"]), form["value"]
    if not written.strip():
        raise ValueError(f"{key}: nothing follows the = (is a shell variable not set?); expected a value, or null")
    for _, problem in traps(written):
        raise ValueError(f"{key}: {problem}")
    try:
        value = parse_value(written)
    except (YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        shown = shortened(masked_assignment(text).partition("=")[2])
        raise ValueError(f"{key}: {shown!r} is not valid YAML: {yaml_problem(error)}") from error
    return Override(tuple(form["key"].split(".")), value, add=bool(form["add"]))


def apply_overrides(
    config: Mapping[str, Any],
    overrides: Sequence[str],
    known_around: Callable[[Sequence[str], Mapping[str, Any]], Sequence[str]],
) -> tuple[dict[str, Any], list[str]]:
    """Apply overrides in order, but overrides of a section's `kind` first, since a new kind replaces the section.

    Args:
        known_around: Function of an override's key and the current values. It returns every full key that needs no `+`,
            even if the YAML lacks it: the keys of the schema and, if the override's key is inside a section that the
            user named, the keys of this section.

    Returns:
        The new mapping, and a line for each override that could not be applied.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(config))
    problems, parsed = [], []
    for text in overrides:
        try:
            parsed.append(parse_override(text))
        except ValueError as error:
            problems.append(str(error))
    for override in sorted(parsed, key=lambda override: not _names_kind(override.key)):
        name, known = ".".join(override.key), known_around(override.key, changed)
        if override.remove:
            if not _remove(changed, override.key):
                problems.append(
                    f"~{shortened(name)}: no such key{did_you_mean(nearest_key(name, present_keys(changed)))}"
                )
        elif override.add or name in known or name in present_keys(changed):
            _set(changed, override.key, override.value)
        elif name == ALGORITHM_KEY:
            problems.append(f"{name}: can only be set in the file, which `nemo-rl-moe run --config FILE` starts")
        else:
            problems.append(unknown_key(name, [*known, *present_keys(changed)]))
    return changed, problems


def present_keys(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return every full key of a nested mapping, sections included."""
    keys = []
    for key, value in config.items():
        keys.append(prefix + key)
        if isinstance(value, Mapping):
            keys += present_keys(value, f"{prefix}{key}.")
    return keys


def _set(config: dict[str, Any], key: Sequence[str], value: Any) -> None:
    section = config
    for part in key[:-1]:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    if _names_kind(key) and section.get(KIND_KEY) != value:
        section.clear()  # the present keys belong to the previous kind
    section[key[-1]] = value


def _names_kind(key: Sequence[str]) -> bool:
    return len(key) > 1 and key[-1] == KIND_KEY and key[-2] in SECTIONS_OF_KINDS


def _remove(config: dict[str, Any], key: Sequence[str]) -> bool:
    section: Any = config
    for part in key[:-1]:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict) or key[-1] not in section:
        return False
    del section[key[-1]]
    return True


MISSING = "???"
_NAMES_A_KEY = re.compile(r"(?<!\\)\$\{\s*(?P<key>\.*[A-Za-z_]\w*(?:\.\w+)*)\s*\}")
_VARIABLE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}")
Place = tuple[str | int, ...]


def resolve(
    config: Mapping[str, Any], is_path: Callable[[Place], bool] = lambda _: False
) -> tuple[dict[str, Any], dict[Place, str]]:
    """Resolve the interpolations `${...}` of a configuration.

    Args:
        is_path: Function that returns whether the value at a position is a path. In paths, `${oc.env:NAME}` is an
            environment variable.

    Returns:
        The resolved mapping, and position -> error line for each value that could not be resolved. Such a value becomes
            null. A value `???`, which an override must replace, is omitted. A value that refers to an omitted value has
            an empty line, so that the missing value is reported once.
    """
    problems: dict[Place, str] = {}
    allowed: dict[str, Any] = _without_missing(config)
    _fill_in_variables(allowed, is_path, problems)
    if (plain := _plainly_resolved(allowed)) is not None:
        return plain, problems
    names = present_keys(allowed)
    nodes = OmegaConf.create(allowed)
    for path, text in _texts(allowed):
        if "${" not in text or path in problems:
            continue
        shown = f"{dotted(path)}: {quoted(text, path)}"
        if "${" in _NAMES_A_KEY.sub("", text):
            problems[path] = f"{shown} is not allowed: ${{...}} takes the name of another key and nothing else"
            continue
        try:
            OmegaConf.select(nodes, _omegaconf_key(path), throw_on_missing=True)
        except InterpolationKeyError:
            if any(value_at(config, found["key"]) == MISSING for found in _NAMES_A_KEY.finditer(text)):
                problems[path] = ""
                continue
            problems[path] = f"{shown} names no key{did_you_mean(_suggestion(text, names))}"
        except OmegaConfBaseException as error:
            problems[path] = f"{shown}: {str(error).splitlines()[0]}"
    resolved = OmegaConf.to_container(OmegaConf.create(_with_blanks(allowed, set(problems))), resolve=True)
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}, problems


def _fill_in_variables(config: dict[str, Any], is_path: Callable[[Place], bool], problems: dict[Place, str]) -> None:
    """Expand environment variables in paths. In other values they are refused, since secrets do not belong in a
    file."""
    for place, text in _texts(config):
        names = _VARIABLE.findall(text)
        if not names or not is_path(place):
            continue
        if missing := [name for name in names if name not in os.environ]:
            problems[place] = f"{dotted(place)}: {quoted(text, place)}: the variable {missing[0]} is not set"
            continue
        _put(config, place, _VARIABLE.sub(lambda found: os.environ[found[1]], text))


def _plainly_resolved(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Resolve interpolations without OmegaConf. Return None if one is not `${section.key}` with a single value at this
    key."""
    # OmegaConf takes most of the time of a load.
    found = copy.deepcopy(config)
    for path, text in _texts(config):
        if "${" not in text:
            continue
        reference = _NAMES_A_KEY.fullmatch(text)
        if reference is None or reference["key"].startswith("."):
            return None
        value: Any = config
        for part in reference["key"].split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        if not isinstance(value, str | int | float | None) or (isinstance(value, str) and "${" in value):
            return None
        _put(found, path, value)
    return {str(key): value for key, value in found.items()}


def _put(config: Any, place: Place, value: Any) -> None:
    reduce(getitem, place[:-1], config)[place[-1]] = value


def dotted(path: Sequence[str | int]) -> str:
    """Return a position in the configuration as a full key with dots."""
    return shortened(".".join(str(part) for part in path))


def _omegaconf_key(path: Place) -> str:
    """Return a position in OmegaConf's notation, in which a key may contain dots."""
    return "".join(f"[{part}]" for part in path)


def _suggestion(text: str, names: Sequence[str]) -> str | None:
    for match in _NAMES_A_KEY.finditer(text):
        if not match["key"].startswith(".") and match["key"] not in names:
            return nearest_key(match["key"], names)
    return None


def _texts(value: Any, path: Place = ()) -> list[tuple[Place, str]]:
    if isinstance(value, str):
        return [(path, value)]
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, entry in entries for found in _texts(entry, (*path, key))]


def _without_missing(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_missing(entry) for key, entry in value.items() if entry != MISSING}
    return value


def _with_blanks(value: Any, blank: set[Place], path: Place = ()) -> Any:
    if path in blank and path:
        return None
    if isinstance(value, Mapping):
        return {key: _with_blanks(entry, blank, (*path, key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_blanks(entry, blank, (*path, index)) for index, entry in enumerate(value)]
    return value
