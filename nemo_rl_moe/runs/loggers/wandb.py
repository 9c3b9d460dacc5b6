# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases: a run online or offline, its charts, its resume.

W&B makes a chart of each key, in a section named after the part of the key before the first slash: `train`, `val`,
`timing`, `plots`. Their axis is the optimizer step, at which rows are logged.
"""

import os
import shutil
import sys
import tempfile
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from nemo_rl_moe.errors import printable
from nemo_rl_moe.routing.metrics.metric_keys import OUTLIER_PREFIX
from nemo_rl_moe.runs.folder.lines import to_plain
from nemo_rl_moe.runs.folder.metrics import RunOutcome, StepRecord
from nemo_rl_moe.runs.folder.sample_text import LEGEND, SAMPLE_LIMITS, ShownSample, as_text, sample_lines
from nemo_rl_moe.runs.loggers.step_plots import is_plot_step
from nemo_rl_moe.runs.loggers.wandb_files import last_wandb_step

_OUTLIERS = f"train/{OUTLIER_PREFIX}"
OUTLIER_CHART_KEY = "plots/expert_utilization_outliers"
# Of a table with more, W&B shows the first ones alone.
_MOST_ROWS = 10_000

# Summaries in W&B's table of runs, besides the last value of a metric.
_BEST_AND_LAST = {
    "min,last": ("train/loss", "val/loss", "train/moe/expert_utilization_min", "train/moe/expert_diversity_min"),
    "max,last": (
        "train/accuracy",
        "train/reward",
        "val/accuracy",
        "val/reward",
        "train/grad_norm",
        "train/skipped_updates",
        "train/moe/cv_excess_mean",
        "train/moe/dead_expert_frac_mean",
        "train/moe/max_violation_max",
        "train/moe/avg_overload_factor",
        "train/moe/max_overload_factor",
        "train/moe/max_cum_overload_factor",
    ),
}


def define_charts(run: Any, has_outlier_chart: bool) -> None:
    for summary, keys in _BEST_AND_LAST.items():
        for key in keys:
            run.define_metric(key, summary=summary)
    # The outliers of each step are other experts: hundreds of charts, most of them with one point. They share one
    # chart instead; the hidden ones can still be looked up.
    if has_outlier_chart:
        run.define_metric(f"{_OUTLIERS}*", hidden=True)


class OutlierChart:
    """The most and the least loaded experts of each step, on one chart."""

    def __init__(self) -> None:
        self.rows: deque[tuple[int, float, str]] = deque(maxlen=_MOST_ROWS)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            if key.startswith(_OUTLIERS):
                self.rows.append((step, value, key.removeprefix(_OUTLIERS)))

    def draw(self) -> Mapping[str, Any]:
        """Return the chart as W&B takes it, by its key; empty while there are no outliers."""
        if not self.rows:
            return {}
        import wandb

        table = wandb.Table(columns=["step", "utilization", "expert"], data=[list(row) for row in self.rows])
        title = "Most and least loaded experts: load over fair share"
        return {OUTLIER_CHART_KEY: wandb.plot.line(table, "step", "utilization", stroke="expert", title=title)}


_DEFAULT_HOST_URL = "https://api.wandb.ai"
_MODES_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
_SECONDS_TO_UPLOAD = 300.0
_SECONDS_TO_ABANDON = 1.0
_CREDENTIAL_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class WandbLogger:
    """One W&B run in `<run folder>/wandb`; asks nothing, prints nothing, keeps NaN and infinities.

    A user who set `WANDB_MODE` gets that mode. Otherwise the run is online when the user is logged in, and offline when
    not; an offline run contacts nobody and can be uploaded later with `wandb sync`.

    A resumed run keeps its id. Offline it gets a further folder, whose steps replace those of the earlier ones from its
    first step on. Online it goes on where the server's history ends: W&B takes no step twice, so steps that were logged
    before the resume keep their values and plots.
    """

    name = "wandb"

    def __init__(
        self,
        run_folder: Path,
        project: str,
        run_name: str | None,
        run_id: str,
        *,
        is_resumed: bool = False,
        earlier_steps: Callable[[], Iterable[StepRecord]] = tuple,
        outlier_chart_every_steps: int | None = None,
    ):
        mode = choose_mode(os.environ)
        if mode == "offline" or os.environ.get("WANDB_MODE") in _MODES_WITHOUT_LOGIN:
            # W&B's error reports and usage statistics go over the network in offline mode too, unless asked not to;
            # it looks at this variable while it is imported.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        _import_beside(run_folder / "wandb")
        import wandb

        self._run: Any = wandb.init(
            project=project,
            name=run_name,
            id=run_id,
            resume="allow" if is_resumed else None,
            dir=str(run_folder),
            mode=mode,
            reinit="create_new",
            # Capturing the console would record every refresh of the live line.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run_id = run_id
        self.announcement: str | None = None
        # Asked first, since W&B warns when an offline run is asked for its address.
        if self._run.offline:
            # Its files say what a killed run has left; what its service had not written yet is sent again.
            self.last_step = last_wandb_step(run_folder / "wandb", run_id) if is_resumed else -1
            self._first_step = 0
            self.announcement = f"W&B run is offline; to upload it: wandb sync {Path(self._run.dir).parent}"
        else:
            self.last_step = self._run.step - 1
            self._first_step = self._run.step
            if self._run.url:
                self.announcement = f"W&B run: {self._run.url}"
        self.seconds_to_close = 0.0 if self._run.offline else _SECONDS_TO_UPLOAD
        self._outlier_chart_every_steps = outlier_chart_every_steps
        define_charts(self._run, has_outlier_chart=bool(outlier_chart_every_steps))
        self._outliers = OutlierChart()
        for record in earlier_steps():
            if record.step <= self.last_step:
                self._outliers.add(record.step, record.metrics)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the step as one row of the run's history; a step that the server has is skipped."""
        if step < self._first_step:
            return
        self._outliers.add(step, metrics)
        if is_plot_step(step, self._outlier_chart_every_steps):
            # Not with the plots, which may be dropped when the backend is slow.
            self._draw_outliers(step)
        # Committed at once: otherwise the row waits for the next step, and the last one is lost in a crash.
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step, commit=True)

    def _draw_outliers(self, step: int) -> None:
        # W&B writes the chart's table to the disk, which may be full; the next chart has all outliers again.
        with suppress(Exception):
            if chart := self._outliers.draw():
                self._run.log(chart, step=step, commit=False)

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        if step < self._first_step:
            return
        import PIL.Image
        import wandb

        images = {key: wandb.Image(PIL.Image.open(BytesIO(content))) for key, content in plots.items()}
        # The row is committed with the step's metrics, which follow.
        self._run.log(images, step=step, commit=False)

    def log_samples(self, step: int, split: str, samples: Sequence[ShownSample]) -> None:
        """Log samples as a table, whose cells are plain text."""
        if step < self._first_step:
            return
        import wandb

        texts = [
            (sample.sample_id, sample.reward, sample.verdict, sample.left_out, _conversation(sample))
            for sample in samples
        ]
        rows = [[step, *map(printable, row)] for row in texts]
        table = wandb.Table(columns=["step", "sample", "reward", "verdict", "left out", _COLUMN], data=rows)
        # The row is committed with the step's metrics, which follow.
        self._run.log({f"samples/{split}": table}, step=step, commit=False)

    def send_alert(self, title: str, text: str) -> None:
        """Send an alert through W&B: by mail or Slack, as set up there."""
        self._run.alert(title, text, level="WARN")

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(to_plain(config), allow_val_change=True)

    def close(self, outcome: RunOutcome = "finished") -> None:
        """End the run and W&B's service process; online, wait until all is uploaded."""
        import wandb

        try:
            self._run.finish(exit_code=0 if outcome == "finished" else 1)
        finally:
            # The service may still write the last records after a run has finished.
            wandb.teardown()


