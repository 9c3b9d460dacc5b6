# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""State of a translation from NeMo-RL: the source configuration, and the result with remarks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import yaml

from nemo_rl_moe.config.files import BASE_OF, value_at
from nemo_rl_moe.config.suggestions import shortened

BASES = {
    "sft": BASE_OF["sft"],
    "dpo": "dpo.yaml",
    "rm": "rm.yaml",
    "grpo": BASE_OF["grpo"],
    "ppo": "ppo_math_1B.yaml",
    "distillation": "distillation_math.yaml",
}
"""Algorithm -> shipped configuration from which its translation inherits."""
MEGATRON = "policy.megatron_cfg"
PLACE_OF_ENGINES = "cluster.roles.generation"
"""Key of the machines for engines that do not share the policy's machines."""
IMAGE_ENVIRONMENTS = ("clevr-cogent", "geometry3k", "refcoco")
"""NeMo-RL's environments for images with questions."""


@dataclass
class Translation:
    """A translated configuration, with remarks on its source.

    Attributes:
        changed: A line for each value that has another meaning here, or was changed.
        without: A line for each key that has an effect but no counterpart.
        idle: A line for each key without a counterpart and without an effect, and for each section that is switched
            off.
        unread: A line for each key that has no effect because of other settings.
        obstacles: A line for each key that needs work before the result can be used.
    """

    algorithm: str
    values: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)

    @property
    def generates(self) -> bool:
        """Whether the settings of the algorithm's loop are in the section `grpo` here. In NeMo-RL, their section has
        the algorithm's name."""
        return self.algorithm not in ("sft", "dpo", "rm")

    def nested(self) -> dict[str, Any]:
        """Return the values as nested sections, with `defaults` naming the shipped configuration from which they
        inherit."""
        return {"defaults": BASES[self.algorithm], **nested(self.values)}

    def text(self, source: str) -> str:
        """Return the configuration as YAML, followed by the remarks as comments. `source` is the name of NeMo-RL's
        file."""
        # In a folder of NeMo-RL, `defaults` would find NeMo-RL's file of the same name.
        head = f"# From NeMo-RL's {source}; to be kept in a folder that has no {BASES[self.algorithm]} of NeMo-RL's."
        parts = [head, yaml.safe_dump(self.nested(), sort_keys=False, width=10_000).rstrip()]
        for title, lines in (
            ("To do:", self.obstacles),
            ("Changed, or with another meaning here:", self.changed),
            ("Without a counterpart:", self.without),
            ("Without effect because of other settings:", self.unread),
            ("Without a counterpart, and without effect:", self.idle),
        ):
            if lines:
                parts += ["", f"# {title}", *(f"#   {line}" for line in lines)]
        return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class Theirs:
    """NeMo-RL's configuration, which rules read by full keys.

    Attributes:
        read: Full keys that rules have read. A key that contains others counts for all of them. Keys that no rule has
            read are reported, so a rule must only read keys that it uses and that have an effect.
    """

    tree: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default if it is missing or null."""
        self.read.add(key)
        value = value_at(self.tree, key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Return whether the key exists, even with the value null. Unlike `get`, does not count the key as read."""
        section, _, name = key.rpartition(".")
        above = value_at(self.tree, section) if section else self.tree
        return isinstance(above, Mapping) and name in above

    def has_read(self, key: str) -> bool:
        """Return whether the key, or a section that contains it, has been read."""
        parts = key.split(".")
        return any(".".join(parts[:length]) in self.read for length in range(1, len(parts) + 1))

    def first(self, *keys: str) -> Any:
        """Return the first value that is not null among the keys, or None."""
        return next((value for key in keys if (value := self.get(key)) is not None), None)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping from full keys to values as nested sections."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        reduce(lambda section, part: section.setdefault(part, {}), sections, tree)[name] = value
    return tree


def shown(value: Any) -> str:
    """Return a value as one line of YAML. A long line is shortened."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return shortened(" ".join(text.split()))
