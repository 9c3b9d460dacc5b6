# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward pass for generation, part by part, against the same formulas over whole sequences."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.cpu.attention import causal_attention
from nemo_rl_moe.models.megatron.cpu.cached_attention import (
    HeadNorm,
    PaddedInferenceContext,
    Rotation,
    SelfAttentionCache,
)
from nemo_rl_moe.models.megatron.cpu.cached_forward import add_experts, has_cached_forward
from nemo_rl_moe.models.megatron.cpu.functions import rotate
from nemo_rl_moe.models.megatron.cpu.fused_attention import HeadLayout
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full
from tests.support.tiny_model import layout, parallel_job, tiny_policy
from tests.support.training_run import build_trainer

ROWS, SLOTS, EPS = 3, 11, 1e-6


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def whole_attention(mixed: Tensor, weights: tuple[Tensor, Tensor], angles: Tensor, heads: HeadLayout) -> Tensor:
    """Norms, rotation and causal attention over `[slots, rows, ...]`."""
    split = mixed.view(*mixed.shape[:2], heads.groups, heads.heads_per_group + 2, heads.dim)
    query = split[..., : heads.heads_per_group, :].reshape(*mixed.shape[:2], -1, heads.dim)
    query, key = (
        rotate(F.rms_norm(tensor, (heads.dim,), weight, EPS), angles.cos(), angles.sin())
        for tensor, weight in ((query, weights[0]), (split[..., -2, :], weights[1]))
    )
    return causal_attention(query, key, split[..., -1, :])


def in_steps(mixed: Tensor, prefill: int, attend: Any, context: PaddedInferenceContext) -> Tensor:
    parts = []
    for columns in (prefill, *[1] * (len(mixed) - prefill)):
        first = context.sequence_len_offset
        # It overwrites its input.
        parts.append(attend(mixed[first : first + columns].clone()))
        context.increment_sequence_len_offset(columns)
    return torch.cat(parts)


@pytest.mark.parametrize("num_pads", [None, [0, 3, 1], [4, 0, 2]])
@pytest.mark.parametrize("heads", [HeadLayout(2, 2, 8), HeadLayout(3, 1, 4), HeadLayout(1, 4, 8)])
@pytest.mark.parametrize("prefill", [1, 5, SLOTS])
@pytest.mark.parametrize("rows_of_angles", [1, ROWS])
@pytest.mark.parametrize("rotated", [1.0, 0.5])
def test_cached_attention_is_attention(
    num_pads: list[int] | None, heads: HeadLayout, prefill: int, rows_of_angles: int, rotated: float
) -> None:
    prefill = max(prefill, max(num_pads or [0]) + 1)
    mixed = random(SLOTS, ROWS, heads.groups * (heads.heads_per_group + 2) * heads.dim, dtype=torch.float32)
    weights = (1 + random(heads.dim, seed=1).float() / 4, 1 + random(heads.dim, seed=2).float() / 4)
    half = int(heads.dim * rotated) // 2
    angles = random(SLOTS, rows_of_angles, 1, half, seed=3, dtype=torch.float32).repeat(1, 1, 1, 2)
    rotation = Rotation(angles, heads.dim)
    context = PaddedInferenceContext(ROWS, SLOTS, rotation, None if num_pads is None else torch.tensor(num_pads))
    cache = SelfAttentionCache(context, heads, HeadNorm.of_each_head(*weights, EPS, heads), heads.dim**-0.5)
    found = in_steps(mixed, prefill, cache.attend, context)
    for row, pads in enumerate(num_pads or [0] * ROWS):
        expected = whole_attention(
            mixed[pads:, row : row + 1].double(),
            tuple(weight.double() for weight in weights),
            angles[pads:, row % rows_of_angles].unsqueeze(1).double(),
            heads,
        )
        torch.testing.assert_close(found[pads:, row : row + 1].double(), expected, rtol=0, atol=2e-6)
        # Padding is computed as well, and must not spoil later layers.
        assert found[:pads, row].isfinite().all()


@pytest.mark.parametrize("rows_of_angles", [1, ROWS])
def test_rows_leave_the_cache(rows_of_angles: int) -> None:
    heads = HeadLayout(2, 2, 8)
    mixed = random(SLOTS, ROWS, 64, dtype=torch.float32)
    weight = torch.ones(8)
    outputs = []
    for leaves in (False, True):
        rotation = Rotation(random(SLOTS, rows_of_angles, 1, 8, seed=3, dtype=torch.float32), 8)
        context = PaddedInferenceContext(ROWS, SLOTS, rotation, torch.tensor([2, 0, 1]))
        cache = SelfAttentionCache(context, heads, HeadNorm.of_each_head(weight, weight, EPS, heads), 1.0)
        context.key_value_memory_dict[1] = cache
        cache.attend(mixed[:6].clone())
        context.increment_sequence_len_offset(6)
        rows = torch.tensor([0, 2])
        step = mixed[6:7].clone()
        if leaves:
            context.select_rows(rows)
            outputs.append(cache.attend(step[:, rows]))
        else:
            outputs.append(cache.attend(step)[:, rows])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("ffn", [16, 6])