_COLUMN = f"conversation ({LEGEND})"


def _conversation(sample: ShownSample) -> str:
    return as_text(sample_lines(sample, SAMPLE_LIMITS))


_TEMPORARY = ("tmp*wandb-artifacts", "tmp*wandb-media")


def _import_beside(folder: Path) -> None:
    """Import W&B, whose temporary folders, made while it is imported, come to lie in a folder of the run."""
    # A killed process leaves them: there the run that goes on removes them, and nothing is left elsewhere.
    if "wandb" in sys.modules:
        return
    folder.mkdir(exist_ok=True)
    for left in (path for pattern in _TEMPORARY for path in folder.glob(pattern)):
        shutil.rmtree(left, ignore_errors=True)
    former, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        import wandb  # noqa: F401
    finally:
        tempfile.tempdir = former


def abandon_service() -> None:
    """Let the process end although W&B's service process hangs, for which W&B would wait without a limit."""
    import wandb

    # Teardown first removes W&B's own exit hook, then waits for the service: in a thread that may be left behind.
    thread = threading.Thread(target=wandb.teardown, name="wandb-teardown", daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_ABANDON)


def choose_run_id(environment: Mapping[str, str]) -> str:
    """Return the id of a new run: the user's `WANDB_RUN_ID`, or a random one."""
    return environment.get("WANDB_RUN_ID") or uuid.uuid4().hex


def choose_mode(environment: Mapping[str, str]) -> Literal["offline"] | None:
    """Return the mode of a W&B run: None where the user's own settings decide, `offline` where nobody is logged in."""
    chosen = environment.get("WANDB_MODE")
    if chosen in _MODES_WITHOUT_LOGIN or _is_logged_in(environment):
        return None
    if chosen:
        raise RuntimeError(
            f"WANDB_MODE is {chosen!r}, and nobody is logged in: run `wandb login`, or set WANDB_API_KEY"
        )
    return "offline"


def _is_logged_in(environment: Mapping[str, str]) -> bool:
    from requests.utils import get_netrc_auth

    if any(environment.get(name) for name in _CREDENTIAL_VARIABLES):
        return True
    return get_netrc_auth(environment.get("WANDB_BASE_URL") or _DEFAULT_HOST_URL) is not None
