# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: its training in layouts, and recomputed.

`test_families.py` compares it with transformers.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families.rules import InterleavedRows
from nemo_rl_moe.models.megatron.cpu.sink_attention import SinkAttention
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import Difference, RankRun, RunSettings, tiny_trainer, train_run
from tests.unit.models.megatron.tiny_trainers import assert_within

MODEL = "gpt_oss"
# Largest seen over all layouts and both versions of Megatron-Core: 9e-8, 3e-7, 2e-7 and 2e-6.
TOLERANCE = Difference(loss=5e-7, grad_norm=2e-6, moe_metrics=2e-6, weights=1e-5)
SHARDED = {"distributed_data_parallel_config__use_distributed_optimizer": True}
PACKED = {"sequence_packing__enabled": True, "sequence_packing__train_mb_tokens": 64}


def settings(world_size: int = 1, sizes: Mapping[str, int] | None = None, **changes: Any) -> RunSettings:
    return RunSettings(tiny_policy(world_size, **layout(**(sizes or {})), **changes), model=MODEL)


@cache
def one_rank() -> RankRun:
    """The run that the others are compared with; made once."""
    return run_ranks(train_run, 1, settings(layer_spec="local"))[0]


@pytest.mark.parametrize(
    ("world_size", "sizes", "changes"),
    [
        slow(1, {}, {}, id="fast modules"),
        full(1, {}, PACKED, id="packed"),
        pytest.param(2, {"tp": 2, "ep": 2}, SHARDED, id="tp2_ep2_zero1"),
        slow(2, {"tp": 2}, PACKED, id="tp2_packed"),
        slow(2, {"tp": 2}, {"layer_spec": "local"}, id="tp2_local"),
        slow(2, {"tp": 2, "ep": 2}, {"layer_spec": "local"}, id="tp2_ep2_local"),
        slow(2, {"ep": 2}, {}, id="ep2"),
        slow(2, {"pp": 2, "vpp": 2}, {}, id="pp2_vpp2"),
        slow(4, {"tp": 2, "ep": 2, "pp": 2}, SHARDED, id="tp2_ep2_pp2_zero1"),
        slow(2, {"pp": 2}, {"activation_checkpointing": "full"}, id="recomputed"),
        slow(2, {"tp": 2}, {"activation_checkpointing": "moe"}, id="experts_recomputed"),
    ],
)
def test_training_is_that_of_one_rank_with_megatrons_modules(
    world_size: int, sizes: dict[str, int], changes: dict[str, Any]
) -> None:
    assert_within(TOLERANCE, run_ranks(train_run, world_size, settings(world_size, sizes, **changes)), one_rank())


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "sizes", "changes"),
    [
        pytest.param(2, {"tp": 2}, {}, id="tp2"),
        slow(1, {}, {}, id="one_rank"),
        slow(1, {}, {"layer_spec": "local"}, id="one_rank_local"),
    ],
)
def test_bfloat16_trains_as_float32_does(world_size: int, sizes: dict[str, int], changes: dict[str, Any]) -> None:
    found = run_ranks(train_run, world_size, settings(world_size, sizes, precision="bfloat16", **changes))[0]
    assert found.losses == pytest.approx(one_rank().losses, rel=5e-3)
    assert found.grad_norms == pytest.approx(one_rank().grad_norms, rel=5e-2)


def attention_windows(policy: Any) -> dict[int, int | None]:
    with tiny_trainer(policy, MODEL) as trainer:
        layers = [layer for chunk in trainer.chunks for layer in chunk.decoder.layers]
        cores = {layer.layer_number: layer.self_attention.core_attention for layer in layers}
        assert all(isinstance(core, SinkAttention) for core in cores.values())
        return {number: core.window for number, core in cores.items()}


def test_windows_belong_to_layers_of_the_whole_model() -> None:
    first, second = run_ranks(attention_windows, 2, tiny_policy(2, **layout(pp=2)))
    assert first | second == {1: 5, 2: None, 3: 5, 4: None}


def test_gate_and_up_rows_take_turns() -> None:
    rows = torch.tensor([[1, 1], [10, 10], [2, 2], [20, 20]])
    joined = InterleavedRows().join([rows], None)
    assert joined.tolist() == [[1, 1], [2, 2], [10, 10], [20, 20]]
    (split,) = InterleavedRows().split(joined, 1, None)
    assert torch.equal(split, rows)
    # A tensor-parallel rank's piece is made of the same piece of the tensor.
    assert InterleavedRows().join([rows[:2]], None).tolist() == [[1, 1], [10, 10]]


def test_a_layer_without_a_type_is_refused() -> None:
    hf_config = FAMILY_MODELS[MODEL].hf_config()
    hf_config.layer_types = ["full_attention"]
    with pytest.raises(ConfigurationError, match="layer_types: got 1 entries, expected one for each of 4 layers"):
        build_transformer_config(tiny_policy(1), hf_config)


def test_experts_with_biases_are_not_cut() -> None:
    policy = tiny_policy(2, **layout(tp=2, etp=2))
    with pytest.raises(ConfigurationError, match="ETP==1"):
        build_transformer_config(policy, FAMILY_MODELS[MODEL].hf_config())
