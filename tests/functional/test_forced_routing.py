# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A drill as a user starts it: every token goes to one of two expert-parallel ranks, and everything says so."""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import yaml

from nemo_rl_moe.config.loading import load_config
from tests.functional import sft_runs
from tests.support.loggers import read_jsonl

pytestmark = [pytest.mark.shared_ray, pytest.mark.full]

NUM_STEPS = 3
BATCH_SIZE = 16
TOPK, EXPERTS, LAYERS = 2, 8, 4
HOT_RANK = 1
HOT_EXPERTS = range(EXPERTS // 2, EXPERTS)
FORCED = "policy.megatron_cfg.moe_router_force_hot_rank"


@dataclass(frozen=True)
class FinishedRun:
    """What a run printed and left behind."""

    folder: Path
    output: str

    def values_of(self, name: str) -> dict[int, float]:
        """A metric by step."""
        return dict(read_jsonl(self.folder / "metrics.jsonl")[name])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("drill")
    data = sft_runs.make_additions(folder / "data", NUM_STEPS * BATCH_SIZE, BATCH_SIZE)
    overrides = sft_runs.settings(
        folder,
        data,
        sft__max_num_steps=NUM_STEPS,
        sft__val_period=0,
        policy__train_global_batch_size=BATCH_SIZE,
        policy__train_micro_batch_size=4,
        policy__megatron_cfg__expert_model_parallel_size=2,
        policy__megatron_cfg__moe_router_force_hot_rank=HOT_RANK,
        policy__megatron_cfg__scheduler__lr_warmup_iters=0,
        checkpointing__enabled=False,
        logger__alerts__dead_expert_steps=2,
        logger__alerts__sustained_steps=2,
        **sft_runs.only_jsonl(),
    )
    done = sft_runs.run_here(overrides, folder, merged=True)
    return FinishedRun(sft_runs.only_run_folder(folder), done.stdout)


def test_the_console_warns(run: FinishedRun) -> None:
    (warning,) = (line for line in run.output.splitlines() if "FORCED ROUTING" in line)
    assert f"{FORCED} is {HOT_RANK}" in warning
    assert "what it trains is worthless" in " ".join(run.output.split())
    before_training = run.output[: run.output.index("FORCED ROUTING")]
    assert f"step {NUM_STEPS}" not in before_training


def test_each_finding_is_reported_once(run: FinishedRun) -> None:
    lines = run.output.splitlines()
    alerts = [line for line in lines if line.startswith("warning: step ")]
    assert len(alerts) == 3
    dead, imbalance, overload = alerts
    likewise = "(likewise layers 1, 2, 3)"
    assert dead == f"warning: step 2: layer 0: 4 of 8 experts dead since step 1; beyond sampling noise {likewise}"
    assert imbalance.startswith("warning: step 2: layer 0: ")
    assert imbalance.endswith(likewise)
    assert overload.startswith("warning: step 2: the busiest expert-parallel rank has 2.00 times the work")
    after_which = [line for line in lines[: lines.index(dead)] if line.startswith("step ")][-1]
    assert after_which.startswith(f"step 2/{NUM_STEPS} ")


def test_the_runs_files_are_marked(run: FinishedRun) -> None:
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["policy"]["megatron_cfg"]["moe_router_force_hot_rank"] == HOT_RANK
    effective = json.loads((run.folder / "effective_moe_configuration.json").read_text())
    assert effective["moe_router_force_hot_rank"] == HOT_RANK


def test_the_overload_is_the_number_of_ranks(run: FinishedRun) -> None:
    every_step = range(1, NUM_STEPS + 1)
    for name in ("avg", "max", "max_cum"):
        assert run.values_of(f"train/moe/{name}_overload_factor") == dict.fromkeys(every_step, 2.0)
    assert run.values_of("train/moe/dead_expert_frac_mean") == dict.fromkeys(every_step, 0.5)
    assert min(run.values_of("train/moe/cv_mean").values()) > 1.0


def test_the_load_file_has_every_assignment(run: FinishedRun) -> None:
    rows = pd.read_parquet(run.folder / "expert_load.parquet")
    assert list(rows.columns) == ["step", "layer", "expert", "count"]
    assert len(rows) == NUM_STEPS * LAYERS * EXPERTS
    num_tokens = run.values_of("train/num_tokens")
    assert set(rows["step"]) == set(num_tokens) == set(range(1, NUM_STEPS + 1))
    for (step, _), layer in rows.groupby(["step", "layer"]):
        assert set(layer[layer["count"] > 0]["expert"]) <= set(HOT_EXPERTS)
        assert layer["count"].sum() == TOPK * num_tokens[step]


def test_a_real_run_forces_nothing() -> None:
    config = load_config(sft_runs.EXEMPLAR, [], check_paths=False)
    megatron = config.policy.megatron_cfg
    assert megatron.moe_router_force_hot_rank is None
    assert not any(name.startswith("moe_router_force") for name in megatron.moe_transformer_fields)
