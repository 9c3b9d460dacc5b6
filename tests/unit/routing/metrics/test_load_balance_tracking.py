# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counting on models of transformers, against a brute-force top-k over the routers' own logits."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from nemo_rl_moe.routing.metrics.load_balance_metrics import (
    collect_expert_loads,
    compute_detailed_metrics,
    disable_load_balance_tracking,
    enable_load_balance_tracking,
)
from tests.unit.routing.hooks.test_record_routes import (
    COMMON,
    EXPERTS,
    TOPK,
    build,
    deepseek_v3,
    mixtral,
    olmoe,
    one_by_one,
    qwen3_moe,
    tokens,
)


def qwen2_moe() -> PreTrainedModel:
    sizes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**COMMON, **sizes, num_experts=EXPERTS))


MODELS = [
    (qwen3_moe, [0, 2, 3]),
    (qwen2_moe, [1, 3]),
    (mixtral, [0, 1, 2, 3]),
    (olmoe, [0, 1, 2, 3]),
    (deepseek_v3, [1, 2, 3]),
]


def tracked(make: Any) -> PreTrainedModel:
    model = build(make)
    enable_load_balance_tracking(model)
    return model


def brute_force(router: nn.Module, logits: Tensor, valid: Tensor | None) -> list[int]:
    """Counts of the experts of each token by its logits, one token at a time."""
    counts = [0] * EXPERTS
    num_groups = getattr(router, "num_group", 1)
    bias = torch.zeros(EXPERTS) if num_groups > 1 else None  # DeepSeek's, which adds it to sigmoid scores
    for row, of_token in enumerate(logits):
        if valid is None or valid.flatten()[row]:
            for expert in one_by_one(of_token, bias, num_groups, best_of_group=2)[0]:
                counts[expert] += 1
    return counts


