# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL's traces of router replay (`NRL_R3_TRACE=1`): whether the routes of the rollout reached the routers.

Layout of the main branch of August 2026, `nemo_rl/utils/r3_trace.py`: each process writes
`r3_trace_{host}_pid{pid}.jsonl` with one event per line. An event has digests (SHA-256) of routes and token ids, but no
routes. The events: the rollout sent routes (`rollout_payload_sample`), a stage of training fetched routes
(`tq_fetch_sample`), a layer was assigned routes (`router_replay_assignment`), a layer replayed its routes
(`router_replay_action`), and (only with `NRL_R3_TRACE_VERIFY_FORWARD=1`) a router took experts
(`router_replay_forward_verify`).
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import DataError, counted
from nemo_rl_moe.routing.audit.summary import JSON_LAYOUT

PATTERN = "r3_trace_*.jsonl"
_STAGES = {"prev_lp": "prev-logprob", "train": "train"}
"""Name of a stage of training in events of fetching -> its name in events of replay."""
_MOST_FALLBACK, _MOST_NAMED = 0.001, 8
Event = Mapping[str, Any]


@dataclass(frozen=True)
class R3Trace:
    """Events of a run's router replay, by the name of the event.

    Attributes:
        unread: Files and lines that are not events, such as an unfinished last line.
    """

    path: Path
    events: Mapping[str, Sequence[Event]]
    unread: Sequence[str] = field(default_factory=list)


def trace_files(path: Path) -> list[Path]:
    """Return the files of the trace at a path. Empty if there is no trace."""
    if path.is_file():
        return [path] if path.match(PATTERN) else []
    return sorted(path.glob(PATTERN)) if path.is_dir() else []


def read_trace(path: Path) -> R3Trace:
    """Return the trace in the files of all processes.

    Raises:
        DataError: The files contain no event.
    """
    events: dict[str, list[Event]] = defaultdict(list)
    unread = []
    for file in trace_files(path):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            unread.append(f"{file.name}: {error.strerror}")
            continue
        for number, line in enumerate(lines, start=1):
            try:
                event = json.loads(line) if line.strip() else {}
            except ValueError:
                event = None
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events[event["event"]].append(event)
            elif event != {}:
                unread.append(f"{file.name}: line {number}")
    if not events:
        raise DataError(f"{path}: holds no event of a trace of router replay")
    return R3Trace(path, events, unread)


def lines_of_trace(trace: R3Trace) -> list[str]:
    """Return the numbers of events, and unread lines, as text."""
    counts = {name: len(found) for name, found in trace.events.items()}
    lines = [f"{trace.path}: trace of NeMo-RL's router replay, {counted(sum(counts.values()), 'event')}"]
    lines += [f"  {name:38}{count:>12,}" for name, count in sorted(counts.items())]
    if not trace.events.get("router_replay_forward_verify"):
        lines.append("note: the experts that routers took are not traced; NRL_R3_TRACE_VERIFY_FORWARD=1 records them")
    if trace.unread:
        lines.append(f"note: not read: {_named(trace.unread)}")
    lines.append(counted(len(problems_of_trace(trace)), "finding", zero="no"))
    return lines


def problems_of_trace(trace: R3Trace) -> list[str]:
    """Return a line for each fault of the router replay."""
    return [*_transport(trace), *_replay(trace), *_verified(trace)]


def trace_json(trace: R3Trace) -> dict[str, Any]:
    """Convert a trace to JSON, with the same keys as other audits."""
    return {
        **JSON_LAYOUT,
        "capture": str(trace.path),
        "problems": problems_of_trace(trace),
        "events": {name: len(found) for name, found in sorted(trace.events.items())},
        "notices": [f"not read: {text}" for text in trace.unread],
        "findings": [
            {"side": "replay", "kind": "replay_trace", "layer": None, "text": text} for text in problems_of_trace(trace)
        ],
        "steps": [],
    }


