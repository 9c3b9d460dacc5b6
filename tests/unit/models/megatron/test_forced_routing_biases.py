# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What forced routing does to the logits, on every rank, in every forward, in every model of a process."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.layers.routers import FORCED_ROUTING_FIELDS, forced_routing_in_force
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config, effective_moe_configuration
from nemo_rl_moe.models.megatron.training.observers import ExpertLoadReports
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_batch, tiny_hf_config, tiny_policy
from tests.support.training_run import RunSettings, difference, observer_of, train_run
from tests.unit.models.megatron.tiny_trainers import shard_for

LAYERS, EXPERTS, TOPK = 4, 8, 2
# So large that the random logits beside it, averaged over the tokens, are nothing.
DEVIATION = 1.0e4
NOISE = 5.0

Biases = npt.NDArray[np.float64]


def biases_of_models(world_size: int, settings: dict[str, Any], num_models: int = 1) -> list[Biases]:
    """Return what is added to the logits of each expert, `[calls, layers, experts]`, on this rank.

    Two steps of one model after another in one process; each rank runs its microbatches in order.
    """
    policy = tiny_policy(world_size, **settings)
    with parallel_job(policy):
        from megatron.core.transformer.moe.router import TopKRouter

        calls: list[Tensor] = []
        routing = TopKRouter.routing

        def noting(self: Any, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                calls.append(logits.detach().double().reshape(-1, EXPERTS).mean(0))
            return routing(self, logits, *args, **kwargs)

        TopKRouter.routing = noting
        try:
            found = []
            for _ in range(num_models):
                trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=10)
                calls.clear()
                for step in range(2):
                    batch = tiny_batch(step)
                    trainer.train([shard_for(trainer, batch)], sft_loss)
                stages = policy.megatron_cfg.pipeline_model_parallel_size
                found.append(torch.stack(calls).reshape(-1, LAYERS // stages, EXPERTS).numpy())
            return found
        finally:
            TopKRouter.routing = routing


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "sign"),
    [
        pytest.param(
            sizes,
            sign,
            id=f"{name}-{sign}",
            marks=() if (name, sign) in (("dp2", -1), ("tp2", 1)) else pytest.mark.slow,
        )
        for name, sizes in (("dp2", {}), ("ep2", {"ep": 2}), ("tp2", {"tp": 2}))
        for sign in (1, -1)
    ],
)
def test_all_ranks_have_the_same_bias(sizes: dict[str, int], sign: int) -> None:
    settings = {"moe_router_force_biased": sign * DEVIATION, **layout(**sizes)}
    ((first,), (second,)) = run_ranks(biases_of_models, 2, 2, settings)
    assert first.shape == second.shape
    np.testing.assert_allclose(first, second, rtol=0, atol=NOISE)
    assert np.abs(first).max() > DEVIATION


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.full), "full"])
def test_a_positive_deviation_draws_anew_in_each_forward(recompute: str) -> None:
    settings = {"moe_router_force_biased": DEVIATION, "activation_checkpointing": recompute}
    ((biases,),) = run_ranks(biases_of_models, 1, 1, settings)
    calls = biases.reshape(-1, EXPERTS)
    assert len(calls) == 2 * 4 * LAYERS
    for index, call in enumerate(calls[1:], start=1):
        assert np.abs(calls[:index] - call).max(1).min() > DEVIATION / 100, "a bias came back"
    # 256 independent draws: their standard deviation scatters by 1 / sqrt(2 * 256) around the asked one. Five sigma.
    assert abs(calls.std() / DEVIATION - 1) < 5 / np.sqrt(2 * calls.size)
    assert abs(calls.mean()) < 5 * DEVIATION / np.sqrt(calls.size)


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize("sizes", [{}, pytest.param({"pp": 2}, marks=pytest.mark.full)], ids=["single", "pp2"])
def test_a_negative_deviation_draws_once_for_each_layer(sizes: dict[str, int], recompute: str) -> None:
    world_size = 2 if sizes else 1
    settings = {"moe_router_force_biased": -DEVIATION, "activation_checkpointing": recompute, **layout(**sizes)}
    for (biases,) in run_ranks(biases_of_models, world_size, world_size, settings):
        np.testing.assert_allclose(biases, np.broadcast_to(biases[:1], biases.shape), rtol=0, atol=NOISE)
        layers = biases[0]
        for index, layer in enumerate(layers[1:], start=1):
            assert np.abs(layers[:index] - layer).max(1).min() > DEVIATION / 100, "two layers share a bias"
        # The deviation is the value's amount: chi-square bounds would hold for any fixed seed, so a wide one will do.
        assert 0.5 < layers.std() / DEVIATION < 1.7


