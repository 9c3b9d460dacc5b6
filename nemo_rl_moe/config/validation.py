# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Validation of values against the schema, with error messages that name key, value and allowed values."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
from operator import getitem
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from nemo_rl_moe.config.files import KIND_KEY
from nemo_rl_moe.config.schema_base import PATH, SETTINGS, ExpectedWords, NameIn, RenamedValue
from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.config.unknown_keys import key_with_dots, unknown_key
from nemo_rl_moe.config.user_code import is_custom, with_colon
from nemo_rl_moe.masking import masked

_TYPE_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_LIST_WORDS = {int: "whole numbers", float: "numbers", str: "texts", dict: "sections"}
_LONGEST_VALUE = 60


def section_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models of a field that is a section or null: one model, or one for each kind of section.
    Empty for other fields."""
    if get_origin(annotation) is Annotated:
        return section_models(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [model for part in get_args(annotation) for model in section_models(part)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def models_for(annotation: Any, value: Any) -> list[type[BaseModel]]:
    """Return the model for the kind that a section's value names, or all models of the section if it names no known
    kind."""
    models = section_models(annotation)
    kind = value.get(KIND_KEY) if isinstance(value, Mapping) else None
    named = [model for model in models if len(models) > 1 and kind in kinds_of(model)]
    return named or models


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the allowed values of a model's key `kind`. Empty if the model has no such key."""
    return get_args(model.model_fields[KIND_KEY].annotation) if KIND_KEY in model.model_fields else ()


def entry_annotation(annotation: Any) -> Any:
    """Return the type of the sections if a field maps names of the user's choice to sections, else None."""
    is_entries = get_origin(annotation) is dict and section_models(get_args(annotation)[1])
    return get_args(annotation)[1] if is_entries else None


def known_keys(model: type[BaseModel], prefix: str = "", values: Any = None) -> list[str]:
    """Return every full key of the schema, sections included. A section with a kind has the keys of the kind in
    `values`."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        value = _entry(values, name)
        for section in models_for(field.annotation, value):
            keys += known_keys(section, f"{prefix}{name}.", value)
    return list(dict.fromkeys(keys))


def _entry(values: Any, name: str) -> Any:
    return values.get(name) if isinstance(values, Mapping) else None


def keys_around(model: type[BaseModel], path: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return every full key that may be set near `path`: the keys of the schema and, if `path` is inside a section that
    the user named (such as an environment of a mixture), the keys of that section.

    In a field that maps the user's names to plain values, such as `policy.megatron_cfg.env_vars`, any key is known.
    """
    known = [*known_keys(model, values=values), *_keys_beside(model, path, values)]
    place, field = field_at(model, path, values)
    if field is not None and (rest := path[len(place) :]):
        entry = _entry_types(field.annotation)
        depth = None if entry is None else 1 if _entry_types(entry[1]) is None else 2
        is_open = entry is not None and (entry[1] is Any or (depth == 2 and len(rest) >= depth))
        known += [_dotted(path)] if is_open or len(rest) == depth else []
    elif field is not None:
        known.append(_dotted(path))
    return known


def is_path(model: type[BaseModel], values: Mapping[str, Any], place: Sequence[Any]) -> bool:
    """Return whether the value at a position is a path."""
    keys, field = field_at(model, place, values)
    return field is not None and len(keys) == len(place) and _has_mark(field.annotation, field.metadata)


def _has_mark(annotation: Any, metadata: Sequence[Any]) -> bool:
    if any(mark is PATH for mark in metadata):
        return True
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _has_mark(inner, more)
    return get_origin(annotation) in (Union, UnionType) and any(_has_mark(part, ()) for part in get_args(annotation))


