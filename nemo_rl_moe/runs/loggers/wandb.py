# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, online or offline: metrics, charts, resume.

W&B makes a chart of each key. The chart is in a section with the name of the part before the first slash: `train`,
`val`, `timing`, `plots`. The x-axis is the optimizer step.
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
_MOST_ROWS = 10_000  # W&B does not show further rows of a table

# Summary in W&B's table of runs -> metrics that have it instead of only the last value.
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
    # Each step has other outliers. As separate metrics they would make hundreds of charts, most with one point. So they
    # share one chart. The hidden metrics can still be looked up.
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
        """Return key -> chart for W&B. Empty while there are no outliers."""
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
    """One W&B run in `<run folder>/wandb`, without questions or output on the console. NaN and infinities are kept.

    The mode is `WANDB_MODE` if that is set, otherwise online if the user is logged in, otherwise offline. An offline
    run uses no network and can be uploaded later with `wandb sync`.

    A resumed run keeps its id. Offline it gets a new folder, and steps in it replace the same steps in earlier folders.
    Online it continues after the server's history, since W&B takes no step twice. So steps that were logged before the
    resume keep their values and plots.
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
            # Otherwise W&B sends error reports and usage statistics even offline. It reads this variable at import.
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if "weave" not in sys.modules:
            # Otherwise W&B advertises Weave on standard error if the user's code has imported openai.
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
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
            # A captured console would contain every refresh of the live line.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run_id = run_id
        self.announcement: str | None = None
        # W&B warns if an offline run's address is read.
        if self._run.offline:
            # Steps that the service had not written to the files before a kill are sent again.
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
        """Log the step as one row of the run's history, unless the server has it."""
        if step < self._first_step:
            return
        self._outliers.add(step, metrics)
        if is_plot_step(step, self._outlier_chart_every_steps):
            # This is not in `log_plots`, since plots are dropped if the backend is slow. A failure (W&B writes the
            # table to a disk that may be full) does not matter, since the next chart has all outliers again.
            with suppress(Exception):
                if chart := self._outliers.draw():
                    self._run.log(chart, step=step, commit=False)
        # Committed immediately. Otherwise the row would wait for the next step, and a crash would lose it.
        self._run.log({key: float(value) for key, value in metrics.items()}, step=step, commit=True)

    def log_plots(self, step: int, plots: Mapping[str, bytes]) -> None:
        if step < self._first_step:
            return
        import PIL.Image
        import wandb

        images = {key: wandb.Image(PIL.Image.open(BytesIO(content))) for key, content in plots.items()}
        # `log_step`, which follows, commits the row.
        self._run.log(images, step=step, commit=False)

    def log_samples(self, step: int, split: str, samples: Sequence[ShownSample]) -> None:
        """Log samples as a table with plain text in its cells."""
        if step < self._first_step:
            return
        import wandb

        columns = ["step", "sample", "reward", "verdict", "left out", f"conversation ({LEGEND})"]
        rows = []
        for sample in samples:
            conversation = as_text(sample_lines(sample, SAMPLE_LIMITS))
            texts = (sample.sample_id, sample.reward, sample.verdict, sample.left_out, conversation)
            rows.append([step, *map(printable, texts)])
        table = wandb.Table(columns=columns, data=rows)
        # `log_step`, which follows, commits the row.
        self._run.log({f"samples/{split}": table}, step=step, commit=False)

    def send_alert(self, title: str, text: str) -> None:
        """Send an alert by mail or Slack, depending on the user's settings at W&B."""
        self._run.alert(title, text, level="WARN")

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(to_plain(config), allow_val_change=True)

    def close(self, outcome: RunOutcome = "finished") -> None:
        """End the run and W&B's service process. Online, wait for the upload."""
        import wandb

        try:
            self._run.finish(exit_code=0 if outcome == "finished" else 1)
        finally:
            # The service may still write the last records after `finish`.
            wandb.teardown()


_TEMPORARY = ("tmp*wandb-artifacts", "tmp*wandb-media")


def _import_beside(folder: Path) -> None:
    """Import W&B so that its temporary folders are in a folder of the run."""
    # W&B creates these folders when it is imported, and a killed process leaves them. Here a resumed run removes them.
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
    """Let the process end although W&B's service process hangs. Otherwise W&B would wait for the service forever."""
    import wandb

    # Teardown removes W&B's exit hook, then waits for the service. The daemon thread may still wait at exit.
    thread = threading.Thread(target=wandb.teardown, name="wandb-teardown", daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_ABANDON)


def choose_run_id(environment: Mapping[str, str]) -> str:
    """Return the id of a new run: `WANDB_RUN_ID`, or a random one."""
    return environment.get("WANDB_RUN_ID") or uuid.uuid4().hex


def choose_mode(environment: Mapping[str, str]) -> Literal["offline"] | None:
    """Return the mode of a W&B run: `offline` if the user is not logged in, None to follow the user's settings."""
    chosen = environment.get("WANDB_MODE")
    if chosen in _MODES_WITHOUT_LOGIN or _is_logged_in(environment):
        return None
    if chosen:
        raise RuntimeError(
            f"WANDB_MODE is {chosen!r}, but no user is logged in: run `wandb login`, or set WANDB_API_KEY"
        )
    return "offline"


def _is_logged_in(environment: Mapping[str, str]) -> bool:
    from requests.utils import get_netrc_auth

    if any(environment.get(name) for name in _CREDENTIAL_VARIABLES):
        return True
    return get_netrc_auth(environment.get("WANDB_BASE_URL") or _DEFAULT_HOST_URL) is not None
