# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradient of the routers by source: exact, the same in every layout, and measured without a trace."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.models.megatron.checkpoint.contents import random_states
from nemo_rl_moe.models.megatron.layers import router_losses
from nemo_rl_moe.models.megatron.training import megatron_model, side_passes
from nemo_rl_moe.models.megatron.training.forward_backward import ForwardBackward
from nemo_rl_moe.models.megatron.training.router_gradients import RouterGradients
from nemo_rl_moe.routing.findings.tracker import FindingTracker, Thresholds
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow, some_of
from tests.support.tiny_model import layout, shard_of_rank, tiny_batch, tiny_grpo_policy
from tests.support.training_run import observer_of, tiny_trainer
from tests.unit.models.megatron.tiny_trainers import (
    EXPERT_BIAS,
    NUM_LAYERS,
    OVERLAP,
    PACKED,
    ZERO_1,
    load_counts,
    policy_gradient_loss,
    shard_for,
    with_advantages,
    with_random_routes,
)

REPLAY = {"routing_replay": "rollout"}
FULL = {"activation_checkpointing": "full"}
GLOBAL_AND_SEQUENCE = {
    "moe_router_load_balancing_type": "[seq_aux_loss, global_aux_loss]",
    "moe_aux_loss_coeff": "[0.05, 0.05]",
}
FULL_ROWS = {"shortest": 16, "longest": 16}
LOSSES = {"moe_z_loss_coeff": 0.01}
# A time, and rounding.
UNLIKE = ("router_gradient/seconds", "router_gradient/error_aux", "router_gradient/error_z")
MEASURED = {"router_gradients__every_n_steps": 1, "router_gradients__num_microbatches": None}


def rl_batch(seed: int = 3, *, with_routes: bool = False, **sizes: int) -> TokenBatch:
    """Eight sequences with advantages, and with experts that no router would choose."""
    batch = with_advantages(tiny_batch(seed, **sizes))
    return with_random_routes(batch, seed) if with_routes else batch


def policy_for(world_size: int = 1, **changes: Any) -> Any:
    given = {"max_grad_norm": None, "activation_checkpointing": "none", **LOSSES, **MEASURED, **changes}
    return tiny_grpo_policy(world_size, **given)


@dataclass(frozen=True)
class Measured:
    """Of one rank: all ranks' parts, the gradient that its routers trained with, and the step's metrics."""

    sources: tuple[str, ...]
    parts: np.ndarray
    trained: dict[int, np.ndarray]
    metrics: dict[str, float]


def measure(policy: Any, sizes: dict[str, int], with_routes: bool, fault: str | None = None) -> Measured:
    with without(fault), tiny_trainer(policy) as trainer:
        measurement = observer_of(trainer, RouterGradients)
        shard = shard_for(trainer, rl_batch(with_routes=with_routes, **sizes))
        for chunk in trainer.ddp_chunks:
            chunk.train()
        parts = measurement.parts(shard, policy_gradient_loss())
        dist.all_reduce(parts)
        metrics = trainer.train([shard], policy_gradient_loss()).moe_metrics
        trained = {
            position: router.weight.main_grad.float().numpy().copy() for position, router in measurement._routers
        }
        return Measured(measurement.sources, parts.numpy(), trained, metrics)


@contextmanager
def without(keeper: str | None) -> Iterator[None]:
    """While open, one of the things that leave no trace is not done."""
    with nullcontext() if keeper is None else mock.patch.object(side_passes, keeper, return_value=nullcontext()):
        yield


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def measured(world_size: int = 1, *, with_routes: bool = False, rows: Any = None, **changes: Any) -> list[Measured]:
    return run_ranks(measure, world_size, policy_for(world_size, **changes), rows or FULL_ROWS, with_routes)


@pytest.fixture(scope="module")
def expected() -> Measured:
    """Return the result of one rank, padded."""
    return measured()[0]


@pytest.fixture(scope="module")
def expected_under_replay() -> Measured:
    return measured(with_routes=True, **REPLAY)[0]


