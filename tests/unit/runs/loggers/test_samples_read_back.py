# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in real TensorBoard files, W&B folders and MLflow stores: there once, at their step, and as text."""

import io
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_rl_moe.runs.folder.conversations import ConversationTurn
from nemo_rl_moe.runs.folder.sample_text import ShownSample
from nemo_rl_moe.runs.folder.samples import SavedTrajectory
from nemo_rl_moe.runs.loggers.console import ConsoleLogger, Notices
from nemo_rl_moe.runs.loggers.factory import build_loggers
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger, Patience
from nemo_rl_moe.runs.loggers.wandb_files import wandb_files, wandb_records
from tests.support.grpo_fakes import trajectory
from tests.support.loggers import ListBackend, read_jsonl, read_mlflow, read_wandb_offline, settings_for

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"
SHOWN = "<script>alert(1)</script>\\x1b[2J\\u202e"
TURNS = (
    ConversationTurn("user", "1+1?", 0, (0, 9)),
    ConversationTurn("assistant", HOSTILE, 0, (9, 20), is_sampled=True, is_trained=True),
    ConversationTurn("tool", "2", 0, (20, 30)),
)


def chosen(step: int, split: str, trajectories: Sequence[SavedTrajectory]) -> list[ShownSample]:
    turns = [TURNS, ()]
    return [
        ShownSample(step, split, f"f:{index}", "q", "a", "1", "right", turns=each) for index, each in enumerate(turns)
    ]


def log(folder: Path, *backends: str) -> str:
    stream = io.StringIO()
    settings = settings_for(folder.parent, *backends, plots_every=2)
    patience = Patience(most_plots_waiting=9, closing_s=90)
    with build_loggers(settings, folder, ConsoleLogger(4, stream=stream), None, patience) as loggers:
        for step in range(1, 5):
            for split in ("train", "val")[: 2 if step == 3 else 1]:
                loggers.log_samples(chosen, step, split, [trajectory()])
            loggers.log_step(step, {"train/loss": 1 / step})
    return stream.getvalue()


def test_tensorboard_has_them_as_text(run_folder: Path) -> None:
    assert "warning" not in log(run_folder, "tensorboard")
    events = EventAccumulator(str(run_folder / "tensorboard"))
    events.Reload()
    found = {
        tag: [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
        if tag.startswith("samples/")
    }
    assert {tag: [step for step, _ in of_tag] for tag, of_tag in found.items()} == {
        "samples/train": [1, 2, 4],
        "samples/val": [3],
    }
    text = found["samples/val"][0][1]
    # A block of Markdown that is indented is shown as it stands.
    assert all(line.startswith("    ") for line in text.splitlines())
    assert f"  * assistant  {SHOWN}" in text
    assert "f:1" not in text, "a prompt and a response are no conversation"


def test_wandb_has_them_as_tables_in_the_rows_of_their_steps(run_folder: Path) -> None:
    assert "warning" not in log(run_folder, "wandb")
    (file,) = wandb_files(run_folder / "wandb")
    rows = [{item.nested_key[0] for item in row.item} for row in wandb_records(file, "history")]
    tables = [sorted(key for key in row if key.startswith("samples/")) for row in rows]
    # Each in the row of its step, and none in a row of its own.
    assert tables == [["samples/train"], ["samples/train"], ["samples/val"], ["samples/train"]]
    (path,) = (run_folder / "wandb").rglob("media/table/samples/val_*.table.json")
    table = json.loads(path.read_text())
    assert [row[:4] for row in table["data"]] == [[3, "f:0", "1", "right"]]
    assert f"  * assistant  {SHOWN}" in table["data"][0][-1]
    assert read_wandb_offline(run_folder / "wandb") == read_jsonl(run_folder / "metrics.jsonl")


def test_mlflow_has_them_as_files(run_folder: Path) -> None:
    assert "warning" not in log(run_folder, "mlflow")
    files = sorted(run_folder.parent.parent.rglob("samples/*.txt"))
    assert [path.name for path in files] == [
        *(f"train_step_{step:06}.txt" for step in (1, 2, 4)),
        "val_step_000003.txt",
    ]
    assert f"  * assistant  {SHOWN}" in files[-1].read_text()
    (store,) = run_folder.parent.parent.glob("*.db")
    assert sqlite3.connect(store).execute("select count(*) from metrics").fetchone() == (4,)
    assert len(read_mlflow(f"sqlite:///{store}", "e")["train/loss"]) == 4


def test_a_backend_that_shows_none_is_left_alone() -> None:
    said: list[str] = []
    backend = ListBackend()
    logger = IsolatedLogger("x", backend.open, Notices(said.append, said.append))
    logger.log_samples(1, "val", chosen(1, "val", ()))
    logger.log_step(1, {"a": 1.0})
    logger.close()
    assert (backend.calls, said) == ([("step", 1)], [])
