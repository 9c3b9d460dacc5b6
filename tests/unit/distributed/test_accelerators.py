# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Machines that a run is planned for, out of a text."""

import pytest

from nemo_rl_moe.distributed.accelerators import ACCELERATORS, Target, parse_target, peak_flops_per_second
from nemo_rl_moe.errors import ConfigurationError


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_card_can_be_named(name: str) -> None:
    card = ACCELERATORS[name]
    assert parse_target(f"8x{name}") == Target(1, 8, card)
    assert parse_target(f"16x4x{name.lower()}") == Target(16, 4, card)
    assert str(parse_target(f"16x4x{name.lower()}")) == f"16x4x{name}"
    assert parse_target(f"16x4x{name}").overrides == ["cluster.num_nodes=16", "cluster.gpus_per_node=4"]
    assert 0 < card.memory_gb < 1000 < 1000 * card.bfloat16_tflops


def test_what_cards_could_do_adds_up() -> None:
    assert peak_flops_per_second(["NVIDIA H100 80GB HBM3"] * 8) == 8 * 989e12
    assert peak_flops_per_second(["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]) == (989 + 312) * 1e12


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB", ""])
def test_nobody_guesses_what_a_card_could_do(name: str) -> None:
    assert peak_flops_per_second(["NVIDIA H200", name]) is None


def test_a_name_is_that_of_one_card() -> None:
    names = [name for card in ACCELERATORS.values() for name in card.device_names]
    assert len(names) == len(set(names)) > 0
    assert all(card.device_names for card in ACCELERATORS.values())


@pytest.mark.parametrize(
    "text", ["", "H100", "8x", "8xH100x", "0x8xH100", "0xH100", "2x2x2xH100", "8 x H100", "8xV100", "x" * 999]
)
def test_anything_else_is_one_line(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_target(text)
    (line,) = caught.value.problems
    assert line.startswith("--target: got ")
    assert "expected " in line
    assert len(line) < 300