def test_experts_add_what_each_makes(ffn: int) -> None:
    num_experts, tokens, hidden, dtype = 5, 13, 8, torch.float32
    inputs, residual = random(tokens, hidden, dtype=dtype), random(tokens, hidden, seed=1, dtype=dtype)
    weights_1 = random(num_experts, 2 * ffn, hidden, seed=2, dtype=dtype)
    weights_2 = random(num_experts, hidden, ffn, seed=3, dtype=dtype)
    # The last expert gets nothing.
    experts = torch.stack([torch.tensor([token % 4, (token + 1 + token % 3) % 4]) for token in range(tokens)])
    probs = random(tokens, 2, seed=4).softmax(-1).to(dtype)
    expected = residual.double()
    for token in range(tokens):
        for prob, expert in zip(probs[token].double(), experts[token], strict=True):
            gate, up = (weights_1[expert].double() @ inputs[token].double()).chunk(2)
            expected[token] += weights_2[expert].double() @ (F.silu(gate) * up * prob)
    add_experts(residual, inputs, probs, experts, weights_1, weights_2)
    torch.testing.assert_close(residual.double(), expected, rtol=0, atol=2e-5)


def uses_cached_forward(policy: PolicyConfig) -> bool:
    with parallel_job(policy):
        (chunk,) = build_trainer(policy).chunks
        return has_cached_forward(chunk)


@pytest.mark.parametrize(
    ("world_size", "changes", "expected"),
    [
        (1, {"layer_spec": "auto"}, True),
        full(1, {"layer_spec": "local"}, False),
        # Padding would take real tokens' places.
        full(1, {"layer_spec": "auto", "moe_expert_capacity_factor": 1.5}, False),
        # Each rounding would have to be that of training.
        full(1, {"layer_spec": "auto", "precision": "bfloat16"}, False),
        full(2, {"layer_spec": "auto", **layout(ep=2)}, True),
        full(2, {"layer_spec": "auto", **layout(tp=2)}, True),
    ],
)
def test_where_it_is_used(world_size: int, changes: dict[str, Any], expected: bool) -> None:
    assert run_ranks(uses_cached_forward, world_size, tiny_policy(world_size, **changes)) == [expected] * world_size


def models_with_cached_forward(policy: PolicyConfig) -> dict[str, bool]:
    with parallel_job(policy):
        return {model: all(map(has_cached_forward, build_trainer(policy, model).chunks)) for model in ATTENTION}


# Sinks and windows have no cached forward.
ATTENTION = {
    "llama": True,
    "olmoe": True,
    "qwen2_moe": True,
    "gpt_oss": False,
    "deepseek_v2": True,
    "deepseek_v3": True,
    "glm4_moe": True,
    "glm4_moe_lite": True,
    "qwen3_next": True,
    "qwen3_5_text": True,
    "nemotron_h": True,
}


def test_attention_that_it_has() -> None:
    assert run_ranks(models_with_cached_forward, 1, tiny_policy()) == [ATTENTION]
    (found,) = run_ranks(models_with_cached_forward, 1, tiny_policy(layer_spec="local"))
    assert not any(found.values()), "Megatron-Core's own modules are what was asked for"


def router_trace(policy: PolicyConfig) -> None:
    """Routes for generation and for training, and looks at what is left behind."""
    with parallel_job(policy):
        router = build_trainer(policy).chunks[0].decoder.layers[0].mlp.router
        tokens = random(6, 32, seed=9, dtype=torch.float32)
        with torch.no_grad():
            probs, indices = router.eval()(tokens.view(6, 1, 32))
            router.last_topk_indices = None
            found_probs, found_indices = router.evaluate(tokens)
        assert router.last_topk_indices is None
        torch.testing.assert_close(found_indices, indices, rtol=0, atol=0)
        torch.testing.assert_close(found_probs, probs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", ["null", "fp32", "fp64"])
def test_router_leaves_no_trace(dtype: str) -> None:
    run_ranks(router_trace, 1, tiny_policy(1, layer_spec="auto", moe_router_dtype=dtype))
