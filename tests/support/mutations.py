# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Changes of bytes, of nested values and of JSON's text, each chosen by a seeded generator."""

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

DEEP: Any = None
for _ in range(300):
    DEEP = [DEEP]
ODD_TEXTS = (
    "",
    " ",
    "NaN",
    "null",
    "1e400",
    "\x1b]0;title\x07\x1b[2J\r",
    "\u202eabc\u2028",
    "a\0b",
    "x" * 10_000,
    "\u00e9\U0001f600",
    "\ud800",
    "../../etc/passwd",
    "/dev/zero",
    "${x}",
    "</script><script>alert(1)</script>",
    "{{ 7 * 7 }}",
)
ODD_NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 1.5, -0.0, 1e308, 5e-324, math.inf, math.nan)
ODD_VALUES: tuple[Any, ...] = (
    *ODD_TEXTS,
    *ODD_NUMBERS,
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": [1, {"c": None}]}},
    list(range(3_000)),
    DEEP,
)

Place = tuple[Any, ...]


def places(tree: Any, at: Place = ()) -> list[Place]:
    """Return the keys and indices that lead to every value in a nested one, itself first; not to what is nested very
    deeply.
    """
    if len(at) > 50:
        return [at]
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at, *(place for key, value in entries for place in places(value, (*at, key)))]


def value_at(tree: Any, place: Place) -> Any:
    """Return the value at a place."""
    for key in place:
        tree = tree[key]
    return tree


def near(generator: random.Random, value: Any) -> Any:
    """Return a value of the same type, where it has one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return generator.choice([value + 1, value - 1, -value, value * 2, value * 10**6, value + 0.5, str(value)])
    if isinstance(value, float):
        return generator.choice([-value, value * 1e300, 0.0, int(value) if math.isfinite(value) else 0, str(value)])
    if isinstance(value, str):
        odd = generator.choice(ODD_TEXTS)
        return generator.choice([value[:-1], value + odd, odd + value, value.upper(), [value], {value: value}])
    if isinstance(value, list):
        return generator.choice([value[:-1], value + value, value[::-1], [value], dict(enumerate(map(str, value)))])
    return generator.choice([list(value), [value], {}]) if isinstance(value, dict) else generator.choice(ODD_VALUES)


def mutated_tree(generator: random.Random, tree: Any, num_changes: int = 1) -> tuple[Any, str]:
    """Return a nested value with changes in it, and the changes in words. The root itself changes seldom."""
    tree = copy.deepcopy(tree)
    reported = []
    for _ in range(num_changes):
        inner = places(tree)[1:]
        if not inner or generator.random() < 0.02:
            return (tree := generator.choice(ODD_VALUES)), f"all of it = {tree!r:.100}"
        place = generator.choice(inner)
        above, key = value_at(tree, place[:-1]), place[-1]
        how = generator.choice(["odd", "odd", "near", "near", "gone", "renamed", "added", "swapped"])
        if how == "odd":
            above[key] = copy.deepcopy(generator.choice(ODD_VALUES))
        elif how == "near":
            above[key] = near(generator, above[key])
        elif how == "gone":
            del above[key]
        elif how == "swapped":
            other = generator.choice(inner)
            above[key] = copy.deepcopy(value_at(tree, other))
        elif isinstance(above, dict):
            new = generator.choice(["x" * 5_000, "", "\x1b[31m", f"{key}_", f"{key}"[:-1], "__proto__", "a.b"])
            above[new] = above.pop(key) if how == "renamed" else generator.choice(ODD_VALUES)
        else:
            above.insert(key, generator.choice(ODD_VALUES))
        reported.append(f"{'.'.join(str(part)[:40] for part in place)}: {how}")
    return tree, "; ".join(reported)


def _flip(generator: random.Random, content: bytearray) -> None:
    for _ in range(generator.choice([1, 1, 3, 30])):
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)


def _cut(generator: random.Random, content: bytearray) -> None:
    del content[generator.randrange(len(content)) :]


def _remove(generator: random.Random, content: bytearray) -> None:
    start = generator.randrange(len(content))
    del content[start : start + generator.choice([1, 1, 7, 100])]


def _zero(generator: random.Random, content: bytearray) -> None:
    start = generator.randrange(len(content))
    length = len(content[start : start + generator.choice([1, 8, 512])])
    content[start : start + length] = bytes(length)


def _repeat(generator: random.Random, content: bytearray) -> None:
    start = generator.randrange(len(content))
    piece = content[start : start + generator.choice([1, 10, 100])]
    content[start:start] = piece * generator.choice([1, 2, 50])


def _insert(generator: random.Random, content: bytearray) -> None:
    odd = (b"\0", b"\xff\xfe", b"\x1b[2J", b"\n", b"\r\n", b"\xed\xa0\x80", b'"', b"{", b"[" * 2_000, b"9" * 5_000)
    start = generator.randrange(len(content) + 1)
    content[start:start] = generator.choice(odd)


_CHANGES: tuple[Callable[[random.Random, bytearray], None], ...] = (_flip, _cut, _remove, _zero, _repeat, _insert)


def mutated_bytes(generator: random.Random, content: bytes) -> tuple[bytes, str]:
    """Return the other bytes, and the change in words."""
    changed = bytearray(content or b"\0")
    reported = []
    for _ in range(generator.choice([1, 1, 1, 3])):
        change = generator.choice(_CHANGES)
        if changed:
            change(generator, changed)
            reported.append(change.__name__.strip("_"))
    return bytes(changed), f"{len(content)} bytes: {', '.join(reported)}"


def mutated_json(generator: random.Random, tree: Any) -> tuple[bytes, str]:
    """Return a JSON text of a changed value, now and then changed once more as a text."""
    tree, what = mutated_tree(generator, tree, generator.choice([1, 1, 1, 2, 4]))
    text = json.dumps(tree)
    how = generator.randrange(12)
    if how == 0:  # a key that stands there twice
        text, what = text.replace("{", '{"a": 1, "a": 2, ', 1), f"{what}; a key twice"
    elif how == 1:
        text, what = text.replace("1", "1" * 5_000, 1), f"{what}; 5,000 digits"
    elif how == 2:
        text, what = text.replace("null", "[" * 100_000, 1), f"{what}; 100,000 brackets"
    elif how == 3:
        content, more = mutated_bytes(generator, text.encode())
        return content, f"{what}; {more}"
    return text.encode(), what
