# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The keys of NeMo-RL's configurations with their counterparts here.

The translator (`nemo_rl.py`) and the documentation's page on migration both use the table `nemo_rl_keys.yaml`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter

from nemo_rl_moe.rl.estimators import ESTIMATORS


@dataclass(frozen=True)
class Row:
    """A key of NeMo-RL, or all keys of a section (`section.*`), and its counterpart.

    Attributes:
        theirs: Full key in NeMo-RL.
        ours: Full key here. None: no counterpart.
        note: The difference, or the reason why there is no counterpart.
        convert: Function that converts the value. None: a rule converts the value together with other keys.
        off: Value that has no effect, in addition to null, false, zero and empty.
        of_sft: Full key here in supervised fine-tuning, if it differs from `ours`.
        repeats: Another key of NeMo-RL, or `section.*` for all keys of a section. If it has the same value as `theirs`,
            `theirs` needs no counterpart.
    """

    theirs: str
    ours: str | None
    note: str
    convert: Callable[[Any], Any] | None
    off: Any = None
    repeats: str | None = None
    of_sft: str | None = None

    def ours_in(self, algorithm: str) -> str | None:
        """Return the full key here for an algorithm, or None if there is no counterpart."""
        return self.of_sft if algorithm == "sft" and self.of_sft else self.ours

    def repeated_by(self, key: str) -> str:
        """Return the other key of NeMo-RL that makes `key` redundant if both have the same value, or an empty text.

        Args:
            key: A key of this row. If `repeats` is a section, the result is the key of the same name in that section.
        """
        repeats, above = self.repeats or "", self.theirs.removesuffix("*")
        return repeats if above == self.theirs else repeats.removesuffix("*") + key.removeprefix(above)


def metric_name(name: Any) -> Any:
    """Return the name here of a metric that selects checkpoints. Every validation loss is called `val:loss` here."""
    is_loss = isinstance(name, str) and name.startswith("val:") and name.endswith("_loss")
    return "val:loss" if is_loss else name


def _or_never(period: Any) -> Any:
    """Return the validation period here, with 0 for never. NeMo-RL also uses negative numbers for never."""
    return max(period or 0, 0)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    **{f"{loop}.val_period": _or_never for loop in ("sft", "dpo", "rm", "grpo", "ppo", "distillation")},
    "rm.max_num_steps": lambda steps: None if steps is None or steps < 0 else steps,
    "checkpointing.metric_name": metric_name,
    **dict.fromkeys(
        ("grpo.async_grpo.enabled", "ppo.async_ppo.enabled"),
        lambda value: "asynchronous" if value else "synchronous",
    ),
    "loss_fn.force_on_policy_ratio": lambda value: "always" if value else "auto",
    "policy.tokenizer.chat_template_kwargs": lambda value: {} if value is None else value,
    "policy.router_replay.enabled": lambda value: "rollout" if value else "none",
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction": lambda value: value or 1.0,
    "policy.generation.vllm_cfg.expert_parallel_size": lambda value: (value or 1) > 1,
}
"""NeMo-RL's key -> conversion of its value. Values of other keys are not changed."""


class _Counterpart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ours: str | None = None
    note: str = ""
    repeats: str | None = None
    of_sft: str | None = None


class _Section(BaseModel):
    """A section of the table. The head of `nemo_rl_keys.yaml` describes its form."""

    model_config = ConfigDict(extra="forbid")

    like: str = ""
    beside: str = ""
    same: list[str] = []
    carried: dict[str, str | _Counterpart] = {}
    decided: dict[str, str | _Counterpart] = {}
    without: dict[str, list[str] | dict[str, Any]] = {}

    def rows(self, section: str) -> Iterator[Row]:
        of_named_rewards = [each.name for each in ESTIMATORS.values() if each.reads_named_rewards]
        named = " and ".join(f"`{name}`" for name in of_named_rewards)
        counterparts = {**dict.fromkeys(self.same, _Counterpart()), **self.carried, **self.decided}
        for name, found in counterparts.items():
            key = f"{section}.{name}"
            ours = _Counterpart(ours=found) if isinstance(found, str) else found
            convert = None if name in self.decided else CONVERSIONS.get(key, lambda value: value)
            note = ours.note.replace("{named}", named)
            full = ours.ours or f"{self.like or section}.{name}"
            yield Row(key, full, note, convert, repeats=ours.repeats, of_sft=ours.of_sft)
        for note, names in self.without.items():
            for name, off in (names if isinstance(names, dict) else dict.fromkeys(names)).items():
                repeats = f"{self.beside}.{name}" if self.beside else None
                yield Row(f"{section}.{name}", None, note, lambda value: value, off, repeats)


def _read_rows() -> Iterator[Row]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    for section, table in TypeAdapter(dict[str, _Section]).validate_python(yaml.safe_load(text)).items():
        yield from table.rows(section)


ROWS = tuple(_read_rows())
_BY_KEY = {row.theirs: row for row in ROWS}


def row_of(key: str) -> Row | None:
    """Return the row of a full key. If it has none, return the row of the nearest section that contains the key, or
    None."""
    if key in _BY_KEY:
        return _BY_KEY[key]
    parts = key.split(".")
    above = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, 0, -1))
    return next((_BY_KEY[section] for section in above if section in _BY_KEY), _BY_KEY.get(f"{key}.*"))


def counterpart_of(key: str) -> str | None:
    """Return the end of an error line that gives the key here for a key of NeMo-RL. None if NeMo-RL has no such key."""
    row = _BY_KEY.get(key, _BY_KEY.get(f"{key}.*"))
    below = [row for name, row in _BY_KEY.items() if name.startswith(f"{key}.") and row.ours is not None]
    if key not in _BY_KEY and len(below) > 1 and len({row.ours for row in below}) == 1:
        row = below[0]  # all keys of the section are of one section here
    if row is None or row.ours == key:
        return None
    if row.ours is None:
        return f"; NeMo-RL has it, without a counterpart here: {row.note}"
    return f"; NeMo-RL's {key} is {row.ours} here" + (f" ({row.note})" if row.note else "")
