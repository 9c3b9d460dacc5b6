# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights of modules that are laid out as vLLM's are: by their Hugging Face names, cut apart and unpacked."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_rl_moe.generation.vllm.stored_weights import stored_tensors, unpacking

HIDDEN, WIDTH, EXPERTS = 6, 4, 3


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


class Linear(nn.Module):
    """A linear layer, perhaps several in one."""

    def __init__(self, weight: Tensor, *sizes: int, bias: Tensor | None = None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        if sizes:
            self.output_sizes = list(sizes)


def packed(linear: Linear) -> Linear:
    """The layer as vLLM leaves it on CPUs: its weights are in the kernel alone."""
    weight = linear.weight.detach()
    linear.input_size_per_partition = weight.shape[1]
    linear.cpu_linear = lambda x, unused, bias: nn.functional.linear(x, weight)
    linear.weight = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
    return linear


def in_pairs(weight: Tensor, isa: str) -> Tensor:
    """A layout of a kernel: pairs of rows, column by column."""
    assert isa == "made up"
    experts, rows, columns = weight.shape
    return weight.view(experts, rows // 2, 2, columns).transpose(2, 3).reshape(weight.shape)


class Experts(nn.Module):
    """A layer's experts, of which each has `WIDTH` rows and two that fill it up."""

    def __init__(self, gate_up: Tensor, down: Tensor, backend: str):
        super().__init__()
        self.w13_weight = nn.Parameter(gate_up, requires_grad=False)
        self.w2_weight = nn.Parameter(down, requires_grad=False)
        self.moe_config = SimpleNamespace(intermediate_size_per_partition=WIDTH)
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "w1", "w3", "w2"
        kernel = SimpleNamespace(fused_experts=SimpleNamespace(isa="made up"))
        self.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name=backend), moe_kernel=kernel)


def model_of(**modules: nn.Module) -> Any:
    """A model with these modules; two underscores for a dot."""
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    for name, module in modules.items():
        *parents, own = name.split("__")
        parent = model
        for each in parents:
            if not hasattr(parent, each):
                parent.add_module(each, nn.Module())
            parent = getattr(parent, each)
        parent.add_module(own, module)
    return model


def assert_holds(model: Any, expected: dict[str, Tensor]) -> None:
    found = dict(stored_tensors(model))
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("prepare", [lambda linear: linear, packed], ids=["plain", "packed"])
def test_joined_projections_are_cut_apart(prepare: Any) -> None:
    weight, bias = values(8, HIDDEN), values(8)
    expected = {
        f"attn.{name}_proj.{kind}": tensor[rows]
        for kind, tensor in (("weight", weight), ("bias", bias))
        for name, rows in (("q", slice(0, 4)), ("k", slice(4, 6)), ("v", slice(6, 8)))
    }
    model = model_of(attn__qkv_proj=prepare(Linear(weight, 4, 2, 2, bias=bias)))
    assert_holds(model, expected)


def test_rows_that_fill_up_a_vocabulary_are_left_out() -> None:
    embedding, norm = Linear(values(8, HIDDEN)), Linear(values(HIDDEN))
    embedding.org_vocab_size = 5
    expected = {"embed_tokens.weight": embedding.weight[:5], "norm.weight": norm.weight}
    assert_holds(model_of(embed_tokens=embedding, norm=norm), expected)


def test_what_cannot_be_mapped_is_left_out() -> None:
    unknown_sizes, no_kernel = Linear(values(8, HIDDEN), 4, 4), packed(Linear(values(4, HIDDEN)))
    del no_kernel.cpu_linear
    too_wide = packed(Linear(values(2, 513)))
    shuffled = Experts(values(EXPERTS, 8, HIDDEN), values(EXPERTS, HIDDEN, 4), "FLASHINFER_CUTLASS")
    not_ready = Experts(values(EXPERTS, 8, HIDDEN), values(EXPERTS, HIDDEN, 4), "CPU")
    not_ready.quant_method.moe_kernel = None
    assert_holds(model_of(attn__qkv_proj=unknown_sizes, head=no_kernel, wide=too_wide, mlp__experts=shuffled), {})
    assert_holds(model_of(mlp__experts=not_ready), {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_unpacked_and_what_fills_them_up_is_left_out(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = values(EXPERTS, 12, HIDDEN, dtype=dtype), values(EXPERTS, HIDDEN, 6, dtype=dtype)
    expected = {}
    for expert in range(EXPERTS):
        prefix = f"mlp.experts.{expert}"
        expected[f"{prefix}.w1.weight"] = gate_up[expert, :WIDTH]
        expected[f"{prefix}.w3.weight"] = gate_up[expert, 6 : 6 + WIDTH]
        expected[f"{prefix}.w2.weight"] = down[expert, :, :WIDTH]
    assert_holds(model_of(mlp__experts__routed_experts=Experts(gate_up, down, "TRITON")), expected)
    monkeypatch.setattr(
        "nemo_rl_moe.generation.vllm.stored_weights.unpacking", lambda weight, isa: unpacking(weight, isa, in_pairs)
    )
    on_cpu = Experts(in_pairs(gate_up, "made up"), in_pairs(down, "made up"), "CPU")
    assert not torch.equal(on_cpu.w13_weight, gate_up)
    assert_holds(model_of(mlp__experts__routed_experts=on_cpu), expected)


def test_experts_of_more_numbers_than_sixteen_bits_can_count_are_unpacked() -> None:
    weight = values(2, 300, 256)
    assert weight[0].numel() > 2**16
    packed_weight = in_pairs(weight, "made up")
    unpack = unpacking(packed_weight, "made up", in_pairs)
    assert torch.equal(torch.stack([unpack(each) for each in packed_weight]), weight)
