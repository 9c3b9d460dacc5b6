# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""GPUs that Ray hands out and torch cannot use: refused in one line, where the run would train on the CPUs."""

import sys
from pathlib import Path

import pytest
import torch

from tests.functional import sft_runs

RUN_LIMIT_S = 250.0
PROGRAM = """
import os, sys, ray
from nemo_rl_moe.cli import main
ray.init(
    "local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20
)
os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")
def test_gpus_that_torch_cannot_use_are_refused(tmp_path: Path) -> None:
    data = sft_runs.make_additions(tmp_path / "data", 128, 16)
    changes = {"cluster__gpus_per_node": 2, "sft__max_num_steps": 1, **sft_runs.only_jsonl()}
    overrides = sft_runs.settings(tmp_path, data, **changes)
    command = [sys.executable, "-c", PROGRAM, "sft", "--config", str(sft_runs.EXEMPLAR), *overrides]
    done = sft_runs.run_command(command, tmp_path, timeout=RUN_LIMIT_S, exit_code=2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: cluster.gpus_per_node: Ray has given the GPUs 0,1 of ")
    assert f"torch cannot use them: torch {torch.__version__} is " in errors[0]
    assert errors[0].endswith("nearest: cluster.gpus_per_node=0, which trains on CPUs")
    assert "starting 2 workers" not in done.stdout
