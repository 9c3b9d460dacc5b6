# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Definitions of Python functions for chat templates, from their types and docstrings."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter

from nemo_rl_moe.errors import ConfigurationError, one_line

_PLAIN_TYPES = (str, int, float, bool, list, dict, tuple, NoneType, Any)
_HEADING = re.compile(r"^(\w[\w ]*)\n-{3,}[ ]*$", re.MULTILINE)
"""Heading of a section in a docstring of numpy's style."""


def is_plain(hint: Any) -> bool:
    """Return whether an annotation consists of types of JSON alone, whose checks run no code of the user."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is None:
        return hint in _PLAIN_TYPES
    if origin not in (list, dict, tuple, Literal, Union, UnionType):
        return False
    return origin is Literal or all(part is ... or is_plain(part) for part in parts)


def definition_of(
    key: str, function: Callable[..., object], shown: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the definition of a function in the standard form.

    Args:
        key: Begins error messages: key and value of the configuration.
        shown: The parameters that the model sees.
        hints: Name of a parameter -> its annotation. Pydantic makes the schemas of types that JSON does not have.

    Raises:
        ConfigurationError: The docstring does not describe a parameter, or a type has no JSON schema.
    """
    from transformers.utils import chat_template_utils as transformers_tools

    def view() -> None: ...

    own = {each.name: _own_schema(key, each.name, hints[each.name]) for each in shown if _is_own(each, hints)}
    view.__name__, view.__doc__ = function.__name__, _in_google_style(function.__doc__)
    view.__annotations__ = {
        each.name: str if each.name in own else hints[each.name] for each in shown if each.name in hints
    }
    view.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    try:
        definition: dict[str, Any] = transformers_tools.get_json_schema(view)
    except (transformers_tools.DocstringParsingException, transformers_tools.TypeHintParsingException) as error:
        raise ConfigurationError(
            f"{key}: {one_line(error).partition(': ')[2]}; expected a docstring with Args: that describes each"
            " parameter, and a type of each"
        ) from error
    properties = definition["function"]["parameters"]["properties"]
    for name, schema in own.items():
        properties[name] = {**schema, "description": properties[name]["description"]}
    return definition


def _is_own(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> bool:
    return parameter.name in hints and not is_plain(hints[parameter.name])


def _own_schema(key: str, name: str, hint: Any) -> dict[str, Any]:
    """Return Pydantic's schema of a type, without references, which many chat templates do not show."""
    try:
        schema = TypeAdapter(hint).json_schema()
        return _resolved(schema, schema.get("$defs", {}))
    except Exception as error:  # the user's class may raise any error while Pydantic reads it
        reason = "it contains itself" if isinstance(error, RecursionError) else one_line(error)
        raise ConfigurationError(
            f"{key}: {name} is of type {inspect.formatannotation(hint)}, which has no JSON schema: {reason}"
        ) from error


def _resolved(schema: Any, shared: Mapping[str, Any]) -> Any:
    """Return a schema without titles, in which definitions replace references to them."""
    if not isinstance(schema, dict):
        return schema
    found = dict(_resolved(shared[schema["$ref"].rpartition("/")[2]], shared)) if "$ref" in schema else {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties"):
            found[key] = {name: _resolved(each, shared) for name, each in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            found[key] = [_resolved(each, shared) for each in value]
        elif key not in ("$ref", "$defs", "title", "discriminator"):
            found[key] = _resolved(value, shared) if key in ("items", "additionalProperties") else value
    return found


def _in_google_style(docstring: str | None) -> str | None:
    """Return a docstring of numpy's style in Google's, and any other as it is."""
    text = inspect.cleandoc(docstring or "")
    summary, *sections = _HEADING.split(text)
    by_name = dict(zip(sections[::2], sections[1::2], strict=True))
    if "Parameters" not in by_name:
        return docstring
    lines = [summary.rstrip(), "", "Args:"]
    for line in by_name["Parameters"].strip("\n").splitlines():
        if line[:1].strip():
            lines.append(f"    {line.partition(':')[0].strip()}:")
        else:
            lines[-1] = f"{lines[-1]} {line.strip()}".rstrip()
    return "\n".join(lines)
