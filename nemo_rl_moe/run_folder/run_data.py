# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a run's folder holds, while the run goes on or after it, whole or cut off by a crash."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import yaml
from jaxtyping import Float, Int

from nemo_rl_moe.errors import DataError
from nemo_rl_moe.run_folder.expert_load import FOLDER_NAME, read_load_arrays
from nemo_rl_moe.run_folder.folder import newest_run_folders
from nemo_rl_moe.run_folder.metrics import METRICS_FILE_NAME, StepRecord, parse_record, read_metrics

CONFIG_FILE_NAME = "config.yaml"
EFFECTIVE_MOE_FILE_NAME = "effective_moe_configuration.json"


@dataclass(frozen=True)
class Series:
    """One metric.

    Attributes:
        steps: Ascending.
        values: Of those steps; may be NaN or infinite.
    """

    steps: Int[np.ndarray, " steps"]
    values: Float[np.ndarray, " steps"]

    @classmethod
    def empty(cls) -> "Series":
        """A metric that was never logged."""
        return cls(np.zeros(0, dtype=np.int64), np.zeros(0))


@dataclass(frozen=True)
class ExpertLoadHistory:
    """The load of every expert.

    Attributes:
        steps: Ascending.
        layers: Index of each MoE layer in the whole model, ascending.
        counts: Assignments that each expert got.
    """

    steps: Int[np.ndarray, " steps"]
    layers: Int[np.ndarray, " layers"]
    counts: Int[np.ndarray, "steps layers experts"]

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return int(self.counts.shape[2])


@dataclass(frozen=True)
class RunData:
    """One run.

    Attributes:
        folder: Its folder.
        metrics: Complete key to its series.
        expert_load: None where the run did not track its experts.
        config: The resolved configuration; empty where the folder has none.
        moe_configuration: The router settings that were in force; empty for a dense model.
        notes: What of the folder could not be read, a line each.
    """

    folder: Path
    metrics: dict[str, Series]
    expert_load: ExpertLoadHistory | None
    config: dict[str, Any] = field(default_factory=dict)
    moe_configuration: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Short, for people: the folder and the one that it is in."""
        resolved = self.folder.resolve()
        return f"{resolved.parent.name}/{resolved.name}"

    @property
    def last_step(self) -> int:
        """The last step that anything is known of."""
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def algorithm(self) -> str | None:
        """Name of the algorithm, for example `sft`: its own section, which a resolved configuration begins with."""
        sections = {name: section for name, section in self.config.items() if isinstance(section, dict)}
        if "algorithm" in self.config:  # of the user's own, which may have its loop in the section of another one
            return next(iter(sections), None)
        return next((name for name, section in sections.items() if "max_num_steps" in section), None)

    @property
    def planned_steps(self) -> int | None:
        """Steps that the configuration asks for; None where it does not say."""
        sections = [section for section in self.config.values() if isinstance(section, dict)]
        found = next((section["max_num_steps"] for section in sections if "max_num_steps" in section), None)
        return found if isinstance(found, int) else None

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that a layer's experts are dealt out to."""
        found: Any = self.config
        for name in ("policy", "megatron_cfg", "expert_model_parallel_size"):
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, int) and found > 0 else 1

    @property
    def topk(self) -> int | None:
        """Experts that a token goes to."""
        found = self.moe_configuration.get("moe_router_topk")
        return found if isinstance(found, int) else None


def read_run(folder: Path) -> RunData:
    """Reads a run's folder.

    Raises:
        DataError: It is no run's folder, or its metrics are damaged before their end.
    """
    path = folder / METRICS_FILE_NAME
    if not path.is_file():
        what = f"holds no {METRICS_FILE_NAME}" if folder.is_dir() else "is no folder"
        raise DataError(f"{folder}: {what}{_hint(folder)}")
    notes: list[str] = []
    expert_load, described = _expert_load(folder, notes), describe_run(folder)
    return replace(described, metrics=_metrics(path), expert_load=expert_load, notes=[*notes, *described.notes])


def describe_run(folder: Path) -> RunData:
    """What stands in a run's folder before its first step: how it is configured; no metrics and no load."""
    notes: list[str] = []
    return RunData(
        folder=folder,
        metrics={},
        expert_load=None,
        config=_mapping(folder / CONFIG_FILE_NAME, notes),
        moe_configuration=_mapping(folder / EFFECTIVE_MOE_FILE_NAME, notes),
        notes=notes,
    )


def _hint(folder: Path) -> str:
    """The runs below a log folder, where that was meant."""
    runs = (path for path in newest_run_folders(folder) if (path / METRICS_FILE_NAME).is_file())
    newest = next(runs, None)
    return f"; did you mean {newest}?" if newest else "; expected a run's folder, such as logs/sft/exp_001"


