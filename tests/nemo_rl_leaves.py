# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Find out what becomes of each leaf of NeMo-RL's configurations in a translation: carried over, named, or lost.

Usage: python -m tests.nemo_rl_leaves RL/examples/configs

walks the YAML files below a folder and prints how many leaves were carried over or named, which ones were lost, how
many results a start would take, and what would stop the others. Exit code 1 where a leaf was lost.
"""

import copy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.loading import problems_of_translation
from nemo_rl_moe.config.nemo_rl import translate_tree
from nemo_rl_moe.config.nemo_rl_files import read_theirs
from nemo_rl_moe.config.nemo_rl_keys import row_of
from nemo_rl_moe.config.nemo_rl_translation import Translation
from nemo_rl_moe.errors import ConfigurationError

Place = tuple[str, ...]


@dataclass
class Fates:
    """Leaves by what became of them.

    Attributes:
        carried: Those whose value decides about the result: another one gives another result.
        named: Those that a remark names, or their section.
        lost: Those that are neither.
    """

    carried: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def fates_of(theirs: Mapping[str, Any], path: Path) -> Fates:
    """Return what becomes of each leaf of a configuration.

    The translator is not asked what it did: a leaf is carried over where another value in its place changes the result.

    Args:
        theirs: The configuration, references resolved.
        path: Its file, for messages.
    """
    fates = Fates()
    translation = translate_tree(theirs, path)
    remarks = remarks_of(translation)
    for place, value in places(theirs):
        key = ".".join(place)
        if _is_named(place, remarks):
            fates.named.append(key)
        elif _is_copied(key, value, translation) or _decides(place, value, theirs, path, translation):
            fates.carried.append(key)
        else:
            fates.lost.append(key)
    return fates


def remarks_of(translation: Translation) -> list[str]:
    """Return all lines that name keys, those of the error output and those of the comments."""
    return [
        *translation.obstacles,
        *translation.changed,
        *translation.without,
        *translation.unread,
        *translation.idle,
    ]


def places(tree: Mapping[str, Any], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield the places and values of the leaves; an empty section is one."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from places(value, (*above, name))
        else:
            yield (*above, name), value


def _is_named(place: Place, remarks: list[str]) -> bool:
    sections = [f"{'.'.join(place[:length])}.*" for length in range(1, len(place) + 1)]
    return any(line.startswith(f"{name}:") for name in (".".join(place), *sections) for line in remarks)


def _is_copied(key: str, value: Any, translation: Translation) -> bool:
    row = row_of(key)
    if row is None or row.ours is None or row.convert is None:
        return False
    return row.ours in translation.values and translation.values[row.ours] == row.convert(value)


def _decides(place: Place, value: Any, theirs: Mapping[str, Any], path: Path, translation: Translation) -> bool:
    for other in _others(value):
        changed: Any = copy.deepcopy(theirs)
        section = changed
        for name in place[:-1]:
            section = section[name]
        section[place[-1]] = other
        try:
            found = translate_tree(changed, path)
        except ConfigurationError:
            return True  # refused aloud
        if (found.values, remarks_of(found)) != (translation.values, remarks_of(translation)):
            return True
    return False


def _others(value: Any) -> list[Any]:
    """Return values that may stand in the place of another one."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2 + 7, value / 2]
    if isinstance(value, str):
        return [f"{value}x"]
    if isinstance(value, list):
        return [[*value, *(value[-1:] or ["y"])], value[1:] or ["z"], [0.5, *value[1:]], [{"name": "other"}]]
    return ["something", 7, True, {"dataset_name": "squad"}] if value is None else [{"another": 1}]


def main(folder: Path) -> int:
    """Print the numbers of a folder; return the exit code."""
    refused, problems, lost = Counter[str](), Counter[str](), Counter[str]()
    files = sorted(folder.rglob("*.yaml"))
    num_leaves = num_carried = num_named = num_right = 0
    for path in files:
        try:
            theirs = read_theirs(path)
            translation = translate_tree(theirs, path)
        except ConfigurationError as error:
            refused[str(error).splitlines()[0].removeprefix(f"{path}: ")] += 1
            continue
        fates = fates_of(theirs, path)
        num_carried, num_named = num_carried + len(fates.carried), num_named + len(fates.named)
        num_leaves += len(fates.carried) + len(fates.named) + len(fates.lost)
        lost.update(fates.lost)
        found = problems_of_translation(translation)
        num_right += not found
        problems.update({line.partition(": ")[0] for line in found})
    num_translated = len(files) - sum(refused.values())
    print(f"{len(files)} files: {num_translated} translated, of which a start takes {num_right}")
    print(f"{num_leaves} leaves: {num_carried} carried over, {num_named} named, {lost.total()} lost")
    for title, counts in (("lost", lost), ("exit code 2 for", problems), ("not translated", refused)):
        for line, count in counts.most_common():
            print(f"{title}: {count} x {line}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