def test_a_second_model_inherits_no_bias() -> None:
    settings = {"moe_router_force_biased": -DEVIATION}
    ((first, second),) = run_ranks(biases_of_models, 1, 1, settings, 2)
    for layer in range(LAYERS):
        assert np.abs(first[0, layer] - second[0, layer]).max() > DEVIATION / 100


def shares_of_models(policies: list[Any]) -> list[Biases]:
    """Share of the tokens that go to each expert, `[calls, experts]`, of one model after another in one process."""
    with parallel_job(policies[0]):
        shares = []
        for policy in policies:
            trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=10)
            trainer.train([shard_of_rank(tiny_batch(0))], sft_loss)
            recorder = observer_of(trainer, ExpertLoadReports).recorder
            counts = recorder.counts.double()
            shares.append((TOPK * counts / counts.sum(-1, keepdim=True)).reshape(-1, EXPERTS).numpy())
        return shares


@pytest.mark.full
def test_a_plain_model_after_a_forced_one_is_plain() -> None:
    policies = [tiny_policy(1, moe_router_force_biased=-DEVIATION), tiny_policy(1)]
    ((forced, after),) = run_ranks(shares_of_models, 1, policies)
    # Such a bias alone decides: the same two experts take every token.
    assert set(forced.reshape(-1).tolist()) == {0.0, 1.0}
    ((alone,),) = run_ranks(shares_of_models, 1, policies[1:])
    np.testing.assert_array_equal(after, alone)


@pytest.mark.parametrize(
    ("forced", "what"),
    [
        pytest.param({"moe_router_force_biased": 1.0}, "full", marks=pytest.mark.full),
        pytest.param({"moe_router_force_biased": 1.0}, "moe", marks=pytest.mark.slow),
        ({"moe_router_force_biased": -1.0}, "full"),
        pytest.param({"moe_router_force_load_balancing": True}, "full", marks=pytest.mark.full),
        pytest.param({"moe_router_force_hot_rank": 0}, "moe", marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("layer_spec", [pytest.param("local", marks=pytest.mark.slow), "auto"])
def test_a_recomputed_forward_routes_as_the_first_one(forced: dict[str, Any], what: str, layer_spec: str) -> None:
    settings = {"layer_spec": layer_spec, **forced}
    (plain,) = run_ranks(train_run, 1, RunSettings(tiny_policy(1, **settings), num_steps=2))
    policy = tiny_policy(1, activation_checkpointing=what, **settings)
    (again,) = run_ranks(train_run, 1, RunSettings(policy, num_steps=2))
    found = difference([again], plain)
    # Gradients of another routing would be off by a tenth and more.
    assert found.grad_norm < 1e-6
    assert found.loss < 1e-6
    assert found.weights < 1e-6
    for step, wanted in zip(again.moe_metrics, plain.moe_metrics, strict=True):
        assert step == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    "forced",
    [
        {"moe_router_force_load_balancing": True, "moe_router_force_biased": 1.0},
        {"moe_router_force_load_balancing": True, "moe_router_force_hot_rank": 0},
        {"moe_router_force_biased": -1.0, "moe_router_force_hot_rank": 0},
    ],
    ids=str,
)
def test_at_most_one_way_is_on(forced: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="only one way of forced routing can be on") as error:
        tiny_policy(1, **forced)
    assert all(name in str(error.value) for name in forced)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_force_load_balancing", True),
        ("moe_router_force_biased", 1.5),
        ("moe_router_force_biased", -0.5),
        ("moe_router_force_hot_rank", 0),
    ],
)
def test_what_is_forced_is_reported(name: str, value: Any) -> None:
    config = build_transformer_config(tiny_policy(1, **{name: value}), tiny_hf_config())
    assert forced_routing_in_force(config) == {name: value}
    assert effective_moe_configuration(config)[name] == value


@pytest.mark.parametrize("name", ["sft_qwen3_30b_a3b.yaml", "sft_tiny_moe.yaml"])
def test_no_default_forces_anything(name: str) -> None:
    policy = load_config(f"examples/configs/{name}", [], check_paths=False).policy
    config = build_transformer_config(policy, tiny_hf_config())
    assert forced_routing_in_force(config) == {}
    assert not any(effective_moe_configuration(config).get(field) for field in FORCED_ROUTING_FIELDS)


def test_a_hot_rank_needs_as_many_experts_as_a_token_goes_to() -> None:
    policy = tiny_policy(8, moe_router_force_hot_rank=1, train_micro_batch_size=1, **layout(ep=8))
    with pytest.raises(ConfigurationError, match="each rank holds 1 experts of a layer, fewer than the 2"):
        build_transformer_config(policy, tiny_hf_config())