def _metrics(path: Path) -> dict[str, Series]:
    steps: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for record in read_metrics(path):
        if not 0 <= record.step < 2**31:
            raise DataError(f"{path}: steps are from 0 to 2^31 - 1, got {record.step}")
        for key, value in record.metrics.items():
            steps.setdefault(key, []).append(record.step)
            values.setdefault(key, []).append(value)
    return {key: _series(steps[key], values[key]) for key in sorted(steps)}


def _series(steps: list[int], values: list[float]) -> Series:
    """In the order of the steps; of a step that stands there twice, the value that was written last."""
    found, from_the_end = np.unique(np.array(steps[::-1], dtype=np.int64), return_index=True)
    return Series(found, np.array(values[::-1], dtype=np.float64)[from_the_end])


def _expert_load(folder: Path, notes: list[str]) -> ExpertLoadHistory | None:
    if not (folder / FOLDER_NAME).is_dir():
        return None
    try:
        steps, layers, counts = read_load_arrays(folder)
    except FileNotFoundError:
        return None
    except DataError as error:
        notes.extend(error.problems)
        return None
    return ExpertLoadHistory(steps, layers, counts)


def _mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    """A YAML or JSON file that holds a mapping; JSON is YAML."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        found: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        # What holds itself, as YAML's aliases can make it, has no end.
        json.dumps(found, default=str, skipkeys=True)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path}: cannot be read: {' '.join(str(error).split())}")
        return {}
    return found if isinstance(found, dict) else {}


_MOST_REMEMBERED_BYTES = 1 << 16


@dataclass(frozen=True)
class NewRecords:
    """New lines of a file of metrics.

    Attributes:
        records: In the order of the file.
        begins_anew: Whether the file has been cut or replaced: these are all that it holds, and earlier ones are void.
        num_damaged: Lines that are no records.
    """

    records: list[StepRecord]
    begins_anew: bool
    num_damaged: int


class MetricsTail:
    """Follows `metrics.jsonl`; a last line without its end is left for the next look.

    Args:
        path: The file, which need not be there yet.
    """

    def __init__(self, path: Path):
        self._path = path
        self._offset = 0
        self._last_bytes = b""

    def read(self) -> NewRecords:
        """The lines that have been written since the last call.

        Raises:
            DataError: The file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            return NewRecords([], False, 0)
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from None

    def _read(self, file: BinaryIO) -> NewRecords:
        # A run that was resumed has cut the file, and may have grown it beyond its former length since.
        file.seek(self._offset - len(self._last_bytes))
        begins_anew = file.read(len(self._last_bytes)) != self._last_bytes
        if begins_anew:
            self._offset, self._last_bytes = file.seek(0), b""
        records: list[StepRecord] = []
        num_damaged = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            self._last_bytes = line[-_MOST_REMEMBERED_BYTES:]
            try:
                if line.strip():
                    records.append(parse_record(line, str(self._path)))
            except DataError:
                num_damaged += 1
        return NewRecords(records, begins_anew, num_damaged)


class ExpertLoadTail:
    """Follows the files of the expert load.

    Args:
        run_folder: The run's folder.
    """

    def __init__(self, run_folder: Path):
        self._run_folder = run_folder
        self._next_step = 0
        self.problems: list[str] = []

    def read(self, last_step: int) -> ExpertLoadHistory | None:
        """The steps that have been written since the last call.

        Args:
            last_step: The last step to take: later ones may be left from before the run was resumed.

        Returns:
            None where there are none. Behind a file that is damaged, only `last_step`; `problems` then says which.
        """
        try:
            found = self._read(last_step)
            if found is None or not self._is_whole(found):
                # Files are joined now and then: some that were listed may have gone before they were opened.
                found = self._read(last_step)
        except (DataError, OSError) as error:
            self.problems = error.problems if isinstance(error, DataError) else [str(error)]
            self._next_step = max(self._next_step, last_step)
            try:
                found = self._read(last_step)
            except (DataError, OSError):
                self._next_step, found = last_step + 1, None
        if found is not None:
            self._next_step = int(found.steps[-1]) + 1
        return found

    def _read(self, last_step: int) -> ExpertLoadHistory | None:
        try:
            steps, layers, counts = read_load_arrays(self._run_folder, self._next_step)
        except FileNotFoundError:
            return None
        number = int((steps <= last_step).sum())
        return ExpertLoadHistory(steps[:number], layers, counts[:number]) if number else None

    def _is_whole(self, found: ExpertLoadHistory) -> bool:
        first = self._next_step or int(found.steps[0])
        return len(found.steps) == int(found.steps[-1]) - first + 1
