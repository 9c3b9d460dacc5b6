# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention with sinks and sliding windows: by hand, by the formula, and beside Megatron-Core's own."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.cpu.attention import causal_attention, causal_mask
from nemo_rl_moe.models.megatron.cpu.sink_attention import SinkAttention, sink_attention
from nemo_rl_moe.models.megatron.cpu.spec import eligible
from tests.support.cpu_layers import layout, make_config, megatron_causal_mask, process_groups

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

HEADS, GROUPS, DIM = 4, 2, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def by_formula(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, window: int | None
) -> Tensor:
    """Every score written out, the sinks as one more column that is dropped after the softmax."""
    queries, batch, heads, _ = query.shape
    keys = key.shape[0]
    key, value = (tensor.repeat_interleave(heads // key.shape[2], 2) for tensor in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
    place = torch.arange(queries)[:, None] + keys - queries
    hidden = torch.arange(keys)[None] > place
    if window is not None:
        hidden |= torch.arange(keys)[None] <= place - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, heads, 1, 1).expand(batch, heads, queries, 1)], -1)
    weights = scores.softmax(-1)[..., :keys]
    return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def test_window_mask_by_hand() -> None:
    assert causal_mask(3, 4, window=2).int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert causal_mask(3, 3, window=1).int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert torch.equal(causal_mask(3, 4, window=4), causal_mask(3, 4))


def test_sinks_by_hand() -> None:
    """Queries of zeros see all keys alike: with a sink of log(s), n keys have a weight of 1 / (n + s) each."""
    query, key = torch.zeros(3, 1, 2, 1), torch.ones(3, 1, 1, 1)
    value = torch.tensor([4.0, 8.0, 12.0]).view(3, 1, 1, 1)
    sinks = torch.tensor([1.0, 2.0]).log()
    everything = sink_attention(query, key, value, sinks).view(3, 2)
    torch.testing.assert_close(everything, torch.tensor([[4 / 2, 4 / 3], [12 / 3, 12 / 4], [24 / 4, 24 / 5]]))
    window = sink_attention(query, key, value, sinks, window=2).view(3, 2)
    torch.testing.assert_close(window, torch.tensor([[4 / 2, 4 / 3], [12 / 3, 12 / 4], [20 / 3, 20 / 4]]))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (1, 6), (1, 1), (3, 6)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_agrees_with_the_formula(
    groups: int, queries: int, keys: int, window: int | None, scale: float | None
) -> None:
    query, sinks = random(queries, 2, HEADS, DIM), random(HEADS, seed=1)
    key, value = (random(keys, 2, groups, DIM, seed=seed) for seed in (2, 3))
    factor = DIM**-0.5 if scale is None else scale
    inputs = query, key, value, sinks
    for output, expected, sources in (
        (sink_attention(*inputs, scale, window), by_formula(*inputs, factor, window), inputs),
        (
            causal_attention(query, key, value, scale, window),
            by_formula(query, key, value, None, factor, window),
            inputs[:3],
        ),
    ):
        torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        found, wanted = (torch.autograd.grad((y * weights).sum(), sources) for y in (output, expected))
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=1e-5)


def config_of(**changes: Any) -> Any:
    fields = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": DIM, "num_layers": 3}
    return make_config(**fields, softmax_type="learnable", **changes)


def core_attention(kind: type, config: Any, layer_number: int) -> Any:
    module = kind(
        config=config,
        layer_number=layer_number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=config.softmax_scale,
    )
    with torch.no_grad():
        module.softmax_offset.copy_(torch.linspace(-1, 2, HEADS))
    return module


@pytest.mark.parametrize("softmax_scale", [None, 0.2])
def test_layers_compute_what_those_of_megatron_compute(softmax_scale: float | None, tmp_path: Path) -> None:
    config = config_of(window_size=(2, 0), window_attn_skip_freq=[1, 0, 1], softmax_scale=softmax_scale)
    query, key, value = random(7, 2, HEADS, DIM), random(7, 2, GROUPS, DIM), random(7, 2, GROUPS, DIM, seed=1)
    windows, outputs = [], []
    with process_groups(tmp_path / "store"), layout():
        for layer_number in (1, 2, 3):
            ours, stock = (core_attention(kind, config, layer_number) for kind in (SinkAttention, DotProductAttention))
            output, expected = ours(query, key, value, None), stock(query, key, value, megatron_causal_mask(7))
            torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
            windows.append(ours.window)
            outputs.append(output)
            assert ours.state_dict().keys() == stock.state_dict().keys() == {"softmax_offset"}
    assert windows == [3, None, 3]
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)


@pytest.mark.parametrize("lengths", [[4, 5, 5], [1, 11, 2]])
def test_packed_sequences_do_not_see_one_another(lengths: list[int]) -> None:
    module = core_attention(SinkAttention, config_of(window_size=(3, 0)), 1)
    query, key, value = random(14, HEADS, DIM), random(14, GROUPS, DIM), random(14, GROUPS, DIM, seed=1)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    output = module(query, key, value, None, packed_seq_params=packed)
    parts = zip(*(tensor.unsqueeze(1).split(lengths) for tensor in (query, key, value)), strict=True)
    expected = torch.cat([module(*part, None) for part in parts]).squeeze(1)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)


def test_bfloat16_is_close() -> None:
    inputs = random(9, 1, HEADS, DIM), random(9, 1, GROUPS, DIM), random(9, 1, GROUPS, DIM, seed=1), random(HEADS)
    query, key, value, sinks = (tensor.bfloat16() for tensor in inputs)
    output = sink_attention(query, key, value, sinks, window=4)
    assert output.dtype is torch.bfloat16
    expected = by_formula(*inputs, 1 / math.sqrt(DIM), 4)
    torch.testing.assert_close(output.float(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"window_size": (0, 0)}, True),
        ({"window_size": (4, 4)}, False),
        ({"window_size": (-1, 0)}, False),
        ({"softmax_type": "off-by-one"}, False),
        ({"attention_dropout": 0.1}, False),
    ],
)
def test_other_attention_stays_megatrons(changes: dict[str, Any], expected: bool) -> None:
    assert eligible("sink_attention", make_config(**{"softmax_type": "learnable", **changes})) is expected
