# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Operations of a model by arithmetic, against numbers worked out by hand from its sizes."""

from itertools import product
from typing import Any

import pytest

from nemo_rl_moe.models.flops import ForwardFlops, IndexerFlops, causal_pairs, forward_flops
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.model.memory_estimate import active_parameters
from nemo_rl_moe.models.megatron.model.sparse_attention import indexer_flops
from nemo_rl_moe.models.megatron.model.transformer_config import attention_windows, build_transformer_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.tiny_model import tiny_policy


def flops_of(hf_config: Any, **mtp: Any) -> ForwardFlops:
    transformer = build_transformer_config(tiny_policy(), hf_config)
    return forward_flops(transformer, hf_config.vocab_size, attention_windows(transformer), **mtp)


def test_a_dense_model_of_grouped_queries() -> None:
    """Qwen3-1.7B: 16 heads and 8 groups of 128 in 28 layers; the head counts where it is the embedding, too."""
    attention = 2048 * 16 * 128 + 2 * 2048 * 8 * 128 + 16 * 128 * 2048
    layer = attention + 3 * 2048 * 6144
    flops = flops_of(load_hf_config("examples/assets/model_configs/Qwen3-1.7B"))
    assert flops == ForwardFlops(2 * (28 * layer + 2048 * 151936), {None: 28 * 2 * 2 * 16 * 128})
    assert flops.per_token == 3_440_902_144


def test_a_model_of_experts_counts_those_that_a_token_is_sent_to() -> None:
    """Qwen3-30B-A3B: 8 of 128 experts of 768, 32 heads and 4 groups of 128, 48 layers."""
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    experts = 8 * 3 * 2048 * 768
    layer = attention + 2048 * 128 + experts
    flops = flops_of(load_hf_config("examples/assets/model_configs/Qwen3-30B-A3B"))
    assert flops == ForwardFlops(2 * (48 * layer + 2048 * 151936), {None: 48 * 2 * 2 * 32 * 128})
    assert flops.per_token == 6_083_313_664


def test_latent_attention_and_a_shared_expert() -> None:
    """Four heads of 8 + 4, values of 6, latents of 10 and 12; one dense layer, three of 3 experts and a shared one."""
    queries, latent, keys_and_values, output = 32 * 10 + 10 * 4 * 12, 32 * (12 + 4), 12 * 4 * (8 + 6), 4 * 6 * 32
    attention = queries + latent + keys_and_values + output
    moe = 32 * 16 + (3 + 1) * 3 * 32 * 12
    products = 4 * attention + 3 * 32 * 48 + 3 * moe + 32 * 64
    flops = flops_of(FAMILY_MODELS["deepseek_v3"].hf_config())
    assert flops == ForwardFlops(2 * products, {None: 4 * 2 * 4 * (12 + 6)})
    assert flops.per_token == 66_048


def test_gated_delta_nets_see_no_pairs() -> None:
    """Three of four layers: 2 key heads of 8, 4 value heads of 6, 4 taps; in the other gates beside 4 query heads."""
    net = 32 * (2 * 16 + 3 * 24 + 2 * 4) + 4 * (2 * 16 + 24) + 3 * 4 * 8 * 6
    attention = 32 * 16 * (3 * 4 + 2 * 2)
    flops = flops_of(FAMILY_MODELS["qwen3_5_text"].hf_config())
    products = 3 * net + attention + 4 * 3 * 32 * 48 + 32 * 61
    assert flops == ForwardFlops(2 * products, {None: 2 * 2 * 4 * 16})


def test_layers_of_one_part_count_that_part_alone() -> None:
    """Two Mamba-2 layers: 4 heads of 6, 2 groups of 8, 4 taps. Two of attention, three with 3 experts, one dense."""
    mamba = 32 * (3 * 24 + 2 * 16 + 4) + 4 * (24 + 2 * 16) + 2 * 24 * 8
    attention = 32 * 16 * (2 * 4 + 2 * 2)
    moe = 32 * 16 + 2 * 32 * (3 * 12 + 20)
    flops = flops_of(FAMILY_MODELS["nemotron_h"].hf_config())
    products = 2 * mamba + 2 * attention + 3 * moe + 2 * 32 * 48 + 32 * 64
    assert flops == ForwardFlops(2 * products, {None: 2 * 2 * 2 * 4 * 16})


def test_layers_with_a_window_see_fewer_pairs() -> None:
    """Every second of four layers sees 5 keys."""
    layer = 32 * 16 * (2 * 4 + 2 * 2) + 32 * 8 + 2 * 3 * 32 * 16
    flops = flops_of(FAMILY_MODELS["gpt_oss"].hf_config())
    pair = 2 * 2 * 4 * 16
    assert flops == ForwardFlops(2 * (4 * layer + 32 * 64), {5: 2 * pair, None: 2 * pair})
    # 1 + ... + 5 + 5 + 5, and 1 + ... + 7.
    assert flops.forward([7]) == 7 * flops.per_token + 2 * pair * 25 + 2 * pair * 28


