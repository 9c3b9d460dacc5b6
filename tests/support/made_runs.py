# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs' folders written by the writers that runs use, reports of made captures, and overload factors of counts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly
from nemo_rl_moe.routing.agreement.statistics import AgreementStatistics, RoutingReport, agreement_metrics
from nemo_rl_moe.routing.findings.reward_signal import FailedResponses
from nemo_rl_moe.routing.findings.tracker import Thresholds
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.routing.metrics.overload_factor import (
    OverloadSums,
    PredictedOverload,
    StageEvents,
    cumulative_peak_ratios,
    overload_metrics,
    overload_sums,
    predictions,
    rank_loads,
)
from nemo_rl_moe.routing.metrics.routing_advantage import AdvantageScores
from nemo_rl_moe.routing.replay import UNKNOWN, ReplayRoutes, RoutedTokens
from nemo_rl_moe.runs.folder.advantages import AdvantageWriter
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadWriter
from nemo_rl_moe.runs.folder.failures import FailureWriter
from nemo_rl_moe.runs.folder.metrics import JsonlLogger
from nemo_rl_moe.runs.folder.routing import RoutingWriter

NUM_EXPERTS, TOPK = 8, 2
THRESHOLDS = Thresholds(dead_expert_steps=3, excess_cv=0.5, overload_factor=1.5, sustained_steps=2)


def random_counts(
    num_steps: int, num_layers: int, num_experts: int, num_tokens: int, topk: int = TOPK, seed: int = 0
) -> NDArray[np.int64]:
    """Count `[steps, layers, experts]` of a router that sends each token to `topk` experts at random."""
    generator = np.random.default_rng(seed)
    scores = generator.random((num_steps, num_layers, num_tokens, num_experts))
    chosen = scores.argpartition(topk - 1, axis=-1)[..., :topk]
    return np.stack([(chosen == expert).sum((-1, -2)) for expert in range(num_experts)], axis=-1)


def routing_report_metrics(report: RoutingReport | None) -> dict[str, float]:
    """Return the metrics of a capture as a run logs them; none without one."""
    return {} if report is None else {f"train/moe/{name}": value for name, value in report.metrics.items()}


def make_run(
    folder: Path,
    metrics: Mapping[int, Mapping[str, float]],
    counts: NDArray[np.int64] | None = None,
    *,
    layers: Sequence[int] | None = None,
    config: Mapping[str, Any] | None = None,
    in_force: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    captures: Mapping[int, RoutingReport] | None = None,
    scores: Mapping[int, AdvantageScores] | None = None,
    image_counts: NDArray[np.int64] | None = None,
    failures: Mapping[int, Sequence[FailedResponses]] | None = None,
) -> Path:
    """Write a run's folder.

    Args:
        folder: Is made.
        metrics: Step to metrics; those of a step's capture are added.
        counts: Loads of the steps 1, 2, ...
        layers: Index of each layer in the model; None: from 0.
        config: The resolved configuration.
        in_force: The router settings that were in force; None: `moe_router_topk` is 2.
        samples: Lines of `samples.jsonl`.
        captures: Step to the report of its capture; a step without metrics has none of them.
        scores: Step to its scores of experts by advantage.
        image_counts: What image tokens are of the loads; None: of a model of text.
        failures: Step to its responses that could not be scored.
    """
    folder.mkdir(parents=True)
    logger = JsonlLogger(folder, print, print)
    routing = RoutingWriter(folder, print)
    for step, report in (captures or {}).items():
        routing.write(step, report)
    routing.close()
    advantages = AdvantageWriter(folder, print)
    for step, found in (scores or {}).items():
        advantages.write(step, found)
    advantages.close()
    failed = FailureWriter(folder, print, print)
    for step, of_step in (failures or {}).items():
        for each in of_step:
            failed.write(step, each)
    failed.close()
    for step, values in metrics.items():
        logger.log_step(step, {**values, **routing_report_metrics((captures or {}).get(step))})
    logger.close()
    if counts is not None:
        writer = ExpertLoadWriter(folder, print)
        of_images = [None] * len(counts) if image_counts is None else list(map(torch.from_numpy, image_counts.copy()))
        for step, (of_step, images) in enumerate(zip(counts, of_images, strict=True), start=1):
            indices = tuple(layers or range(len(of_step)))
            writer.write(step, ExpertLoad(indices, torch.from_numpy(of_step.copy()), images))
        writer.close()
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config or {"sft": {"max_num_steps": 10}}), sort_keys=False))
    settings = {"moe_router_topk": TOPK} if in_force is None else dict(in_force)
    (folder / "effective_moe_configuration.json").write_text(json.dumps(settings))
    if samples:
        (folder / "samples.jsonl").write_text("".join(f"{json.dumps(sample)}\n" for sample in samples))
    return folder


