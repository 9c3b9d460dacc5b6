# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters arrive at engines, merged or as they are; the check finds at the first sync what went wrong on the way."""

from pathlib import Path

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.lora_refits import CHANGES, first_syncs, lora_policy, right_syncs
from tests.support.quick_list import some_of

pytestmark = pytest.mark.megatron
OF_ADAPTERS = [*CHANGES, "not selected", "arrives twice", "a layer is missing", "another base"]
CASES = [
    (name, refit, precision)
    for name in ("qwen3_moe", "gpt_oss", "deepseek_v3", "llama")
    for refit in ("merged", "adapter")
    for precision in ("float32", "bfloat16")
]


@pytest.mark.parametrize(("name", "refit", "precision"), some_of(CASES, 3))
def test_right_refits_pass(name: str, refit: str, precision: str, tmp_path: Path) -> None:
    policy = lora_policy(refit, precision, "none" if name == "llama" else "per_expert")
    ((gaps, share_compared),) = run_ranks(right_syncs, 1, name, str(tmp_path), policy, 2)
    assert len(gaps) == 3
    assert share_compared > (0.99 if refit == "adapter" else 0.3)


@pytest.mark.parametrize("gives_fingerprints", [True, False])
@pytest.mark.parametrize("precision", some_of(["float32", "bfloat16"], 1))
@pytest.mark.parametrize(("refit", "faults"), [("merged", [*CHANGES]), ("adapter", OF_ADAPTERS)])
def test_faults_are_found_at_the_first_sync(
    refit: str, faults: list[str], precision: str, gives_fingerprints: bool, tmp_path: Path
) -> None:
    policy = lora_policy(refit, precision)
    (said,) = run_ranks(first_syncs, 1, "qwen3_moe", str(tmp_path), policy, ["none", *faults], gives_fingerprints)
    assert said.pop("none") is None
    assert not [fault for fault, text in said.items() if text is None]
