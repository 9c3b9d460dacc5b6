# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The checks of `make test-gpu` pass on the fake card with the settings of a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_card.environment import REPOSITORY, card_environment, shared_folder

pytestmark = pytest.mark.timeout(3000)  # on a busy machine

# Not here: `families`; what measures speed (`rank_share`, `tracking_cost`); what only other kernels of attention would
# change (`decode_*`); and vLLM (`test_vllm`).
NAMES = (
    *("sync", "slice_step", "host_state", "refit", "decode_auto", "long", "save_and_resume"),
    *("refusal_without_engine", "parity_with_cpu"),
)


def run_kit_check(name: str, folder: Path, **environment: str) -> list[dict[str, Any]]:
    """Return the lines of a check; fails with what it printed, if it has none."""
    results = folder / "results.jsonl"
    with shared_folder() as shared:
        command = [sys.executable, "-W", "ignore", "-m", "tests.fake_card.kit", name, str(results)]
        ended = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=card_environment(shared, **environment),
            capture_output=True,
            text=True,
            check=False,
        )
    printed = (ended.stdout + ended.stderr)[-6000:]
    assert ended.returncode == 0, printed
    assert results.is_file(), printed
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    for line in lines:
        assert line["status"] == "passed", f"{line['why']}\n{printed}"
    return lines


@pytest.mark.parametrize("name", NAMES)
def test_check_passes_with_the_settings_of_a_gpu(name: str, tmp_path: Path) -> None:
    lines = run_kit_check(name, tmp_path)
    if name == "refit":
        assert [line["numbers"]["transport"] for line in lines] == ["files", "cuda_ipc", "nccl"]
    for line in lines:
        numbers = line["numbers"]
        assert line["card"] == "NVIDIA H100 80GB HBM3"
        assert line["transformer_engine"] == "stand-in"
        if "held_bytes" in numbers:
            # What an earlier model of the same process held has been given back.
            assert numbers["held_bytes"] == pytest.approx(numbers["planned_held_bytes"], rel=0.1)
        print(name, line["seconds"], json.dumps(numbers)[:600])