def _transport(trace: R3Trace) -> Iterator[str]:
    """Yield a line for each difference between the routes sent by the rollout and the routes fetched by training."""
    sent: dict[str, Event] = {}
    for event in trace.events.get("rollout_payload_sample", ()):
        sent.setdefault(str(event.get("key")), event)
    fetched: dict[str, dict[str, list[Event]]] = {stage: defaultdict(list) for stage in _STAGES}
    for event in trace.events.get("tq_fetch_sample", ()):
        fetched.setdefault(str(event.get("stage")), defaultdict(list))[str(event.get("key"))].append(event)
    if not sent:
        if trace.events.get("tq_fetch_sample"):
            yield "training fetched routes, but the trace has no routes that a rollout sent"
        return
    for stage, by_key in fetched.items():
        for name, what in (("routed_experts", "routes"), ("input_ids", "token ids")):
            others = [key for key in sent if any(_digest(e, name) != _digest(sent[key], name) for e in by_key[key])]
            if others:
                yield (
                    f"stage {stage}: the {what} of {len(others)} of {counted(len(sent), 'sequence')} are not those"
                    f" that the rollout sent: {_named(others)}"
                )
        missing = [key for key in sent if not by_key[key]]
        if missing and any(by_key.values()):
            number = f"{len(missing)} of {counted(len(sent), 'sequence')}"
            yield f"stage {stage}: {number} were not fetched: {_named(missing)}"
    zeros = [key for key, event in sent.items() if _is_zero(event)]
    if zeros:
        yield f"the routes of {counted(len(zeros), 'sequence')} begin with expert 0 alone: {_named(zeros)}"


def _digest(event: Event, name: str) -> str | None:
    found = event.get(name)
    return str(found.get("valid_sha256")) if isinstance(found, Mapping) else None


def _is_zero(event: Event) -> bool:
    found = event.get("routed_experts")
    preview = found.get("valid_preview") if isinstance(found, Mapping) else None
    return isinstance(preview, list) and len(preview) > 1 and not any(preview)


def _replay(trace: R3Trace) -> Iterator[str]:
    """Yield a line for each stage, and for the layers of a stage, that did not replay routes."""
    given, forward, backward = (defaultdict[str, set[Any]](set) for _ in range(3))
    for event in trace.events.get("router_replay_assignment", ()):
        given[str(event.get("stage"))].add(event.get("layer_number"))
    for event in trace.events.get("router_replay_action", ()):
        of_action = {"replay_forward": forward, "replay_backward": backward}.get(str(event.get("action")))
        if of_action is not None:
            of_action[str(event.get("stage"))].add(event.get("layer_number"))
    if not given and not forward:
        yield "no stage of training has replayed any routes"
        return
    for stage in _STAGES.values():
        if not given[stage] and not forward[stage]:
            yield f"stage {stage}: no layer has been given routes: its routers choose"
            continue
        for what, found in (
            ("used them forward", forward),
            *([("used them backward", backward)] if stage == "train" else []),
        ):
            # An action on all layers at once names no layer.
            idle = set() if None in found[stage] else given[stage] - found[stage]
            if idle:
                layers = sorted(layer for layer in idle if isinstance(layer, int))
                yield f"stage {stage}: layers {_named(list(map(str, layers)))} were given routes and have not {what}"
    if given["train"] and given["prev-logprob"] and given["train"] != given["prev-logprob"]:
        yield "the stages prev-logprob and train replay in different layers: their log-probabilities are not comparable"


def _verified(trace: R3Trace) -> Iterator[str]:
    wrong: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for event in trace.events.get("router_replay_forward_verify", ()):
        stage, layer = str(event.get("stage")), event.get("layer_number")
        if not event.get("matches_expected"):
            wrong[f"layer {layer} in {stage}"] += 1
        actual = event.get("actual")
        shape = actual.get("shape") if isinstance(actual, Mapping) else None
        rows[stage] += int(shape[0]) if isinstance(shape, list) and shape and isinstance(shape[0], int) else 0
        fallback = event.get("fallback_rows")
        own[stage] += fallback if isinstance(fallback, int) else 0
    if wrong:
        yield f"routers took other experts than they were given: {_named(list(wrong))}"
    for stage, number in own.items():
        if rows[stage] and number > _MOST_FALLBACK * rows[stage]:
            yield (
                f"stage {stage}: {number:,} of {rows[stage]:,} rows had no routes ({number / rows[stage]:.1%}): routers"
                " chose there"
            )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )
