# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""State of a running run in the terminal view, updated from its folder."""

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.routing.findings.routing_signal import ANOMALIES_METRIC
from nemo_rl_moe.routing.findings.tracker import FindingTracker
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory, ExpertLoadTail
from nemo_rl_moe.runs.folder.failures import FAILURES_FILE_NAME, FailuresTail
from nemo_rl_moe.runs.folder.line_tail import by_step
from nemo_rl_moe.runs.folder.metrics import METRICS_FILE_NAME, MetricHistory, MetricsTail, StepRecord
from nemo_rl_moe.runs.folder.routing import ANOMALIES_FILE_NAME, AnomaliesTail
from nemo_rl_moe.runs.folder.run_data import RunData, describe_run
from nemo_rl_moe.runs.folder.sample_text import ShownSample
from nemo_rl_moe.runs.folder.saved_samples import NewestConversation
from nemo_rl_moe.runs.folder.step_tables import MAX_DELAY_S
from nemo_rl_moe.runs.report.run_findings import Episodes, episodes_of, findings_of, thresholds_of

SHOWN_METRICS = {
    "train/reward": "reward",
    "train/loss": "loss",
    "train/teacher_kl": "teacher",
    "train/critic/explained_variance": "explained",
    "train/moe/cv_mean": "cv",
    "train/moe/cv_excess_mean": "cv excess",
    "train/moe/avg_overload_factor": "overload",
    "train/grad_norm": "grad norm",
    "train/staleness/mean": "staleness",
    "train/rollouts/idle_share/trainer": "waiting",
    "train/rollouts/idle_share/engines": "idle",
}
"""Key of a metric -> its label, in the order of display."""
ROUTING_METRICS = (AGREEMENT, LIVE_AGREEMENT, ANOMALIES) = (
    "train/moe/routing/agreement",
    "train/moe/routing/live_agreement",
    ANOMALIES_METRIC,
)
"""Keys of the line about routing. Every step with a capture has the last key."""
_SPEED_KEY = "timing/train/tokens_per_second"
_STEPS_OF_A_PACE = 20


@dataclass
class WatchedRun:
    """State of a run, as one frame of the terminal view shows it.

    Attributes:
        described: The run's configuration, without its history.
        routing: `ROUTING_METRICS` of the last step with captured routes.
        conversation: Sample with the newest conversation.
    """

    described: RunData
    step: int | None = None
    first_time: float = 0.0
    last_time: float = 0.0
    tokens_per_second: float | None = None
    series: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    routing: Mapping[str, float] = field(default_factory=dict)
    num_wrong_steps: int = 0
    load: ExpertLoadHistory | None = None
    conversation: ShownSample | None = None
    episodes: Sequence[Episodes] = ()
    notes: Sequence[str] = ()
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_STEPS_OF_A_PACE + 1))

    @property
    def seconds_per_step(self) -> float | None:
        """Median duration of the last 20 steps, in seconds. None at the first step."""
        paces = [
            (end - start) / (last - first) for (first, start), (last, end) in pairwise(self.recent) if last > first
        ]
        return max(0.0, median(paces)) if paces else None


class RunWatcher:
    def __init__(self, folder: Path):
        self._folder = folder
        self._begin()

    def look(self) -> WatchedRun:
        """Read the new records and return the state of the run."""
        # A run writes a step's anomalies and failures before its metrics.
        new, wrong, failed = self._metrics.read(), self._anomalies.read(), self._failures.read()
        if new.begins_anew or wrong.begins_anew or failed.begins_anew:
            self._begin()
            new, wrong, failed = self._metrics.read(), self._anomalies.read(), self._failures.read()
        if self.run.step is None:
            # A run writes its configuration before its first step.
            self._describe()
        damaged_lines = {
            METRICS_FILE_NAME: new.num_damaged,
            ANOMALIES_FILE_NAME: wrong.num_damaged,
            FAILURES_FILE_NAME: failed.num_damaged,
        }
        self._num_damaged.update(damaged_lines)
        for step, failures in by_step(failed.records).items():
            self._waiting.setdefault(step, []).extend(failures)
        self._update(new.records)
        # A run writes samples after the metrics of their step.
        self.run.conversation = self._conversation.read()
        self._update_capture(new.records, by_step(wrong.records))
        self.run.episodes = episodes_of([*self._standing, *self._tracker.findings])
        damaged = [f"{name}: lines that are no records: {number}" for name, number in (+self._num_damaged).items()]
        self.run.notes = [*self.run.described.notes, *damaged, *self._load.problems]
        return self.run

    def _begin(self) -> None:
        self._metrics = MetricsTail(self._folder / METRICS_FILE_NAME)
        self._anomalies, self._last_capture_step = AnomaliesTail(self._folder), -1
        self._failures, self._waiting = FailuresTail(self._folder), dict[int, list[FailedResponses]]()
        self._load, self._unobserved = ExpertLoadTail(self._folder), deque[StepRecord]()
        self._conversation = NewestConversation(self._folder)
        self._series: MetricHistory = {}
        self._num_damaged: Counter[str] = Counter()
        self.run = WatchedRun(RunData(self._folder, {}, None), series=self._series)

    def _describe(self) -> None:
        self.run.described = described = describe_run(self._folder)
        self._tracker = FindingTracker(thresholds_of(described.config), described.topk)
        self._standing = findings_of(described)

    def _update(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._add(record)
        self._unobserved.extend(records)
        load = None if self.run.step is None else self._load.read(self.run.step)
        counts, layers = ({}, []) if load is None else (load.by_step(), load.layers.tolist())
        if load is not None:
            # A copy, so that the counts of earlier steps do not stay in memory.
            self.run.load = ExpertLoadHistory(load.steps[-1:], load.layers, load.counts[-1:].copy())
        while self._unobserved and not self._awaits_load(self._unobserved[0]):
            record = self._unobserved.popleft()
            failed = self._waiting.pop(record.step, ())
            if failed or any(key.startswith("train/") for key in record.metrics):
                self._tracker.observe(record.step, record.metrics, layers, counts.get(record.step), failed)

    def _awaits_load(self, record: StepRecord) -> bool:
        """Return whether a step's loads may still be written, because the loads of short steps are written together."""
        if self.run.load is None or record.step <= self.run.load.steps[-1]:
            return False
        return time.time() - record.time < 2 * MAX_DELAY_S

    def _update_capture(self, records: Sequence[StepRecord], wrong: Mapping[int, Sequence[RoutingAnomaly]]) -> None:
        """Observe the captures of new steps. The last step may have no metrics, because its anomalies ended the run."""
        with_capture = {record.step for record in records if ANOMALIES in record.metrics}
        for step in sorted(with_capture | wrong.keys()):
            if step > self._last_capture_step:
                self._last_capture_step = step
                self.run.num_wrong_steps += step in wrong
                self._tracker.observe_anomalies(step, wrong.get(step, ()))

    def _add(self, record: StepRecord) -> None:
        self.run.step = record.step
        self.run.first_time = self.run.first_time if self.run.recent else record.time
        self.run.last_time = record.time
        self.run.recent.append((record.step, record.time))
        for key in SHOWN_METRICS.keys() & record.metrics.keys():
            self._series.setdefault(key, []).append((record.step, record.metrics[key]))
        if ANOMALIES in record.metrics:
            self.run.routing = {key: record.metrics[key] for key in ROUTING_METRICS if key in record.metrics}
        self.run.tokens_per_second = record.metrics.get(_SPEED_KEY, self.run.tokens_per_second)
