# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every layout trains as one rank does: losses, gradient norms, MoE metrics and weights after two steps."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, listed, slow
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import Difference, RankRun, RunSettings, difference, train_run
from tests.unit.models.megatron.tiny_trainers import CHUNKED, OVERLAP, ZERO_1, assert_within

# Largest seen over all layouts and both versions of Megatron-Core: 6e-8, 5e-7, 5e-7 and 6e-6; a weight moves by 1e-2.
TOLERANCE = Difference(loss=5e-7, grad_norm=2e-6, moe_metrics=2e-6, weights=1e-5)

LATE_WEIGHTS = {
    "distributed_data_parallel_config__overlap_param_gather": True,
    "distributed_data_parallel_config__bucket_size": 1000,  # a bucket for each matrix
    **CHUNKED,
}
DENSE_STAGE = {"mlp_only_layers": [0, 1]}

LAYOUTS = {
    "dp2": (2, {}),
    "dp2_zero1": (2, ZERO_1),
    "dp2_zero1_overlap": (2, ZERO_1 | OVERLAP),
    "dp2_zero1_late_weights": (2, ZERO_1 | OVERLAP | LATE_WEIGHTS),
    "ep2_dp4_zero1_late_weights": (4, layout(ep=2) | ZERO_1 | OVERLAP | LATE_WEIGHTS),
    "pp2_dp2_zero1_late_weights": (4, layout(pp=2) | ZERO_1 | OVERLAP | LATE_WEIGHTS),
    "dp4": (4, {}),
    "ep2": (2, layout(ep=2)),
    "ep2_zero1": (2, layout(ep=2) | ZERO_1),
    "ep2_dp4_zero1": (4, layout(ep=2) | ZERO_1),
    "pp2": (2, layout(pp=2)),
    "pp2_vpp2": (2, layout(pp=2, vpp=2)),
    "pp2_vpp2_dp2_zero1": (4, layout(pp=2, vpp=2) | ZERO_1),
    "pp2_uneven": (2, layout(pp=2, last=1)),
    "pp3_uneven": (3, layout(pp=3, first=2)),
    "pp3_uneven_ends": (3, layout(pp=3, first=1, last=1)),
    "pp2_ep2": (4, layout(pp=2, ep=2)),
    "pp2_ep2_zero1": (4, layout(pp=2, ep=2) | ZERO_1),
    "tp2": (2, layout(tp=2)),
    "tp2_zero1": (2, layout(tp=2) | ZERO_1),
    "tp2_etp2": (2, layout(tp=2, etp=2)),
    "tp2_ep2": (2, layout(tp=2, ep=2)),
    "tp2_ep2_dp2_zero1": (4, layout(tp=2, ep=2) | ZERO_1),
    "tp2_etp2_ep2": (4, layout(tp=2, etp=2, ep=2)),
    "tp2_pp2": (4, layout(tp=2, pp=2)),
    "tp2_pp2_ep2_zero1": (4, layout(tp=2, pp=2, ep=2) | ZERO_1),
}


@cache
def single_rank(layer_spec: str, model: tuple[tuple[str, Any], ...] = (), **changes: Any) -> RankRun:
    """The run that the others are compared with; made once."""
    settings = RunSettings(tiny_policy(1, layer_spec=layer_spec, **changes), _model(model))
    return run_ranks(train_run, 1, settings)[0]


def _model(changes: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in changes}


def assert_same_training(runs: list[RankRun], reference: RankRun) -> None:
    assert_within(TOLERANCE, runs, reference)


# Every dimension of a layout, every two of them, and the sharded optimizer with each are in one of these.
COMBINING_MOST = {
    "dp2_zero1_late_weights",
    "ep2_zero1",
    "pp2_uneven",
    "pp2_vpp2_dp2_zero1",
    "tp2_ep2_dp2_zero1",
    "tp2_etp2_ep2",
    "tp2_pp2_ep2_zero1",
}
# What Megatron-Core's own modules compute in two dimensions they compute in one; of stages those of recomputed
# activations see them.
WITH_STOCK_MODULES = {"ep2", "tp2"}


