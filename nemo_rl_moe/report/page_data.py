# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a page knows of the runs: texts as JSON, numbers as packed arrays, within a budget of bytes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.report.arrays import ArrayPool, narrowest
from nemo_rl_moe.report.charts import charts_of
from nemo_rl_moe.report.configuration import configuration_rows
from nemo_rl_moe.report.load_view import load_view, view_bytes
from nemo_rl_moe.report.run_findings import episodes_of, findings_of, thresholds_of
from nemo_rl_moe.run_folder.run_data import ExpertLoadHistory, RunData, Series
from nemo_rl_moe.run_folder.samples import LONGEST_TEXT, evenly_spaced, read_samples, shortened, thinned

_POINTS = ((2000, 2000), (2000, 500), (1000, 250), (1000, 120), (600, 60), (300, 30), (150, 15), (75, 6))
"""How many points the metrics of the charts keep, and how many the others: the first pair that fits."""
_LATEST = (
    ("train/reward", "reward"),
    ("val/accuracy", "validation accuracy"),
    ("train/loss", "loss"),
    ("train/moe/cv_excess_mean", "cv beyond chance"),
    ("train/moe/avg_overload_factor", "overload"),
    ("train/moe/dead_expert_frac_mean", "share of dead experts"),
)
_SHARE_OF_METRICS, _SHARE_OF_SAMPLES, _SHARE_OF_VIEWS = 0.35, 0.15, 0.25
_LENGTHS = (LONGEST_TEXT, 1000, 500, 200, 80, 30)
"""How many characters the texts of samples keep: the first number that fits."""
_FRAMES_TO_MEASURE, _MOST_TRIES = 8, 12
_MARKUP = {ord(character): f"\\u{ord(character):04x}" for character in "&<>\u2028\u2029"}


@dataclass(frozen=True)
class PageData:
    """What goes into the page.

    Attributes:
        title: Of the page.
        text: The JSON document.
        blobs: Packed arrays by the name that the document gives them.
        num_findings: Of each run.
    """

    title: str
    text: str
    blobs: Mapping[str, str]
    num_findings: list[int]


