# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Counting with a router of one's own, which needs no library: naming of layers, several ranks, synchronisation."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel

from nemo_rl_moe.routing.metrics.load_balance_metrics import collect_expert_loads, enable_load_balance_tracking
from tests.support.gloo_ranks import run_ranks


class ToyTopKRouter(nn.Module):
    """Sends each token to experts that the test names."""

    def __init__(self, num_experts: int = 4, top_k: int = 2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, choice: Tensor) -> tuple[Tensor, Tensor]:
        return self.weight * choice, choice


class Tower(nn.Module):
    def __init__(self, layers: int, router: Callable[[], nn.Module] = ToyTopKRouter):
        super().__init__()
        self.layers = nn.ModuleList(router() for _ in range(layers))

    def forward(self, choices: list[Tensor]) -> None:
        for layer, choice in zip(self.layers, choices, strict=True):
            layer(choice)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = Tower(2), Tower(2)


def test_layers_come_in_the_order_of_their_numbers() -> None:
    model = Tower(12)
    enable_load_balance_tracking(model)
    model([torch.tensor([[0, 1], [0, 3]])] * 12)
    loads = collect_expert_loads(model)
    assert list(loads) == list(range(12))
    assert all(load["expert_load"].tolist() == [2, 1, 0, 1] for load in loads.values())


def test_layers_without_numbers_of_their_own_are_named_by_path() -> None:
    model = TwoTowers()
    enable_load_balance_tracking(model)
    assert list(collect_expert_loads(model)) == ["text.layers.0", "text.layers.1", "vision.layers.0", "vision.layers.1"]


_SIZES = {"hidden_size": 16, "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_k": 2}
_FURTHER = {"hunyuan_v1_moe": {"moe_topk": 2}, "nemotron_h": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}}
ROUTERS = {
    "ernie4_5_moe": "Ernie4_5_MoeTopKRouter",
    "granitemoe": "GraniteMoeTopKRouter",
    "hunyuan_v1_moe": "HunYuanMoEV1Gate",
    "lfm2_moe": "Lfm2MoeTopKRouter",
    "llama4_text": "Llama4Router",
    "nemotron_h": "NemotronHTopkRouter",
    "phimoe": "PhimoeTopKRouter",
}
"""By the type of a family that is not trained here: the router of transformers' model."""


def router_of(model_type: str) -> nn.Module:
    config = AutoConfig.for_model(model_type, **{**_SIZES, **_FURTHER.get(model_type, {})})
    folder = model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    torch.manual_seed(3)
    router: nn.Module = getattr(module, ROUTERS[model_type])(config)
    for tensor in router.state_dict().values():
        tensor.normal_()
    return router


@pytest.mark.parametrize("model_type", ROUTERS)
def test_routers_of_families_that_are_not_trained_here_are_counted(model_type: str) -> None:
    model = nn.Sequential(router_of(model_type))
    if model_type == "lfm2_moe":
        # The block that it belongs to gives it its bias.
        model[0].forward = partial(model[0].forward, expert_bias=torch.zeros(8))
    enable_load_balance_tracking(model)
    outputs = model(torch.randn(5, 16))
    load = next(iter(collect_expert_loads(model).values()))["expert_load"]
    assert load.sum() == 10
    # Experts that were given a weight, or that are named.
    named = [output for output in outputs if not output.is_floating_point()]
    expected = named[0] if named else outputs[0].topk(2).indices
    assert load.tolist() == torch.bincount(expected.flatten(), minlength=8).tolist()


def test_experts_without_weights_are_counted() -> None:
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter

    sizes = {"hidden_size": 16, "n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 12}
    model = nn.Sequential(LongcatFlashTopkRouter(AutoConfig.for_model("longcat_flash", **sizes)))
    enable_load_balance_tracking(model)
    model(torch.randn(5, 16))
    assert next(iter(collect_expert_loads(model).values()))["expert_load"].tolist() == [5] * 12


@pytest.mark.parametrize(("model_type", "name"), [("jetmoe", "JetMoeTopKGating"), ("doge", "DogeCDMoE")])
def test_unusual_modules_that_choose_experts_are_named(model_type: str, name: str) -> None:
    config = AutoConfig.for_model(model_type, is_moe=True, num_hidden_layers=1)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    with pytest.raises(ValueError, match=f"chooses experts in modules whose choice cannot be read: {name};"):
        enable_load_balance_tracking(model)


def test_modules_that_choose_experts_and_cannot_be_read_are_named() -> None:
    from transformers.models.afmoe.modeling_afmoe import AfmoeTokenChoiceRouter

    config = AutoConfig.for_model("afmoe", hidden_size=16, num_experts=4)
    model = nn.ModuleList([AfmoeTokenChoiceRouter(config)])
    with pytest.raises(ValueError, match="ModuleList chooses experts in modules whose choice cannot be read: AfmoeTok"):
        enable_load_balance_tracking(model)
    with pytest.raises(ValueError, match="ModuleList has no MoE layer to track"):
        enable_load_balance_tracking(nn.ModuleList([nn.Linear(2, 2)]))


def test_a_router_that_reports_no_choice_is_an_error() -> None:
    class MuteTopKRouter(ToyTopKRouter):
        def forward(self, choice: Tensor) -> tuple[Tensor, Tensor]:
            return (self.weight * choice,) * 2

    model = Tower(1, MuteTopKRouter)
    enable_load_balance_tracking(model)
    with pytest.raises(TypeError, match="MuteTopKRouter of layer 0 returned no choice of experts"):
        model([torch.tensor([[0, 1]])])


class SynchronisingCalls(TorchDispatchMode):
    """Notes every operation that makes a host wait for a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "bincount", "unique", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if any(word in name for word in self.WAITING):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_counting_never_waits_for_the_device() -> None:
    model = Tower(3)
    enable_load_balance_tracking(model)
    with SynchronisingCalls() as calls:
        model([torch.tensor([[0, 1], [2, 3]])] * 3)
        assert calls.seen == []
        torch.ones(2).nonzero()
        assert calls.seen == ["nonzero"]


def collect_on_rank() -> tuple[int, list[list[int]]]:
    """The number of collectives, and the loads that they gave, of a rank of which only the first saw tokens."""
    dist.init_process_group("gloo")
    model = Tower(3)
    enable_load_balance_tracking(model)
    if dist.get_rank() == 0:
        model([torch.tensor([[0, 1], [0, 3]])] * 3)
    calls = 0
    all_reduce = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    loads = collect_expert_loads(model, dist.group.WORLD)
    return calls, [load["expert_load"].tolist() for load in loads.values()]


def test_ranks_add_up_in_one_collective() -> None:
    assert run_ranks(collect_on_rank, 2) == [(1, [[2, 1, 0, 1]] * 3)] * 2
