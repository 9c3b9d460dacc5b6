# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counting on Megatron-Core's own routers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_rl_moe.routing.metrics.load_balance_metrics import collect_expert_loads, enable_load_balance_tracking

pytestmark = pytest.mark.megatron

EXPERTS, TOPK = 8, 2


def routers(index_router: bool = False, **fields: Any) -> nn.Module:
    """Three routers, of layers 2, 3 and 11 counted from 1."""
    from nemo_rl_moe.models.megatron.cpu import cpu_backend  # noqa: F401  (before megatron.core)

    # isort: split
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_rl_moe.models.megatron.cpu.moe import IndexTopKRouter

    config = TransformerConfig(
        num_layers=12,
        hidden_size=16,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        **fields,
    )
    groups: Any = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    model = nn.ModuleList()
    for number in (2, 3, 11):
        torch.manual_seed(number)
        router = (IndexTopKRouter if index_router else TopKRouter)(config, groups)
        router.set_layer_number(number)
        model.append(router)
    return model


def hidden_states() -> Tensor:
    return torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(0))


def top_k_of_logits(router: Any, hidden: Tensor, keep: Tensor) -> list[int]:
    logits = router.gating(hidden).reshape(-1, EXPERTS)[keep.flatten()]
    return torch.bincount(logits.topk(TOPK).indices.flatten(), minlength=EXPERTS).tolist()


@pytest.mark.parametrize("index_router", [False, True])
def test_counts_leave_padding_out(index_router: bool) -> None:
    model = routers(index_router)
    assert enable_load_balance_tracking(model) == 3
    hidden, padding = hidden_states(), torch.zeros(7, 3, dtype=torch.bool)
    padding[4:, 1] = True
    for router in model:
        router(hidden)
        router(hidden, padding_mask=padding)
        router(hidden, padding)
    loads = collect_expert_loads(model)
    assert list(loads) == [1, 2, 10]
    for router, load in zip(model, loads.values(), strict=True):
        everything = torch.tensor(top_k_of_logits(router, hidden, torch.ones_like(padding)))
        real = torch.tensor(top_k_of_logits(router, hidden, ~padding))
        assert load["expert_load"].tolist() == (everything + 2 * real).tolist()
        assert (load["n_experts"], load["topk"]) == (EXPERTS, TOPK)


def test_slots_padded_to_capacity_do_not_count() -> None:
    dropping: dict[str, Any] = {"moe_expert_capacity_factor": 1.0, "moe_token_dispatcher_type": "alltoall"}
    real, padded = routers(**dropping), routers(**dropping, moe_pad_expert_input_to_capacity=True)
    loads = []
    for model in (real, padded):
        enable_load_balance_tracking(model)
        for router in model:
            router(hidden_states())
        loads.append([load["expert_load"].tolist() for load in collect_expert_loads(model).values()])
    assert loads[0] == loads[1]
    # Some tokens were dropped, and dropped ones do not count.
    assert all(sum(counts) < 21 * TOPK for counts in loads[0])
