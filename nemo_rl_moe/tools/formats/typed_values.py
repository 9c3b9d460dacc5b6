# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of unquoted arguments to the types in a tool's schema."""

import math
from collections.abc import Mapping
from typing import Any

from nemo_rl_moe.tools.formats.scanning import CallProblem, read_json

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_WORDS = {"true": True, "1": True, "false": False, "0": False}
_DEFINITIONS = ("$defs", "definitions")


def properties_of(parameters: object) -> dict[str, Any]:
    """Return name of a parameter -> its schema, with the shared definitions to which it may refer.

    Args:
        parameters: The JSON schema of all parameters. It may be any value, because agents send it unchecked.
    """
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(parameters, Mapping) or not isinstance(properties, Mapping):
        return {}
    shared = {key: parameters[key] for key in _DEFINITIONS if key in parameters}
    return {
        name: {**shared, **schema} if isinstance(schema, Mapping) else schema for name, schema in properties.items()
    }


def kinds_of(schema: object) -> set[str]:
    """Return JSON's names of the types that a schema allows. Empty if the schema states no type."""
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema} if isinstance(schema, Mapping) else {}
    return _kinds(schema, shared, ())


def _kinds(schema: object, shared: Mapping[str, object], seen: tuple[str, ...]) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    stated = schema.get("type")
    kinds = {each for each in (stated if isinstance(stated, list) else [stated]) if isinstance(each, str)}
    values = schema.get("enum")
    for value in values if isinstance(values, list) else ():
        kinds.add(_kind_of(value))
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else ():
            kinds |= _kinds(choice, shared, seen) or {"string"}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        kinds |= _kinds(_named(reference, shared), shared, (*seen, reference))
    if schema.get("nullable"):
        kinds = (kinds or {"string"}) | {"null"}
    return kinds


def _named(reference: str, shared: Mapping[str, object]) -> object:
    """Return the schema to which a reference such as `#/$defs/Point` refers, or None if it is missing."""
    root, _, path = reference.partition("/")
    key, _, name = path.partition("/")
    definitions = shared.get(key) if root == "#" else None
    return definitions.get(name) if isinstance(definitions, Mapping) else None


def _kind_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def typed_value(text: str, kinds: set[str]) -> object:
    """Return a text converted to one of a parameter's types (`kinds_of`), or the text if no type fits.

    Types are tried in vLLM's order: null, integer, number, boolean, object or array, text.
    """
    if not kinds:
        return text
    word = text.strip()
    if "null" in kinds and (word.lower() == "null" or word == "None"):  # Qwen3-Coder's template writes None
        return None
    if kinds & {"integer", "number"} and (number := _number(word, whole="number" not in kinds)) is not None:
        return number
    if "boolean" in kinds and word.lower() in _WORDS:
        return _WORDS[word.lower()]
    is_text_too = "string" in kinds
    if is_text_too and not kinds & {"object", "array"}:
        return text
    if not is_text_too and word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    try:
        value, end = read_json(word, 0)
    except CallProblem:
        return text
    if end < len(word) or (is_text_too and _kind_of(value) not in kinds):
        return text
    return value


def _number(word: str, *, whole: bool) -> int | float | None:
    """Return the value of a number, or None if the word is no number of JSON. If `whole`, only integers are numbers."""
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = math.nan if whole else float(word)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if number == int(number) else number
