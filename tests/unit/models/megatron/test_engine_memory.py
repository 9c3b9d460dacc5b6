# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of vLLM's engines against numbers worked out by hand."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.generation.vllm.record import size
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model.engine_memory import EngineMemory, bytes_on_the_way, engine_memory
from nemo_rl_moe.models.megatron.model.memory_estimate import whole_model_parameters
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

MODEL = Path(__file__).resolve().parents[4] / "examples/assets/model_configs/Qwen3-30B-A3B"
VLLM = "policy.generation.vllm"


def run_of(*overrides: str) -> tuple[Any, Any, Any]:
    config = load_grpo_config(
        "grpo_qwen3_30b_a3b_vllm.yaml", [f"policy.model_name={MODEL}", *overrides], check_paths=False
    )
    hf_config = load_hf_config(str(MODEL))
    return config, build_transformer_config(config.policy, hf_config), hf_config


@pytest.mark.parametrize(
    ("ranks", "heads_of_keys"),
    [(1, 4), (2, 2), (4, 1), (8, 1)],  # 8 ranks: every head is there twice
)
def test_a_rank_of_an_engine(ranks: int, heads_of_keys: int) -> None:
    config, *model = run_of(f"{VLLM}.tensor_parallel_size={ranks}", f"{VLLM}.expert_parallel=false")
    memory = engine_memory(size(config), *model)
    queries_and_output = 2 * 2048 * 32 * 128 // ranks
    keys_and_values = 2 * 2048 * heads_of_keys * 128
    norms = 2 * 2048 + 2 * 128
    router, experts = 128 * 2048, 128 * 3 * 2048 * 768 // ranks
    layer = queries_and_output + keys_and_values + norms + router + experts
    ends = 2 * 151936 // ranks * 2048 + 2048
    assert memory.weights == 2 * (48 * layer + ends)
    assert memory.cache_of_a_token == 48 * heads_of_keys * 2 * 128 * 2


def test_one_rank_has_the_whole_model() -> None:
    alone = f"{VLLM}.tensor_parallel_size=1", f"{VLLM}.expert_parallel=false"
    config, transformer, hf_config = run_of(*alone, f"{VLLM}.dtype=float32")
    memory = engine_memory(size(config), transformer, hf_config)
    assert memory.weights == 4 * whole_model_parameters(transformer, hf_config)


def test_cache_is_what_the_share_leaves() -> None:
    memory = EngineMemory(weights=15, cache_of_a_token=1)
    assert memory.cache(100, 0.4) == 25
    assert memory.cache(100, 0.1) == 0


@pytest.mark.parametrize(
    ("held", "utilization", "expected"), [(30, 0.5, 60), (0, 1.0, 15), (30, 1.0, float("inf")), (3, 0.1, 150)]
)
def test_devices_that_hold_both(held: int, utilization: float, expected: float) -> None:
    # 150: of which the share of a tenth holds the weights.
    assert EngineMemory(weights=15, cache_of_a_token=1).fits_from(held, utilization) == pytest.approx(expected)


def test_buckets_on_the_way() -> None:
    # 16 ranks x 2 buckets of 64 MiB; embedding and output layer, 151,936 x 2048 x 2 bytes, in place of two of them.
    expected = 32 * 64 * 2**20 + 2 * (151936 * 2048 * 2 - 64 * 2**20)
    assert bytes_on_the_way(*run_of()) == expected
