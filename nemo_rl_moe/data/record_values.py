# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Values in records: look-up by key, JSON in strings, and names of types. Values that cannot be used raise
`RecordError`."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from nemo_rl_moe.config.suggestions import did_you_mean, nearest, shortened
from nemo_rl_moe.errors import DataError, counted, json_problem

MOST_NAMES = 20


class RecordError(ValueError):
    """A record cannot be used. The message gives the reason, without the record's file and line."""


def json_object(value: object, name: str) -> dict[str, Any]:
    """Return an object, which may be given as JSON in a string. An empty string means an empty object."""
    decoded = decoded_json(value, name) if value != "" else {}
    if not isinstance(decoded, Mapping):
        found = "JSON of " if isinstance(value, str) else ""
        raise RecordError(f"{name} is {found}{kind_of(decoded)}, expected an object, or its JSON as a string")
    return dict(decoded)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object from JSON's pairs, for `object_pairs_hook`. A repeated key raises `RecordError`, since JSON
    libraries read it in different ways."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise RecordError(f"the key {shortened(twice)!r} occurs twice in an object, expected once")
    return found


def decoded_json(value: object, name: str) -> Any:
    """Return the decoded JSON of a string. Other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=unique_keys)
    except RecordError as error:
        raise RecordError(f"{name} is a string of JSON: {error}") from None
    except json.JSONDecodeError as error:
        reason = f"{json_problem(error)} at character {error.pos + 1}"
        raise RecordError(f"{name} is a string that is not valid JSON: {reason}") from None
    except ValueError as error:  # a number with thousands of digits
        raise RecordError(f"{name} is a string that is not valid JSON: {error}") from None


def value_at(record: Mapping[str, Any], key: str, setting: str) -> Any:
    """Return the value of a key. Dots in the key reach into objects and lists, unless the record has a key with these
    dots.

    Args:
        key: A key such as `reward_model.ground_truth`, or `answers.text.0` for the first member of a list.
        setting: The setting that names the key, for error messages.
    """
    if key in record:
        return record[key]
    found: Any = record
    for depth, part in enumerate(parts := key.split(".")):
        place = ".".join(parts[:depth]) or "the line"
        if is_list(found) and part.isdecimal():
            if int(part) >= len(found):
                raise RecordError(f"{place} has {counted(len(found), 'member')}, and no {part} ({setting}={key})")
            found = found[int(part)]
            continue
        if not isinstance(found, Mapping):
            raise RecordError(f"{place} is {kind_of(found)}, expected an object with {part} ({setting}={key})")
        if part not in found:
            keys = [str(name) for name in found]
            hint = did_you_mean(nearest(part, keys))
            raise RecordError(f"{place} has no {part} ({setting}={key}); its keys: {names_in(keys)}{hint}")
        found = found[part]
    return found


def columns_of(path: str, names: Sequence[str], keys: Mapping[str, str]) -> list[str]:
    """Return the columns of a table that hold the keys of its records.

    Args:
        path: Path of the table, for error messages.
        names: Names of the table's columns.
        keys: Setting, such as `data.prompt_key` -> key that it names. Of a key with dots, the first part may be the
            column.

    Raises:
        DataError: A column is missing.
    """
    columns = {setting: key if key in names else key.partition(".")[0] for setting, key in keys.items()}
    for setting, column in columns.items():
        if column not in names:
            hint = did_you_mean(nearest(column, names))
            raise DataError(
                f"{path}: has no column {column!r} ({setting}={keys[setting]}); its columns: {names_in(names)}{hint}"
            )
    return list(columns.values())


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls in its objects, at any depth. Tables fill missing keys with nulls.

    JSON in strings is not changed, and nulls in lists stay.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if is_list(value) else value


def require_encodable(text: str, name: str) -> None:
    """Raise `RecordError` if a text has half of a surrogate pair. It is valid in JSON, but no tokenizer can encode
    it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        problem = f"{name} holds \\u{code:04x} alone, half of a surrogate pair, which is no character"
        raise RecordError(problem) from None


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a sequence other than a text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def names_in(names: Iterable[str]) -> str:
    """Return the first 20 keys of a record, or columns of a table, as a text for messages."""
    found = [shortened(str(name)) for name in names]
    more = f" and {len(found) - MOST_NAMES} more" if len(found) > MOST_NAMES else ""
    return f"{', '.join(found[:MOST_NAMES])}{more}" if found else "none"


def kind_of(value: object) -> str:
    """Return JSON's name for the type of a value, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if is_list(value) else f"a {type(value).__name__}"