def test_the_parts_are_there_and_add_up(expected: Measured) -> None:
    assert expected.sources == ("policy", "aux", "z")
    for layer in range(NUM_LAYERS):
        assert all(np.linalg.norm(part[layer]) > 0 for part in expected.parts)
        assert relative(expected.parts.sum(0)[layer], expected.trained[layer]) < 1e-6


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        full(1, PACKED),
        slow(1, FULL),
        slow(1, {"layer_spec": "local"}),
        slow(2, {}),
        full(2, OVERLAP),
        slow(2, layout(tp=2)),
        full(2, layout(tp=2) | PACKED | FULL),
        full(2, layout(ep=2) | {"activation_checkpointing": "moe"}),
        slow(2, layout(pp=2)),
        slow(2, layout(pp=2) | FULL | OVERLAP),
        (2, layout(pp=2, vpp=2) | OVERLAP),
        slow(4, layout(pp=2, tp=2) | PACKED | FULL),
        slow(4, layout(tp=2, ep=2)),
    ],
)
def test_every_layout_measures_what_one_rank_does(world_size: int, changes: dict[str, Any], expected: Measured) -> None:
    compare(measured(world_size, **changes), expected, complete=True)


EVERY_LOSS = {
    "moe_router_load_balancing_type": "[aux_loss, seq_aux_loss, global_aux_loss]",
    "moe_aux_loss_coeff": "[0.05, 0.02, 0.03]",
}
PADDED_ROWS = {"shortest": 3, "longest": 23}


@pytest.mark.parametrize(
    ("world_size", "changes", "most"),
    [
        full(1, {"precision": "bfloat16"}, 0.03),
        full(2, {}, 1e-5),
        (2, layout(tp=2) | PACKED | FULL, 1e-5),
        full(2, layout(pp=2) | FULL, 1e-5),
        full(2, layout(pp=2, vpp=2), 1e-5),
        full(2, layout(ep=2) | {"layer_spec": "local"}, 1e-5),
        full(1, {"router_gradients__num_microbatches": 2}, 1e-5),
    ],
)
def test_the_last_router_gets_what_the_equations_say(world_size: int, changes: dict[str, Any], most: float) -> None:
    found = measured(world_size, rows=PADDED_ROWS, **EVERY_LOSS, **changes)[0].metrics
    for source in ("aux", "z"):
        assert found[f"router_gradient/scale_{source}"] == pytest.approx(1.0, abs=most)
        assert found[f"router_gradient/error_{source}"] < most


@pytest.mark.full
def test_a_gradient_that_is_rounding_alone_is_not_compared() -> None:
    policy = policy_for(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.05, moe_router_topk=8)
    found = run_ranks(measure, 1, policy, PADDED_ROWS, False)[0].metrics
    assert "router_gradient/error_aux" not in found, "all tokens go to all experts"
    assert found["router_gradient/scale_z"] == pytest.approx(1.0, abs=1e-5)


NO_LIMITS = Thresholds(dead_expert_steps=None, excess_cv=None, overload_factor=None, sustained_steps=1)


def measure_with_fault(policy: Any, fault: str) -> dict[str, float]:
    """Measure while the gradient reduction's divisor is forgotten, padding counts, or tokens count twice."""
    with ExitStack() as stack:
        if fault == "scale":
            one_rank = mock.Mock(wraps=router_losses.parallel_state, get_data_parallel_world_size=lambda: 1)
            stack.enter_context(mock.patch.object(router_losses, "parallel_state", one_rank))
        elif fault == "mask":
            of = router_losses.SequencesOfTokens.of

            def without_mask(sequence: torch.Tensor, num_sequences: int, copies: Any = None) -> Any:
                return replace(of(sequence, num_sequences, copies), is_token=torch.ones(len(sequence)))

            stack.enter_context(mock.patch.object(router_losses.SequencesOfTokens, "of", without_mask))
        else:
            terms = router_losses.BatchSize.terms
            twice = lambda size, name: 2 * terms(size, name)  # noqa: E731
            stack.enter_context(mock.patch.object(router_losses.BatchSize, "terms", twice))
        return measure(policy, PADDED_ROWS, False).metrics


