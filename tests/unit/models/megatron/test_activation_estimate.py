# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`plan`'s terms beside what torch's allocator has recorded at the peak of a full-size step, line by line.

The record is of rank 0 of the 8 x H100 recipe of Qwen3-30B-A3B with replay: 48 layers, one microbatch of 8,192 tokens,
Transformer Engine 2.17.1 and Megatron-Core 0.19.2 on the fake card (docs/gpu.md). Kernels did nothing there; the
libraries' allocations are real.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

import pytest

from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model.activation_estimate import (
    LayerActivations,
    head_activations,
    layer_activations,
)
from nemo_rl_moe.models.megatron.model.memory_estimate import worker_memory
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

LAYERS, TOKENS, VOCABULARY, CHUNK = 48, 8192, 151936, 1024
FOLDER = "examples/assets/model_configs/Qwen3-30B-A3B"
RECIPE = "examples/configs/grpo_qwen3_30b_a3b_8xh100_r3.yaml"
HELD, PEAK = 51.21, 72.15
"""GB allocated before the step, and at its peak."""

RECORDED: Mapping[str, Sequence[float]] = {
    # the sum behind the MLP half, and the embedding; the last layer's is the input of the last norm
    "input": (1.611,),
    # roped queries and keys; values; output
    "attention": (3.624, 0.403, 3.221),
    # queries and keys, made dense
    "query_key_norms": (3.221, 0.403),
    # layernorm_linear; rmsnorm without the last norm's output. Both lines have statistics too.
    "norms": (1.612 - 0.0015, 1.702 - 0.034 - 0.057 - 0.0015),
    "residual": (1.611,),
    # norms of queries and keys; softmax; the two norms
    "statistics": (0.057, 0.050, 0.0015, 0.0015),
    # row_id_map; probabilities; map; choice
    "routing": (0.404, 0.201, 0.050, 0.025),
    "matrices": (),
}
"""GB by term."""
# Sum of the weight's gradients; float32 logits; logits; their gradient; the last norm and the gradient of its output.
HEAD = (1.245, 0.622, 0.311, 0.311, 0.034, 0.034, 0.034)


def _transformer_config() -> Any:
    config = load_grpo_config(RECIPE, [f"policy.model_name={FOLDER}"], check_paths=False)
    return build_transformer_config(config.policy, load_hf_config(FOLDER))


@pytest.mark.parametrize("term", [field.name for field in fields(LayerActivations)])
def test_a_term_of_all_layers_is_what_the_allocator_has(term: str) -> None:
    transformer = _transformer_config()
    layers = [layer_activations(transformer, index, is_replayed=True) for index in range(LAYERS)]
    planned = sum(getattr(layer, term) for layer in layers) * TOKENS
    assert planned / 1e9 == pytest.approx(sum(RECORDED[term]), rel=0.01)


def test_the_head_is_what_the_allocator_has() -> None:
    assert head_activations(_transformer_config(), TOKENS, VOCABULARY, CHUNK) / 1e9 == pytest.approx(
        sum(HEAD), rel=0.01
    )


def test_the_peak_is_within_three_percent() -> None:
    config = load_grpo_config(RECIPE, [f"policy.model_name={FOLDER}"], check_paths=False)
    hf_config = load_hf_config(FOLDER)
    planned = worker_memory(config, build_transformer_config(config.policy, hf_config), hf_config, 0)
    assert planned.always / 1e9 == pytest.approx(HELD, rel=0.001)
    assert planned.while_training_at_least / 1e9 == pytest.approx(PEAK, rel=0.03)
    assert planned.while_training_at_least / 1e9 < PEAK


def test_with_full_recomputation_the_input_alone_stays() -> None:
    config = load_grpo_config(RECIPE, [f"policy.model_name={FOLDER}"], check_paths=False)
    megatron = config.policy.megatron_cfg.model_copy(update={"activation_checkpointing": "full"})
    policy = config.policy.model_copy(update={"megatron_cfg": megatron})
    kept = layer_activations(build_transformer_config(policy, load_hf_config(FOLDER)), 0)
    assert [value for value in astuple(kept) if value] == [kept.input] == [2 * 2048]
