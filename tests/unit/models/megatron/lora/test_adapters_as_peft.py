# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits, loss and gradients of adapters are those of peft on transformers' model; merged weights give the same."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from nemo_rl_moe.models.megatron.lora.adapter import Adapter, Factor
from tests.support.gloo_ranks import run_ranks
from tests.support.lora_models import Array, Comparison, Factors, compare_with_peft, plain_policy
from tests.support.quick_list import some_of
from tests.support.tiny_model import layout

TOLERANCE = 1e-5
ROUNDING = 5e-5
"""Of merged weights, which moves what latent attention computes of them; and of gated delta nets without adapters."""
OTHER_CHUNKS = 6
"""Room beside the difference of peft from itself with other chunks of the delta rule; see test_recurrent_models.py."""
ALL = ("all-linear",)
WITH_ROUTER = ("all-linear", "router")

FAMILIES = (
    "qwen3_moe",
    "llama",
    "qwen2_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "qwen3_moe_dense_layers_raw_weights",
    "glm4_moe",
    "glm4_moe_lite",
    "minimax_m2",
    "qwen3_next",
    "qwen3_5_moe_text",
    "qwen3_5_text",
)

DENSE = ("llama", "qwen3_5_text")
ONE_OF_A_NET = tuple((name,) for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"))


def _cases() -> list[tuple[str, str, tuple[str, ...], str]]:
    cases = [(name, mode, ALL, "auto") for name in FAMILIES for mode in ("per_expert", "shared") if name not in DENSE]
    cases += [(name, "none", ALL, "auto") for name in DENSE]
    cases += [(name, "per_expert", ALL, "local") for name in ("qwen3_next", "qwen3_5_moe_text")]
    cases += [("qwen3_5_moe_text", "none", targets, "auto") for targets in ONE_OF_A_NET]
    cases += [("qwen3_moe", "none", ("q_proj", "v_proj"), "auto")]
    cases += [(name, "none", WITH_ROUTER, "auto") for name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")]
    cases += [("qwen3_moe", "per_expert", ("down_proj",), "auto"), ("qwen3_moe", "per_expert", ALL, "local")]
    cases += [("qwen3_moe", "per_expert", ("gate_proj", "up_proj"), "auto"), ("deepseek_v3", "shared", ALL, "local")]
    return cases


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def largest(found: Array, expected: Array) -> float:
    """Return the largest difference, of numbers above 1 as a share of the largest."""
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def largest_of(found: Factors, expected: Factors) -> float:
    return max(largest(found[name], values) for name, values in expected.items())


def compared(name: str, root: Path, experts: str, targets: tuple[str, ...] = ALL, **changes: Any) -> Comparison:
    policy = plain_policy(experts, targets, **changes)
    found = run_ranks(compare_with_peft, changes.get("world_size", 1), name, policy, str(root))[0]
    assert isinstance(found, Comparison)
    return found


@pytest.mark.parametrize(("name", "experts", "targets", "layer_spec"), some_of(_cases(), 4))
def test_as_peft(name: str, experts: str, targets: tuple[str, ...], layer_spec: str, folders: Path) -> None:
    assert_as_peft(name, compared(name, folders, experts, targets, layer_spec=layer_spec))


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.parametrize(
    "changes",
    some_of(
        [
            {},
            layout(tp=2),
            layout(pp=2),
            layout(ep=2),
            {"sequence_packing__enabled": True},
            {"activation_checkpointing": "full"},
            {"sequence_packing__enabled": True, "activation_checkpointing": "full", **layout(tp=2, ep=2)},
        ],
        1,
    ),
    ids=str,
)
def test_delta_nets_as_peft_in_layouts(name: str, changes: dict[str, Any], folders: Path) -> None:
    world_size = 2 if "sequence_parallel" in changes else 1
    found = compared(name, folders, "per_expert", WITH_ROUTER, world_size=world_size, **changes)
    assert_as_peft(name, found, [key for key, value in changes.items() if value])


def decays_in_place_of_rates(adapter: Adapter) -> torch.Tensor:
    joined = UP(adapter)
    if adapter.base.names[-1] != "in_proj_a":
        return joined
    *others, rates, decays = joined.split([len(joined) - 4, 2, 2])
    return torch.cat([*others, decays, rates])


def doubled(adapter: Adapter, inputs: torch.Tensor) -> torch.Tensor:
    return 2 * OF_LINEAR(adapter, inputs)


def cut_as_one_section(adapter: Adapter) -> Iterator[Factor]:
    for factor in FACTORS(adapter):
        yield replace(factor, sections=(sum(factor.sections),))


UP, OF_LINEAR, FACTORS = Adapter.up, Adapter.of_linear, Adapter.factors
FAULTS: dict[str, tuple[str, Any]] = {
    "swapped projections": ("up", decays_in_place_of_rates),
    "another scale": ("of_linear", doubled),
    "queries, keys and values cut as one": ("factors", cut_as_one_section),
}


def compare_with_fault(fault: str, *arguments: Any) -> Comparison | None:
    method, faulty = FAULTS[fault]
    with mock.patch.object(Adapter, method, faulty):
        return compare_with_peft(*arguments)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_adapters_of_delta_nets_shows_beside_peft(fault: str, folders: Path) -> None:
    policy = plain_policy("per_expert", world_size=2, **layout(tp=2))
    found = run_ranks(compare_with_fault, 2, fault, "qwen3_5_moe_text", policy, str(folders))[0]
    assert isinstance(found, Comparison)
    assert largest(found.ours.logits, found.peft.logits) > 1e-2
    assert largest_of(found.ours.gradients, found.peft.gradients) > 1e-2


def assert_as_peft(name: str, found: Comparison, changes: Sequence[str] = ()) -> None:
    base = largest(found.base, found.ours_without)
    assert base < (ROUNDING if name.startswith(("qwen3_next", "qwen3_5")) else TOLERANCE)
    logits = largest(found.ours.logits, found.peft.logits)
    floor = largest_of(found.peft_again.gradients, found.peft.gradients)
    gradients = largest_of(found.ours.gradients, found.peft.gradients)
    print(f"| `{name}` | {', '.join(changes) or 'one'} | {logits:.1e} | {base:.1e} | {gradients:.1e} | {floor:.1e} |")
    assert logits < max(TOLERANCE, 2 * base)
    assert abs(found.ours.loss - found.peft.loss) < TOLERANCE
    assert found.ours.gradients.keys() == found.peft.gradients.keys()
    for parameter, gradient in found.peft.gradients.items():
        assert np.abs(gradient).max() > 10 * TOLERANCE, parameter  # there is something to compare
    assert gradients < max(TOLERANCE, OTHER_CHUNKS * floor)
    assert largest(found.merged, found.ours.logits) < ROUNDING
    assert largest(found.base, found.merged) > 0.05
