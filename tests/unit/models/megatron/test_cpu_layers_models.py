# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Whole models with the fast modules against Megatron-Core's own modules, same weights, one process."""

import copy
import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.models.megatron.cpu import fused_attention as self_attention
from nemo_rl_moe.models.megatron.cpu.functions import PlainColumnLinear, RMSNorm
from nemo_rl_moe.models.megatron.cpu.fused_attention import FastSelfAttention
from nemo_rl_moe.models.megatron.cpu.moe import GroupedExperts, IndexTopKRouter, LocalMoELayer, LocalTokenDispatcher
from nemo_rl_moe.models.megatron.cpu.spec import fast_layer_spec
from nemo_rl_moe.models.megatron.model.releases import recorded_auxiliary_losses
from tests.support.cpu_layers import (
    SEQUENCE,
    assert_same,
    build,
    gradients,
    layout,
    make_config,
    megatron_causal_mask,
    process_groups,
    token_batch,
    train_once,
)
from tests.unit.models.megatron.tiny_trainers import WITHOUT_LOSSES

# isort: split
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter


@pytest.fixture(scope="module", autouse=True)
def single_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank of everything."""
    store: Path = tmp_path_factory.mktemp("store") / "rendezvous"
    with process_groups(store), layout():
        yield


@pytest.fixture(params=["fused attention", "separate attention"])
def attention_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences take one path through self attention, long ones the other."""
    if request.param == "separate attention":
        monkeypatch.setattr(self_attention, "LONGEST_SEQUENCE", 0)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dense": {"num_moe_experts": None, "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": None},
    "moe": {},
    "no auxiliary loss": WITHOUT_LOSSES,
    "dense and moe layers": {"moe_layer_freq": [0, 1]},
    "softmax before top-k, scaled": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
    "loss per token": {"calculate_per_token_loss": True},
    "router in float64": {"moe_router_dtype": "fp64"},
    "shared experts": {"moe_shared_expert_intermediate_size": 40},
    "recompute all": FULL,
    "recompute moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "recompute core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "no query and key norm": {"qk_layernorm": False},
    "own softmax scale": {"softmax_scale": 0.2},
    "stock router: capacity": {"moe_expert_capacity_factor": 1.0},
    "three balancing losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.05, 0.02, 0.03],
    },
    "z loss": {"moe_z_loss_coeff": 0.01},
    "positions of images": {"mrope_section": [1, 2, 1], **WITHOUT_LOSSES},
}


def assert_same_training(actual: Any, expected: Any, atol: float = 5e-7) -> None:
    """Losses and auxiliary losses; gradients within the tolerance."""
    torch.testing.assert_close(actual[0], expected[0], atol=1e-6, rtol=1e-6)
    assert_same(actual[1], expected[1], atol=atol)
    assert_same(actual[2], expected[2], atol=1e-6, rtol=1e-6)


def trained_both_ways(config: Any, batch: Any, shared: bool = False, **inputs: Any) -> tuple[Any, Any, Any]:
    """Return the model with the fast modules, what it trains, and what the stock one does."""
    stock, fast = (build(config, fast=fast, share_embeddings_and_output_weights=shared) for fast in (False, True))
    expected = train_once(stock, batch, megatron_causal_mask(SEQUENCE), **inputs)
    return fast, train_once(fast, batch, **inputs), expected


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_agrees_with_stock_modules(name: str, attention_path: None) -> None:
    batch = token_batch()
    if name == "positions of images":
        batch["position_ids"] = image_positions(*batch["input_ids"].shape)
    fast, actual, expected = trained_both_ways(make_config(**CONFIGURATIONS[name]), batch)
    assert_same_training(actual, expected)
    assert isinstance(fast.decoder.layers[0].self_attention, FastSelfAttention)


def test_logits_agree() -> None:
    config = make_config()
    batch = {name: tensor for name, tensor in token_batch().items() if name != "labels"}
    mask = megatron_causal_mask(SEQUENCE)
    expected = build(config, fast=False).eval()(**batch, attention_mask=mask)
    for attention_mask in (None, mask):
        actual = build(config, fast=True).eval()(**batch, attention_mask=attention_mask)
        torch.testing.assert_close(actual, expected, atol=6e-7, rtol=0)


def test_padding_mask_changes_only_the_auxiliary_loss() -> None:
    batch = token_batch()
    padding = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    padding[0, -5:] = padding[2, -1:] = True
    fast, actual, expected = trained_both_ways(make_config(), batch, padding_mask=padding)
    assert_same_training(actual, expected, atol=2e-7)
    without = train_once(fast, batch)
    assert torch.equal(without[0], actual[0])
    assert not torch.allclose(without[2]["load_balancing_loss"], actual[2]["load_balancing_loss"])
    # Padding is still dispatched.
    assert fast.decoder.layers[0].mlp.router.last_topk_indices.shape == (batch["input_ids"].numel(), 2)


