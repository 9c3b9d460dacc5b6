# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A wheel, built and installed without a network: it runs the demo's recipe where there is no repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY_ROOT

pytest.importorskip("hatchling", reason="builds a wheel: pip install -e '.[test]'")
LIMIT_S = 400.0
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["--no-deps", "--no-index"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the wheel is installed in; what it depends on is that of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(folder), str(REPOSITORY_ROOT)]
    subprocess.run([*PIP, *build], check=True, timeout=LIMIT_S)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run([*PIP, "install", *OFFLINE, "--target", str(site), str(wheel)], check=True, timeout=LIMIT_S)
    return site


def run_in(folder: Path, site: Path, *words: str) -> str:
    """Run Python with the installed wheel, in a folder; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-P", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_the_demos_recipe_runs_from_a_wheel(site: Path, tmp_path: Path) -> None:
    assert run_in(tmp_path, site, "-c", "import nemo_rl_moe; print(nemo_rl_moe.__file__)").startswith(str(site))
    sizes = ["--num-train", "256", "--num-validation", "16", "--num-grpo-prompts", "0", "--num-preferences", "0"]
    run_in(tmp_path, site, "-m", "nemo_rl_moe.demo_data", "--output", "data/addition", *sizes)
    command = str(site / "bin" / "nemo-rl-moe")
    assert "sft_tiny_moe.yaml" in run_in(tmp_path, site, command, "sft", "--help")
    printed = run_in(tmp_path, site, command, "sft", "--config", "sft_tiny_moe.yaml", "sft.max_num_steps=1")
    assert "step 1/1" in printed
    assert (tmp_path / "results/sft_tiny_moe/final/model.safetensors.index.json").is_file()
    assert (tmp_path / "logs/sft_tiny_moe/exp_001/metrics.jsonl").is_file()