def routing_report(
    differing: Sequence[int],
    *,
    num_tokens: int = 40,
    missing: Sequence[int] = (),
    zero: Sequence[int] = (),
    margins: Sequence[float] = (0.0005, 0.2),
    layers: Sequence[int] | None = None,
    replays: bool = False,
    anomalies: Sequence[RoutingAnomaly] = (),
) -> RoutingReport:
    """Return the report of a capture of one microbatch, whose last token was fed to no model.

    Args:
        differing: Number of the first tokens for which the router of each layer would choose otherwise.
        num_tokens: Tokens.
        missing: Number of the last tokens fed that each layer has no row of; none where it is shorter.
        zero: Number of those before them that have expert 0 alone.
        margins: Router margins, of the differing rows and of the others.
        layers: Indices of the layers; None: from 0.
        replays: Routers took the capture's experts.
        anomalies: What else is wrong.
    """
    fed = torch.arange(num_tokens) < num_tokens - 1
    chosen = torch.stack([torch.arange(num_tokens) % NUM_EXPERTS, (torch.arange(num_tokens) + 1) % NUM_EXPERTS], 1)
    capture = chosen[:, None].repeat(1, len(differing), 1).to(torch.int16)
    capture[~fed] = UNKNOWN
    seen = []
    for layer, number in enumerate(differing):
        end = num_tokens - 1 - (missing[layer] if layer < len(missing) else 0)
        capture[end : num_tokens - 1, layer] = UNKNOWN
        capture[end - (zero[layer] if layer < len(zero) else 0) : end, layer] = 0
        live = chosen.clone()
        live[:number] = (live[:number] + 2) % NUM_EXPERTS
        margin = torch.where(torch.arange(num_tokens) < number, *map(torch.tensor, margins))
        seen.append(RoutedTokens(live, chosen if replays else live, margin))
    statistics = AgreementStatistics(len(differing), NUM_EXPERTS, torch.device("cpu"))
    statistics.add(0, torch.arange(len(differing)), ReplayRoutes.of(capture, NUM_EXPERTS), fed, seen)
    indices = tuple(layers if layers is not None else range(len(differing)))
    totals = statistics.reduced()
    metrics = agreement_metrics(totals, indices, per_layer=True) | {"routing/anomalies": float(len(anomalies))}
    return RoutingReport(indices, totals, metrics, tuple(anomalies))


def summarise_overload(
    counts_DMLE: Tensor,
    expert_parallel_size: int,
    layer_indices: Sequence[int],
    stage_events: Sequence[StageEvents] = (),
    *,
    per_layer: bool = False,
) -> dict[str, float]:
    loads = rank_loads(counts_DMLE, expert_parallel_size)
    peaks = [float(cumulative_peak_ratios(loads, stage).amax()) for stage in stage_events]
    sums = _sums_of_all(counts_DMLE, [expert_parallel_size], expert_parallel_size)
    return overload_metrics(sums, layer_indices, max(peaks, default=None), per_layer=per_layer)


def predict_overload(
    counts_DMLE: Tensor, expert_parallel_sizes: Sequence[int], *, recorded_expert_parallel_size: int = 1
) -> dict[int, PredictedOverload]:
    sums = _sums_of_all(counts_DMLE, expert_parallel_sizes, recorded_expert_parallel_size)
    return dict(zip(expert_parallel_sizes, predictions(sums), strict=True))


def _sums_of_all(counts_DMLE: Tensor, sizes: Sequence[int], recorded_size: int) -> OverloadSums:
    _, num_microbatches, num_layers, _ = counts_DMLE.shape
    places = torch.arange(num_microbatches * num_layers)
    return overload_sums(counts_DMLE.flatten(1, 2), places, (num_microbatches, num_layers), sizes, recorded_size)
