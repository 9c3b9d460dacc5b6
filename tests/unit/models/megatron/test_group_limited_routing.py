# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts of a few groups alone: by hand, as transformers chooses them, and what Megatron-Core would choose."""

from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nemo_rl_moe.models.megatron.layers.routers import GroupLimitedChoice, group_limited_topk, limit_groups
from nemo_rl_moe.models.megatron.model import gpt_model as model_module
from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from tests.support.family_models import FAMILY_MODELS
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import parallel_job, tiny_policy
from tests.support.training_run import hf_config_of

# Three groups of two: the best expert is in the second, the two best sums are those of the first and the third.
SCORES = torch.tensor([[0.5, 0.4, 0.6, 0.0, 0.45, 0.3]])


@pytest.mark.parametrize(
    ("scores", "topk", "group_topk", "best_of_group", "expected"),
    [
        # Groups 2 and 1: of 0.5, 0.4, 0.6 and 0.0.
        (SCORES, 2, 2, 1, {2: 0.6, 0: 0.5}),
        # Groups 1 (0.9) and 3 (0.75), not 2 (0.6).
        (SCORES, 3, 2, 2, {0: 0.5, 4: 0.45, 1: 0.4}),
        # A bias can take scores below zero, which is where experts of other groups must not win.
        (SCORES - 2, 2, 1, 2, {0: -1.5, 1: -1.6}),
    ],
    ids=["the best expert is that of its group", "the two best experts are", "negative scores"],
)
def test_experts_are_chosen_from_the_best_groups(
    scores: Tensor, topk: int, group_topk: int, best_of_group: int, expected: dict[int, float]
) -> None:
    values, experts = group_limited_topk(scores, topk, 3, group_topk, best_of_group=best_of_group)
    assert experts.tolist() == [list(expected)]
    torch.testing.assert_close(values, torch.tensor([list(expected.values())]))


def test_gradients_reach_the_chosen_scores() -> None:
    scores = SCORES.clone().requires_grad_()
    group_limited_topk(scores, topk=2, num_groups=3, group_topk=2, best_of_group=1)[0].sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1.0, 0.0, 1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("best_of_group", [1, 2])
def test_a_choice_changes_at_its_margin_and_not_before(best_of_group: int) -> None:
    """Of 64 random tokens each; scores near a cut move towards each other by a share of the margin."""
    torch.manual_seed(4)
    scores = torch.rand(64, 16, dtype=torch.float64)
    topk, num_groups, group_topk = 4, 4, 2
    choice = GroupLimitedChoice(best_of_group)
    margins = choice.margins(scores, topk, num_groups, group_topk).double()
    chosen = _chosen(choice, scores)
    of_group = chosen.unflatten(1, (num_groups, -1)).any(-1).repeat_interleave(16 // num_groups, dim=1)
    changes = {share: torch.zeros(64, dtype=torch.bool) for share in (0.99, 1.01)}
    for share, changed in changes.items():
        # An expert against one of a usable group, or all of a usable group against all of another one.
        for kept in range(16):
            for other in range(16):
                moved = scores.clone()
                moved[:, kept] -= share * margins / 2
                moved[:, other] += share * margins / 2
                within = chosen[:, kept] & ~chosen[:, other] & of_group[:, other]
                changed |= within & (_chosen(choice, moved) != chosen).any(-1)
        for kept in range(num_groups):
            for other in range(num_groups):
                moved = scores.unflatten(1, (num_groups, -1)).clone()
                moved[:, kept] -= share * margins[:, None] / 2 / best_of_group
                moved[:, other] += share * margins[:, None] / 2 / best_of_group
                between = of_group[:, kept * 4] & ~of_group[:, other * 4]
                changed |= between & (_chosen(choice, moved.flatten(1)) != chosen).any(-1)
    assert not changes[0.99].any()
    assert changes[1.01].all()


def _chosen(choice: GroupLimitedChoice, scores: Tensor) -> Tensor:
    _, experts = choice.get_replay_topk(scores, 4, 4, 2)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True)


