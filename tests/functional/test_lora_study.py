# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The study of adapters as a user starts it: tiny runs with adapters and with all weights, each made once."""

from pathlib import Path

import pytest

from examples.lora_study.__main__ import main
from examples.lora_study.grid import METHODS, Run
from examples.lora_study.measures import MEASURES
from examples.studies.results import read_result
from nemo_rl_moe.demo_data import main as make_data
from tests.conftest import REPOSITORY_ROOT


@pytest.mark.slow
def test_two_runs_have_all_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_data(["--output", str(tmp_path / "data"), "--seed", "0"])
    tiny = str(REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe")
    few = ["policy.init=random", "grpo.max_num_steps=2", "grpo.num_prompts_per_step=4", "grpo.max_val_samples=4"]
    few += [
        "policy.train_global_batch_size=32",
        "policy.train_micro_batch_size=32",
        "policy.generation.max_new_tokens=8",
        "policy.megatron_cfg.routing_measurements.every_n_steps=1",
    ]
    words = ["run", "--methods", "full,lora", "--seeds", "1", "--model", tiny, "--output", str(tmp_path), *few]
    assert main(words) == 0
    assert main(["tables", "--output", str(tmp_path)]) == 0
    results = [read_result(tmp_path / "runs" / Run(name, METHODS[name].rate, 0).name) for name in ("full", "lora")]
    for result in results:
        assert result is not None
        assert set(result.measures) == set(MEASURES)
    assert main(words) == 0
    assert "2 runs, 2 of them done" in capsys.readouterr().out
