# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Traces of NeMo-RL's router replay: a whole one has no finding, and each kind of failure is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.cli import main

LAYERS, KEYS = (1, 2, 3), ("a", "b", "c")
Event = dict[str, Any]


def payload(event: str, key: str, **more: Any) -> Event:
    """Digests of a sequence, as `_valid_sample_record` of NeMo-RL writes them."""
    routes = {"full_shape": [3, 16, 3, 2], "valid_shape": [12, 3, 2], "dtype": "torch.int32", "valid_sha256": f"r{key}"}
    ids = {"full_shape": [3, 16], "valid_shape": [12], "dtype": "torch.int64", "valid_sha256": f"i{key}"}
    return {
        "event": event,
        "trace_step": 1,
        "key": key,
        "valid_length": 12,
        "routed_experts": {**routes, "valid_preview": [3, 1, 0, 7]},
        "input_ids": {**ids, "valid_preview": [5, 6]},
        **more,
    }


def events() -> list[Event]:
    found = [payload("rollout_payload_sample", key) for key in KEYS]
    for stage, replays in (("prev_lp", "prev-logprob"), ("train", "train")):
        found += [payload("tq_fetch_sample", key, stage=stage, rank=0) for key in KEYS]
        for layer in LAYERS:
            of_layer = {"stage": replays, "trace_step": 1, "layer_number": layer, "rank": 0}
            tensor = {"shape": [36, 2], "dtype": "torch.int64", "sha256": "x", "preview": [3, 1]}
            found.append({**of_layer, "event": "router_replay_assignment", "payload_idx": layer - 1, "tensor": tensor})
            found.append({**of_layer, "event": "router_replay_action", "action": "replay_forward"})
            verified = {"matches_expected": True, "fallback_rows": 0, "actual": tensor, "action": "replay_forward"}
            found.append({**of_layer, "event": "router_replay_forward_verify", **verified})
            if stage == "train":
                found.append({**of_layer, "event": "router_replay_action", "action": "replay_backward"})
    return found


def written(folder: Path, found: list[Event]) -> Path:
    """Two processes' files."""
    for number in range(2):
        lines = [json.dumps({"time": 0.0, "host": "n", "pid": number, **event}) for event in found[number::2]]
        (folder / f"r3_trace_n_pid{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_a_whole_trace_has_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(written(tmp_path, events()))]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "trace of NeMo-RL's router replay" in printed.out
    assert printed.out.endswith("no findings\n")


def _other_routes(found: list[Event]) -> None:
    next(e for e in found if e.get("stage") == "train" and e.get("key") == "b")["routed_experts"]["valid_sha256"] = "?"


def _other_tokens(found: list[Event]) -> None:
    next(e for e in found if e.get("stage") == "prev_lp" and e.get("key") == "c")["input_ids"]["valid_sha256"] = "?"


def _not_fetched(found: list[Event]) -> None:
    found[:] = [e for e in found if (e["event"], e.get("key"), e.get("stage")) != ("tq_fetch_sample", "a", "train")]


def _no_replay(found: list[Event]) -> None:
    found[:] = [e for e in found if not e["event"].startswith("router_replay")]


def _no_replay_in_train(found: list[Event]) -> None:
    found[:] = [e for e in found if not (e["event"].startswith("router_replay") and e["stage"] == "train")]


def _idle_layer(found: list[Event]) -> None:
    found[:] = [e for e in found if not (e.get("action") == "replay_backward" and e.get("layer_number") == 2)]


def _other_experts(found: list[Event]) -> None:
    next(e for e in found if e["event"] == "router_replay_forward_verify")["matches_expected"] = False


def _own_choice(found: list[Event]) -> None:
    next(e for e in found if e["event"] == "router_replay_forward_verify")["fallback_rows"] = 30


def _zeros(found: list[Event]) -> None:
    found[0]["routed_experts"]["valid_preview"] = [0] * 16


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_other_routes, "stage train: the routes of 1 of 3 sequences are not those that the rollout sent: b"),
        (_other_tokens, "stage prev_lp: the token ids of 1 of 3 sequences are not those that the rollout sent: c"),
        (_not_fetched, "stage train: 1 of 3 sequences were not fetched: a"),
        (_no_replay, "no stage of training has replayed any routes"),
        (_no_replay_in_train, "stage train: no layer has been given routes: its routers choose"),
        (_idle_layer, "stage train: layers 2 were given routes and have not used them backward"),
        (_other_experts, "routers took other experts than they were given: layer 1 in prev-logprob"),
        (_own_choice, "stage prev-logprob: 30 of 108 rows had no routes (27.8%): routers chose there"),
        (_zeros, "the routes of 1 sequence begin with expert 0 alone: a"),
    ],
)
def test_each_failure_is_named(
    fault: Callable[[list[Event]], None], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = events()
    fault(found)
    assert main(["audit", str(written(tmp_path, found)), "--json", "-"]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"error: {tmp_path}: {text}\n"
    (audited,) = json.loads(printed.out)
    assert [finding["text"] for finding in audited["findings"]] == [text]


def test_a_line_that_is_being_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, events()) / "r3_trace_n_pid1.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"event": "rou', encoding="utf-8")
    assert main(["audit", str(tmp_path)]) == 0
    assert "note: not read: r3_trace_n_pid1.jsonl: line" in capsys.readouterr().out


def test_an_empty_trace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "r3_trace_n_pid1.jsonl").touch()
    assert main(["audit", str(tmp_path)]) == 2