# Every dimension, but for the experts' own tensor parallelism.
QUICK = {("tp2_pp2_ep2_zero1", "auto"), ("ep2", "local")}


# The sharded optimizer does not know which modules run, so with Megatron-Core's own it is tried once.
CASES = [
    (name, layer_spec)
    for name in LAYOUTS
    for layer_spec in ("local", "auto")
    if layer_spec == "auto" or "zero1" not in name or name == "ep2_zero1"
]
ON_EACH_CHANGE = [(name, "auto") for name in COMBINING_MOST] + [(name, "local") for name in WITH_STOCK_MODULES]


@pytest.mark.parametrize(("name", "layer_spec"), listed(CASES, QUICK, ON_EACH_CHANGE))
def test_layout_trains_as_one_rank_does(name: str, layer_spec: str) -> None:
    world_size, changes = LAYOUTS[name]
    settings = RunSettings(tiny_policy(world_size, layer_spec=layer_spec, **changes))
    assert_same_training(run_ranks(train_run, world_size, settings), single_rank(layer_spec))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "layer_spec"),
    [
        slow({"pp": 2}, "local", id="pp2-local"),
        slow({"pp": 2}, "auto", id="pp2-auto"),
        slow({"pp": 2, "tp": 2}, "local", id="pp2_tp2-local"),
        slow({"pp": 2, "tp": 2}, "auto", id="pp2_tp2-auto"),
        slow({"pp": 2, "ep": 2}, "local", id="pp2_ep2-local"),
        pytest.param({"pp": 2, "ep": 2}, "auto", id="pp2_ep2-auto"),
    ],
)
def test_pipeline_stage_without_experts(sizes: dict[str, int], layer_spec: str) -> None:
    world_size = 2 if sizes == {"pp": 2} else 4
    settings = RunSettings(tiny_policy(world_size, layer_spec=layer_spec, **layout(**sizes)), DENSE_STAGE)
    runs = run_ranks(train_run, world_size, settings)
    reference = single_rank(layer_spec, (("mlp_only_layers", (0, 1)),))
    assert_same_training(runs, reference)
    layers = {key for key in runs[0].moe_metrics[0] if key.startswith("load_balancing_loss_layer_")}
    assert layers == {"load_balancing_loss_layer_2", "load_balancing_loss_layer_3"}


RECOMPUTING = {
    "single-local": (1, {}, "local"),
    "single-auto": (1, {}, "auto"),
    "pp2-local": (2, {"pp": 2}, "local"),
    "ep2-auto": (2, {"ep": 2}, "auto"),
    "tp2-local": (2, {"tp": 2}, "local"),
}


@pytest.mark.parametrize(
    ("name", "what"), listed(product(RECOMPUTING, ("full", "moe")), [("pp2-local", "full"), ("ep2-auto", "moe")])
)
def test_recomputed_activations_change_nothing(name: str, what: str) -> None:
    world_size, sizes, layer_spec = RECOMPUTING[name]
    policy = tiny_policy(world_size, layer_spec=layer_spec, activation_checkpointing=what, **layout(**sizes))
    runs = run_ranks(train_run, world_size, RunSettings(policy))
    # The MoE metrics are part of it: a router that runs twice must not count twice.
    assert_same_training(runs, single_rank(layer_spec))


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        full(1, {}),
        slow(2, {}),
        (2, layout(ep=2)),
        slow(2, layout(pp=2)),
        slow(2, layout(pp=2, vpp=2)),
        slow(2, layout(tp=2)),
        full(4, layout(tp=2, pp=2)),
    ],
    ids=["single", "dp2", "ep2", "pp2", "pp2_vpp2", "tp2", "tp2_pp2"],
)
def test_packed_sequences_train_as_padded_ones(world_size: int, changes: dict[str, Any]) -> None:
    policy = tiny_policy(world_size, layer_spec="auto", **changes)
    packing = policy.sequence_packing.model_copy(update={"enabled": True})
    settings = RunSettings(policy.model_copy(update={"sequence_packing": packing}))
    assert_same_training(run_ranks(train_run, world_size, settings), single_rank("auto"))


