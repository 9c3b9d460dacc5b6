# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters arrive at engines, merged or as they are; the check finds at the first sync what went wrong on the way."""

from pathlib import Path

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.lora_refits import (
    CHANGES,
    first_syncs,
    later_refit,
    load_with_a_gap,
    lora_policy,
    right_syncs,
)
from tests.support.quick_list import some_of
from tests.support.tiny_model import layout

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


@pytest.mark.parametrize("gives_fingerprints", some_of([True, False], 1))
@pytest.mark.parametrize("precision", some_of(["float32", "bfloat16"], 1))
@pytest.mark.parametrize(("refit", "faults"), [("merged", [*CHANGES]), ("adapter", OF_ADAPTERS)])
def test_faults_are_found_at_the_first_sync(
    refit: str, faults: list[str], precision: str, gives_fingerprints: bool, tmp_path: Path
) -> None:
    policy = lora_policy(refit, precision)
    (said,) = run_ranks(first_syncs, 1, "qwen3_moe", str(tmp_path), policy, ["none", *faults], gives_fingerprints)
    assert said.pop("none") is None
    assert not [fault for fault, text in said.items() if text is None]


LATER = [
    ("qwen3_moe", {}, ("q_proj", "o_proj"), "none", False),
    ("qwen3_moe", layout(tp=2, ep=2), ("all-linear",), "none", True),
    ("qwen3_moe", layout(tp=2, ep=2), ("down_proj",), "per_expert", False),
    ("qwen3_moe", layout(pp=2), ("all-linear",), "shared", True),
    ("gpt_oss", layout(ep=2), ("down_proj",), "per_expert", False),
    ("deepseek_v3", {}, ("kv_b_proj",), "none", False),
    ("mixtral", {}, ("all-linear",), "per_expert", False),
    ("llama", layout(tp=2), ("gate_proj",), "none", True),
]


@pytest.mark.parametrize(("name", "sizes", "targets", "experts", "on_device"), some_of(LATER, 3))
def test_an_engine_with_the_base_gets_the_blocks_that_adapters_change(
    name: str, sizes: dict[str, int], targets: tuple[str, ...], experts: str, on_device: bool, tmp_path: Path
) -> None:
    world_size = 2 if sizes else 1
    policy = lora_policy("merged", "float32", experts, targets, world_size, **sizes)
    ranks = run_ranks(later_refit, world_size, name, str(tmp_path), policy, on_device)
    names, moved, sent = (set.union(*(getattr(rank, of) for rank in ranks)) for of in ("names", "moved", "sent"))
    assert moved
    assert moved <= sent < names
    assert all(rank.are_right for rank in ranks)
    if experts == "none" and "q_proj" in targets:
        assert all(".self_attn." in each for each in sent), "experts stay"


def test_a_parameter_of_which_a_part_arrives_is_an_error(tmp_path: Path) -> None:
    (said,) = run_ranks(load_with_a_gap, 1, "qwen3_moe", str(tmp_path), lora_policy("merged"))
    assert said[0] == ""
    assert "k_proj.weight" in said[1]
    assert "have not arrived" in said[1]
