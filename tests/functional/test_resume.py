# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped and started again leaves the same behind as one that never stopped, in every logger."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from nemo_rl_moe.runs.folder.expert_load import read_expert_load
from nemo_rl_moe.runs.folder.metrics import read_metrics
from tests.functional import dpo_runs, grpo_runs, rm_runs, sft_runs, shared_ray
from tests.support.loggers import read_jsonl, read_mlflow, read_tensorboard, read_wandb_offline

pytestmark = pytest.mark.shared_ray

NUM_STEPS, STOP_AFTER, TIME_LIMIT_S = 7, 4, 600
CHECKPOINTING: dict[str, Any] = {"checkpointing__save_period": 3, "checkpointing__keep_top_k": 1}


@dataclass(frozen=True)
class Algorithm:
    """A command of the program, and what a short run of it needs."""

    name: str
    config: Path
    overrides: list[str]

    def command(self) -> list[str]:
        """Return the command that a user types."""
        program = [sys.executable, "-m", "nemo_rl_moe.cli", self.name]
        return [*program, "--config", str(self.config), *self.overrides]


def sft(folder: Path, data: Path) -> Algorithm:
    settings = sft_runs.settings(
        folder,
        data,
        sft__max_num_steps=NUM_STEPS,
        sft__val_period=2,
        sft__val_batches=1,
        policy__train_global_batch_size=32,
        policy__train_micro_batch_size=16,
        policy__megatron_cfg__scheduler__lr_warmup_iters=2,
        **CHECKPOINTING,
    )
    return Algorithm("sft", sft_runs.EXEMPLAR, settings)


def grpo(folder: Path, data: Path) -> Algorithm:
    # The penalty keeps a reference model, which a resumed run has to have from the start and not from the checkpoint.
    settings = grpo_runs.settings(
        folder,
        grpo_runs.make_prompts(data / "prompts", 32),
        grpo__max_num_steps=NUM_STEPS,
        loss_fn__reference_policy_kl_penalty=0.1,
        policy__megatron_cfg__optimizer__lr=1e-3,
        **CHECKPOINTING,
    )
    return Algorithm("grpo", grpo_runs.EXEMPLAR, settings)


def dpo(folder: Path, data: Path) -> Algorithm:
    # The reference measures each batch in its step, as it does in the exemplar.
    loggers = dict.fromkeys(sft_runs.only_jsonl(), True)
    pairs = dpo_runs.make_pairs(data / "pairs", 64, 12)
    settings = dpo_runs.settings(folder, pairs, dpo__max_num_steps=NUM_STEPS, **loggers, **CHECKPOINTING)
    return Algorithm("dpo", dpo_runs.EXEMPLAR, settings)


def rm(folder: Path, data: Path) -> Algorithm:
    loggers = dict.fromkeys(sft_runs.only_jsonl(), True)
    pairs = dpo_runs.make_pairs(data / "pairs", 64, 12)
    settings = rm_runs.settings(folder, pairs, rm__max_num_steps=NUM_STEPS, **loggers, **CHECKPOINTING)
    return Algorithm("rm", rm_runs.EXEMPLAR, settings)


LORA = (
    "policy.lora={rank: 4, alpha: 8.0, use_rslora: false, targets: [all-linear], dropout: %s, experts: %s,"
    " init: kaiming, path: null}"
)


def sft_of_adapters(folder: Path, data: Path) -> Algorithm:
    return _with(sft(folder, data), LORA % (0.1, "per_expert"))


def grpo_of_adapters(folder: Path, data: Path) -> Algorithm:
    return _with(grpo(folder, data), LORA % (0.0, "shared"))


def dpo_of_adapters(folder: Path, data: Path) -> Algorithm:
    return _with(dpo(folder, data), LORA % (0.0, "per_expert"))


def _with(algorithm: Algorithm, override: str) -> Algorithm:
    return Algorithm(algorithm.name, algorithm.config, [*algorithm.overrides, override])