@pytest.mark.parametrize("fault", some_of(("scale", "mask", "count"), 1))
def test_a_fault_of_the_losses_is_found(fault: str) -> None:
    metrics = run_ranks(measure_with_fault, 2, policy_for(2, **EVERY_LOSS), fault)[0]
    (finding,) = FindingTracker(NO_LIMITS, 2).observe(
        1, {f"train/moe/{name}": value for name, value in metrics.items()}
    )
    assert finding.kind == "router_loss_gradient"
    expected = {"scale": 0.5, "count": 0.5}
    if fault in expected:
        assert metrics["router_gradient/scale_z"] == pytest.approx(expected[fault], rel=1e-4)
        assert "the z-loss trains with 0.50 times its coefficient" in finding.text


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "changes"),
    [slow(2, ZERO_1 | OVERLAP), (2, layout(ep=2) | ZERO_1), slow(2, layout(pp=2, vpp=2) | ZERO_1)],
)
def test_with_a_sharded_optimizer_too(world_size: int, changes: dict[str, Any], expected: Measured) -> None:
    """A rank keeps only its own part of such an optimizer's gradients."""
    compare(measured(world_size, **changes), expected, complete=world_size == 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (1, FULL),
        slow(1, {"layer_spec": "local"}),
        slow(2, layout(tp=2) | PACKED | FULL),
        full(2, layout(pp=2, vpp=2) | FULL),
    ],
)
def test_under_replay_too(world_size: int, changes: dict[str, Any], expected_under_replay: Measured) -> None:
    compare(measured(world_size, with_routes=True, **REPLAY, **changes), expected_under_replay, complete=True)


@pytest.mark.full
def test_replay_changes_the_gradient(expected: Measured, expected_under_replay: Measured) -> None:
    assert relative(expected_under_replay.parts[0], expected.parts[0]) > 0.1


def compare(ranks: Sequence[Measured], expected: Measured, *, complete: bool) -> None:
    """All ranks' parts with those of one rank, and with the gradient that was trained with where a rank has it."""
    for rank in ranks:
        for part, wanted in zip(rank.parts, expected.parts, strict=True):
            for layer in range(NUM_LAYERS):
                assert relative(part[layer], wanted[layer]) < 1e-4
        if complete:
            for layer, trained in rank.trained.items():
                assert relative(rank.parts.sum(0)[layer], trained) < 2e-6
    for name, value in expected.metrics.items():
        if name.startswith("router_gradient/") and name not in UNLIKE:
            assert ranks[0].metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for rank in ranks[1:]:
        assert not any(name.startswith("router_gradient/") for name in rank.metrics)


def test_metrics_are_those_of_the_parts(expected: Measured) -> None:
    found = {name.split("/")[1]: v for name, v in expected.metrics.items() if name.startswith("router_gradient/")}
    assert found.pop("seconds") > 0
    by_source = dict(zip(expected.sources, expected.parts, strict=True))
    for source, part in by_source.items():
        assert found.pop(f"norm_{source}") == pytest.approx(float(np.linalg.norm(part)), rel=1e-6)
        for layer in range(NUM_LAYERS):
            norm = float(np.linalg.norm(part[layer]))
            assert found.pop(f"norm_{source}_layer_{layer}") == pytest.approx(norm, rel=1e-6)
    assert sum(found.pop(f"share_{source}") for source in by_source) == pytest.approx(1)
    for source in ("aux", "z"):
        assert found.pop(f"scale_{source}") == pytest.approx(1.0, abs=1e-5)
        assert found.pop(f"error_{source}") < 1e-5
    endings = ["", *(f"_layer_{layer}" for layer in range(NUM_LAYERS))]
    assert found.keys() == {f"cosine_policy_{part}{ending}" for part in ("aux", "z") for ending in endings}


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "sources"),
    [
        full({"moe_z_loss_coeff": None}, ("policy", "aux")),
        full({"moe_router_load_balancing_type": "none"}, ("policy", "z")),
        full({"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": None}, ("policy",)),
        (GLOBAL_AND_SEQUENCE, ("policy", "aux", "z")),
    ],
)
def test_sources_are_those_of_the_configuration(changes: dict[str, Any], sources: tuple[str, ...]) -> None:
    (found,) = measured(**changes)
    assert found.sources == sources
    for layer, trained in found.trained.items():
        assert relative(found.parts.sum(0)[layer], trained) < 2e-6


