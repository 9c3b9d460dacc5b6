# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints every key of the configuration, from the schema and the shipped files: `docs/configuration.md` shows it.

Usage: python docs/make_configuration_reference.py
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, create_model
from pydantic.fields import FieldInfo

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.files import KIND_KEY, KINDS_NAME, find_config, read_with_defaults
from nemo_rl_moe.config.megatron_moe_fields import MOE_FIELD_NAMES, VALUE_SINCE
from nemo_rl_moe.config.validation import expected, kinds_of, section_models

BASES = {
    "sft": "sft.yaml",
    "dpo": "dpo.yaml",
    "rm": "rm.yaml",
    "grpo": "grpo.yaml",
    "ppo": "ppo_math_1B.yaml",
    "distillation": "distillation_math.yaml",
}
"""The shipped file of each algorithm that, with what it inherits, has every key."""
_MISSING = "not set"
_BASES_OF_SEVERAL = ("StrictModel", "DataConfig")
"""Schemas that sections share without being the same section."""


@dataclass
class Key:
    """One key, as some algorithms have it.

    Attributes:
        name: Without its section.
        takes: What may be given, in words.
        meaning: The schema's words.
        values: Algorithm -> value in its shipped file.
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
        kind: Kind of the environment's part to which its keys belong; empty for keys that every kind has.
        meaning: The schema's words.
        algorithms: Those that have it.
        keys: Its keys that are no sections.
    """

    path: str
    kind: str
    meaning: str
    algorithms: list[str] = field(default_factory=list)
    keys: dict[tuple[str, str, str], Key] = field(default_factory=dict)


def sections() -> list[Section]:
    """All sections of all algorithms, those that they share once, in the order of the schema.

    Raises:
        ValueError: A key has no words in the schema.
    """
    found: dict[tuple[str, str, str], Section] = {}
    for algorithm, record in ALGORITHMS.items():
        shipped = read_with_defaults(find_config(BASES[algorithm]))
        for path, kind, model, meaning, values in _walk(record.config_class, (), "", shipped):
            # A schema that adds keys to another one describes the same section.
            section = found.setdefault((path, kind, _base_of(model)), Section(path, kind, meaning))
            section.algorithms.append(algorithm)
            for name, info in model.model_fields.items():
                if not section_models(info.annotation) and not (kind and name == KIND_KEY):
                    _add(section, algorithm, name, info, values)
    return [section for section in found.values() if section.keys]


def reference() -> str:
    """All sections as Markdown."""
    return "\n\n".join(_section_text(section) for section in sorted(sections(), key=_place)) + "\n"


def _walk(
    model: type[BaseModel], path: tuple[str, ...], meaning: str, values: Any, kind: str = ""
) -> Iterator[tuple[str, str, type[BaseModel], str, Mapping[str, Any]]]:
    of_section = values if isinstance(values, Mapping) else {}
    of_model, of_key = (" ".join(text.split()) for text in (model.__doc__ or "", meaning))
    is_said = of_key.rstrip(".").lower() in of_model.lower()
    yield ".".join(path), kind, model, of_model if is_said else f"{of_key} {of_model}".strip(), of_section
    for name, info in model.model_fields.items():
        models = section_models(info.annotation)
        place, words, below = (*path, name), info.description or "", of_section.get(name)
        for inner in models if len(models) == 1 else [_choice(models)] if models else []:
            yield from _walk(inner, place, words, below, kind)
        for inner in models if len(models) > 1 else []:
            (named,) = kinds_of(inner)
            defaults = read_with_defaults(find_config(KINDS_NAME))[name]
            yield from _walk(inner, place, "", defaults.get(named), named)


def _choice(models: Sequence[type[BaseModel]]) -> type[BaseModel]:
    """A schema that has the key `kind` alone, of a section of several kinds."""
    meanings = {kind: " ".join((model.__doc__ or "").split()) for model in models for kind in kinds_of(model)}
    words = " ".join(f"`{kind}`: {meaning}" for kind, meaning in meanings.items())
    return create_model("Choice", kind=(Literal[tuple(meanings)], Field(description=words)))


def _base_of(model: type[BaseModel]) -> str:
    """The most general schema of a section; only the schemas of the package's sections are looked at."""
    ancestors = [ancestor for ancestor in model.__mro__ if ancestor.__module__.startswith("nemo_rl_moe.config.schema_")]
    own = [ancestor.__name__ for ancestor in ancestors if ancestor.__name__ not in _BASES_OF_SEVERAL]
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
    of_kind = f" of kind `{section.kind}`" if section.kind else ""
    title = f"### `{section.path}`{of_kind}{'' if is_algorithm else of_whom}"
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