def run_to_its_end(algorithm: Algorithm, cwd: Path) -> str:
    return sft_runs.run_command(algorithm.command(), cwd, timeout=TIME_LIMIT_S).stdout


def run_and_stop(algorithm: Algorithm, cwd: Path) -> str:
    """Sends SIGTERM as soon as some steps are done; the run ends by itself."""
    process = subprocess.Popen(
        algorithm.command(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=sft_runs.environment(),
        cwd=cwd,
    )
    assert process.stdout is not None
    printed, deadline = "", time.monotonic() + TIME_LIMIT_S
    for line in process.stdout:
        printed += line
        if line.startswith(f"step {STOP_AFTER}/"):
            process.send_signal(signal.SIGTERM)
        assert time.monotonic() < deadline, printed
    assert process.wait() == 0, printed
    return printed


def untimed(path: Path) -> dict[int, dict[str, float]]:
    """Every step's metrics but for how long things took."""
    records = read_metrics(path)
    steps = {
        record.step: {key: value for key, value in record.metrics.items() if not key.startswith("timing/")}
        for record in records
    }
    assert len(steps) == len(records), "no step twice"
    return steps


def weights_of(folder: Path) -> dict[str, bytes]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118  (no dictionary)
    assert tensors
    return tensors


def samples_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "make",
    [
        sft,
        *(pytest.param(make, marks=pytest.mark.full) for make in (sft_of_adapters, grpo_of_adapters)),
        *(pytest.param(make, marks=pytest.mark.slow) for make in (dpo_of_adapters, grpo, dpo, rm)),
    ],
    ids=lambda make: make.__name__,
)
def test_a_run_of_fewer_steps_goes_on_to_the_last_bit(make: Any, tmp_path: Path) -> None:
    data = sft_runs.make_additions(tmp_path / "data", 300, 40)
    folders = {name: tmp_path / name / "logs" / "exp_001" for name in ("whole", "extended")}
    same_schedule = f"policy.megatron_cfg.scheduler.lr_decay_iters={NUM_STEPS}"

    def run(name: str, *changes: str) -> str:
        algorithm = make(tmp_path / name, data)
        only_jsonl = [f"logger.{logger}=false" for logger in sft_runs.JSONL_ONLY]
        words = [algorithm.name, "--config", str(algorithm.config), *algorithm.overrides, *only_jsonl, same_schedule]
        done = shared_ray.run_here([*words, *changes], tmp_path / "work")
        return done.stdout

    run("whole")
    name = make(tmp_path, data).name
    run("extended", f"{name}.max_num_steps={STOP_AFTER}")
    assert f": {STOP_AFTER} of {NUM_STEPS} steps are done" in run("extended")
    assert_same_run(folders["extended"], folders["whole"])
    if name == "grpo":
        assert samples_of(folders["extended"] / "samples.jsonl") == samples_of(folders["whole"] / "samples.jsonl")


def assert_same_run(found: Path, expected: Path) -> None:
    """Metrics of each step, final weights and expert load of two run folders are the same, bit for bit."""
    metrics = [untimed(folder / "metrics.jsonl") for folder in (found, expected)]
    assert sorted(metrics[0]) == list(range(NUM_STEPS + 1))
    assert str(metrics[0]) == str(metrics[1]), "as text, since NaN equals nothing"
    assert weights_of(found / "checkpoints" / "final") == weights_of(expected / "checkpoints" / "final")
    loads = [read_expert_load(folder) for folder in (found, expected)]
    for name in ("steps", "layers", "counts"):
        np.testing.assert_array_equal(getattr(loads[0], name), getattr(loads[1], name))


