# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""State of a translation from NeMo-RL: the source configuration, and the result with its remarks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import yaml

from nemo_rl_moe.config.files import BASE_OF
from nemo_rl_moe.config.suggestions import shortened

BASES = {
    "sft": BASE_OF["sft"],
    "dpo": "dpo.yaml",
    "grpo": BASE_OF["grpo"],
    "ppo": "ppo_math_1B.yaml",
    "distillation": "distillation_math.yaml",
}
"""Shipped configuration that the translation of each algorithm inherits from."""
MEGATRON = "policy.megatron_cfg"
PLACE_OF_ENGINES = "cluster.roles.generation"
"""Machines of engines that are not the policy's."""
IMAGE_ENVIRONMENTS = ("clevr-cogent", "geometry3k", "refcoco")
"""Environments of theirs for images with questions."""


@dataclass
class Translation:
    """A translated configuration.

    Attributes:
        values: By full key.
        changed: A line for each value that means something else here, or was read otherwise.
        without: A line for each key that asks for something and has no counterpart.
        idle: Keys without a counterpart that ask for nothing, and sections that are switched off.
        unread: A line for each key that other settings make irrelevant.
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
        """Return True for an algorithm with GRPO's loop, whose section of theirs has the algorithm's name."""
        return self.algorithm not in ("sft", "dpo")

    def nested(self) -> dict[str, Any]:
        """Return the values as sections, over the shipped configuration that they inherit from."""
        tree: dict[str, Any] = {"defaults": BASES[self.algorithm]}
        for key, value in self.values.items():
            *sections, name = key.split(".")
            reduce(lambda section, part: section.setdefault(part, {}), sections, tree)[name] = value
        return tree

    def text(self, source: str) -> str:
        """Return the result as YAML, with remarks as comments below."""
        # In a folder of NeMo-RL's, `defaults` would be a file of theirs.
        head = f"# From NeMo-RL's {source}; to be kept in a folder that has no {BASES[self.algorithm]} of NeMo-RL's."
        parts = [head, yaml.safe_dump(self.nested(), sort_keys=False, width=10_000).rstrip()]
        for title, lines in (
            ("To do:", self.obstacles),
            ("Read otherwise:", self.changed),
            ("Without a counterpart:", self.without),
            ("Not read beside the other settings:", self.unread),
            ("Without a counterpart, and asking for nothing:", self.idle),
        ):
            if lines:
                parts += ["", f"# {title}", *(f"#   {line}" for line in lines)]
        return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class Theirs:
    """The source configuration, read by full keys.

    Attributes:
        read: Full keys that rules have asked for, with all below: other keys are reported, so a rule asks for what it
            uses, and for nothing that another setting rules out.
    """

    tree: Mapping[str, Any]
    read: set[str] = field(default_factory=set)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key; the default where it is not there or null."""
        self.read.add(key)
        value = self._at(key)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Return True where the key is there, null or not; this does not count as reading it."""
        section, _, name = key.rpartition(".")
        above = self._at(section) if section else self.tree
        return isinstance(above, Mapping) and name in above

    def has_read(self, key: str) -> bool:
        """Return True where the key, or a section that it is in, has been asked for."""
        parts = key.split(".")
        return any(".".join(parts[:length]) in self.read for length in range(1, len(parts) + 1))

    def first(self, *keys: str) -> Any:
        """Return the value of the first of the keys that is there and not null; None without one."""
        return next((value for key in keys if (value := self.get(key)) is not None), None)

    def _at(self, key: str) -> Any:
        value: Any = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value


def shown(value: Any) -> str:
    """Return a value as one line of YAML, shortened."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return shortened(" ".join(text.split()))
