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
    recomputed_activations,
)
from nemo_rl_moe.models.megatron.model.adapter_estimate import rounding_of_frozen_experts
from nemo_rl_moe.models.megatron.model.memory_estimate import worker_memory
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config

LAYERS, TOKENS, VOCABULARY, CHUNK = 48, 8192, 151936, 1024
FOLDER = "examples/assets/model_configs/Qwen3-30B-A3B"
RECIPE = "examples/configs/grpo_qwen3_30b_a3b_8xh100_r3.yaml"
GLM_4_7_FLASH = "examples/configs/grpo_glm_4_7_flash.yaml"
GLM_4_7_FLASH_FOLDER = "examples/assets/model_configs/GLM-4.7-Flash"
HELD, PEAK = 51.21, 71.18
"""GB allocated before the step, and at its peak."""

RECORDED: Mapping[str, Sequence[float]] = {
    # the sum behind the MLP half, and the embedding; the last layer's is the input of the last norm
    "input": (1.611,),
    # roped queries and keys; values; output
    "attention": (3.624, 0.403, 3.221),
    # queries and keys, made dense
    "query_key_norms": (3.221, 0.403),
    "latents": (),
    "angles": (),
    # layernorm_linear; rmsnorm without the last norm's output. Both lines have statistics too.
    "norms": (1.612 - 0.0015, 1.702 - 0.034 - 0.057 - 0.0015),
    "residual": (1.611,),
    # norms of queries and keys; softmax; the two norms
    "statistics": (0.057, 0.050, 0.0015, 0.0015),
    # choice
    "routing": (0.025,),
    "matrices": (),
}
"""GB by term."""
# Sum of the weight's gradients; float32 logits; logits or their gradient; last norm and gradient of its output.
HEAD = (1.245, 0.622, 0.311, 0.034, 0.034, 0.034)


def _transformer_config(recipe: str = RECIPE, folder: str = FOLDER, overrides: Sequence[str] = ()) -> Any:
    config = load_grpo_config(recipe, [f"policy.model_name={folder}", *overrides], check_paths=False)
    return build_transformer_config(config.policy, load_hf_config(folder))


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


def test_latent_attention_by_hand() -> None:
    """GLM-4.7-Flash: latents of 768 (queries) and 512 (keys), before and behind their norms, and 64 rotary angles."""
    kept = layer_activations(_transformer_config(GLM_4_7_FLASH, GLM_4_7_FLASH_FOLDER), 1)
    assert kept.latents == 2 * 2 * (768 + 512)
    assert kept.angles == 2 * 2 * 2 * 64  # cosines and sines, for queries and for keys
    assert kept.attention == 2 * 20 * (256 + 256 + 256 + 256)  # queries, keys, values and output of 20 heads
    assert kept.statistics == 4 * (2 + 2 + 20)  # norms of hidden states and of latents, softmax
    assert (kept.query_key_norms, kept.routing, kept.matrices) == (0, 0, 0)


def test_packed_values_are_padded_to_the_width_of_keys() -> None:
    """Kimi-K2: 64 heads with keys of 192 and values of 128, padded while packed; the output padded and not padded."""
    transformer = _transformer_config(GLM_4_7_FLASH, "examples/assets/model_configs/Kimi-K2-Instruct")
    assert layer_activations(transformer, 1, is_packed=True).attention == 2 * 64 * (4 * 192 + 128)
    assert layer_activations(transformer, 1).attention == 2 * 64 * 2 * (192 + 128)


def test_the_first_layer_of_glm_has_matrices_alone() -> None:
    kept = layer_activations(_transformer_config(GLM_4_7_FLASH, GLM_4_7_FLASH_FOLDER), 0)
    assert kept.matrices == 2 * 3 * 10240  # gate, up and their product


def test_shared_experts_are_kept_without_recomputation() -> None:
    plain = ["policy.megatron_cfg.activation_checkpointing=none"]
    kept = layer_activations(_transformer_config(GLM_4_7_FLASH, GLM_4_7_FLASH_FOLDER, plain), 1)
    assert kept.matrices == 2 * (4 * (2048 + 3 * 1536) + 3 * 1536)


def test_a_frozen_output_layer_has_no_gradient() -> None:
    """1,024 tokens' logits in float32 with what they were converted from; three hidden states of each token."""
    frozen = head_activations(_transformer_config(), TOKENS, VOCABULARY, CHUNK, is_frozen=True)
    assert frozen == CHUNK * VOCABULARY * (4 + 2) + 3 * TOKENS * 2048 * 2


def test_a_chunk_s_gradient_of_a_large_weight_is_more_than_its_logits() -> None:
    """256 tokens: the gradient of 151,936 x 2,048 numbers with the gradient of the logits, both in bfloat16."""
    found = head_activations(_transformer_config(), TOKENS, VOCABULARY, 256)
    sums, of_chunk = VOCABULARY * 2048 * 4, (VOCABULARY * 2048 + 256 * VOCABULARY) * 2
    assert found == sums + of_chunk + 3 * TOKENS * 2048 * 2


def test_a_layer_of_adapters_that_is_computed_again() -> None:
    """GLM-4.5-Air: rows of 8 experts in 4 copies and with the adapter's term twice, 3 x 1,408 within an expert.

    Then the shared expert's 3 x 1,408 and output, and what a layer keeps: 96 and 8 heads of 128, three hidden states,
    float32 numbers of two norms and softmax, probabilities, map and order of rows.
    """
    transformer = _transformer_config(
        "examples/configs/grpo_glm_4_5_air_lora.yaml", "examples/assets/model_configs/GLM-4.5-Air"
    )
    experts = 2 * (8 * (6 * 4096 + 3 * 1408) + 3 * 1408 + 4096)
    attention = 2 * (104 * 2 * 128 + 3 * 4096) + 4 * (2 + 96)
    routing = 128 * (4 + 1) + 257 * 4
    assert recomputed_activations(transformer, 1, are_experts_adapted=True) == experts + attention + routing
    without = recomputed_activations(transformer, 1)
    assert without == experts - 2 * 8 * 2 * 4096 + attention + routing
    dense = recomputed_activations(transformer, 0, are_experts_adapted=True)
    assert dense == attention + 2 * 3 * 10944


def test_experts_alone_are_computed_again() -> None:
    """Qwen3-30B-A3B: four copies of 8 experts' rows, 3 x 768 within an expert, and the router's numbers."""
    assert recomputed_activations(_transformer_config(), 0) == 2 * 8 * (4 * 2048 + 3 * 768) + 128 * 5 + 257 * 4


def test_frozen_experts_take_whole_blocks() -> None:
    """GLM-4.5-Air: matrices of 22 MiB fit; 16 routed and a shared one of 11 MiB take 12 in each of 45 layers."""
    transformer = _transformer_config(
        "examples/configs/grpo_glm_4_5_air_lora.yaml", "examples/assets/model_configs/GLM-4.5-Air"
    )
    assert rounding_of_frozen_experts(transformer, range(46)) == 45 * 17 * 2**20
    assert rounding_of_frozen_experts(transformer, [0]) == 0
    assert rounding_of_frozen_experts(_transformer_config(), range(48)) == 0  # 6 and 3 MiB share larger ones