def field_at(
    model: type[BaseModel], path: Sequence[Any], values: Any = None
) -> tuple[tuple[str, ...], FieldInfo | None]:
    """Follow a position as far as the schema goes.

    Args:
        values: Values of the entire configuration, from which the kinds of sections are read. None: a section may have
            any kind.

    Returns:
        The keys of `path` that the schema knows, and the field at the last of these keys. The field is None if the
            first key is unknown.
    """
    keys: list[str] = []
    field: FieldInfo | None = None
    sections: list[type[BaseModel]] = [model]
    entry: Any = None
    for part in path:
        values = _entry(values, part)
        if entry is not None:  # a free name of a section
            keys.append(part)
            sections, entry = models_for(entry, values), None
            continue
        found = next((section.model_fields[part] for section in sections if part in section.model_fields), None)
        if found is None:
            break
        field = found
        keys.append(part)
        sections, entry = models_for(field.annotation, values), entry_annotation(field.annotation)
    return tuple(keys), field


def without_kinds(schema: type[BaseModel], values: Any, location: Sequence[Any]) -> tuple[Any, ...]:
    """Return a pydantic error location without the kinds, which pydantic adds after the name of a section with several
    kinds."""
    place: list[Any] = []
    is_kind = False
    for part in location:
        if is_kind:
            is_kind = False
            continue
        place.append(part)
        keys, field = field_at(schema, place, values)
        is_kind = field is not None and len(keys) == len(place) and len(section_models(field.annotation)) > 1
    return tuple(place)


def expected(field: FieldInfo) -> str:
    """Return the allowed values of a field in words, such as `a whole number above 0 or null`."""
    if get_origin(field.annotation) is list and (names := choices(field)):
        return f"a list of some of {', '.join(names)}"
    return _expected(field.annotation, field.metadata)


def choices(field: FieldInfo) -> list[str]:
    """Return the allowed values of a field that only has fixed values. Empty for other fields."""
    return [str(value) for annotation in (field.annotation, *field.metadata) for value in _literals(annotation)]


