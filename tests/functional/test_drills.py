# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A dozen drills over the kinds of runs, as `make drills` runs hundreds; and a run that restarts itself."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.functional import drill_records, drill_runs, drills, run_kills
from tests.functional.drill_faults import menu, plan
from tests.functional.drill_moments import last_step

NUM_DRILLS = 12
SEED = 1099
"""Of the first 3000 the one whose dozen has the most different victims, faults and phases."""
ASYNCHRONOUS_SEED = 851
"""Of one chain of four kills, of all victims and in four phases."""
CALLERS_SEED = 1011
"""Of two chains of four, each with kills of the main process and of a rank, and a pause of what calls."""
START_LIMIT_S = 400.0
END_LIMIT_S = 200.0
COMPLETION_LIMIT_S = 900.0


def long(test: Any) -> Any:
    """Marks a test that takes minutes."""
    for mark in (pytest.mark.slow, pytest.mark.drill, pytest.mark.timeout(1800)):
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drills")


@long
def test_a_dozen_drills_end_as_if_nothing_had_happened(output: Path) -> None:
    # Images would be a sixth unharmed run, for chains that are near to those of grpo.
    all_kinds = drill_runs.KINDS.items()
    kinds = [name for name, kind in all_kinds if not kind.uses_vllm and not kind.only_if_asked]
    kinds.remove("grpo_vision")
    options = ["--kills", str(NUM_DRILLS), "--seed", str(SEED), "--jobs", "2", "--output", str(output)]
    options += ["--kinds", *kinds]
    assert drills.main(options) == 0
    results = drills.read_results(output / drills.RESULTS)
    assert len(results) >= NUM_DRILLS
    assert all(result["equal"] for result in results)
    assert [result["left"] for result in results if result["left"]] == []
    assert len({result["kind"] for result in results}) >= 4
    before = (output / drills.RESULTS).read_text()
    assert drills.main(options) == 0, "nothing is missing"
    assert (output / drills.RESULTS).read_text() == before


@long
def test_an_asynchronous_run_trains_on_each_prompt_once_an_epoch(output: Path) -> None:
    """Kills of the main process, a scoring worker, and ranks; the engine's are among them."""
    options = ["--kills", "4", "--seed", str(ASYNCHRONOUS_SEED), "--output", str(output), "--kinds", "grpo_async"]
    options += ["--victims", "worker", "driver", "reward_function"]
    assert drills.main(options) == 0
    results = [each for each in drills.read_results(output / drills.RESULTS) if each["kind"] == "grpo_async"]
    assert {(each["victim"], each["fault"]) for each in results} == {
        ("worker", "kill"),
        ("driver", "kill"),
        ("reward_function", "kill"),
    }
    assert all(each["equal"] for each in results)
    assert [each["left"] for each in results if each["left"]] == []


@long
def test_runs_that_are_hit_while_tools_or_agents_are_under_way_go_on(tmp_path: Path) -> None:
    """The ranks are the trainer's and the engine's."""
    kinds = ("grpo_tools", "grpo_agent")
    options = ["--kills", "8", "--seed", str(CALLERS_SEED), "--jobs", "2", "--output", str(tmp_path), "--kinds", *kinds]
    options += ["--phases", "calling", "--victims", "worker", "driver", "tool", "agent"]
    assert drills.main(options) == 0
    results = drills.read_results(tmp_path / drills.RESULTS)
    for kind, caller in zip(kinds, ("tool", "agent"), strict=True):
        hit = {(each["victim"], each["fault"]) for each in results if each["kind"] == kind}
        assert hit >= {("worker", "kill"), ("driver", "kill"), (caller, "pause")}
    assert all(each["equal"] for each in results)
    assert [each["left"] for each in results if each["left"]] == []


@long
def test_a_run_restarts_itself(output: Path, tmp_path: Path) -> None:
    num_steps = drills.num_steps_of(drills.drills_a_chain(NUM_DRILLS, 5))
    kind = drill_runs.KINDS["sft"]
    reference = drills.reference_of(kind, output, num_steps)
    inputs = drill_runs.make_inputs(output / "inputs")
    logs = drill_records.Logs(tmp_path)
    command = [*kind.command(tmp_path, inputs, num_steps), "cluster.max_restarts=3"]
    with run_kills.running(command, tmp_path / "run") as run:
        for number in (1, 2):
            run.wait_for(lambda least=3 * number: last_step(run) > least, START_LIMIT_S)
            os.kill(run.find("worker")[0].pid, signal.SIGKILL)
            run.wait_for(lambda text=f"restart {number} of 3: ": text in run.errors, END_LIMIT_S)
        assert run.wait_for_end(COMPLETION_LIMIT_S) == 0, run.errors
        run.wait_until_nothing_runs(END_LIMIT_S)
        assert run.errors.count("error: worker rank ") == 2
        assert "restart 3" not in run.errors
    assert reference.differences(logs) == []


