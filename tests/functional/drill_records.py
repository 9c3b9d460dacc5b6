# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the runs of drills leave, and what two runs of a kind must have in common."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

STEP_PHASES = ("generation", "rewards", "logprobs", "reference_logprobs", "train", "refit", "refit_check")
"""In the order in which a step has them; the metrics have their times under these names."""
ROUTING = "train/moe/routing/"
VALIDATION_TIME = "timing/validation/seconds"


@dataclass(frozen=True)
class Logs:
    """What the attempts of one training leave below a folder: `logs`, with a folder for each run.

    Attributes:
        folder: Holds `logs`.
    """

    folder: Path

    @property
    def run_folder(self) -> Path | None:
        """The newest: attempts that are killed before the first checkpoint is whole have others before it."""
        return max((self.folder / "logs").glob("exp_*"), default=None)

    def num_records(self) -> int:
        """Number of steps recorded up to now."""
        return len(self._lines("metrics.jsonl"))

    def metrics(
        self, routes_lost: Collection[int] = (), *, inexact: Collection[str] = (), of_all: bool = False
    ) -> dict[int, list[str]]:
        """Metrics of each recorded step, all but times; of some steps also without those of routes.

        Args:
            routes_lost: These steps.
            inexact: Metrics of all steps that are left out.
            of_all: As of `samples`.
        """
        return {
            step: [
                str(
                    {
                        key: value
                        for key, value in record["metrics"].items()
                        if not _is_time(key)
                        and key not in inexact
                        and not (step in routes_lost and key.startswith(ROUTING))
                    }
                )
                for record in records
            ]
            for step, records in self._by_step("metrics.jsonl", of_all).items()
        }

    def samples(self, *, of_all: bool = False) -> dict[int, list[dict[str, Any]]]:
        """The responses of each recorded step, all but times; none but of GRPO.

        Args:
            of_all: Of all folders, the newest one that has a step, and not of the newest alone.
        """
        return {
            step: [{key: value for key, value in record.items() if key != "times"} for record in records]
            for step, records in self._by_step("samples.jsonl", of_all).items()
        }

    def last_step_s(self) -> float | None:
        """Seconds of the last step's phases; None where the run's folder has just been deleted with its records."""
        lines = self._lines("metrics.jsonl")
        return sum(_phase_seconds(json.loads(lines[-1])["metrics"]).values()) if lines else None

    def is_saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        return any(self.folder.glob("logs/*/checkpoints/.*.incomplete"))

    def weights(self) -> dict[str, bytes]:
        """The final weights, tensor by tensor; none where there are none."""
        tensors = {}
        for path in sorted(self.folder.glob("logs/*/checkpoints/final/*.safetensors")):
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                tensors |= {name: file.get_tensor(name).numpy().tobytes() for name in names}
        return tensors

    def _by_step(self, name: str, of_all: bool) -> dict[int, list[dict[str, Any]]]:
        """Records by step, in the order of the file."""
        found: dict[int, list[dict[str, Any]]] = {}
        for folder in sorted((self.folder / "logs").glob("exp_*")) if of_all else [self.run_folder]:
            own: dict[int, list[dict[str, Any]]] = {}
            for record in map(json.loads, self._lines(name, folder)):
                own.setdefault(record["step"], []).append(record)
            first = min(own, default=None)
            found = {step: records for step, records in found.items() if first is None or step < first} | own
        return found

    def _lines(self, name: str, folder: Path | None = None) -> list[str]:
        folder = folder or self.run_folder
        if folder is None or not (path := folder / name).is_file():
            return []
        return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _is_time(key: str) -> bool:
    return key.startswith("timing/") or key.endswith("/tools/seconds")


def _phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics.get(f"timing/{name}/seconds", 0.0) for name in STEP_PHASES}


@dataclass(frozen=True)
class Reference:
    """An unharmed run of a kind, which every killed one must equal.

    Attributes:
        logs: What it has left.
        inexact: Metrics whose last bits time decides.
    """

    logs: Logs
    inexact: Collection[str] = ()

    @cached_property
    def _metrics(self) -> list[dict[str, float]]:
        """Metrics of the steps after the first, which is slower than the others."""
        assert self.logs.run_folder is not None
        lines = (self.logs.run_folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["metrics"] for line in lines[2:]]

    @cached_property
    def phase_seconds(self) -> dict[str, float]:
        """Mean seconds of each phase of a step, in their order, and of a validation, which comes after them."""
        means = {
            name: sum(_phase_seconds(metrics)[name] for metrics in self._metrics) / len(self._metrics)
            for name in STEP_PHASES
        }
        times = [metrics[VALIDATION_TIME] for metrics in self._metrics if VALIDATION_TIME in metrics]
        return means | {"validation": sum(times) / len(times)}

    @property
    def step_s(self) -> float:
        """Mean seconds of a step's phases."""
        return sum(self.phase_seconds[name] for name in STEP_PHASES)

    def window(self, phase: str) -> tuple[float, float]:
        """Return the average start and end of a phase, in seconds after the step's start."""
        start = 0.0
        for name, seconds in self.phase_seconds.items():
            if name == phase:
                return start, start + seconds
            start += seconds
        raise AssertionError(phase)

    def differences(
        self, found: Logs, *, lost_until: int | None = None, routes_lost: Collection[int] = ()
    ) -> list[str]:
        """Differences of another run's end: metrics of all steps but times, samples, final weights' bytes.

        Args:
            found: What the other run has left.
            lost_until: Last step whose records may be lost, with a folder that was deleted; later ones must be there.
                The deleted folder's `run.json` is lost, too, so that the next attempt begins a folder of its own: later
                records may lie in several. None: no folder was deleted, all records are in one.
            routes_lost: Steps whose routes may be lost, with an engine: not compared are metrics of routes.
        """
        differences, of_all = [], lost_until is not None
        metrics = partial(Logs.metrics, routes_lost=routes_lost, inexact=self.inexact)
        pairs: tuple[tuple[str, dict[int, Any], dict[int, Any]], ...] = (
            ("metrics", metrics(found, of_all=of_all), metrics(self.logs)),
            ("samples", found.samples(of_all=of_all), self.logs.samples()),
        )
        for name, records, expected in pairs:
            needed = {step for step in expected if lost_until is None or step > lost_until}
            missing, others = sorted(needed - records.keys()), sorted(records.keys() - expected.keys())
            changed = [step for step in expected if step in records and records[step] != expected[step]]
            if missing or others or changed:
                differences.append(f"{name}: missing are steps {missing}, too many {others}, not the same {changed}")
            if list(records) != sorted(records):
                differences.append(f"{name}: steps in the order {list(records)}")
        if not found.weights() or found.weights() != self.logs.weights():
            differences.append("final weights")
        return differences

    def doubts(self) -> list[str]:
        """Return what would make the comparison worthless: weights that do not change, rewards that do not vary."""
        doubts = []
        idle = [index for index, metrics in enumerate(self._metrics) if not metrics["train/grad_norm"] > 0]
        if idle:
            doubts.append(f"no gradient in steps {idle}")
        rewards = {sample["reward"] for samples in self.logs.samples().values() for sample in samples}
        if rewards and len(rewards) < 4:
            doubts.append("the rewards do not vary")
        return doubts
