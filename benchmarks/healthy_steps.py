# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Large numbers of healthy steps, made from the captures and live routes of real runs, for all checks.

A simulated step samples its sequences, with replacement, from one recorded step, in neighbouring pairs like responses
to one prompt. From one simulated step to the next, the recorded one moves by at most one, so that changes over a run
occur here too. After the routers, everything is the code of a run: the agreement statistics, the counts of repeated
rows and of ranks, the sample's identity, the metrics, the alerts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_rl_moe.config.schema_run import AlertsConfig
from nemo_rl_moe.routing.agreement.rank_rows import rows_by_rank
from nemo_rl_moe.routing.agreement.repeated_rows import RepeatedRows
from nemo_rl_moe.routing.agreement.replayed_passes import ReplayedPass
from nemo_rl_moe.routing.agreement.report import CheckTotals, routing_report
from nemo_rl_moe.routing.agreement.route_identity import RouteSample, RoutingAnomaly
from nemo_rl_moe.routing.agreement.statistics import AgreementStatistics, AgreementTotals
from nemo_rl_moe.routing.metrics.load_arrays import overload_of_steps
from nemo_rl_moe.routing.replay import ReplayRoutes, RoutedTokens, in_planes
from nemo_rl_moe.runs.loggers.alerts import AlertWatch

NUM_RANKS, SAMPLED, WINDOW = 2, 2, 48
STEPS_A_RUN = 100
CPU = torch.device("cpu")


def record_steps(trainer: Any, rank: int, folder: Path) -> None:
    """Make a worker save capture and live routes of each training pass, in one file per step.

    Arrays `capture` and `live` are `[sequences, tokens, moe_layers, topk]`, `margin` is `[sequences, tokens,
    moe_layers]`, and `lengths` has the number of tokens of each sequence that were fed to the sampling model.
    """
    hooks, parts = trainer._hooks, list[Any]()
    wait, train = hooks._wait, trainer.train

    def recording(chunk: int, microbatch: Any, found: ReplayedPass) -> None:
        # Before small microbatches are joined, so there is one pass for each.
        chosen = np.stack([of_layer.live.numpy() for of_layer in found.seen], 1).astype(np.int16)
        margin = np.stack([of_layer.margin.numpy() for of_layer in found.seen if of_layer.margin is not None], 1)
        parts.append(
            (found.routes.planes.permute(2, 1, 0).numpy(), chosen, margin.astype(np.float16), found.fed.numpy())
        )
        wait(chunk, microbatch, found)

    def training(shards: Sequence[Any], loss_function: Any) -> Any:
        parts.clear()
        result = train(shards, loss_function)
        batches = [batch for shard in shards for batch in shard.microbatches]
        rows: dict[str, list[np.ndarray]] = {"capture": [], "live": [], "margin": [], "fed": []}
        for batch, part in zip(batches, parts, strict=True):
            for name, values in zip(rows, part, strict=True):
                # Routers see all sequences of a column, then of the next column.
                rows[name].append(values.reshape(-1, len(batch), *values.shape[1:]).swapaxes(0, 1))
        longest = max(values.shape[1] for values in rows["capture"])
        fills = {"capture": -1, "live": 0, "margin": 0, "fed": False}
        arrays: dict[str, Any] = {
            name: np.concatenate([_padded(values, longest, fills[name]) for values in of_kind])
            for name, of_kind in rows.items()
        }
        lengths = arrays.pop("fed").sum(1)
        number = len(list(folder.glob(f"*_rank_{rank}.npz"))) + 1
        arrays["lengths"] = lengths
        np.savez(folder / f"step_{number:04d}_rank_{rank}.npz", **arrays)
        return result

    hooks._wait = recording
    replace_train(trainer, training)


def replace_train(trainer: Any, train: Callable[..., Any]) -> None:
    """Replace a rank's `train` on its class, by which the driver calls it."""
    type(trainer).train = lambda _, *args: train(*args)


def _padded(values: np.ndarray, longest: int, fill: float) -> np.ndarray:
    widths = [(0, 0), (0, longest - values.shape[1]), *[(0, 0)] * (values.ndim - 2)]
    return np.pad(values, widths, constant_values=fill)


@dataclass(frozen=True)
class Recorded:
    """Sequences of one recorded step, of all ranks.

    Attributes:
        arrays: `capture`, `live`, `margin` and `lengths` of `record_steps`.
    """

    arrays: Mapping[str, np.ndarray]

    def sampled(self, places: np.ndarray) -> dict[str, torch.Tensor]:
        """Return some of the sequences."""
        return {name: torch.from_numpy(values[places]) for name, values in self.arrays.items()}