@pytest.mark.slow
@pytest.mark.timeout(900)  # three runs with every logger
@pytest.mark.parametrize("make", [sft, grpo, dpo], ids=lambda make: make.__name__)
def test_a_stopped_run_goes_on_to_the_last_bit(make: Any, tmp_path: Path) -> None:
    data = sft_runs.make_additions(tmp_path / "data", 300, 40)
    work = tmp_path / "work"
    work.mkdir()
    folders = {name: tmp_path / name / "logs" / "exp_001" for name in ("whole", "stopped")}
    run_to_its_end(make(tmp_path / "whole", data), work)

    stopped = make(tmp_path / "stopped", data)
    printed = run_and_stop(stopped, work)
    match = re.search(r"^stopped after step (\d+) of 7 \(SIGTERM\); saved to (\S+)\. To go on, run the", printed, re.M)
    assert match is not None, printed
    last_step, checkpoint = int(match[1]), Path(match[2])
    assert STOP_AFTER <= last_step < NUM_STEPS
    assert (checkpoint / "state.json").is_file()
    assert not (checkpoint.parent / "final").exists(), "nothing that looks like a finished model"
    assert sorted(untimed(folders["stopped"] / "metrics.jsonl")) == list(range(last_step + 1))

    printed = run_to_its_end(stopped, work)
    assert f"going on from {checkpoint}: {last_step} of {NUM_STEPS} steps are done" in printed
    assert f"\nstep {last_step}/" not in printed
    assert [path.name for path in (tmp_path / "stopped" / "logs").iterdir()] == ["exp_001"], "in the same folder"
    assert list(work.iterdir()) == []

    assert_same_run(folders["stopped"], folders["whole"])
    if make is grpo:
        assert samples_of(folders["stopped"] / "samples.jsonl") == samples_of(folders["whole"] / "samples.jsonl")

    history = read_jsonl(folders["stopped"] / "metrics.jsonl")
    assert read_wandb_offline(folders["stopped"] / "wandb") == history
    name = "sft_tiny_moe" if make is sft else None
    assert read_mlflow(f"sqlite:///{tmp_path / 'stopped' / 'mlflow.db'}", "nemo-rl-moe", name) == history
    tensorboard = read_tensorboard(folders["stopped"] / "tensorboard")
    assert {key: [step for step, _ in points] for key, points in tensorboard.items()} == {
        key: [step for step, _ in points] for key, points in history.items()
    }

    # The same command once more finds nothing to do, and touches nothing.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped" / "logs").rglob("*")}
    printed = run_to_its_end(stopped, work)
    assert "is the end of this run: 7 of 7 steps are done" in printed
    assert "starting Ray" not in printed
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped" / "logs").rglob("*")}
    touched = {path.name for path in after if after[path] != before.get(path)}
    assert touched <= {"checkpoints", ".lock"}, "what says who was here"


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Through Ray, with the distributed optimizer: data parallel 2, then expert parallel 2, then one worker."""
    data = sft_runs.make_additions(tmp_path / "data", 300, 40)
    zero = "policy.megatron_cfg.distributed_data_parallel_config.use_distributed_optimizer=true"
    whole, moved = (sft(tmp_path / name, data) for name in ("whole", "moved"))
    whole.overrides.append(zero)
    run_to_its_end(whole, tmp_path)
    for steps, layout in (
        (2, []),
        (4, ["policy.megatron_cfg.expert_model_parallel_size=2"]),
        (NUM_STEPS, ["cluster.cpu_workers_per_node=1"]),
    ):
        part = Algorithm("sft", moved.config, [*moved.overrides, zero, *layout, f"sft.max_num_steps={steps}"])
        part.overrides.append(f"policy.megatron_cfg.scheduler.lr_decay_iters={NUM_STEPS}")
        printed = run_to_its_end(part, tmp_path)
        assert ("another layout" in printed) is (steps != 2)
    expected, found = (untimed(tmp_path / name / "logs/exp_001/metrics.jsonl") for name in ("whole", "moved"))
    for step in range(1, NUM_STEPS + 1):
        for key in ("train/loss", "train/grad_norm", "train/moe/load_balancing_loss"):
            assert found[step][key] == pytest.approx(expected[step][key], rel=2e-5), (step, key)