@pytest.mark.full
def test_uneven_stages_in_pieces_train_as_one_rank_does() -> None:
    six_layers = {"num_hidden_layers": 6}
    settings = RunSettings(tiny_policy(2, layer_spec="auto", **layout(pp=2, vpp=2, first=4)), six_layers)
    assert_same_training(run_ranks(train_run, 2, settings), single_rank("auto", tuple(six_layers.items())))


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [slow(2, {"ep": 2}), (2, {"tp": 2}), slow(4, {"tp": 2, "pp": 2})],
    ids=["ep2", "tp2", "tp2_pp2"],
)
def test_z_loss_in_layouts(world_size: int, sizes: dict[str, int]) -> None:
    changes = {"layer_spec": "auto", "moe_z_loss_coeff": 0.01}
    (reference,) = run_ranks(train_run, 1, RunSettings(tiny_policy(1, **changes)))
    policy = tiny_policy(world_size, **changes, **layout(**sizes))
    runs = run_ranks(train_run, world_size, RunSettings(policy))
    assert "z_loss_layer_3" in reference.moe_metrics[0]
    assert_same_training(runs, reference)


@pytest.mark.full
@pytest.mark.parametrize("balancing", ["seq_aux_loss", slow("global_aux_loss")])
def test_other_balancing_losses_under_tensor_parallelism(balancing: str) -> None:
    changes = {"layer_spec": "auto", "moe_router_load_balancing_type": balancing}
    (reference,) = run_ranks(train_run, 1, RunSettings(tiny_policy(1, **changes)))
    settings = RunSettings(tiny_policy(2, **changes, **layout(tp=2)))
    assert_same_training(run_ranks(train_run, 2, settings), reference)


@pytest.mark.full
@pytest.mark.parametrize(
    "sizes", [slow({"pp": 2}), {"pp": 2, "vpp": 2}, slow({"pp": 2, "tp": 2}), full({"tp": 2})], ids=str
)
def test_tied_embeddings(sizes: dict[str, int]) -> None:
    """The last pipeline stage has a copy of tied embeddings."""
    world_size = 4 if len(sizes) == 2 and "vpp" not in sizes else 2
    settings = RunSettings(tiny_policy(world_size, layer_spec="auto", **layout(**sizes)), {"tie_word_embeddings": True})
    reference = single_rank("auto", (("tie_word_embeddings", True),))
    runs = run_ranks(train_run, world_size, settings)
    stages = {key: values for run in runs for key, values in run.pieces.items()}
    for run in runs:
        for name, rank in [key for key in run.pieces if key[0] == "output_layer.weight"]:
            assert (run.pieces.pop((name, rank)) == stages["embedding.word_embeddings.weight", rank]).all()
        run.shards.pop("output_layer.weight", None)
    assert_same_training(runs, reference)


def test_layer_specs_agree() -> None:
    """Megatron-Core's own modules and this project's compute the same."""
    assert_same_training([single_rank("auto")], single_rank("local"))


def test_training_moves_the_weights_far_beyond_the_tolerance() -> None:
    one_step = RunSettings(tiny_policy(1, layer_spec="local"), num_steps=1)
    moved = difference(run_ranks(train_run, 1, one_step), replace_steps(single_rank("local"), 1))
    assert moved.weights > 100 * TOLERANCE.weights


def replace_steps(run: RankRun, num_steps: int) -> RankRun:
    return replace(
        run,
        losses=run.losses[:num_steps],
        grad_norms=run.grad_norms[:num_steps],
        moe_metrics=run.moe_metrics[:num_steps],
    )