def test_chains_have_every_drill_of_their_kind_once_before_one_comes_again() -> None:
    for kind in drill_runs.KINDS.values():
        whole = menu(kind, with_disk=True)
        assert len(set(whole)) == len(whole)
        size = 12
        chains = [plan(kind, 3, turn, size, with_disk=True) for turn in range(-(-len(whole) // size))]
        assert [len(chain) for chain in chains] == [size] * len(chains)
        drilled = [drill for chain in chains for drill in chain]
        assert set(drilled) == set(whole), "and fewer come again than make a chain"
        assert plan(kind, 3, 1, size, with_disk=True) == chains[1], "the same from the same seed"
        assert plan(kind, 4, 1, size, with_disk=True) != chains[1]
        ends = [drill.phase == "end" for drill in chains[0]]
        assert ends == sorted(ends), "nothing comes after the end"


def test_the_table_counts() -> None:
    well: dict[str, Any] = {"victim": "worker", "fault": "kill", "ended": True, "went_on": True, "problem": ""}
    results = [
        {**well, "phase": "train", "equal": True, "left": []},
        {**well, "phase": "train", "equal": False, "left": ["process 7"]},
        {**well, "phase": "end", "ended": False, "went_on": False, "equal": False, "left": []},
        {**well, "phase": "saving", "fault": "pause", "ended": None, "equal": True, "left": []},
        {
            **well,
            "phase": "saving",
            "fault": "pause",
            "ended": None,
            "problem": "a traceback",
            "equal": True,
            "left": [],
        },
    ]
    head, _, *rows = [row.strip("| ").split(" | ") for row in drills.table(results).splitlines()]
    columns = ("hit", "train", "saving", "end", "drills", "as it should", "went on", "equal", "left behind")
    assert [[row[head.index(column)].strip() for column in columns] for row in rows] == [
        ["worker: kill", "2", "", "1", "3", "2", "2", "1", "1"],
        ["worker: pause", "", "2", "", "2", "1", "2", "2", "0"],
        ["all", "2", "2", "1", "5", "3", "4", "3", "1"],
    ]


def test_records_after_those_that_a_deleted_folder_has_taken_must_be_there(tmp_path: Path) -> None:
    def run(name: str, *folders: Sequence[int], changed: int | None = None) -> drill_records.Logs:
        for number, steps in enumerate(folders, start=1):
            folder = tmp_path / name / "logs" / f"exp_{number:03d}"
            (folder / "checkpoints" / "final").mkdir(parents=True)
            save_file({"weight": torch.ones(1)}, folder / "checkpoints" / "final" / "model.safetensors")
            losses = {step: -1 if step == changed else step for step in steps}
            lines = [json.dumps({"step": step, "metrics": {"train/loss": loss}}) for step, loss in losses.items()]
            (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
            samples = [json.dumps({"step": step, "sample": number}) for step in steps for number in range(2)]
            (folder / "samples.jsonl").write_text("".join(f"{line}\n" for line in samples))
        return drill_records.Logs(tmp_path / name)

    reference = drill_records.Reference(run("reference", range(6)))
    nothing, two = run("nothing", []), run("two", [4, 5])
    assert reference.differences(nothing, lost_until=5) == []
    assert len(reference.differences(nothing, lost_until=4)) == 2
    assert reference.differences(two, lost_until=3) == []
    reported = "missing are steps [3], too many [], not the same []"
    assert reference.differences(two, lost_until=2) == [f"{name}: {reported}" for name in ("metrics", "samples")]
    assert len(reference.differences(two)) == 2
    assert len(reference.differences(run("without the first", range(1, 6)))) == 2

    # The folder was deleted before step 2, the run went on there, and the next attempt began another one at step 4.
    split = run("split", [2, 3, 4], [4, 5])
    assert reference.differences(split, lost_until=1) == []
    assert len(reference.differences(split, lost_until=0)) == 2
    assert len(reference.differences(split)) == 2, "nothing was deleted: all records must lie in one folder"
    for name, folders in {
        "gap": ([2, 3], [5]),
        "gap in the first": ([2, 4], [4, 5]),
        "too many": ([2, 3], [4, 5, 6]),
        "in disorder": ([3, 2], [4, 5]),
        "twice": ([2, 3], [4, 5, 5]),
    }.items():
        assert reference.differences(run(name, *folders), lost_until=1), name
    (reported,) = reference.differences(run("changed", [2, 3], [4, 5], changed=3), lost_until=1)
    assert reported == "metrics: missing are steps [], too many [], not the same [3]"