def test_indexers_run_forward_only_and_limit_the_pairs() -> None:
    """Four layers with an indexer of 16 heads of 8, from a latent of 10; a query sees 4 keys."""
    hf_config = FAMILY_MODELS["deepseek_v32_sparse"].hf_config()
    policy = tiny_policy()
    transformer = build_transformer_config(policy, hf_config)
    indexers = indexer_flops(policy, hf_config)
    assert indexers == IndexerFlops(4, 2 * 4 * (16 * 8 * 10 + (8 + 16) * 32), 2 * 4 * 16 * (8 + 1))
    found = forward_flops(transformer, hf_config.vocab_size, attention_windows(transformer), indexers)
    plain = flops_of(hf_config)
    assert (found.per_token, found.per_pair) == (plain.per_token, {4: plain.per_pair[None]})
    # 1 + 2 + 3 + 4 + 4 + 4 pairs of attention, 21 of indexers. In three tokens indexers choose all.
    decoder = 6 * found.per_token + 18 * found.per_pair[4]
    of_indexers = 6 * indexers.per_token + 21 * indexers.per_pair
    assert found.forward([6]) == decoder + of_indexers
    assert found.training([6]) == 3 * decoder + of_indexers
    assert found.forward([3]) == plain.forward([3])
    assert indexer_flops(tiny_policy(max_total_sequence_length=4), hf_config) is None


def test_layers_of_multi_token_prediction_count_in_training() -> None:
    """Each joins two vectors of 32, and has attention, the last layer's experts or MLP, and the output layer again."""
    queries, latent, keys_and_values, output = 32 * 10 + 10 * 4 * 12, 32 * (12 + 4), 12 * 4 * (8 + 6), 4 * 6 * 32
    moe = 32 * 16 + (3 + 1) * 3 * 32 * 12
    of_layer = 2 * 32 * 32 + queries + latent + keys_and_values + output + moe
    hf_config = FAMILY_MODELS["deepseek_v3"].hf_config()
    plain, joint = flops_of(hf_config), flops_of(hf_config, mtp_layers=1)
    detached = flops_of(hf_config, mtp_layers=1, detaches_mtp=True)
    assert joint.mtp == ForwardFlops(2 * (of_layer + 32 * 64), {None: 2 * 4 * (12 + 6)})
    assert joint.mtp.per_token == 23_936
    assert joint.forward([5, 2]) == plain.forward([5, 2])
    # 15 and 3 pairs. Without a gradient of the output layer's weight, its products are two instead of three.
    of_mtp = 7 * 23_936 + 18 * 144
    assert joint.training([5, 2]) == plain.training([5, 2]) + 3 * of_mtp
    assert detached.training([5, 2]) == plain.training([5, 2]) + 3 * of_mtp - 7 * 2 * 32 * 64

    dense = flops_of(FAMILY_MODELS["qwen3_5_text"].hf_config(), mtp_layers=2).mtp
    of_layer = 2 * 32 * 32 + 32 * 16 * (3 * 4 + 2 * 2) + 3 * 32 * 48
    assert dense == ForwardFlops(2 * 2 * (of_layer + 32 * 61), {None: 2 * 2 * 2 * 4 * 16})


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen2_moe_dense_layers_normalized_weights", "deepseek_v2", "mixtral"])
def test_a_token_passes_two_operations_for_each_parameter_that_is_active(name: str) -> None:
    """But for the embedding, which is looked up, and norms and biases, which are less than 2% even of these models."""
    hf_config = FAMILY_MODELS[name].hf_config()
    transformer = build_transformer_config(tiny_policy(), hf_config)
    in_matrices = active_parameters(transformer, hf_config) - hf_config.vocab_size * hf_config.hidden_size
    assert 0.97 * in_matrices < flops_of(hf_config).per_token / 2 < in_matrices


def test_sequences_attend_to_themselves_alone() -> None:
    flops = ForwardFlops(per_token=10, per_pair={None: 3})
    assert flops.forward([3, 2]) == 5 * 10 + 3 * (1 + 2 + 3) + 3 * (1 + 2)
    assert flops.training([3, 2]) == 3 * flops.forward([3, 2])
    assert flops.forward([]) == 0


@pytest.mark.parametrize(("length", "window"), list(product(range(7), (None, 1, 3, 6, 9))))
def test_pairs_are_those_of_a_causal_mask(length: int, window: int | None) -> None:
    seen = [
        key <= query and (window is None or query - key < window) for query in range(length) for key in range(length)
    ]
    assert causal_pairs(length, window) == sum(seen)
