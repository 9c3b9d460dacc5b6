# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""MLflow tracking, by default in a local SQLite store next to the log folder."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.files import leaves
from nemo_rl_moe.runs.folder.metrics import RunOutcome
from nemo_rl_moe.runs.folder.sample_text import ShownSample, samples_text
from nemo_rl_moe.runs.loggers.console import quiet

# Largest numbers of entries in a request, and largest lengths that present servers accept.
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_LONGEST_KEY = 250
_LONGEST_VALUE = 500
_SQLITE_PREFIX = "sqlite:///"


class MlflowLogger:
    """One MLflow run. It has a separate client, so that MLflow's global state does not change.

    NaN is kept. A local store keeps infinities as plus and minus the largest float64.

    A resumed run continues its MLflow run, or starts a new one if the store has lost it. MLflow cannot replace values.
    So steps that were logged before the resume keep their values and plots, and are not logged again.
    """

    name = "mlflow"
    announcement = None
    seconds_to_close = 0.0

    def __init__(
        self, tracking_uri: str, experiment_name: str, run_name: str | None, resumed_run_id: str | None = None
    ):
        _set_environment_defaults()
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric_type, self._param_type = Metric, Param
        store = Path(tracking_uri.removeprefix(_SQLITE_PREFIX)) if tracking_uri.startswith(_SQLITE_PREFIX) else None
        # MLflow's default for a local store is the working directory.
        artifacts = None if store is None else store.resolve().parent / "mlartifacts"
        # These packages log notes, for example about the tables of a new database.
        with quiet("mlflow", "alembic", least=logging.WARNING), _alone_with(store):
            self._client = MlflowClient(tracking_uri)
            experiment_id = self._experiment_id(experiment_name, artifacts)
        self._last_steps: dict[str, int] = {}
        self._stored_params: frozenset[str] = frozenset()
        run = None if resumed_run_id is None else self._resumed(resumed_run_id)
        if run is None:
            run = self._client.create_run(experiment_id, run_name=run_name)
        self.run_id: str = run.info.run_id
        self._last_before = max(self._last_steps.values(), default=0)
        # One less, since the last step may be incomplete if the run was killed.
        self.last_step = self._last_before - 1

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the new metrics of the step, up to 1,000 in one request."""
        milliseconds = int(time.time() * 1000)
        new = {key: value for key, value in metrics.items() if step > self._last_steps.get(key, -1)}
        entries = [self._metric_type(key, float(value), milliseconds, step) for key, value in new.items()]
        for batch in _batches(entries, _METRICS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=batch)
            self._last_steps.update((entry.key, step) for entry in batch)

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        """Store each plot as an image of the step, unless the run has them from before the resume."""
        import PIL.Image

        if step > self._last_before:
            for key, content in plots.items():
                self._client.log_image(self.run_id, PIL.Image.open(BytesIO(content)), key=key, step=step)

    def log_samples(self, step: int, split: str, samples: Sequence[ShownSample]) -> None:
        """Store samples as a text, such as `samples/val_step_000100.txt`."""
        if step > self._last_before or not self._last_before:
            self._client.log_text(self.run_id, f"{samples_text(samples)}\n", f"samples/{split}_step_{step:06}.txt")

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the configuration as parameters, such as `policy.megatron_cfg.track_moe_metrics`.

        A resumed run keeps its parameters, since MLflow refuses to change them.
        """
        parameters = flatten_config(config).items()
        entries = [self._param_type(key, value) for key, value in parameters if key not in self._stored_params]
        for batch in _batches(entries, _PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, params=batch)

    def close(self, outcome: RunOutcome = "finished") -> None:
        self._client.set_terminated(self.run_id, status=outcome.upper())

    def _resumed(self, run_id: str) -> Any:
        """Return the run that is resumed, marked as running again. None if the store does not have it."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(run_id)
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_STATE"):
                return None
            raise
        # The latest value of each key with its step, which `run.data.metrics` omits.
        self._last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._stored_params = frozenset(run.data.params)
        return run

    def _experiment_id(self, name: str, artifact_folder: Path | None) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                location = artifact_folder.as_uri() if artifact_folder else None
                return str(self._client.create_experiment(name, artifact_location=location))
            except MlflowException:
                # Another run may have created it meanwhile. If it still does not exist, the error was another one.
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)


@contextmanager
def _alone_with(store: Path | None) -> Iterator[None]:
    """Lock a local store against other runs, since two runs fail if both create its tables at the same time."""
    if store is None:
        yield
        return
    with store.with_name(f"{store.name}.lock").open("a") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def local_store_uri(folder: Path) -> str:
    """Return the tracking URI of the SQLite store `mlflow.db` in a folder. The folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    return f"{_SQLITE_PREFIX}{(folder.resolve() / 'mlflow.db').as_posix()}"


def flatten_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a nested configuration as `a.b.c` -> value. Both are strings, cut to the lengths that MLflow accepts."""
    return {key[:_LONGEST_KEY]: str(value)[:_LONGEST_VALUE] for key, value in leaves(config)}


def _batches(entries: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (entries[start : start + size] for start in range(0, len(entries), size))


def _set_environment_defaults() -> None:
    """Set environment variables for MLflow, unless the user has set them."""
    # Send data only to the user's store.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # Progress bars would mix with the lines of the console.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # By default, a lost server would block the logger's thread for several minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
