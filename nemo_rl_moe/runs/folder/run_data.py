# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Content of a run's folder, during the run or afterwards: configuration, metrics, expert load, routing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.masking import masked
from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.runs.folder.advantages import AdvantageHistory, read_advantages
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory, read_expert_load
from nemo_rl_moe.runs.folder.failures import FAILURES_FILE_NAME, FailuresTail
from nemo_rl_moe.runs.folder.folder import CONFIG_FILE_NAME, newest_run_folders
from nemo_rl_moe.runs.folder.line_tail import LineTail, by_step
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, metric_history, read_metrics
from nemo_rl_moe.runs.folder.routing import ANOMALIES_FILE_NAME, AnomaliesTail, RoutingHistory, read_routing
from nemo_rl_moe.runs.folder.time_line import TimeLineHistory, read_time_line
from nemo_rl_moe.shapes import Float, Int

EFFECTIVE_MOE_FILE_NAME = "effective_moe_configuration.json"
History = TypeVar("History")
Record = TypeVar("Record")
_MOST_VALUES, _LARGEST_NUMBER = 100_000, 2.0**53


@dataclass(frozen=True)
class Series:
    steps: Int[np.ndarray, " steps"]
    values: Float[np.ndarray, " steps"]


@dataclass(frozen=True)
class RunData:
    """Content of a run's folder.

    Attributes:
        metrics: Full key -> series.
        minutes: Minutes from the first record to the record of each step, pauses included.
        moe_configuration: Router settings in effect. Empty for a dense model.
        notes: One line for each unreadable file.
        rank_names: Names of data-parallel ranks, if they have names.
    """

    folder: Path
    metrics: dict[str, Series]
    expert_load: ExpertLoadHistory | None
    config: dict[str, Any] = field(default_factory=dict)
    moe_configuration: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    routing: RoutingHistory | None = None
    advantages: AdvantageHistory | None = None
    time_line: TimeLineHistory | None = None
    minutes: Series | None = None
    anomalies: dict[int, list[RoutingAnomaly]] = field(default_factory=dict)
    failures: dict[int, list[FailedResponses]] = field(default_factory=dict)
    label: str | None = None
    rank_names: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Names of the folder's parent and of the folder, for example `sft_tiny_moe/exp_001`."""
        resolved = self.folder.resolve()
        return f"{resolved.parent.name}/{resolved.name}"

    @property
    def last_step(self) -> int:
        """Last step of any metric. 0 before the first step."""
        return max((int(series.steps[-1]) for series in self.metrics.values()), default=0)

    @property
    def algorithm(self) -> str | None:
        """Name of the algorithm, for example `sft`. It is the name of the first section of a resolved configuration."""
        return next((name for name, section in self.config.items() if isinstance(section, dict)), None)

    @property
    def planned_steps(self) -> int | None:
        # The loop's settings may be in the section of another algorithm.
        numbers = (number_at(self.config, name, "max_num_steps") for name in self.config)
        return next((int(number) for number in numbers if number is not None), None)

    @property
    def expert_parallel_size(self) -> int:
        return max(1, int(number_at(self.config, "policy", "megatron_cfg", "expert_model_parallel_size") or 1))

    @property
    def topk(self) -> int | None:
        found = number_at(self.moe_configuration, "moe_router_topk")
        return None if found is None or found < 1 else int(found)


def read_run(folder: Path) -> RunData:
    """Return the content of a run's folder."""
    path = folder / METRICS_FILE_NAME
    if not path.is_file():
        what = f"holds no {METRICS_FILE_NAME}" if folder.is_dir() else "is no folder"
        newest = next((run for run in newest_run_folders(folder) if (run / METRICS_FILE_NAME).is_file()), None)
        hint = f"did you mean {newest}?" if newest else "expected a run's folder, such as logs/sft/exp_001"
        raise DataError(f"{folder}: {what}; {hint}")
    notes: list[str] = []
    expert_load, routing = _table(read_expert_load, folder, notes), _table(read_routing, folder, notes)
    anomalies = by_step(_lines(AnomaliesTail(folder), folder / ANOMALIES_FILE_NAME, "anomalies", notes))
    failures = by_step(_lines(FailuresTail(folder), folder / FAILURES_FILE_NAME, "failures", notes))
    described = describe_run(folder)
    records = read_metrics(path)
    metrics = {key: series_of(points) for key, points in sorted(metric_history(records).items())}
    return replace(
        described,
        metrics=metrics,
        minutes=series_of([(record.step, (record.time - records[0].time) / 60) for record in records])
        if records
        else None,
        expert_load=expert_load,
        routing=routing,
        advantages=_table(read_advantages, folder, notes),
        time_line=_table(read_time_line, folder, notes),
        anomalies=anomalies,
        failures=failures,
        notes=[*notes, *described.notes],
    )


def describe_run(folder: Path) -> RunData:
    """Return the run's data with only its configuration, which is in the folder before the first step."""
    notes: list[str] = []
    config, moe = (_mapping(folder / name, notes) for name in (CONFIG_FILE_NAME, EFFECTIVE_MOE_FILE_NAME))
    return RunData(folder, {}, None, config, moe, notes)


def number_at(settings: Any, *keys: str) -> float | None:
    """Return the finite number at nested keys of a file that may have been edited, or None."""
    for key in keys:
        settings = settings.get(key) if isinstance(settings, dict) else None
    is_number = isinstance(settings, int | float) and not isinstance(settings, bool)
    return settings if is_number and abs(settings) < _LARGEST_NUMBER else None


def _table(read: Callable[[Path], History], folder: Path, notes: list[str]) -> History | None:
    """Return a table of the run, or None if it does not exist. Damage is added to `notes`."""
    try:
        return read(folder)
    except FileNotFoundError:
        return None
    except DataError as error:
        notes += error.problems
        return None


def _lines(tail: LineTail[Record], path: Path, what: str, notes: list[str]) -> list[Record]:
    """Return the records of a file. Empty if it does not exist. Damage is added to `notes`."""
    try:
        found = tail.read()
    except DataError as error:
        notes += error.problems
        return []
    if found.num_damaged:
        notes.append(f"{path}: lines that are no {what}: {found.num_damaged}")
    return found.records


def series_of(points: list[tuple[int, float]]) -> Series:
    """Return the points as a series in order of steps. If a step occurs twice, the last written value counts."""
    steps, values = zip(*reversed(points), strict=True)
    found, from_the_end = np.unique(np.array(steps, dtype=np.int64), return_index=True)
    return Series(found, np.array(values, dtype=np.float64)[from_the_end])


def _mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file. Empty if it does not exist. Damage is added to `notes`."""
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        found: Any = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        if not _has_at_most(found, _MOST_VALUES):  # YAML's aliases of aliases
            raise ValueError(f"more than {_MOST_VALUES:,} values")
        found = masked(found)  # an edited or old file may contain secrets
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path}: cannot be read: {one_line(error)}")
        return {}
    return found if isinstance(found, dict) else {}


def _has_at_most(value: Any, number: int) -> bool:
    """Return True if a nested value, with aliases expanded, has at most `number` values."""
    left = [value]
    while left and number >= 0:
        found = left.pop()
        number -= 1
        if isinstance(found, dict | list):
            number -= len(found)
            left += (found.values() if isinstance(found, dict) else found) if number >= 0 else ()
    return number >= 0