def test_a_microbatch_of_padding_alone_has_no_auxiliary_loss() -> None:
    batch = token_batch()
    padding = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    _, grads, auxiliary = train_once(build(make_config(), fast=True), batch, padding_mask=padding)
    assert auxiliary["load_balancing_loss"].eq(0).all()
    assert all(grad.isfinite().all() for grad in grads.values())


def image_positions(rows: int, columns: int) -> torch.Tensor:
    """Three positions of each token, other ones in each row."""
    return torch.randint(0, 2 * columns, (3, rows, columns), generator=torch.Generator().manual_seed(8))


def _pack(lengths: list[int], longest: int) -> PackedSeqParams:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


@pytest.mark.parametrize("of_images", [False, True])
@pytest.mark.parametrize("lengths", [[5, 9, 3, 7], [8, 8, 8], [24], [1, 20, 2, 1]])
def test_packed_sequences_agree_with_one_by_one(lengths: list[int], of_images: bool, attention_path: None) -> None:
    # Auxiliary losses differ between one microbatch and several: off here.
    config = make_config(**CONFIGURATIONS["positions of images" if of_images else "no auxiliary loss"])
    total = sum(lengths)
    batch = token_batch(1, total)
    if of_images:
        batch["position_ids"] = image_positions(1, total)
    stock, fast = build(config, fast=False).train(), build(config, fast=True).train()
    losses = []
    for start, end in pairwise(torch.tensor([0, *lengths]).cumsum(0).tolist()):
        part = {name: values[..., start:end] for name, values in batch.items()}
        if not of_images:
            part["position_ids"] = torch.arange(end - start)[None]
        losses.append(stock(**part, attention_mask=megatron_causal_mask(end - start)))
    expected = torch.cat(losses, 1)
    expected.mean().backward()
    # Positions from the start of each sequence, or (as long as the pack) through it: only differences matter.
    for longest in (max(lengths), total):
        actual, grads, _ = train_once(fast, batch, packed_seq_params=_pack(lengths, longest))
        torch.testing.assert_close(actual, expected.detach(), atol=1e-6, rtol=1e-6)
        assert_same(grads, gradients(stock), atol=3e-7)


def test_packed_sequences_through_the_stock_forward_pass() -> None:
    lengths = [5, 9, 3, 7]
    batch = token_batch(1, sum(lengths))
    packed = _pack(lengths, max(lengths))
    recomputed = make_config(**CONFIGURATIONS["recompute core attention"])
    expected = train_once(build(make_config(), fast=True), batch, packed_seq_params=packed)
    actual = train_once(build(recomputed, fast=True), batch, packed_seq_params=packed)
    torch.testing.assert_close(actual[0], expected[0], atol=1e-6, rtol=1e-6)
    assert_same(actual[1], expected[1], atol=2e-7)


def test_bfloat16_is_close() -> None:
    config = make_config(params_dtype=torch.bfloat16, bf16=True)
    _, actual, expected = trained_both_ways(config, token_batch())
    torch.testing.assert_close(actual[0].float(), expected[0].float(), atol=0.03, rtol=0.02)
    for name, grad in expected[1].items():
        difference = (actual[1][name].float() - grad.float()).norm() / grad.float().norm().clamp(min=1e-6)
        assert difference < 0.1, f"{name}: {difference}"


def test_tied_embeddings() -> None:
    _, actual, expected = trained_both_ways(make_config(), token_batch(), shared=True)
    assert_same_training(actual, expected, atol=2e-7)


def test_evaluation_records_no_auxiliary_loss_but_the_indices() -> None:
    model = build(make_config(), fast=True).eval()
    router = model.decoder.layers[1].mlp.router
    assert router.last_topk_indices is None
    for values in recorded_auxiliary_losses().values():
        values.zero_()
    batch = token_batch()
    with torch.inference_mode():
        model(**batch, attention_mask=None)
    # Not with gradients either, as when log-probabilities are taken in evaluation.
    model(**batch, attention_mask=None)
    assert all(values.eq(0).all() for values in recorded_auxiliary_losses().values())
    assert router.last_topk_indices.shape == (batch["input_ids"].numel(), 2)
    # What inference mode left behind in caches must not stop training.
    train_once(model, batch)


