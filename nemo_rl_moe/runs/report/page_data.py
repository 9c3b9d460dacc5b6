# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Data of a report about one or more runs: texts as JSON, numbers as packed arrays, within a budget of bytes."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_rl_moe.config.files import leaves
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadHistory
from nemo_rl_moe.runs.folder.run_data import RunData, Series
from nemo_rl_moe.runs.folder.saved_samples import LONGEST_TEXT, evenly_spaced, read_samples, shortened
from nemo_rl_moe.runs.folder.thumbnails import read_thumbnail
from nemo_rl_moe.runs.report.arrays import ArrayPool, narrowest, thinned
from nemo_rl_moe.runs.report.charts import SECTIONS, charts_of
from nemo_rl_moe.runs.report.load_view import load_view, modality_view
from nemo_rl_moe.runs.report.overlap import overlap_facts
from nemo_rl_moe.runs.report.routing_view import advantage_view, layer_tables, routing_view
from nemo_rl_moe.runs.report.run_findings import episodes_of, findings_of, thresholds_of
from nemo_rl_moe.runs.report.time_line_view import time_line_view

MOST_IMAGES = 48
"""Largest number of images in a report, for all runs together."""


def embedded_thumbnails(
    run_folder: Path, samples: Sequence[Mapping[str, Any]], most: int, budget: int, notes: list[str]
) -> dict[str, str]:
    """Return name -> PNG file in base64, within `budget` characters. Missing images are added to `notes`."""
    names = dict.fromkeys(name for sample in samples for name in sample.get("thumbnails", ()))
    found: dict[str, str] = {}
    problems: list[str] = []
    num_left_out = 0
    for name in names:
        try:
            text = base64.b64encode(read_thumbnail(run_folder, name)).decode("ascii")
        except DataError as error:
            problems += error.problems
            continue
        if len(found) < most and len(text) <= budget:
            found[name] = text
            budget -= len(text)
        else:
            num_left_out += 1
    if problems:
        notes.append(f"images of samples that cannot be shown: {len(problems)}, the first of them {problems[0]}")
    if num_left_out:
        notes.append(f"images of samples that are omitted: {num_left_out}; the page has room for {len(found)}")
    return found


_LATEST = (
    ("train/reward", "reward"),
    ("val/reward", "validation reward"),
    ("val/accuracy", "validation accuracy"),
    ("train/loss", "loss"),
    ("train/teacher_kl", "divergence from the teacher"),
    ("train/critic/explained_variance", "explained variance of the critic"),
    ("train/moe/cv_excess_mean", "cv beyond chance"),
    ("train/moe/avg_overload_factor", "overload"),
    ("train/moe/dead_expert_frac_mean", "share of dead experts"),
    ("train/moe/routing/live_agreement", "agreement with rollouts"),
)
_LEVELS_OF_DETAIL = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03)
_MOST_POINTS, _FEWEST_POINTS = 2000, 6
_FEWEST_CHARACTERS = 30
_SHARE_BESIDE_LOADS = 0.6
"""Largest share of the budget for everything except the loads of all experts, if the runs have loads."""
_SHARE_OF_IMAGES = 0.15
"""Largest share of the budget for thumbnails of samples."""
_STEPS_TO_MEASURE = 8
_BYTES_OF_FRAMES = 250  # size of a reference to loads in the document
_LONGEST_SETTING = 2000
_WITHOUT_LOAD = (
    "The load of the experts is not known: policy.megatron_cfg.track_moe_metrics was off, or the model is dense."
)
_MARKUP = {ord(character): f"\\u{ord(character):04x}" for character in "&<>\u2028\u2029"}


@dataclass(frozen=True)
class PageWords:
    """Texts of a page that depend on its subject."""

    heading: str
    without_load: str


@dataclass(frozen=True)
class PageData:
    title: str
    text: str
    blobs: Mapping[str, str]
    num_findings: list[int]


