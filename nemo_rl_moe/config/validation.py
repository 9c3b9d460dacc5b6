# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""From a plain mapping to the typed configuration, with every problem told at once."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from nemo_rl_moe.config.describe import choices, expected_instead_of, field_at, got, known_keys, section_model
from nemo_rl_moe.config.schema_base import SETTINGS
from nemo_rl_moe.config.suggestions import did_you_mean, nearest, nearest_key

ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(
    schema: type[ModelT], values: Mapping[str, Any], reported: AbstractSet[tuple[Any, ...]] = frozenset()
) -> tuple[ModelT, list[str], bool]:
    """Checks values against the schema.

    Args:
        schema: The model of the whole configuration.
        values: Plain nested mapping.
        reported: Places that something else has complained about already; nothing more is said about them.

    Returns:
        The configuration, one line for each problem, and whether the configuration is whole. Where it is not, it
        holds the valid values only: reading another one raises AttributeError.
    """
    try:
        return schema.model_validate(values), [], True
    except ValidationError as error:
        lines: dict[tuple[Any, ...], str] = {}
        for detail in error.errors(include_url=False, include_context=False):
            place, line = _problem(schema, values, detail["loc"], detail["type"])
            if not any(place[: len(known)] == known for known in reported):
                lines.setdefault(place, line)
        return valid_part(schema, values), list(lines.values()), False


def valid_part(schema: type[ModelT], values: Mapping[str, Any]) -> ModelT:
    """The configuration without its invalid values, so that rules between the others can be checked all the same."""
    valid: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        if name not in values:
            continue
        section = section_model(field.annotation)
        if section is not None and isinstance(values[name], Mapping):
            valid[name] = valid_part(section, values[name])
            continue
        try:
            annotation: Any = Annotated[field.annotation, field]
            adapter = TypeAdapter(annotation, config=None if section is not None else SETTINGS)
            valid[name] = adapter.validate_python(values[name], strict=True)
        except ValidationError:
            continue
    return schema.model_construct(_fields_set=set(valid), **valid)


def _problem(
    schema: type[BaseModel], values: Mapping[str, Any], location: Sequence[Any], kind: str
) -> tuple[tuple[Any, ...], str]:
    place, field = field_at(schema, location)
    if kind == "extra_forbidden":
        return tuple(location), _unknown_key(schema, location)
    name = ".".join(place)
    if field is None:
        return place, f"the configuration: got {got(values)}, expected sections"
    if kind == "missing":
        return place, f"{name}: missing; expected {expected_instead_of(field, None)}"
    value = _value_at(values, place)
    suggestion = nearest(value, choices(field)) if isinstance(value, str) else None
    return place, f"{name}: got {got(value)}, expected {expected_instead_of(field, value)}{did_you_mean(suggestion)}"


def _unknown_key(schema: type[BaseModel], location: Sequence[Any]) -> str:
    name = ".".join(str(part) for part in location)
    known = known_keys(schema)
    suggestion = nearest_key(name, known)
    if suggestion is not None:
        return f"{name}: unknown key{did_you_mean(suggestion)}"
    section = ".".join(str(part) for part in location[:-1])
    allowed = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    return f"{name}: unknown key; allowed here: {', '.join(allowed)}"


def _value_at(values: Any, place: Sequence[str]) -> Any:
    for part in place:
        values = values[part]
    return values
