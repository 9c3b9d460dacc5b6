# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Interpolation: `${policy.model_name}` stands for the value of that key.

A name of another key is all that may stand in `${...}`. OmegaConf's resolvers (`${oc.env:HOME}` and the like) are
refused: the resolved configuration is stored and sent to the loggers, and must hold neither what the environment
holds, such as access tokens, nor values that differ from one machine to the next.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from nemo_rl_moe.config.overrides import present_keys
from nemo_rl_moe.config.suggestions import did_you_mean, nearest_key

MISSING = "???"
_NAMES_A_KEY = re.compile(r"(?<!\\)\$\{\s*(?P<key>\.*[A-Za-z_]\w*(?:\.\w+)*)\s*\}")

Place = tuple[str | int, ...]


def resolve(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Place, str]]:
    """Puts values in the place of interpolations.

    Args:
        config: Plain nested mapping; it is not changed.

    Returns:
        The resolved mapping, and a line for each value that could not be resolved, by the value's place. Such a value
        stays as it was written. A value `???` is left out: it is to be given by an override.
    """
    problems = {}
    allowed: dict[str, Any] = _without_missing(config)
    names = present_keys(allowed)
    texts = [(path, text) for path, text in _texts(allowed) if "${" in text]
    for path, text in texts:
        rest = _NAMES_A_KEY.sub("", text)
        if "${" in rest:
            problems[path] = (
                f"{dotted(path)}: {text!r} is not allowed: ${{...}} takes the name of another key and nothing else"
            )
    nodes = OmegaConf.create(_with_blanks(allowed, set(problems)))
    for path, text in texts:
        if path in problems:
            continue
        try:
            OmegaConf.select(nodes, _omegaconf_key(path), throw_on_missing=True)
        except InterpolationKeyError:
            problems[path] = f"{dotted(path)}: {text!r} names no key{did_you_mean(_suggestion(text, names))}"
        except (OmegaConfBaseException, RecursionError) as error:
            problems[path] = f"{dotted(path)}: {text!r}: {str(error).splitlines()[0]}"
    safe = OmegaConf.create(_with_blanks(allowed, set(problems)))
    try:
        resolved = OmegaConf.to_container(safe, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:  # a circle through a whole section
        resolved = allowed
        problems[()] = f"interpolation: {str(error).splitlines()[0]}"
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}, problems


def dotted(path: Sequence[str | int]) -> str:
    """A place in the configuration as the user writes it."""
    return ".".join(str(part) for part in path)


def _omegaconf_key(path: Place) -> str:
    """A place in OmegaConf's own notation, in which keys with dots in them stay whole."""
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