def page_data(runs: Sequence[RunData], budget: int, words: PageWords | None = None) -> PageData:
    """Return the data of the page, with as much detail as fits into `budget` bytes."""
    words = words or PageWords("Runs compared" if len(runs) > 1 else "Report of a run", _WITHOUT_LOAD)
    names = _names(runs)
    keys = sorted({key for run in runs for key in run.metrics})
    charts = charts_of(keys)
    charted = {line["key"] for chart in charts for line in chart["lines"]}
    described = [_described(run, name) for run, name in zip(runs, names, strict=True)]
    _add_thumbnails(runs, described, int(budget * _SHARE_OF_IMAGES))
    document = {
        **asdict(words),
        "runs": described,
        "charts": charts,
        "routing_sections": [SECTIONS[name].heading for name in ("routing", "mismatch")],
        "modality_section": SECTIONS["modalities"].heading,
        "staleness_section": SECTIONS["staleness"].heading,
        "keys": keys,
        "configuration": configuration_rows(runs),
    }
    samples = [of_run["samples"] for of_run in described]
    with_load = sorted(
        ((run.expert_load, of_run) for run, of_run in zip(runs, described, strict=True) if run.expert_load),
        key=lambda one: one[0].counts.size,
    )
    limit = budget * (_SHARE_BESIDE_LOADS if with_load else 1)
    for detail in _LEVELS_OF_DETAIL:
        pool = ArrayPool("arrays")
        for run, of_run, whole in zip(runs, described, samples, strict=True):
            of_run["samples"] = shortened(whole, max(int(LONGEST_TEXT * detail), _FEWEST_CHARACTERS))
            of_run["metrics"] = {
                # Metrics without a chart lose points first.
                key: _packed(series, int(_MOST_POINTS * (detail if key in charted else detail**2)), pool)
                for key, series in run.metrics.items()
            }
            if run.minutes:
                of_run["minutes"] = _packed(run.minutes, len(run.minutes.steps), pool)
            if run.routing:
                of_run["routing"] = routing_view(run.routing, pool, detail)
            if run.advantages:
                of_run["advantages"] = advantage_view(run.advantages, pool, detail)
            if run.time_line:
                of_run["time_line"] = time_line_view(run.time_line, pool)
            if run.expert_load:
                of_run["modalities"] = modality_view(run.expert_load, run.topk, pool, detail)
                of_run["load"] = load_view(run.expert_load, run.topk, run.expert_parallel_size, pool, detail)
        blobs = {"arrays": pool.encoded()}
        rest = budget - len(blobs["arrays"]) - len(_as_text(document).encode()) - _BYTES_OF_FRAMES * len(with_load)
        if rest >= budget - limit:
            break
    # Larger runs get the bytes that smaller runs do not use.
    for number, (load, of_run) in enumerate(with_load):
        name = f"counts-{number}"
        of_run["load"]["frames"], blobs[name] = _frames(load, rest // (len(with_load) - number), name)
        rest -= len(blobs[name])
    title = " and ".join(names[:3]) + (" and others" if len(names) > 3 else "")
    return PageData(title, _as_text(document), blobs, [len(run["findings"]) for run in described])


def configuration_rows(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return a row for each setting: `key`, the `values` of the runs as text, and whether they `differ`. Router
    settings are last.
    """
    columns = [
        _as_texts(run.config) | {f"in force: {key}": value for key, value in _as_texts(run.moe_configuration).items()}
        for run in runs
    ]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = []
    for key in sorted(keys, key=lambda key: key.startswith("in force: ")):
        values = [column.get(key) for column in columns]
        rows.append({"key": key, "values": values, "differ": len(set(values)) > 1})
    return rows


def _as_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> setting. Strings are unchanged, and other values are JSON."""
    found = {}
    for key, value in leaves(settings):
        text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False, skipkeys=True)
        found[key] = text if len(text) <= _LONGEST_SETTING else f"{text[:_LONGEST_SETTING]} [...]"
    return found


def _described(run: RunData, name: str) -> dict[str, Any]:
    thresholds = thresholds_of(run.config)
    notes = list(run.notes)
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
        "samples": read_samples(run.folder, notes),
        "minutes": None,
        "load": None,
        "routing": None,
        "advantages": None,
        "modalities": None,
        "time_line": None,
        "layer_tables": layer_tables(run.metrics),
        "latest": [
            {"label": label, "value": f"{run.metrics[key].values[-1]:.4g}"}
            for key, label in _LATEST
            if key in run.metrics
        ]
        + [{"label": label, "value": value} for label, value in overlap_facts(run)],
        "notes": notes,
    }


def _add_thumbnails(runs: Sequence[RunData], described: Sequence[dict[str, Any]], budget: int) -> None:
    """Add the thumbnails of the samples to the runs' data. Each run gets an equal part of the budget."""
    most = max(MOST_IMAGES // len(runs), 1)
    for run, of_run in zip(runs, described, strict=True):
        of_run["thumbnails"] = embedded_thumbnails(
            run.folder, of_run["samples"], most, budget // len(runs), of_run["notes"]
        )


def _packed(series: Series, most: int, pool: ArrayPool) -> dict[str, Any]:
    kept = thinned(series, max(most, _FEWEST_POINTS))
    values: NDArray[Any]
    with np.errstate(over="ignore"):
        values = kept.values.astype(np.float32)
    if np.isinf(values).sum() > np.isinf(kept.values).sum():
        # A finite value beyond float32, such as the loss of a diverging run, stays finite.
        values = kept.values
    return {"steps": pool.add(kept.steps.astype(np.int32)), "values": pool.add(values), "number": len(series.steps)}


def _frames(load: ExpertLoadHistory, budget: int, name: str) -> tuple[dict[str, Any], str]:
    """Return the loads of as many evenly spaced steps as fit into the budget, but at least of the last step."""
    number = len(load.steps)
    measured = min(number, _STEPS_TO_MEASURE)
    _, blob = _packed_frames(load, measured, name)
    most = min(max(budget * measured // len(blob), 1), number)
    while True:
        frames, blob = _packed_frames(load, most, name)
        if len(blob) <= budget or most == 1:
            return frames, blob
        most = max(most * 19 // 20, 1)


def _packed_frames(load: ExpertLoadHistory, most: int, name: str) -> tuple[dict[str, Any], str]:
    chosen = evenly_spaced(len(load.steps), most)
    pool = ArrayPool(name)
    frames = {
        "steps": pool.add(load.steps[chosen].astype(np.int32)),
        "counts": pool.add(narrowest(load.counts[chosen])),
    }
    return frames, pool.encoded()


def _names(runs: Sequence[RunData]) -> list[str]:
    """Return a name for each run: its label, or the shortest distinct end of its path. Equal names are numbered."""
    paths = [run.folder.resolve().parts for run in runs]
    length = 2
    while length < max(map(len, paths)) and len({path[-length:] for path in paths}) < len(set(paths)):
        length += 1
    names = [run.label or "/".join(path[-length:]) for run, path in zip(runs, paths, strict=True)]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: position + 1].count(name)})"
        for position, name in enumerate(names)
    ]


def _as_text(value: Any) -> str:
    """Return JSON without lone surrogates, and without characters that could end the surrounding block of the page."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode("utf-8").translate(_MARKUP)