def test_indices_are_the_stock_routers_choice() -> None:
    config, batch = make_config(), token_batch()
    stock, fast = build(config, fast=False), build(config, fast=True)
    maps: list[torch.Tensor] = []
    hook = stock.decoder.layers[1].mlp.router.register_forward_hook(lambda _module, _inputs, out: maps.append(out[1]))
    train_once(stock, batch, megatron_causal_mask(SEQUENCE))
    hook.remove()
    train_once(fast, batch)
    indices = fast.decoder.layers[1].mlp.router.last_topk_indices
    assert torch.equal(torch.zeros_like(maps[0]).scatter(1, indices, True), maps[0])


def test_generation_with_cached_keys() -> None:
    config, batch = make_config(), token_batch()
    model = build(config, fast=True).eval()
    tokens, prompt = batch["input_ids"], 7
    positions = batch["position_ids"]
    with torch.no_grad():
        full = build(config, fast=False).eval()(tokens, positions, megatron_causal_mask(SEQUENCE))
        context = StaticInferenceContext(tokens.size(0), SEQUENCE)
        start = 0
        for end in (prompt, *range(prompt + 1, SEQUENCE + 1)):
            inputs = tokens[:, start:end], positions[:, start:end], None
            logits = model(*inputs, inference_context=context, runtime_gather_output=True)
            torch.testing.assert_close(logits[:, -1], full[:, end - 1], atol=1e-6, rtol=1e-5)
            context.increment_sequence_len_offset(end - start)
            context.enable_decode_mode()
            start = end


def test_where_each_module_is_used() -> None:
    model = build(make_config(moe_layer_freq=[0, 1]), fast=True)
    dense, sparse = model.decoder.layers
    assert isinstance(dense.mlp.linear_fc1, PlainColumnLinear)
    assert isinstance(dense.self_attention, FastSelfAttention)
    assert isinstance(sparse.mlp, LocalMoELayer)
    assert isinstance(sparse.mlp.router, IndexTopKRouter)
    assert isinstance(sparse.mlp.token_dispatcher, LocalTokenDispatcher)
    assert isinstance(sparse.mlp.experts, GroupedExperts)
    assert isinstance(model.decoder.final_layernorm, RMSNorm)
    assert isinstance(model.output_layer, PlainColumnLinear)


def test_an_untried_setting_keeps_the_stock_module() -> None:
    layer = build(make_config(moe_expert_capacity_factor=1.0, attention_dropout=0.1), fast=True).decoder.layers[0]
    assert type(layer.mlp) is MoELayer
    assert type(layer.mlp.router) is TopKRouter
    assert isinstance(layer.mlp.experts, GroupedExperts)
    assert not isinstance(layer.self_attention, FastSelfAttention)


def test_expert_weights_are_named_and_marked() -> None:
    layer = build(make_config(), fast=True).decoder.layers[0].mlp
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.experts.named_parameters()}
    assert shapes == {"linear_fc1_weights": (4, 48, 32), "linear_fc2_weights": (4, 32, 24)}
    assert all(parameter.allreduce is False for parameter in layer.experts.parameters())
    assert all(parameter.tensor_model_parallel for parameter in layer.experts.parameters())


def test_experts_are_initialised_apart_and_with_both_methods() -> None:
    config = make_config(perform_initialization=True, init_method_std=0.5, num_layers=50)
    experts = GroupedExperts(4, config)
    assert experts.linear_fc1_weights.std().item() == pytest.approx(0.5, rel=0.1)
    assert experts.linear_fc2_weights.std().item() == pytest.approx(0.05, rel=0.1)
    assert not torch.equal(experts.linear_fc1_weights[0], experts.linear_fc1_weights[1])


def test_the_given_spec_stays_as_it_is() -> None:
    config = make_config()
    spec = get_gpt_layer_local_spec(num_experts=4, qk_layernorm=True, normalization="RMSNorm")
    before = copy.deepcopy(_described(spec))
    changed = fast_layer_spec(config, spec)
    assert _described(spec) == before
    assert _described(changed) != before


def _described(spec: Any) -> Any:
    """A spec as nested plain values."""
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        return {field.name: _described(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    if hasattr(spec, "keywords"):
        return spec.func, _described(spec.keywords)
    if isinstance(spec, dict):
        return {name: _described(value) for name, value in spec.items()}
    return spec


def test_labels_outside_the_vocabulary_have_no_loss() -> None:
    batch = token_batch()
    model = build(make_config(), fast=True)
    complete, _, _ = train_once(model, batch)
    batch["labels"][0, :3] = -100
    losses, _, _ = train_once(model, batch)
    assert losses[0, :3].eq(0).all()
    assert torch.equal(losses[1:], complete[1:])
    assert torch.equal(losses[0, 3:], complete[0, 3:])
