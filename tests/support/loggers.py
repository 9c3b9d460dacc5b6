# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What several tests of the loggers use: settings, a backend, readers of what was logged, and a recorder over lists."""

import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nemo_rl_moe.algorithms.step_recorder import RecordSinks, StepRecorder
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema_run import LoggerConfig
from nemo_rl_moe.routing.agreement.statistics import RoutingReport
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD, ROUTING
from nemo_rl_moe.runs.folder.metrics import MetricHistory as MetricHistory
from nemo_rl_moe.runs.folder.metrics import read_history
from nemo_rl_moe.runs.loggers.interface import MetricLogger
from nemo_rl_moe.runs.loggers.wandb_files import wandb_files, wandb_history


def settings_for(
    log_dir: Path,
    *enabled: str,
    tracking_uri: str | None = None,
    plots_every: int | None = None,
    alerts: bool = False,
    backends: Sequence[str] = (),
) -> LoggerConfig:
    """Return the `logger` section with some backends enabled; alerts after three steps."""
    return LoggerConfig.model_validate(
        {
            "log_dir": str(log_dir),
            "console": {"live": "auto"},
            **{f"{name}_enabled": name in enabled for name in ("tensorboard", "wandb", "mlflow")},
            "backends": list(backends),
            "expert_load_plots": {"every_steps": plots_every},
            "alerts": {
                "enabled": alerts,
                "dead_expert_steps": 3,
                "excess_cv": 1.0,
                "overload_factor": 1.5,
                "sustained_steps": 3,
                "idle_steps": 3,
                "failed_responses_share": 0.01,
                "missing_routes_share": 0.001,
                "missing_routes_steps": 3,
                "sudden_steps": None,
                "unbounded_lag": None,
            },
            "wandb": {"project": "p", "name": "n"},
            "mlflow": {"experiment_name": "e", "run_name": "n", "tracking_uri": tracking_uri},
        }
    )


class ListBackend:
    """Keeps what it is given, in order; waits at `gate`, and fails where it is reported to.

    Args:
        gate: Each step waits for it.
        fails_from: The first step that it does not take.
        bad_keys: Keys, a letter each, with which it takes no step.
        no_plots_at: Steps whose plots it does not take.
    """

    name = "x"
    announcement = None

    def __init__(
        self,
        gate: threading.Event | None = None,
        fails_from: int = 99,
        bad_keys: str = "",
        no_plots_at: Collection[int] = (),
    ):
        self.run_id, self.last_step, self.seconds_to_close = "id-1", -1, 0.0
        self.calls: list[tuple[str, int]] = []
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.plots: dict[int, Mapping[str, bytes]] = {}
        self.asked_for_plots_at: list[int] = []
        self.config: Mapping[str, Any] = {}
        self.outcome = ""
        self.thread: threading.Thread | None = None
        self._gate, self._fails_from, self._bad_keys = gate, fails_from, set(bad_keys)
        self._no_plots_at = no_plots_at

    def open(self) -> "ListBackend":
        """Open as a backend does, in the thread that all its calls have to come from."""
        self.thread = threading.current_thread()
        return self

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        assert threading.current_thread() is self.thread
        if self._gate is not None:
            self._gate.wait()
        if step >= self._fails_from:
            raise OSError("disk is full")
        if bad := self._bad_keys & metrics.keys():
            raise ValueError(f"invalid key {sorted(bad)}")
        self.calls.append(("step", step))
        self.steps.append((step, dict(metrics)))

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        self.asked_for_plots_at.append(step)
        if step in self._no_plots_at:
            raise OSError("no space")
        self.calls.append(("plots", step))
        self.plots[step] = {**self.plots.get(step, {}), **plots}

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def close(self, outcome: str = "finished") -> None:
        self.outcome = outcome


def load_of(*rows: Sequence[int]) -> ExpertLoad:
    return ExpertLoad(tuple(range(1, len(rows) + 1)), torch.tensor(rows))


def log_steps(logger: MetricLogger, steps: Iterable[int], pause: float = 0.0) -> None:
    for step in steps:
        logger.log_step(step, {"train/loss": float(step)})
        time.sleep(pause)


# How MLflow names the plots of a step; older versions put % where newer ones put +.
_MLFLOW_PLOT = re.compile(r"images/(?P<key>.+?)[+%]step[+%](?P<step>\d+)[+%]timestamp[+%].*\.png")

PlotHistory = dict[str, list[tuple[int, bytes]]]


def read_jsonl(path: Path) -> MetricHistory:
    return _sorted(read_history(path))


