# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`make test-gpu` without a GPU: its lines, its exit code, its arithmetic, and a rehearsal of every check."""

import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.config.loading import load_grpo_config
from tests.gpu import checks, run, vllm_check
from tests.gpu.calls import CALLS
from tests.gpu.kit.closure import link_packages
from tests.gpu.models import Failed, recipe_config
from tests.gpu.rank_share import RECIPE
from tests.gpu.run import CHECKS, Check, run_checks
from tests.gpu.sync import growing, waits_counted
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks
from tests.support.pretended_gpu import Wait
from tests.support.tiny_model import tiny_policy

FAKES = "tests.support.small_programs"


def lines_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


FACTS = {"date", "card", "torch", "transformer_engine", "megatron-core"}


@pytest.mark.full
def test_a_check_that_crashes_or_hangs_leaves_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    limits = {"crashes": 60, "fails": 60, "hangs": 2, "passes": 60}
    ways = [Check(name, f"{FAKES}:{name}", limit, ()) for name, limit in limits.items()]
    assert run_checks(ways, tmp_path, output=tmp_path / "output") == 1
    printed = capfd.readouterr().out
    found = lines_of(printed)
    assert [(line["name"], line["status"], line["numbers"]) for line in found] == [
        ("crashes", "passed", {"speed": 2}),
        ("crashes", "failed", {}),
        ("fails", "passed", {"speed": 1}),
        ("fails", "failed", {"speed": 3}),
        ("hangs", "failed", {}),
        ("passes", "passed", {"rehearse": False}),
        ("passes", "passed", {"second": 2}),
    ]
    assert found[1]["why"] == "ended by SIGSEGV; its last line: about to die"
    assert found[3]["why"] == "Measured: too slow"
    assert found[4]["why"].startswith("took longer than 2 s; its last line: ")
    assert all(line.keys() == {"name", "status", "why", "numbers", "seconds"} | FACTS for line in found)
    assert {line["torch"] for line in found} == {torch.__version__}
    assert (tmp_path / "output/results.jsonl").read_text() == printed
    assert "== crashes\nabout to die" in (tmp_path / "output/checks.log").read_text()


def test_what_is_missing_is_said_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run.NEEDS, "gpu", lambda: "no GPU")
    assert run_checks(CHECKS, tmp_path) == 0
    found = lines_of(capsys.readouterr().out)
    assert [line["name"] for line in found] == [check.name for check in CHECKS]
    assert {(line["status"], line["why"]) for line in found} == {("skipped", "no GPU")}


def test_checks_end_by_the_limit_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ways = [Check(name, f"{FAKES}:{name}", 600, ()) for name in ("hangs", "passes")]
    assert run_checks(ways, tmp_path, deadline=time.monotonic() + 1.0) == 1
    hung, left_out = lines_of(capsys.readouterr().out)
    assert hung["why"].startswith("took longer than ")
    assert (left_out["status"], left_out["why"]) == ("skipped", "no time is left")