def got(value: Any, key: str = "") -> str:
    """Return a given value as messages show it, such as `'ten' (str)`. A secret is masked."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, bool):
        return f"{str(value).lower()} (bool)"
    text = repr(masked(value, key))
    shown = text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
    return f"{shown} ({type(value).__name__})"


def _with_finite(words: str, value: Any) -> str:
    """Return `words` with "a finite number" in place of "a number" if the value is infinite or NaN."""
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return words if is_finite else words.replace("a number", "a finite number")


def _literals(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, NameIn):
        return tuple(annotation.registry)
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(value for argument in get_args(annotation) for value in _literals(argument))


def _expected(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *inner_metadata = get_args(annotation)
        flat = [
            item for entry in inner_metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])
        ]
        return _expected(inner, [*metadata, *flat])
    if len(models := section_models(annotation)) > 1:
        null = " or null" if NoneType in get_args(annotation) else ""
        return f"a section with kind: {', '.join(kind for model in models for kind in kinds_of(model))}{null}"
    if origin in (Union, UnionType):
        return " or ".join("null" if part is NoneType else _expected(part) for part in get_args(annotation))
    names = [
        str(value)
        for item in (annotation, *metadata)
        if get_origin(item) is Literal or isinstance(item, NameIn)
        for value in _literals(item)
    ]
    if names:
        return " or ".join(names) if len(names) <= 2 else f"one of {', '.join(names)}"
    special = next((item.words for item in metadata if isinstance(item, ExpectedWords)), None)
    if special is not None:
        return special
    if origin is dict:
        return "a section"
    if origin is list:
        (item,) = get_args(annotation)
        if _literals(item):
            return "a list of these"
        plain = get_args(item)[0] if get_origin(item) is Annotated else item
        return f"a list of {_LIST_WORDS[get_origin(plain) or plain]}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        required = [name for name, field in annotation.model_fields.items() if field.is_required()]
        return f"a section with the keys {', '.join(required)}"
    if annotation is str and metadata:
        return "text that is not empty"
    bounds = [words for item in metadata for words in [_bound(item)] if words]
    if len(bounds) == 2 and bounds[0].endswith(" up") and bounds[1].startswith("up to "):
        bounds = [f"{bounds[0].removesuffix(' up')} {bounds[1].removeprefix('up ')}"]  # from 0 to 1
    return " ".join([_TYPE_WORDS[annotation], *([" and ".join(bounds)] if bounds else [])])


def _bound(item: Any) -> str | None:
    match item:
        case Gt(gt=limit):
            return f"above {limit}"
        case Ge(ge=limit):
            return f"from {limit} up"
        case Lt(lt=limit):
            return f"below {limit}"
        case Le(le=limit):
            return f"up to {limit}"
    return None


ModelT = TypeVar("ModelT", bound=BaseModel)


def validate(
    schema: type[ModelT], values: Mapping[str, Any], reported: AbstractSet[tuple[Any, ...]] = frozenset()
) -> tuple[ModelT, list[str], bool]:
    """Check values against the schema.

    Args:
        reported: Positions whose problems have been reported already. No problem at or below them is returned.

    Returns:
        The configuration, one line for each problem, and whether the configuration is complete. An incomplete
            configuration only has the valid values, and reading another value raises AttributeError.
    """
    try:
        return schema.model_validate(values), [], True
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        lines: dict[tuple[Any, ...], str] = {}
        for detail in details:
            place, line = _problem(schema, values, detail["loc"], detail["type"])
            if not any(place[: len(known)] == known for known in reported):
                lines.setdefault(place, line)
        return valid_part(schema, values), list(lines.values()), False


def valid_part(schema: type[ModelT], values: Mapping[str, Any]) -> ModelT:
    """Return the configuration without its invalid values, so that rules between the valid values can be checked."""
    valid: dict[str, Any] = {}
    for name, field in schema.model_fields.items():
        if name not in values:
            continue
        sections = models_for(field.annotation, values[name])
        if sections and isinstance(values[name], Mapping):
            if len(sections) == 1:
                valid[name] = valid_part(sections[0], values[name])
            continue
        try:
            annotation: Any = Annotated[field.annotation, field]
            adapter = TypeAdapter(annotation, config=None if sections else SETTINGS)
            valid[name] = adapter.validate_python(values[name], strict=True)
        except ValidationError:
            continue
    return schema.model_construct(_fields_set=set(valid), **valid)


def _problem(
    schema: type[BaseModel], values: Mapping[str, Any], location: Sequence[Any], kind: str
) -> tuple[tuple[Any, ...], str]:
    location = without_kinds(schema, values, location)
    place, field = field_at(schema, location, values)
    if kind == "extra_forbidden":
        known = [*known_keys(schema, values=values), *_keys_beside(schema, location, values)]
        line = key_with_dots(str(location[-1]), known) if len(location) == 1 else None
        return tuple(location), line or unknown_key(_dotted(location), known)
    name = ".".join(place)
    if field is None:
        return place, f"the configuration: got {got(values)}, expected sections"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return place, _problem_of_kind(schema, place, field, reduce(getitem, place, values).get(KIND_KEY))
    if kind == "missing":
        return place, f"{name}: missing; expected {expected(field)}{_or_no_section(schema, place)}"
    value: Any = reduce(getitem, place, values)
    renamed = next((item for item in field.metadata if isinstance(item, RenamedValue) and item.old == value), None)
    if renamed is not None:
        return place, f"{name}: got {value!r}, which is now called {renamed.new}"
    if location[-1] == "[key]" and isinstance(value, Mapping) and entry_annotation(field.annotation) is not None:
        (names, _) = get_args(field.annotation)
        shown = shortened(repr(place[-1]))
        return place, f"{'.'.join(place[:-1])}: got the name {shown}, expected {_expected(names)}"
    if entry_annotation(field.annotation) is not None and not isinstance(value, Mapping) and _is_entry(schema, place):
        return place, f"{name}: got {got(value, name)}, expected a section"
    if isinstance(value, Mapping) and len(location) > len(place) and (entry := _entry_types(field.annotation)):
        return _problem_of_entry(place, location[len(place) :], value, entry)
    allowed = _with_finite(expected(field), value)
    return place, f"{name}: got {got(value, name)}, expected {allowed}{did_you_mean(_suggestion(field, value))}"


def _problem_of_kind(schema: type[BaseModel], place: Sequence[str], field: FieldInfo, kind: Any) -> str:
    name = f"{_dotted(place)}.{KIND_KEY}"
    kinds = [kind for model in section_models(field.annotation) for kind in kinds_of(model)]
    allowed = f"expected one of {', '.join(kinds)}"
    if kind is None:
        return f"{name}: missing; {allowed}{_or_no_section(schema, (*place, KIND_KEY))}"
    own_code = with_colon(str(kind)) or (kind if is_custom(str(kind)) else None)
    meant = f"custom, with factory: {own_code}" if own_code and "custom" in kinds else nearest(str(kind), kinds)
    return f"{name}: got {got(kind, name)}, {allowed}{did_you_mean(meant)}"


def _or_no_section(schema: type[BaseModel], place: Sequence[str]) -> str:
    """Return the end of an error line about a missing key. It suggests null for the key's section, or is empty if the
    section may not be null."""
    _, section = field_at(schema, place[:-1])
    may_be_null = section is not None and NoneType in get_args(section.annotation)
    return f", or {_dotted(place[:-1])}: null" if may_be_null else ""


def _suggestion(field: FieldInfo, value: Any) -> str | None:
    """Return a suggestion for a wrong value, or None: the most similar allowed value or, for a reference to the user's
    code, `package.module:name` instead of `package.module.name`."""
    texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
    if "package.module:" in expected(field) and (own := [name for text in texts if (name := with_colon(text))]):
        return own[0]
    names = choices(field)
    found = next((nearest(text, names) for text in texts if isinstance(value, str) or text not in names), None)
    return f"[{found}]" if found and isinstance(value, str) and get_origin(field.annotation) is list else found


def _entry_types(annotation: Any) -> tuple[Any, Any] | None:
    """Return the types of names and values if a field maps the user's names to plain values, else None."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is dict and not section_models(get_args(candidate)[1]):
            names, values = get_args(candidate)
            return names, values
    return None


