# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An error in the input while Ray is still starting in the background."""

import argparse
import threading

import pytest

from nemo_rl_moe.config.loading import load_config, load_grpo_config
from nemo_rl_moe.errors import DataError, UserError, report_problems
from nemo_rl_moe.launch import early_start, setup
from nemo_rl_moe.launch.early_start import EarlyCluster, stored_bytes
from nemo_rl_moe.launch.generate_command import OPTIONS, reported_by_option
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

LIMIT_S = 120.0


def test_it_is_reported_before_ray_has_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported, started = threading.Event(), threading.Event()

    class SlowCluster:
        def __init__(self, config: object, stored_bytes: int):
            assert reported.wait(LIMIT_S), "the error waits for Ray"
            started.set()

        def shutdown(self) -> None:
            pass

    def report(error: UserError) -> None:
        report_problems(error)
        reported.set()

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(early_start, "RayCluster", SlowCluster)
    monkeypatch.setattr(setup, "report_problems", report)
    config = load_config("sft_tiny_moe.yaml", check_paths=False)
    with pytest.raises(DataError) as caught, ModelRun(config, ConsoleLogger(total_steps=0, live="never")) as run:
        run._early_cluster = EarlyCluster(config)
        run._opened.callback(run._early_cluster.close)
        raise DataError("data.jsonl:3: no messages")
    assert started.is_set(), "its end is waited for nevertheless"
    report_problems(caught.value)
    assert capsys.readouterr().err == "error: data.jsonl:3: no messages\n", "once"


def test_the_object_store_holds_the_routes_of_a_step() -> None:
    sizes = ("grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=32", "policy.train_global_batch_size=512")
    longest = "policy.max_total_sequence_length=4096"
    config = load_grpo_config("grpo_qwen3_30b_a3b.yaml", [*sizes, longest], check_paths=False)
    assert stored_bytes(config) == 512 * 4096 * 1024
    without = "policy.megatron_cfg.capture_routing=false"
    assert stored_bytes(load_grpo_config("grpo_qwen3_30b_a3b.yaml", [*sizes, without], check_paths=False)) == 0
    config = load_grpo_config("grpo_tiny_moe_async.yaml", check_paths=False)
    step = config.responses_per_step * config.policy.max_total_sequence_length * 1024
    assert config.grpo.rollouts.most_lag > 0
    assert stored_bytes(config) == (1 + config.grpo.rollouts.most_lag) * step
    assert stored_bytes(load_config("sft_tiny_moe.yaml", check_paths=False)) == 0
    alone, with_positions = (
        stored_bytes(load_grpo_config("grpo_tiny_moe.yaml", more, check_paths=False))
        for more in ([], ["policy.megatron_cfg.indexer_replay=rollout"])
    )
    assert with_positions == alone // 1024 * (1024 + 320 * 64)


def test_one_that_names_options_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(**{name.removeprefix("--").replace("-", "_"): None for name in OPTIONS})
    options.prompts = "prompts.txt"
    with pytest.raises(DataError) as caught, reported_by_option(OPTIONS, options):
        error = DataError("data.train.path: has no lines")
        report_problems(error)
        raise error
    report_problems(caught.value)
    assert capsys.readouterr().err == "error: data.train.path: has no lines\n"
    assert caught.value.problems == ["--prompts: has no lines"]
