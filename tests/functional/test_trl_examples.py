# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The scripts of `docs/from-trl.md`, on a model with random weights: `make test-trl`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.conftest import REPOSITORY_ROOT
from tests.functional import sft_runs

pytestmark = pytest.mark.trl
EXAMPLES = REPOSITORY_ROOT / "examples"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model` and `data`."""
    folder = tmp_path_factory.mktemp("trl")
    tiny = EXAMPLES / "assets" / "tiny_qwen3_moe"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny)).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "model")
    command = [sys.executable, str(EXAMPLES / "make_demo_data.py"), "--output", str(folder / "data"), "--seed", "0"]
    subprocess.run([*command, "--num-train", "256", "--num-grpo-prompts", "64"], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_each_script_trains_and_logs_the_routing(place: Path, name: str) -> None:
    script = str(EXAMPLES / "trl" / f"{name}.py")
    done = sft_runs.run_command([sys.executable, script, "--model", "model", "--data", "data", "--steps", "1"], place)
    assert re.search(r"'loss': .*'moe/cv_mean': ", done.stdout)
