# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints every key of the configuration, from the schema and the shipped files: `docs/configuration.md` shows it.

Usage: python docs/make_configuration_reference.py
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.files import find_config, read_with_defaults
from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES, VALUE_SINCE
from nemo_rl_moe.config.validation import expected, section_model

BASES = {
    "sft": "sft.yaml",
    "dpo": "dpo.yaml",
    "grpo": "grpo.yaml",
    "ppo": "ppo_math_1B.yaml",
    "distillation": "distillation_math.yaml",
}
"""The shipped file of each algorithm that, with what it inherits, has every key."""
_MISSING = "not set"


@dataclass
class Key:
    """One key, as some algorithms have it.

    Attributes:
        name: Without its section.
        takes: What may be given, in words.
        meaning: The schema's words.
        values: Algorithm to what its shipped file says.
    """

    name: str
    takes: str
    meaning: str
    values: dict[str, str] = field(default_factory=dict)


@dataclass
class Section:
    """One section, as some algorithms have it.

    Attributes:
        path: Full key; empty for the top.
        meaning: The schema's words.
        algorithms: Those that have it.
        keys: Its keys that are no sections.
    """

    path: str
    meaning: str
    algorithms: list[str] = field(default_factory=list)
    keys: dict[tuple[str, str, str], Key] = field(default_factory=dict)


def sections() -> list[Section]:
    """All sections of all algorithms, those that they share once, in the order of the schema.

    Raises:
        ValueError: A key has no words in the schema.
    """
    found: dict[tuple[str, str], Section] = {}
    for algorithm, record in ALGORITHMS.items():
        shipped = read_with_defaults(find_config(BASES[algorithm]))
        for path, model, meaning, values in _walk(record.config_class, (), "", shipped):
            # A schema that adds keys to another one describes the same section.
            section = found.setdefault((path, _base_of(model)), Section(path, meaning))
            section.algorithms.append(algorithm)
            for name, info in model.model_fields.items():
                if section_model(info.annotation) is None:
                    _add(section, algorithm, name, info, values)
    return [section for section in found.values() if section.keys]


def reference() -> str:
    """All sections as Markdown."""
    return "\n\n".join(_section_text(section) for section in sorted(sections(), key=_place)) + "\n"


def _walk(
    model: type[BaseModel], path: tuple[str, ...], meaning: str, values: Any
) -> Iterator[tuple[str, type[BaseModel], str, Mapping[str, Any]]]:
    of_section = values if isinstance(values, Mapping) else {}
    of_kind, of_key = (" ".join(text.split()) for text in (model.__doc__ or "", meaning))
    is_said = of_key.rstrip(".").lower() in of_kind.lower()
    yield ".".join(path), model, of_kind if is_said else f"{of_key} {of_kind}", of_section
    for name, info in model.model_fields.items():
        if (inner := section_model(info.annotation)) is not None:
            yield from _walk(inner, (*path, name), info.description or "", of_section.get(name))


def _base_of(model: type[BaseModel]) -> str:
    """The most general schema of a section; only the schemas of the package's sections are looked at."""
    ancestors = [ancestor for ancestor in model.__mro__ if ancestor.__module__.startswith("nemo_rl_moe.config.schema_")]
    own = [ancestor.__name__ for ancestor in ancestors if ancestor.__name__ != "StrictModel"]
    return own[-1] if own else model.__name__


def _add(section: Section, algorithm: str, name: str, info: FieldInfo, values: Mapping[str, Any]) -> None:
    if not info.description:
        raise ValueError(f"{section.path}.{name}: has no docstring in the schema")
    meaning = " ".join(info.description.split()) + _versions(name, info)
    key = section.keys.setdefault((name, expected(info), meaning), Key(name, expected(info), meaning))
    key.values[algorithm] = _shown(values[name]) if name in values else _MISSING


def _versions(name: str, info: FieldInfo) -> str:
    """Releases of Megatron-Core that have a field, and its values."""
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    notes = [
        text.format(extra[key])
        for key, text in (("since", "Megatron-Core {} and newer."), ("until", "Megatron-Core up to {}."))
        if extra.get(key)
    ]
    notes += [f"`{value}`: Megatron-Core {first} and newer." for value, first in VALUE_SINCE.get(name, {}).items()]
    return "".join(f" {note}" for note in notes)


def _shown(value: Any) -> str:
    # A table's row is one line.
    style = '"' if "\n" in str(value) else None
    text: str = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10_000)
    return f"`{text.removesuffix('...' + chr(10)).strip()}`"


def _place(section: Section) -> int:
    """Loops and losses first, then what all algorithms have."""
    top = section.path.partition(".")[0]
    order = [
        *ALGORITHMS,
        "value",
        "value_loss_fn",
        "loss_fn",
        "env",
        "reward_model",
        "data",
        "policy",
        "checkpointing",
        "logger",
        "cluster",
    ]
    return order.index(top)


def _section_text(section: Section) -> str:
    everywhere = set(section.algorithms)
    of_whom = "" if len(everywhere) == len(ALGORITHMS) else f" ({', '.join(section.algorithms)})"
    is_algorithm = section.path in ALGORITHMS
    rows = [_row(key, section) for key in section.keys.values()]
    title = f"### `{section.path}`{'' if is_algorithm else of_whom}"
    head = "| key | takes | shipped | meaning |\n|---|---|---|---|"
    return "\n".join([title, "", section.meaning, "", head, *rows])


def _row(key: Key, section: Section) -> str:
    only = "" if len(key.values) == len(section.algorithms) else f" ({', '.join(key.values)})"
    shipped = set(key.values.values())
    if shipped == {_MISSING}:
        value = "the model's own" if key.name in MOE_FIELD_NAMES else _MISSING
    elif len(shipped) == 1:
        (value,) = shipped
    else:
        value = ", ".join(f"{algorithm} {value}" for algorithm, value in key.values.items())
    cells = [f"`{key.name}`{only}", key.takes, value, key.meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(reference(), end="")
