# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`make test-gpu` without a GPU: its lines, its exit code, its arithmetic, and a rehearsal of every check."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from tests.gpu import checks, run, vllm_check
from tests.gpu.run import CHECKS, Check, run_checks

FAKES = "tests.support.gpu_check_fakes"


def lines_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


@pytest.mark.full
def test_a_check_that_crashes_or_hangs_leaves_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    limits = {"crashes": 60, "fails": 60, "hangs": 2, "passes": 60}
    ways = [Check(name, f"{FAKES}:{name}", limit, ()) for name, limit in limits.items()]
    assert run_checks(ways, tmp_path) == 1
    found = lines_of(capfd.readouterr().out)
    assert [(line["name"], line["status"]) for line in found] == [
        ("crashes", "failed"),
        ("fails", "failed"),
        ("hangs", "failed"),
        ("passes", "passed"),
    ]
    crashed, failed, hung, passed = found
    assert crashed["why"] == "ended by SIGSEGV; its last line: about to die"
    assert (failed["why"], failed["numbers"]) == ("Measured: too slow", {"speed": 3})
    assert hung["why"].startswith("took longer than 2 s; its last line: ")
    assert passed["numbers"] == {"rehearse": False}
    assert all(line.keys() == {"name", "status", "why", "numbers", "seconds"} for line in found)


def test_what_is_missing_is_said_and_fails_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(run.NEEDS, "gpu", lambda: "no GPU")
    assert run_checks(CHECKS, tmp_path) == 0
    found = lines_of(capsys.readouterr().out)
    assert [line["name"] for line in found] == [check.name for check in CHECKS]
    assert {(line["status"], line["why"]) for line in found} == {("skipped", "no GPU")}


def test_all_checks_together_have_ten_minutes() -> None:
    assert sum(check.limit_s for check in CHECKS) <= 600


def test_operations_of_a_token() -> None:
    sizes = SimpleNamespace(
        num_hidden_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=5,
        vocab_size=10,
    )
    # Of 2,000 parameters, 80 are looked up, and 2 layers x 3 experts x 3 matrices of 40 are passed by: 1,200 work.
    assert checks.flops_of_a_token(sizes, 2000, 16) == 6 * 1200 + 6 * 2 * 2 * 4 * 16


def test_memory_that_plan_reports_wrongly() -> None:
    assert checks.memory_problem(104, 100, 130, 120) is None
    assert "held all the time" in str(checks.memory_problem(106, 100, 130, 120))
    assert "a peak" in str(checks.memory_problem(100, 100, 110, 120))


@pytest.mark.slow
def test_the_refusal_is_seen_and_its_absence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs Transformer Engine" in checks.refusal_without_engine(rehearse=True)["message"]
    with pytest.raises(checks.Failed, match="is not refused"):  # on CPUs nothing is
        checks.refusal_without_engine(rehearse=False)


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
        with pytest.raises(checks.Failed, match=why):
            vllm_check.judged([start, step | wrong], 1, has_engine=True)
    with pytest.raises(checks.Failed, match="1 validations instead of 2"):
        vllm_check.judged([step], 1, has_engine=True)
    with pytest.raises(checks.Failed, match="lack train/moe/routing"):
        vllm_check.judged([start, start | {"train/loss": 1.0}], 1, has_engine=False)
    with pytest.raises(checks.Failed, match="0 steps"):
        vllm_check.judged([], 1, has_engine=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_check_runs_on_cpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_checks(CHECKS, tmp_path, rehearse=True) == 0, capfd.readouterr().out