@contextmanager
def recorded_logits(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    logits: dict[str, list[Tensor]] = {}
    gates = [(name, module) for name, module in model.named_modules() if name.endswith(".gate")]
    handles = [
        gate.register_forward_hook(lambda _m, _a, out, name=name: logits.setdefault(name, []).append(out[0].detach()))
        for name, gate in gates
    ]
    yield logits
    for handle in handles:
        handle.remove()


def loads_of(model: nn.Module) -> dict[Any, list[int]]:
    return {layer: load["expert_load"].tolist() for layer, load in collect_expert_loads(model).items()}


@pytest.mark.parametrize(("make", "layers"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_counts_are_those_of_the_routers_logits(make: Any, layers: list[int]) -> None:
    model = build(make)
    assert enable_load_balance_tracking(model) == len(layers)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    mask[1, :2] = 0
    with recorded_logits(model) as logits:
        # Two microbatches, the second with padding on either side.
        model(input_ids=tokens(1)).logits.sum().backward()
        model(input_ids=tokens(2), attention_mask=mask)
    loads = collect_expert_loads(model)
    assert list(loads) == layers
    for layer, load in loads.items():
        name = f"model.layers.{layer}.mlp.gate"
        router = model.get_submodule(name)
        first, second = logits[name]
        expected = torch.tensor(brute_force(router, first, None)) + torch.tensor(brute_force(router, second, mask))
        assert load["expert_load"].tolist() == expected.tolist()
        assert load["expert_load"].sum() == (18 + 13) * TOPK
        assert (load["n_experts"], load["topk"], load["aux_loss"]) == (EXPERTS, TOPK, None)
    metrics = compute_detailed_metrics(loads)
    assert {f"layer_{layer}/cv" for layer in layers} | {"cv_null_mean"} <= metrics.keys()
    # Collected is cleared.
    assert all(sum(counts) == 0 for counts in loads_of(model).values())


def test_only_training_forwards_count() -> None:
    model = tracked(mixtral)
    with torch.no_grad():
        model(tokens(1))
    model.generate(tokens(1), max_new_tokens=2, do_sample=False, pad_token_id=0)
    model.eval()
    model(tokens(1))
    assert all(sum(counts) == 0 for counts in loads_of(model).values())
    model.train()
    model(tokens(1))
    assert all(sum(counts) == 18 * TOPK for counts in loads_of(model).values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_layers_count_once(use_reentrant: bool) -> None:
    model = tracked(qwen3_moe)
    model(tokens(1)).logits.sum().backward()
    expected = loads_of(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    with recorded_logits(model) as logits:
        model(tokens(1)).logits.sum().backward()
    # The layers did run twice.
    assert all(len(calls) == 2 for calls in logits.values())
    assert loads_of(model) == expected


def test_a_positional_attention_mask_is_seen() -> None:
    model = tracked(olmoe)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[:, 5:] = 0
    model(tokens(1), mask)
    assert all(sum(counts) == 10 * TOPK for counts in loads_of(model).values())


def test_a_mask_of_another_size_is_an_error_and_leaves_nothing_behind() -> None:
    model = tracked(olmoe)
    cache = model(tokens(1)).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask of \[2, 10\] cannot mark which of a router's 2 tokens"):
        model(tokens(2, columns=1), attention_mask=torch.ones(2, 10), past_key_values=cache)
    loads_of(model)
    model(tokens(1))
    assert all(sum(counts) == 18 * TOPK for counts in loads_of(model).values())


def test_padding_does_not_count_in_a_loop_that_calls_the_model_inside() -> None:
    model = tracked(qwen3_moe)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    model.model(input_ids=tokens(0), attention_mask=mask)
    assert {sum(load) for load in loads_of(model).values()} == {14 * model.config.num_experts_per_tok}


def test_losses_gradients_and_state_are_untouched() -> None:
    plain, tracked = build(qwen3_moe), build(qwen3_moe)
    keys = list(tracked.state_dict())
    enable_load_balance_tracking(tracked)
    for model in (plain, tracked):
        model(tokens(1), labels=tokens(1)).loss.backward()
    assert list(tracked.state_dict()) == keys
    assert len(list(tracked.buffers())) == len(list(plain.buffers()))
    for expected, parameter in zip(plain.parameters(), tracked.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)


def test_enabling_twice_counts_once_and_disabling_removes_every_hook() -> None:
    model = build(mixtral)

    def hooks() -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())

    before = hooks()
    assert enable_load_balance_tracking(model) == enable_load_balance_tracking(model) == 4
    model(tokens(1))
    assert all(sum(counts) == 18 * TOPK for counts in loads_of(model).values())
    disable_load_balance_tracking(model)
    disable_load_balance_tracking(model)
    assert hooks() == before
    with pytest.raises(ValueError, match="not enabled on this MixtralForCausalLM"):
        collect_expert_loads(model)


class Wrapper(nn.Module):
    """What data parallelism does: calls the model that it holds."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_wrappers_around_a_tracked_model() -> None:
    model = tracked(mixtral)
    wrapper = Wrapper(model)
    assert enable_load_balance_tracking(wrapper) == 4
    wrapper(tokens(1))
    assert all(sum(counts) == 18 * TOPK for counts in loads_of(wrapper).values())
    disable_load_balance_tracking(wrapper)
    with pytest.raises(ValueError, match="not enabled"):
        collect_expert_loads(model)


def test_a_copy_is_not_tracked_and_does_not_count_for_the_original() -> None:
    model = tracked(mixtral)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  (what it just wrote)
        with pytest.raises(ValueError, match="not enabled"):
            collect_expert_loads(copied)
        copied(tokens(1))
        assert all(sum(counts) == 0 for counts in loads_of(model).values())
        enable_load_balance_tracking(copied)
        copied(tokens(1))
        assert all(sum(counts) == 18 * TOPK for counts in loads_of(copied).values())
        assert all(sum(counts) == 0 for counts in loads_of(model).values())


def test_a_tracked_model_can_be_freed() -> None:
    model = tracked(mixtral)
    model(tokens(1))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