def halves(policy: Any) -> list[np.ndarray]:
    """Parts of all four microbatches, of the first two, and of the last two."""
    with tiny_trainer(policy) as trainer:
        measurement = observer_of(trainer, RouterGradients)
        shard = shard_for(trainer, rl_batch())
        turned = replace(shard, microbatches=shard.microbatches[2:] + shard.microbatches[:2])
        found = []
        for number, given in ((None, shard), (2, shard), (2, turned)):
            measurement._num_microbatches = number
            parts = measurement.parts(given, policy_gradient_loss())
            dist.all_reduce(parts)
            found.append(parts.numpy())
        return found


@pytest.mark.full
def test_some_microbatches_stand_for_all() -> None:
    """Their parts have the size of a whole step's, so that the mean of two halves is the whole."""
    whole, first, last = run_ranks(halves, 1, policy_for())[0]
    for part in range(3):
        assert relative((first + last)[part] / 2, whole[part]) < 1e-6
        assert relative(first[part], whole[part]) > 0.1


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "sizes", "expected"),
    [full(1, {"pp": 2, "vpp": 2}, 2), (3, {"pp": 2, "vpp": 2}, 4), full(1, {"pp": 2}, 1)],
)
def test_an_interleaved_pipeline_runs_whole_rounds(number: int, sizes: dict[str, int], expected: int) -> None:
    policy = policy_for(2, **layout(**sizes), router_gradients__num_microbatches=number)
    assert run_ranks(microbatches_that_run, 2, policy) == [expected] * 2


def microbatches_that_run(policy: Any) -> int:
    with tiny_trainer(policy) as trainer:
        assert observer_of(trainer, RouterGradients)
        numbers = []
        train = ForwardBackward.train

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            numbers.append(kwargs.get("num_microbatches"))
            return train(self, *args, **kwargs)

        with mock.patch.object(ForwardBackward, "train", watched):
            trainer.train([shard_of_rank(rl_batch())], policy_gradient_loss())
        assert numbers == [numbers[0]] * 3 + [None]
        return numbers[0]


# Without a trace


@dataclass(frozen=True)
class Run:
    """Everything that a run of one rank leaves behind."""

    weights: dict[str, bytes]
    buffers: dict[str, bytes]
    optimizer: list[bytes]
    random: dict[str, bytes]
    metrics: list[dict[str, float]]
    loads: list[Any]
    measured: list[bool]


def three_steps(policy: Any, with_routes: bool, dropout: float, fault: str | None) -> Run:
    build = megatron_model.build_transformer_config

    def with_dropout(*args: Any) -> Any:
        config = build(*args)
        config.hidden_dropout = config.attention_dropout = dropout
        return config

    of_model = mock.patch.object(megatron_model, "build_transformer_config", with_dropout)
    with of_model, without(fault), tiny_trainer(policy) as trainer:
        metrics, loads = [], []
        for step in range(3):
            shard = shard_for(trainer, rl_batch(step, with_routes=with_routes))
            result = trainer.train([shard], policy_gradient_loss())
            series = {name: found.reduce() for name, found in result.microbatch_metrics.items()}
            metrics.append(result.moe_metrics | series | {"loss": result.global_loss, "norm": result.grad_norm})
            counts = load_counts(result)
            loads.append(None if counts is None else counts.tolist())
        chunks = torch.nn.ModuleList(trainer.chunks)
        named, buffers = dict(chunks.named_parameters()), dict(chunks.named_buffers())
        state = [
            values
            for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
            for of_parameter in part.optimizer.state.values()
            for values in of_parameter.values()
            if isinstance(values, torch.Tensor)
        ]
        gradients = {name: tensor.main_grad for name, tensor in named.items() if tensor.requires_grad}
        return Run(
            weights=as_bytes(named | {f"gradient of {name}": tensor for name, tensor in gradients.items()}),
            buffers=as_bytes(buffers),
            optimizer=[tensor.detach().numpy().tobytes() for tensor in state],
            random=as_bytes(random_states()),
            metrics=[{n: v for n, v in of_step.items() if not n.startswith("router_grad")} for of_step in metrics],
            loads=loads,
            measured=[any(name.startswith("router_grad") for name in of_step) for of_step in metrics],
        )


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