def test_the_page_says_how_long_all_checks_may_take(repository_root: Path) -> None:
    minutes = -(-sum(check.limit_s for check in CHECKS) // 60)
    assert f"It takes at most {minutes:.0f} minutes" in (repository_root / "docs/gpu.md").read_text()


def test_memory_that_plan_reports_wrongly() -> None:
    def problem(held: int | None, peak: int) -> str | None:
        planned = {"planned_held_bytes": 100, "planned_peak_bytes_at_least": 120}
        return checks.memory_problem({"held_bytes": held, "peak_bytes": peak} | planned)

    assert problem(104, 130) is None
    assert problem(None, 0) is None
    assert "held all the time" in str(problem(106, 130))
    assert "a peak" in str(problem(100, 110))


@pytest.mark.slow
def test_the_refusal_is_seen_and_its_absence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs Transformer Engine" in next(checks.refusal_without_engine(rehearse=True))["message"]
    with pytest.raises(Failed, match="is not refused"):  # on CPUs nothing is
        next(checks.refusal_without_engine(rehearse=False))


def test_the_run_with_vllm_is_a_valid_configuration(tmp_path: Path) -> None:
    config = load_grpo_config(
        vllm_check.exemplar(rehearse=False), vllm_check.overrides(tmp_path, rehearse=False), check_paths=False
    )
    assert (config.cluster.gpus_per_node, config.policy.generation.backend) == (1, "vllm")
    assert config.policy.megatron_cfg.routing_replay == "rollout"
    assert config.grpo.val_at_start, "the engine generates twice before weights arrive"
    assert (config.grpo.val_period, config.grpo.use_dynamic_sampling) == (1, True)
    assert config.data.validation is not None


def test_what_a_run_with_vllm_must_say() -> None:
    start = {"val/accuracy": 0.0}
    step = start | {
        "train/loss": 1.0,
        "train/moe/routing/rows_missing_share": 0.0,
        "train/refit/logprob_gap": 0.01,
        "train/refit/checks_failed": 0.0,
    }
    assert vllm_check.judged([start, step], 1, has_engine=True)["steps"] == 1
    for wrong, why in (
        ({"train/moe/routing/rows_missing_share": 0.1}, "did not arrive"),
        ({"train/refit/checks_failed": 1.0}, "weights did not"),
    ):
        with pytest.raises(Failed, match=why):
            vllm_check.judged([start, step | wrong], 1, has_engine=True)
    with pytest.raises(Failed, match="1 validations instead of 2"):
        vllm_check.judged([step], 1, has_engine=True)
    with pytest.raises(Failed, match="lack train/moe/routing"):
        vllm_check.judged([start, start | {"train/loss": 1.0}], 1, has_engine=False)
    with pytest.raises(Failed, match="0 steps"):
        vllm_check.judged([], 1, has_engine=False)


def test_a_rank_s_share_is_that_of_the_recipe() -> None:
    """With the recipe's own tokens and recomputation, and its optimizer's bytes."""
    recipe = load_grpo_config("grpo_qwen3_30b_a3b_80gb.yaml", check_paths=False).policy
    ours = recipe_config(rehearse=False, tokens=RECIPE[0]).policy
    assert (recipe.sequence_packing.train_mb_tokens, recipe.megatron_cfg.activation_checkpointing) == RECIPE
    assert ours.megatron_cfg.optimizer == recipe.megatron_cfg.optimizer
    assert ours.megatron_cfg.distributed_data_parallel_config == recipe.megatron_cfg.distributed_data_parallel_config


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_families_have_sizes_of_tuned_kernels_on_gpus(name: str) -> None:
    """Whether Megatron-Core takes the sizes shows as it builds its configuration, without a model."""
    (found,) = run_ranks(configuration_on_gpus, 1, name)
    assert found["hidden_size"] == 256
    assert found["kv_channels"] % 64 == 0
    assert found["num_moe_experts"] in (None, 128)


def configuration_on_gpus(name: str) -> dict[str, Any]:
    from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

    built = build_transformer_config(tiny_policy(1), checks.family_config(name, rehearse=False))
    return {field: getattr(built, field) for field in ("hidden_size", "kv_channels", "num_moe_experts")}


def test_waits_are_counted_by_who_asks() -> None:
    with waits_counted() as found:
        for text in ("called a synchronizing CUDA operation (Triggered internally)", "something else"):
            warnings.warn(text, stacklevel=1)
    (wait,) = found
    assert (wait.owner, found[wait]) == ("tests", 1)
    assert wait.function == "test_gpu_checks.test_waits_are_counted_by_who_asks"


def test_waits_that_grow_with_the_microbatches_are_ours_alone() -> None:
    def waits(*counts: int) -> Counter[Wait]:
        places = [Wait("ours", "a", "x"), Wait("ours", "b", "x"), Wait("megatron", "c", "x")]
        return Counter(dict(zip(places, counts, strict=True)))

    assert growing(waits(1, 2, 2), waits(1, 2, 4)) == {}
    assert growing(waits(1, 2, 2), waits(1, 4, 4)) == {"b": 2}
    assert growing(Counter(), waits(1, 0, 4)) == {"a": 1}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_check_runs_on_cpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_checks(CHECKS, tmp_path, rehearse=True) == 0, capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_checks_run_with_what_a_machine_has_and_the_kit_brings(tmp_path: Path, repository_root: Path) -> None:
    """In an environment that has nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "machine")], check=True)
    (site,) = (tmp_path / "machine/lib").glob("python3*/site-packages")
    link_packages(site)
    environment = os.environ | {"PYTHONPATH": str(repository_root)}
    of_the_calls = sorted({name for call in CALLS.values() for name in call.checks})
    command = [str(tmp_path / "machine/bin/python"), "-m", "tests.gpu.run", "--rehearse", "--only", *of_the_calls]
    done = subprocess.run(command, cwd=repository_root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line["name"] for line in lines_of(done.stdout)} == set(of_the_calls)