def choices(model: str, *, is_limited: bool, replays: bool = False) -> list[tuple[bool, bool, bool]]:
    """Return for each of the random routers with bias whether it has the experts and the weights of transformers'
    router for all tokens, and whether recorded experts are the chosen ones.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    policy = tiny_policy(1, moe_enable_routing_replay=replays)
    hf_config = FAMILY_MODELS[model].hf_config()
    install = limit_groups if is_limited else (lambda chunk, **_: None)
    with parallel_job(policy), mock.patch.object(model_module, "limit_groups", install):
        config = build_transformer_config(policy, hf_config)
        found = []
        for router in build_model_chunks(policy, config, hf_config)[0].modules():
            if isinstance(router, TopKRouter):
                router.eval()
                if replays:
                    router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
                found.append(_compare(router, hf_config, replays=replays))
        return found


def _compare(router: Any, hf_config: Any, *, replays: bool) -> tuple[bool, bool, bool]:
    torch.manual_seed(router.layer_number)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape))
        theirs = _router_of_transformers(hf_config)
        theirs.weight.copy_(router.weight)
        if router.expert_bias is not None:
            router.expert_bias.copy_(0.3 * torch.randn(router.expert_bias.shape))
            theirs.e_score_correction_bias.copy_(router.expert_bias)
        tokens = torch.randn(200, 1, hf_config.hidden_size)
        probs, chosen = router(tokens)
        _, weights, experts = theirs(tokens)
    expected = torch.zeros_like(probs).scatter(1, experts, weights)
    recorded = router.router_replay.get_recorded_indices() if replays else _indices(chosen)
    return (
        torch.equal(chosen, expected > 0),
        torch.allclose(probs, expected, atol=1e-6),
        torch.equal(recorded.sort(-1).values, _indices(chosen)),
    )


def _indices(chosen: Tensor) -> Tensor:
    return chosen.nonzero()[:, 1].view(len(chosen), -1)


def _router_of_transformers(hf_config: Any) -> Any:
    kind = hf_config.model_type
    modeling: Any = import_module(f"transformers.models.{kind}.modeling_{kind}")
    (router,) = (value for name, value in vars(modeling).items() if name.endswith("TopkRouter"))
    return router(hf_config)


MODELS = {"deepseek_v2_groups": 3, "deepseek_v3": 3, "deepseek_v32": 3, "glm4_moe_norms_groups": 2}
"""Layers with experts, by model."""


WAYS: dict[str, dict[str, bool]] = {
    "limited": {"is_limited": True},
    "recorded": {"is_limited": True, "replays": True},
    "as Megatron-Core": {"is_limited": False},
}


def all_choices() -> dict[str, list[tuple[bool, bool, bool]]]:
    return {f"{model} {way}": choices(model, **chosen) for model in MODELS for way, chosen in WAYS.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[bool, bool, bool]]]:
    (answers,) = run_ranks(all_choices, 1)
    return answers


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("way", ["limited", "recorded"])
def test_routers_choose_as_transformers_does(model: str, way: str, found: Any) -> None:
    assert found[f"{model} {way}"] == [(True, True, True)] * MODELS[model]


@pytest.mark.parametrize("model", MODELS)
def test_megatron_core_chooses_otherwise(model: str, found: Any) -> None:
    """This is what `limit_groups` corrects; the test fails once Megatron-Core is corrected itself."""
    assert not any(same for same, _, _ in found[f"{model} as Megatron-Core"])


def has_own_choice(model: Any, **changes: Any) -> bool:
    """Return whether the routers of a model do not choose as Megatron-Core does."""
    from megatron.core.transformer.moe.router import TopKRouter

    policy = tiny_policy(1, **changes)
    with parallel_job(policy):
        hf_config = hf_config_of(model)
        (chunk,) = build_model_chunks(policy, build_transformer_config(policy, hf_config), hf_config)
        (own,) = {module.router_replay is not None for module in chunk.modules() if isinstance(module, TopKRouter)}
        return own


def test_only_groups_of_the_model_are_chosen_so() -> None:
    assert run_ranks(has_own_choice, 1, "deepseek_v3") == [True]
    assert run_ranks(has_own_choice, 1, "deepseek_v3_moonlight") == [False]


def test_groups_that_a_user_sets_are_chosen_as_megatron_core_does() -> None:
    from megatron.core.transformer.moe.moe_utils import group_limited_topk as of_megatron

    scores = torch.rand(64, 16, generator=torch.Generator().manual_seed(0))
    for topk, group_topk in ((4, 2), (4, 1), (6, 3)):
        expected = of_megatron(scores, topk, 64, 16, 4, group_topk)[1]
        found = group_limited_topk(scores, topk, 4, group_topk, best_of_group=topk // group_topk)[1]
        assert torch.equal(found, expected)