def page_data(runs: Sequence[RunData], budget: int) -> PageData:
    """Chooses what fits.

    Args:
        runs: One or more.
        budget: Bytes that the document and its arrays may take together, as far as that can be helped.
    """
    names = _names(runs)
    keys = sorted({key for run in runs for key in run.metrics})
    charts = charts_of(keys)
    described = [_described(run, name) for run, name in zip(runs, names, strict=True)]
    _fit_samples(described, int(budget * _SHARE_OF_SAMPLES))
    blobs = {}
    loads = ArrayPool("loads")
    wanted = sum(view_bytes(run.expert_load) for run in runs if run.expert_load is not None)
    share = _SHARE_OF_VIEWS * budget / max(wanted, 1)
    for run, of_run in zip(runs, described, strict=True):
        if run.expert_load is not None:
            of_run["load"] = load_view(run.expert_load, run.topk, run.expert_parallel_size, loads, share)
    blobs["loads"] = loads.encoded()
    metrics, blobs["metrics"] = _metrics(runs, {line["key"] for chart in charts for line in chart["lines"]}, budget)
    for of_run, metrics_of_run in zip(described, metrics, strict=True):
        of_run["metrics"] = metrics_of_run
    document = {"runs": described, "charts": charts, "keys": keys, "configuration": configuration_rows(runs)}
    rest = budget - sum(map(len, blobs.values())) - _num_bytes(document)
    with_load = [(run.expert_load, of_run) for run, of_run in zip(runs, described, strict=True) if run.expert_load]
    # What a small run leaves of its share is for the others.
    with_load.sort(key=lambda one: one[0].counts.size)
    for number, (load, of_run) in enumerate(with_load):
        name = f"counts-{number}"
        of_run["load"]["frames"], blobs[name] = _frames(load, rest // (len(with_load) - number), name)
        rest -= len(blobs[name])
    title = " and ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    return PageData(title, _as_text(document), blobs, [len(run["findings"]) for run in described])


def _described(run: RunData, name: str) -> dict[str, Any]:
    thresholds = thresholds_of(run.config)
    notes = list(run.notes)
    samples = read_samples(run.folder, notes)
    return {
        "name": name,
        "folder": str(run.folder),
        "algorithm": run.algorithm,
        "last_step": run.last_step,
        "planned_steps": run.planned_steps,
        "thresholds": asdict(thresholds),
        "findings": [
            {**asdict(found.latest), "number": found.number, "began_first": found.first_step}
            for found in episodes_of(findings_of(run, thresholds))
        ],
        "samples": samples,
        "load": None,
        "latest": [
            {"label": label, "value": f"{run.metrics[key].values[-1]:.4g}"}
            for key, label in _LATEST
            if key in run.metrics
        ],
        "notes": notes,
    }


def _fit_samples(described: Sequence[dict[str, Any]], budget: int) -> None:
    """Cuts the samples' texts, and leaves all out where that is not enough."""
    whole = [of_run["samples"] for of_run in described]
    for length in _LENGTHS:
        for of_run, samples in zip(described, whole, strict=True):
            of_run["samples"] = shortened(samples, length)
        if _num_bytes([of_run["samples"] for of_run in described]) <= budget:
            return
    for of_run in described:
        if of_run["samples"]:
            of_run["samples"] = []
            of_run["notes"].append("samples: left out, they need more space than this page has for them")


def _metrics(runs: Sequence[RunData], charted: set[str], budget: int) -> tuple[list[dict[str, Any]], str]:
    """The metrics of each run, with as many points as fit."""
    for points, points_of_others in _POINTS:
        pool = ArrayPool("metrics")
        found = [
            {
                key: _packed(series, points if key in charted else points_of_others, pool)
                for key, series in run.metrics.items()
            }
            for run in runs
        ]
        blob = pool.encoded()
        if len(blob) <= budget * _SHARE_OF_METRICS:
            break
    return found, blob


def _packed(series: Series, most: int, pool: ArrayPool) -> dict[str, Any]:
    kept = thinned(series, most)
    values: NDArray[Any]
    with np.errstate(over="ignore"):
        values = kept.values.astype(np.float32)
    if np.isinf(values).sum() > np.isinf(kept.values).sum():
        # What is too large for 4 bytes is not infinite.
        values = kept.values
    return {"steps": pool.add(kept.steps.astype(np.int32)), "values": pool.add(values), "number": len(series.steps)}


def _frames(load: ExpertLoadHistory, budget: int, name: str) -> tuple[dict[str, Any], str]:
    """The loads of as many steps as fit, evenly spaced; of the last step at least."""
    number = len(load.steps)
    found, fitting, too_many = _packed_frames(load, 1, name), 1, number + 1
    tried = min(number, _FRAMES_TO_MEASURE)
    for _ in range(_MOST_TRIES):
        if not fitting < tried < too_many:
            break
        frames, blob = _packed_frames(load, tried, name)
        # The next try aims at a little less than the budget.
        aim = int(tried * budget * 0.98 / len(blob))
        if len(blob) <= budget:
            found, fitting = (frames, blob), tried
            if tried >= aim * 0.9:
                break
        else:
            too_many = tried
        # Bytes of a step depend on which steps are chosen, and aims may mislead: then half way between.
        aim = min(aim, number)
        tried = aim if fitting < aim < too_many else (fitting + too_many) // 2
    return found


def _packed_frames(load: ExpertLoadHistory, most: int, name: str) -> tuple[dict[str, Any], str]:
    chosen = evenly_spaced(len(load.steps), most)
    pool = ArrayPool(name)
    frames = {
        "steps": pool.add(load.steps[chosen].astype(np.int32)),
        "counts": pool.add(narrowest(load.counts[chosen])),
    }
    return frames, pool.encoded()


def _names(runs: Sequence[RunData]) -> list[str]:
    """The ends of the folders' paths, as long as tells them apart; a folder that comes again has a number."""
    paths = [run.folder.resolve().parts for run in runs]
    length = 2
    while length < max(map(len, paths)) and len({path[-length:] for path in paths}) < len(set(paths)):
        length += 1
    names = ["/".join(path[-length:]) for path in paths]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: position + 1].count(name)})"
        for position, name in enumerate(names)
    ]


def _as_text(value: Any) -> str:
    """JSON in which nothing can end the block of a page that it stands in; all of it can be written as UTF-8."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode("utf-8").translate(_MARKUP)


def _num_bytes(value: Any) -> int:
    return len(_as_text(value).encode())