def read_steps(folder: Path) -> list[Recorded]:
    """Read the steps that workers recorded."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("step_*.npz")):
        files.setdefault(path.name.split("_rank_")[0], []).append(path)
    return [Recorded(_joined([dict(np.load(path)) for path in of_step])) for of_step in files.values()]


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    longest = max(part["capture"].shape[1] for part in parts)
    fills = {"capture": -1, "live": 0, "margin": 0}
    joined = {
        name: np.concatenate([_padded(part[name], longest, fill) for part in parts]) for name, fill in fills.items()
    }
    return joined | {"lengths": np.concatenate([part["lengths"] for part in parts])}


class HealthySteps:
    """Simulated steps of one recorded run.

    Args:
        is_exact: Capture and live routes have the same weights in float32.
    """

    def __init__(
        self,
        recorded: Sequence[Recorded],
        num_experts: int,
        alerts: AlertsConfig,
        *,
        is_exact: bool,
    ):
        *_, num_layers, self._topk = recorded[0].arrays["capture"].shape
        self._recorded, self._num_experts, self._layers = recorded, num_experts, tuple(range(num_layers))
        self._alerts, self._is_exact = alerts, is_exact
        self.agreements: list[float] = []
        """Live agreement of each step."""

    def alarms(self, num_steps: int, seed: int) -> list[str]:
        """Return a line for each alarm of the checks, in runs of a hundred steps."""
        generator = np.random.default_rng(seed)
        said: list[str] = []
        for first in range(0, num_steps, STEPS_A_RUN):
            watch = AlertWatch(self._alerts, self._topk)
            place = int(generator.integers(len(self._recorded)))
            for step in range(1, min(STEPS_A_RUN, num_steps - first) + 1):
                place = int(np.clip(place + generator.integers(-1, 2), 0, len(self._recorded) - 1))
                metrics, counts, anomalies = self._step(self._recorded[place], generator)
                said += [anomaly.text for anomaly in anomalies]
                said += [alert.line for alert in watch.observe(step, metrics, self._layers, counts)]
        return said

    def _step(
        self, recorded: Recorded, generator: np.random.Generator
    ) -> tuple[dict[str, float], np.ndarray, list[RoutingAnomaly]]:
        size = len(recorded.arrays["lengths"])
        all_statistics, repeats, samples = [], torch.zeros(3, dtype=torch.long), []
        slots = None
        for rank in range(NUM_RANKS):
            first = generator.integers(size - 1, size=size // NUM_RANKS // 2)
            sampled = recorded.sampled(np.stack([first, first + 1], 1).reshape(-1))
            statistics = self._statistics(sampled)
            all_statistics.append(statistics)
            repeats += self._repeated(sampled)
            of_rank = rows_by_rank(statistics.rows, rank)
            slots = of_rank if slots is None else slots + of_rank
            samples.append(_sampled(sampled))
        assert slots is not None
        of_ranks = [statistics.reduced() for statistics in all_statistics]
        names = [field.name for field in fields(AgreementTotals)]
        totals = AgreementTotals(*(torch.stack([getattr(part, name) for part in of_ranks]).sum(0) for name in names))
        checked = CheckTotals(repeats, slots, num_ranks=NUM_RANKS, is_exact=self._is_exact)
        sample = RouteSample(*(np.concatenate([part[kind] for part in samples]) for kind in (0, 1)))
        layers = tuple(self._layers)
        report = routing_report(layers, totals, checked, sample, num_experts=self._num_experts, per_layer=False)
        metrics, anomalies = report.metrics, list(report.anomalies)
        self.agreements.append(metrics["routing/live_agreement"])
        counts = totals.live_experts.numpy()
        overload = float(overload_of_steps(counts, NUM_RANKS).mean())
        named = {f"train/moe/{name}": value for name, value in metrics.items()}
        return named | {"train/moe/avg_overload_factor": overload}, counts, anomalies

    def _statistics(self, sampled: Mapping[str, torch.Tensor]) -> AgreementStatistics:
        statistics = AgreementStatistics(len(self._layers), self._num_experts, CPU)
        capture, live, margin = (_in_router_order(sampled[name]) for name in ("capture", "live", "margin"))
        seen = [
            RoutedTokens(live[:, layer].long(), live[:, layer].long(), margin[:, layer].float())
            for layer in range(len(self._layers))
        ]
        routes = ReplayRoutes.of(capture, self._num_experts)
        statistics.add(0, torch.arange(len(self._layers)), routes, _in_router_order(_fed(sampled)), seen)
        return statistics

    def _repeated(self, sampled: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = RepeatedRows(CPU)
        capture, live = (_in_router_order(sampled[name]) for name in ("capture", "live"))
        distance = len(sampled["lengths"])
        follows = torch.arange(len(capture)) >= distance
        routes = ReplayRoutes.of(capture, self._num_experts)
        rows.add(routes, in_planes(live, self._num_experts), _in_router_order(_fed(sampled)), distance, follows)
        return rows.counts


def _fed(sampled: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.arange(sampled["capture"].shape[1]) < sampled["lengths"][:, None]


def _in_router_order(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(0, 1).flatten(0, 1)


def _sampled(sampled: Mapping[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the capture and live routes of a rank's sample, like in a run: last tokens of the first sequences."""
    shape = (SAMPLED, WINDOW, *sampled["capture"].shape[2:])
    found = []
    for name in ("capture", "live"):
        sample = np.full(shape, -1, dtype=np.int32)
        for row, length in enumerate(sampled["lengths"][:SAMPLED].tolist()):
            last = sampled[name][row, max(0, length - WINDOW) : length].numpy()
            sample[row, : len(last)] = last
        found.append(sample)
    return found[0], found[1]