BIAS = {**EXPERT_BIAS, "moe_router_bias_update_rate": 0.01}
GLOBAL = {"moe_router_load_balancing_type": "[aux_loss, global_aux_loss]", "moe_aux_loss_coeff": "[0.05, 0.05]"}
EVERYTHING = BIAS | GLOBAL


def both(
    world_size: int, changes: dict[str, Any], *, with_routes: bool = False, dropout: float = 0.1, fault: Any = None
) -> tuple[list[Run], list[Run]]:
    """The ranks of a run with measurements on every step, and of one without any."""
    runs = [
        run_ranks(three_steps, world_size, policy_for(world_size, **changes, **more), with_routes, dropout, fault)
        for more in ({}, {"router_gradients__every_n_steps": None})
    ]
    return runs[0], runs[1]


@pytest.mark.parametrize(
    ("world_size", "changes", "settings"),
    [
        slow(1, {}, {"dropout": 0.0}),
        slow(1, EVERYTHING, {}),
        (1, EVERYTHING | FULL | REPLAY, {"with_routes": True}),
        slow(1, EVERYTHING | {"layer_spec": "local", "precision": "bfloat16"}, {}),
        full(2, EVERYTHING | ZERO_1 | OVERLAP, {}),
        slow(2, EVERYTHING | layout(ep=2) | OVERLAP | {"activation_checkpointing": "moe"}, {}),
        slow(2, EVERYTHING | layout(tp=2) | PACKED | REPLAY, {"with_routes": True, "dropout": 0.0}),
        slow(2, EVERYTHING | layout(pp=2, vpp=2) | FULL | OVERLAP | ZERO_1, {}),
    ],
)
def test_measuring_changes_no_bit(world_size: int, changes: dict[str, Any], settings: dict[str, Any]) -> None:
    with_measurements, without = both(world_size, changes, **settings)
    assert [run.measured for run in with_measurements] == [[rank == 0] * 3 for rank in range(world_size)]
    for found, expected in zip(with_measurements, without, strict=True):
        assert expected.measured == [False] * 3
        assert replace(found, measured=expected.measured) == expected
    assert any("expert_bias" in name for name in without[0].buffers) == ("moe_router_enable_expert_bias" in changes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("_kept_random_states", "random"),
        slow("_kept_router_buffers", "weights"),
        slow("_kept_auxiliary_losses", "metrics"),
    ],
)
def test_each_trace_would_be_seen(fault: str, what: str) -> None:
    (found,), (expected,) = both(1, EVERYTHING, fault=fault)
    assert getattr(found, what) != getattr(expected, what)


# A mean that is taken twice is the same mean: of whole gradients over data-parallel ranks nothing would be seen.
@pytest.mark.full
@pytest.mark.parametrize("changes", [slow(layout(tp=2)), ZERO_1])
def test_gradients_that_the_schedule_had_reduced_would_be_seen(changes: dict[str, Any], expected: Measured) -> None:
    ranks = run_ranks(measure, 2, policy_for(2, **changes), FULL_ROWS, False, "_unreduced_gradients")
    assert relative(ranks[0].parts, expected.parts) > 0.1


def due_steps(policy: Any) -> list[bool]:
    with tiny_trainer(policy) as trainer:
        found = [
            trainer.train([shard_of_rank(rl_batch(step))], policy_gradient_loss()).moe_metrics for step in range(4)
        ]
        return ["router_gradient/seconds" in metrics for metrics in found]


@pytest.mark.full
def test_every_second_step() -> None:
    policy = policy_for(router_gradients__every_n_steps=2, router_gradients__num_microbatches=1)
    assert run_ranks(due_steps, 1, policy) == [[False, True, False, True]]