def read_tensorboard(folder: Path) -> MetricHistory:
    """Read the scalars of all event files in a folder; values are float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 asks for every scalar; the default keeps a random 10,000 a key.
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    keys = accumulator.Tags()["scalars"]
    return _sorted({key: [(event.step, event.value) for event in accumulator.Scalars(key)] for key in keys})


def read_tensorboard_plots(folder: Path) -> PlotHistory:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0})
    accumulator.Reload()
    keys = accumulator.Tags()["images"]
    return {key: [(event.step, event.encoded_image_string) for event in accumulator.Images(key)] for key in keys}


def read_wandb_offline(folder: Path) -> MetricHistory:
    """Read the history of the one W&B run below a folder, such as `<run folder>/wandb`.

    A run that was resumed has several files: each replaces what earlier ones hold from its first step on. W&B's own
    columns, which begin with an underscore, and values that are not numbers are left out.
    """
    rows: list[tuple[int, dict[tuple[str, ...], Any]]] = []
    for path in _files_of_one_wandb_run(folder):
        later = list(wandb_history(path))
        first = min((step for step, _ in later), default=None)
        rows = [row for row in rows if first is None or row[0] < first] + later
    history: MetricHistory = {}
    for step, row in rows:
        for (key, *part), value in row.items():
            if not part and not key.startswith("_") and isinstance(value, int | float):
                history.setdefault(key, []).append((step, float(value)))
    return _sorted(history)


def read_wandb_offline_plots(folder: Path) -> PlotHistory:
    plots: PlotHistory = {}
    for path in _files_of_one_wandb_run(folder):
        rows = list(wandb_history(path))
        first = min((step for step, _ in rows), default=None)
        for points in plots.values():
            points[:] = [point for point in points if first is None or point[0] < first]
        for step, row in rows:
            for (key, *part), value in row.items():
                if part == ["_type"] and value == "image-file":
                    image = path.parent / "files" / row[key, "path"]
                    plots.setdefault(key, []).append((step, image.read_bytes()))
    return {key: points for key, points in plots.items() if points}


def _files_of_one_wandb_run(folder: Path) -> list[Path]:
    files = wandb_files(folder)
    assert len({path.name for path in files}) == 1, files
    return files


def read_mlflow(tracking_uri: str, experiment_name: str, run_name: str | None = None) -> MetricHistory:
    """Read the newest run of an MLflow experiment, or the newest one that has a certain name."""
    client, run = _mlflow_run(tracking_uri, experiment_name, run_name)
    history = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    return _sorted({key: [(entry.step, _unclamped(entry.value)) for entry in history[key]] for key in history})


def read_mlflow_plots(tracking_uri: str, experiment_name: str, run_name: str | None = None) -> PlotHistory:
    client, run = _mlflow_run(tracking_uri, experiment_name, run_name)
    plots: PlotHistory = {}
    with tempfile.TemporaryDirectory() as folder:
        for entry in client.list_artifacts(run.info.run_id, "images"):
            if found := _MLFLOW_PLOT.fullmatch(entry.path):
                content = Path(client.download_artifacts(run.info.run_id, entry.path, folder)).read_bytes()
                # A slash cannot stand in the name of a file.
                plots.setdefault(re.sub("[~#]", "/", found["key"]), []).append((int(found["step"]), content))
    return {key: sorted(points, key=lambda point: point[0]) for key, points in sorted(plots.items())}


def _mlflow_run(tracking_uri: str, experiment_name: str, run_name: str | None) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri)
    experiment = client.get_experiment_by_name(experiment_name)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    return client, next(run for run in runs if run_name is None or run.info.run_name == run_name)


def _unclamped(value: float) -> float:
    """Return a local MLflow store writes an infinity as the largest float64."""
    return value * float("inf") if abs(value) == sys.float_info.max else value


def _sorted(history: MetricHistory) -> MetricHistory:
    return {key: sorted(points, key=lambda point: point[0]) for key, points in sorted(history.items())}


@dataclass
class DiaryOfCheckpoints:
    """Saves nothing.

    Attributes:
        diary: Gets `save N`, `poll` and `finish`.
        period: Steps between two that are due; 0: none is.
        states: What was saved.
        folder: Gets the queue of each checkpoint; None: nothing is written.
    """

    diary: list[str] = field(default_factory=list)
    period: int = 0
    states: list[LoopState] = field(default_factory=list)
    folder: Path | None = None

    @property
    def last_published(self) -> Path | None:
        return Path(f"step_{self.states[-1].step}") if self.states else None

    def is_due(self, step: int) -> bool:
        return self.period > 0 and step % self.period == 0

    def start(
        self, state: LoopState, metrics: Mapping[str, float], write_more: Callable[[Path], None] = lambda folder: None
    ) -> None:
        assert not any(name.startswith("timing/checkpoint") for name in metrics)
        self.diary.append(f"save {state.step}")
        self.states.append(state)
        if self.folder is not None:
            checkpoint = self.folder / f"step_{state.step}"
            checkpoint.mkdir()
            write_more(checkpoint)

    def poll(self) -> None:
        pass

    def finish(self) -> None:
        self.diary.append("finish")


def make_recorder(
    logger: MetricLogger,
    loads: list[tuple[int, Any]] | None = None,
    samples: Callable[[int, str, Any], None] = lambda step, split, responses: None,
    checkpoints: Any = None,
    stop_reason: Callable[[], str | None] = lambda: None,
    start: LoopState | None = None,
    max_skipped_in_a_row: int = 3,
    captures: list[tuple[int, RoutingReport]] | None = None,
    flush: Callable[[], None] = lambda: None,
) -> StepRecorder:
    def log_artifact(step: int, name: str, artifact: Any) -> None:
        kept = {EXPERT_LOAD.name: loads, ROUTING.name: captures}[name]
        if kept is not None:
            kept.append((step, artifact))

    sinks = RecordSinks(logger, log_artifact, samples, flush)
    return StepRecorder(sinks, checkpoints, stop_reason, max_skipped_in_a_row, start or LoopState())
