# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights go in and out tensor by tensor: beside the model there is never room for a second one."""

from pathlib import Path

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.hf_runs import memory_of_loading, memory_of_saving
from tests.support.tiny_model import tiny_policy

# 268 million parameters of four bytes, in embeddings of 128 MiB and experts of 4 MiB.
LARGE = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_768,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "moe_intermediate_size": 1024,
}
MOST_ADDED_BYTES = 300 * 10**6


@pytest.mark.slow
@pytest.mark.parametrize(("max_shard_bytes", "fewest_files"), [(50_000_000, 10), (5_000_000_000, 1)])
def test_a_model_of_a_gigabyte_goes_in_and_out_with_little_besides(
    max_shard_bytes: int, fewest_files: int, tmp_path: Path
) -> None:
    folder, policy = tmp_path / "weights", tiny_policy()
    arguments = (policy, LARGE, str(folder))
    ((model_bytes, added),) = run_ranks(memory_of_saving, 1, *arguments, max_shard_bytes, timeout_s=280, fresh=True)
    assert model_bytes > 10**9
    assert len(list(folder.glob("model*.safetensors"))) >= fewest_files
    print(f"writing {model_bytes:,} bytes adds {added:,}")
    assert added < MOST_ADDED_BYTES
    ((_, added),) = run_ranks(memory_of_loading, 1, *arguments, timeout_s=280, fresh=True)
    print(f"reading them adds {added:,}")
    assert added < MOST_ADDED_BYTES