def _problem_of_entry(
    place: tuple[str, ...], rest: Sequence[Any], value: Mapping[Any, Any], entry: tuple[Any, Any]
) -> tuple[tuple[Any, ...], str]:
    """Return position and error line of an entry whose name or value is wrong, in a field that maps the user's names to
    plain values."""
    shown = shortened(_dotted((*place, rest[0])))
    if rest[-1] == "[key]":
        return (*place, rest[0]), f"{shown}: got the name {shortened(repr(rest[0]))}, expected {_expected(entry[0])}"
    given = value.get(rest[0])
    words = _with_finite(_expected(entry[1]), given)
    return (*place, rest[0]), f"{shown}: got {got(given, str(rest[0]))}, expected {words}"


def _keys_beside(schema: type[BaseModel], location: Sequence[Any], values: Any) -> list[str]:
    """Return the full keys of the section that the user named and that contains the location. Empty if there is no such
    section."""
    for size in range(1, len(location)):
        place, field = field_at(schema, location[:size], values)
        entry = None if field is None else entry_annotation(field.annotation)
        if entry is not None and len(place) == size and len(location) > size:
            below = reduce(_entry, location[: size + 1], values)
            prefix = f"{_dotted(location[: size + 1])}."
            return [key for model in models_for(entry, below) for key in known_keys(model, prefix, below)]
    return []


def _is_entry(schema: type[BaseModel], place: Sequence[str]) -> bool:
    """Return whether the position is that of a section whose name the user chose."""
    _, above = field_at(schema, place[:-1])
    return above is not None and entry_annotation(above.annotation) is not None


def _dotted(location: Sequence[Any]) -> str:
    return ".".join(str(part) for part in location)
