# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Each fast function against plain formulas or torch's own modules."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  (before megatron.core)
from nemo_rl_moe.models.megatron.cpu.attention import (
    PaddedBatch,
    SDPAttention,
    causal_attention,
    packed_attention,
    packed_lengths,
    worth_padding,
)
from nemo_rl_moe.models.megatron.cpu.functions import RMSNorm, RotaryFunction, cosines_and_sines, cross_entropy
from nemo_rl_moe.models.megatron.cpu.moe import CombineFunction, DispatchFunction, SwigluExpertsFunction
from nemo_rl_moe.models.megatron.cpu.spec import FastModule, eligible
from tests.unit.models.megatron.test_cpu_layers_sinks import by_formula

# isort: split
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def _gradients(output: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.autograd.grad(output, inputs, weights.to(output.dtype))


def _assert_same(output: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    found, wanted = (_gradients(y, *inputs) for y in (output, expected))
    torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)


def _norm(hidden: int, dtype: torch.dtype = torch.float32, sequence_parallel: bool = False) -> RMSNorm:
    config: Any = SimpleNamespace(params_dtype=dtype, sequence_parallel=sequence_parallel)
    return RMSNorm(config, hidden, eps=1e-6, has_residual=True, name="norm")


def test_norm_agrees_with_torch() -> None:
    norm, inputs = _norm(24), _random(5, 3, 24)
    norm.weight.data += 0.3 * _random(24).detach()
    expected = F.rms_norm(inputs, (24,), norm.weight, 1e-6)
    output = norm(inputs)
    _assert_same(output, expected, inputs, norm.weight)


def test_norm_of_bfloat16_has_float32_statistics() -> None:
    norm = _norm(4096, torch.bfloat16)
    inputs = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    # Summed in bfloat16, the squares would stop growing after a few hundred of them.
    assert norm(inputs).eq(1.0).all()
    assert norm(inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norm_marks_its_weight(sequence_parallel: bool) -> None:
    assert _norm(4, sequence_parallel=sequence_parallel).weight.sequence_parallel is sequence_parallel


def test_rotation_agrees_with_megatron_and_is_cached() -> None:
    angles = torch.rand(6, 1, 1, 4, generator=torch.Generator().manual_seed(1)).repeat(1, 1, 1, 2)
    cosines, sines = cosines_and_sines(angles, torch.float32)
    assert cosines_and_sines(angles, torch.float32)[0] is cosines
    assert cosines_and_sines(angles[:5], torch.float32)[0].shape[0] == 5
    inputs = _random(6, 2, 3, 8)
    output, expected = RotaryFunction.apply(inputs, cosines, sines), _apply_rotary_pos_emb_bshd(inputs, angles)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(_gradients(output, inputs), _gradients(expected, inputs))


def test_angles_seen_first_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        angles = torch.rand(4, 1, 1, 8)
        cosines_and_sines(angles, torch.float32)
    inputs = _random(4, 1, 1, 8)
    RotaryFunction.apply(inputs, *cosines_and_sines(angles, torch.float32)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_agrees_with_torch(dtype: torch.dtype) -> None:
    logits = _random(7, 2, 45, dtype=dtype)
    labels = torch.arange(14).view(2, 7) * 3
    expected = F.cross_entropy(logits.float().permute(1, 2, 0), labels, reduction="none")
    output = cross_entropy(logits, labels)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(_gradients(output, logits), _gradients(expected, logits), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[4, 5, 5], [1, 11, 2]])
def test_packed_attention_looks_only_inside_a_sequence(lengths: list[int]) -> None:
    query, key, value = _random(14, 4, 8), _random(14, 2, 8), _random(14, 2, 8, seed=1)
    parts = zip(*(tensor.unsqueeze(1).split(lengths) for tensor in (query, key, value)), strict=True)
    expected = torch.cat([by_formula(*part, None, 8**-0.5, None) for part in parts]).squeeze(1)
    output = packed_attention(causal_attention, query, key, value, lengths)
    _assert_same(output, expected, query, key, value)


def test_both_ways_through_packed_sequences_are_taken() -> None:
    assert worth_padding([4, 5, 5])
    assert not worth_padding([1, 11, 2])


def test_padded_batch_moves_tokens_there_and_back() -> None:
    tokens = torch.arange(1, 7).view(6, 1)
    batch = PaddedBatch.of([2, 3, 1])
    padded = batch.pad(tokens)
    assert padded.squeeze(-1).tolist() == [[1, 3, 6], [2, 4, 0], [0, 5, 0]]
    assert torch.equal(batch.unpad(padded), tokens)


def _core_attention(mask_type: AttnMaskType = AttnMaskType.causal) -> SDPAttention:
    config: Any = SimpleNamespace()
    return SDPAttention(config=config, layer_number=1, attn_mask_type=mask_type, attention_type="self")


def test_attention_refuses_what_is_not_causal() -> None:
    core = _core_attention()
    query = _random(4, 1, 2, 8)
    causal = torch.ones(4, 4, dtype=torch.bool).triu_(1)[None, None]
    torch.testing.assert_close(core(query, query, query, causal), core(query, query, query, None))
    everything = torch.zeros_like(causal)
    for mask in (everything, causal[..., :3], causal.expand(2, 1, 4, 4) | torch.eye(4, dtype=torch.bool)):
        with pytest.raises(ValueError, match="not the causal mask of 4 queries and 4 keys"):
            core(query, query, query, mask)
    with pytest.raises(ValueError, match="only causal attention"):
        core(query, query, query, None, attn_mask_type=AttnMaskType.no_mask)
    with pytest.raises(ValueError, match="attention_bias"):
        core(query, query, query, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="only causal attention"):
        _core_attention(AttnMaskType.no_mask)


def test_packed_lengths_must_cover_the_pack() -> None:
    bounds = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    assert packed_lengths(packed, 7) == [3, 4]
    padded = torch.tensor([0, 4, 8], dtype=torch.int32)
    packed_with_padding = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_q_padded=padded)
    assert packed_lengths(packed_with_padding, 8) == [4, 4]
    with pytest.raises(ValueError, match="from 0 to 9, got 0 to 7"):
        packed_lengths(packed, 9)
    with pytest.raises(ValueError, match="'thd', got 'bshd'"):
        packed_lengths(PackedSeqParams(qkv_format="bshd", cu_seqlens_q=bounds), 7)


def _experts_by_hand(tokens: Tensor, probs: Tensor, first: Tensor, second: Tensor, counts: list[int]) -> Tensor:
    outputs = []
    for expert, (part, prob) in enumerate(zip(tokens.split(counts), probs.split(counts), strict=True)):
        gate, up = (part @ first[expert].t()).chunk(2, -1)
        outputs.append((F.silu(gate) * up * prob.unsqueeze(-1)) @ second[expert].t())
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", [[3, 0, 5], [1, 1, 1], [0, 0, 4], [0, 0, 0]])
@pytest.mark.parametrize(("hidden", "ffn"), [(16, 8), (18, 5)])
def test_experts_agree_with_the_formula(hidden: int, ffn: int, counts: list[int]) -> None:
    """The second sizes are not multiples of 16 bytes: torch's grouped product refuses them."""
    inputs = _random(sum(counts), hidden), _random(sum(counts)), _random(3, 2 * ffn, hidden), _random(3, hidden, ffn)
    output = SwigluExpertsFunction.apply(*inputs, torch.tensor(counts))
    expected = _experts_by_hand(*inputs, counts)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    # An expanded gradient, as that of a sum.
    for actual, wanted in zip(*(torch.autograd.grad(y.sum(), inputs) for y in (output, expected)), strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


def test_experts_in_bfloat16_with_float32_probabilities() -> None:
    counts = [3, 0, 5]
    shapes = (8, 16), (3, 16, 16), (3, 16, 8)
    tokens, first, second = (_random(*shape, dtype=torch.bfloat16) for shape in shapes)
    probs = _random(8)
    output = SwigluExpertsFunction.apply(tokens, probs, first, second, torch.tensor(counts))
    assert output.dtype == torch.bfloat16
    wide = tuple(tensor.detach().float().requires_grad_() for tensor in (tokens, probs, first, second))
    expected = _experts_by_hand(*wide, counts)
    torch.testing.assert_close(output.float(), expected, atol=0.5, rtol=0.05)
    grads = torch.autograd.grad(output.float().sum(), (tokens, probs, first, second))
    assert grads[1].dtype == torch.float32
    for actual, wanted in zip(grads, torch.autograd.grad(expected.sum(), wide), strict=True):
        assert (actual.float() - wanted).norm() < 0.05 * wanted.norm()


def test_dispatch_and_combine_are_each_others_reverse() -> None:
    tokens = _random(5, 3)
    experts = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1], [0, 2]])
    order = experts.reshape(-1).argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(10)).view(5, 2)
    rows = DispatchFunction.apply(tokens, order // 2, place)
    assert torch.equal(rows, tokens[order // 2])
    combined = CombineFunction.apply(rows, order // 2, place)
    torch.testing.assert_close(combined, 2 * tokens)
    expected = _gradients(2 * tokens, tokens)
    torch.testing.assert_close(_gradients(combined, tokens), expected)


def _config(**changes: Any) -> Any:
    fields = {
        "normalization": "RMSNorm",
        "tensor_model_parallel_size": 1,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "moe_router_load_balancing_type": "aux_loss",
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(
    ("module", "change"),
    [
        ("norm", {"normalization": "LayerNorm"}),
        ("linear", {"tensor_model_parallel_size": 2}),
        ("core_attention", {"attention_dropout": 0.1}),
        ("core_attention", {"window_size": (4, 0)}),
        ("self_attention", {"rotary_interleaved": True}),
        ("self_attention", {"num_query_groups": 1, "tensor_model_parallel_size": 2}),
        ("self_attention", {"multi_latent_attention": True}),
        ("experts", {"activation_func": F.gelu}),
        ("experts", {"moe_apply_probs_on_input": True}),
        ("experts", {"expert_tensor_parallel_size": 2}),
        ("local_routing", {"expert_model_parallel_size": 2}),
        ("local_routing", {"moe_router_load_balancing_type": "sinkhorn"}),
        ("local_routing", {"moe_expert_capacity_factor": 1.0}),
        ("local_routing", {"moe_router_force_load_balancing": True}),
        ("local_routing", {"moe_router_force_biased": 1.0}),
        ("local_routing", {"moe_enable_routing_replay": True}),
        ("local_routing", {"moe_router_enable_expert_bias": True}),
        ("local_routing", {"moe_router_score_function": "sigmoid"}),
        ("local_routing", {"moe_input_jitter_eps": 0.1}),
        ("local_routing", {"moe_router_num_groups": 2}),
        ("local_routing", {"moe_shared_expert_overlap": True}),
        ("cross_entropy", {"cross_entropy_loss_fusion": True}),
    ],
)
def test_eligible_until_a_setting_is_untried(module: FastModule, change: dict[str, Any]) -> None:
    assert eligible(module, _config())
    assert not eligible(module, _config(**change))
