# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every layout counts the same assignments, and they are those that the routers' own logits call for."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch, make_shard
from nemo_rl_moe.distributed.microbatches import Batching, DynamicBatching, PackedBatching, plan_microbatches
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import MICROBATCHES, layout, parallel_job, tiny_batch, tiny_hf_config, tiny_policy

Counts = npt.NDArray[np.int64]
TOPK = 2


@dataclass(frozen=True)
class Variant:
    """What is trained in a layout, and how its batches are cut."""

    changes: Mapping[str, Any] = field(default_factory=dict)  # further settings of the policy
    model: Mapping[str, Any] = field(default_factory=dict)
    # Sequences of each microbatch, over all data-parallel ranks; or a planner that cuts them.
    microbatches: Sequence[Sequence[int]] | Batching = MICROBATCHES
    batch: Mapping[str, int] = field(default_factory=dict)  # arguments of `tiny_batch`
    extra_columns: int = 0  # of padding that each microbatch gets beyond its longest sequence
    num_steps: int = 2  # calls of `train`
    batches_in_step: int = 1  # global batches in each call
    evaluate: bool = False  # before and after each step
    reference: str = "auto"  # the variant that one rank must run to see the same tokens and the same weights
    same_microbatches: bool = True  # as that one's, and so the auxiliary losses


@dataclass(frozen=True)
class Step:
    """What one rank reports of one step."""

    layers: tuple[int, ...]  # global index of each row
    counts: Counts  # [layers, experts]
    metrics: dict[str, float]
    by_hand: Counts | None  # on one rank, the counts as the test worked them out
    num_microbatches: int  # of this data-parallel rank


# Microbatches other than the reference's: the first step alone, because an auxiliary loss of other microbatches moves
# the weights elsewhere.
OTHER_MICROBATCHES: dict[str, Any] = {"num_steps": 1, "same_microbatches": False}
CAPACITY = {"moe_expert_capacity_factor": 1.0}
PADDED_CAPACITY = CAPACITY | {"moe_pad_expert_input_to_capacity": True}
# A capacity counts padding, which stages and data-parallel ranks do not cut alike.
FULL_ROWS = {"shortest": 16, "longest": 16}

# The base ones and the evaluation take two steps, and so show what one leaves to the next.
VARIANTS: dict[str, Variant] = {
    "auto": Variant(),
    "local": Variant({"layer_spec": "local"}, reference="local"),
    "recompute_full": Variant({"activation_checkpointing": "full"}),
    "recompute_moe": Variant({"activation_checkpointing": "moe"}, num_steps=1),
    "recompute_full_local": Variant(
        {"activation_checkpointing": "full", "layer_spec": "local"}, num_steps=1, reference="local"
    ),
    "one_each": Variant(microbatches=tuple((index,) for index in range(8)), **OTHER_MICROBATCHES),
    "four_each": Variant(microbatches=((0, 1, 2, 3), (4, 5, 6, 7)), **OTHER_MICROBATCHES),
    # Stages exchange one shape, so that whole rows of padding come in.
    "uneven": Variant(microbatches=((7, 0, 3), (1,), (5, 2), (4, 6)), **OTHER_MICROBATCHES),
    "dynamic": Variant(microbatches=DynamicBatching(max_tokens=40), **OTHER_MICROBATCHES),
    "added_padding": Variant(extra_columns=6, num_steps=1),
    "added_padding_local": Variant({"layer_spec": "local"}, extra_columns=6, num_steps=1, reference="local"),
    "packed": Variant({"sequence_packing__enabled": True}),
    "packed_planned": Variant(
        {"sequence_packing__enabled": True}, microbatches=PackedBatching(max_tokens=40), **OTHER_MICROBATCHES
    ),
    "dense_layers": Variant(model={"mlp_only_layers": [0, 1]}, num_steps=1, reference="dense_layers"),
    "three_batches": Variant(batches_in_step=3, num_steps=1, reference="three_batches"),
    "evaluation": Variant(evaluate=True),
    "capacity": Variant(CAPACITY, batch=FULL_ROWS, num_steps=1, reference="capacity"),
    "padded_capacity": Variant(PADDED_CAPACITY, batch=FULL_ROWS, num_steps=1, reference="capacity"),
    "shared_experts": Variant({"moe_shared_expert_intermediate_size": 16}, num_steps=1, reference="shared_experts"),
}
# Further ones that one rank alone runs: dropping with padding, and recomputed.
ONE_RANK_ALONE: dict[str, Variant] = {
    f"{capacity}_{layer_spec}{'' if recompute == 'none' else '_recomputed'}": Variant(
        changes | {"layer_spec": layer_spec, "activation_checkpointing": recompute},
        extra_columns=2,
        num_steps=1,
        reference=f"{capacity}_{layer_spec}",
    )
    for capacity, changes in (("capacity", CAPACITY), ("padded_capacity", PADDED_CAPACITY))
    for layer_spec in ("local", "auto")
    for recompute in ("none", "full")
}

ALL = tuple(VARIANTS)
# On one rank: what the layouts of several are compared with, and of the rest the cases that combine most.
ON_ONE_RANK = tuple(
    name
    for name in VARIANTS
    if name not in {"recompute_moe", "recompute_full_local", "one_each", "four_each", "added_padding_local"}
)
# Of those, what only continuous integration runs, in a job of its own.
FULL_ON_ONE_RANK = {
    "dynamic",
    "added_padding",
    "packed_planned",
    "three_batches",
    "evaluation",
    "padded_capacity",
    "shared_experts",
}
QUICK_ALONE = {"capacity_local", "capacity_local_recomputed", "padded_capacity_auto", "padded_capacity_auto_recomputed"}
BASE = ("auto", "local", "recompute_full", "packed")


@dataclass(frozen=True)
class Layout:
    """A layout, with the variants that are tried in it and those of the slow tests.

    Each variant runs in a layout of several ranks at least, one where it can go wrong.
    """

    world_size: int
    sizes: Mapping[str, int]
    variants: Sequence[str]
    further: Sequence[str] = ()


def _layout(world_size: int, sizes: Mapping[str, int], *variants: str, every: Sequence[str] = ALL) -> Layout:
    return Layout(world_size, sizes, variants, [name for name in every if name not in variants])


LAYOUTS: dict[str, Layout] = {
    "single": _layout(1, {}, *ON_ONE_RANK),
    "dp2": _layout(2, {}, "auto", "one_each", "dynamic", "padded_capacity"),
    "ep2": _layout(2, {"ep": 2}, "auto", "packed_planned", "capacity", "shared_experts"),
    "pp2": _layout(
        2,
        {"pp": 2},
        *("auto", "packed", "uneven", "dense_layers", "three_batches", "evaluation", "recompute_full_local"),
    ),
    # Without capacities, which sequence parallelism cuts along the sequence.
    "tp2": _layout(
        2,
        {"tp": 2},
        *("auto", "local", "added_padding"),
        every=(*BASE, "recompute_moe", "uneven", "added_padding", "dense_layers", "shared_experts"),
    ),
    # An interleaved schedule runs microbatches in groups of as many as there are stages.
    "pp2_vpp2": _layout(
        2,
        {"pp": 2, "vpp": 2},
        *("auto", "recompute_full", "four_each", "packed_planned", "recompute_moe", "added_padding_local"),
    ),
    "tp2_ep2": _layout(2, {"tp": 2, "ep": 2}, "auto", "packed", every=BASE),
    "ep2_dp4": _layout(4, {"ep": 2}, "auto", "packed", every=BASE),
    "pp2_ep2": _layout(
        4, {"pp": 2, "ep": 2}, *("auto", "uneven"), every=(*BASE, "recompute_moe", "dense_layers", "uneven")
    ),
}


def run_variants(world_size: int, sizes: Mapping[str, int], variants: Mapping[str, Variant]) -> dict[str, list[Step]]:
    """Runs on every rank; only the first one gets the load matrix, and so returns steps."""

    def policy_of(variant: Variant) -> PolicyConfig:
        settings = {"layer_spec": "auto", "moe_metrics__mode": "detailed"} | layout(**sizes) | dict(variant.changes)
        return tiny_policy(world_size, **settings)

    with parallel_job(policy_of(next(iter(variants.values())))) as rank:
        return {name: run_variant(policy_of(variant), variant, rank) for name, variant in variants.items()}


def run_variant(policy: PolicyConfig, variant: Variant, rank: int) -> list[Step]:
    trainer = MegatronTrainer(policy, tiny_hf_config(**variant.model), None, num_steps=10)
    by_hand = dist.get_world_size() == 1 and policy.megatron_cfg.activation_checkpointing == "none"
    steps = []
    for step in range(variant.num_steps):
        first = step * variant.batches_in_step
        batches = [tiny_batch(100 + first + index, **variant.batch) for index in range(variant.batches_in_step)]
        shards = [cut(variant, trainer, batch) for batch in batches]
        if variant.evaluate:
            trainer.evaluate(shards[0], sft_loss)
        with noted_logits(trainer) as noted:
            result = trainer.train(shards, sft_loss)
        if variant.evaluate:
            trainer.evaluate(shards[0], sft_loss)
        microbatches = [batch for shard in shards for batch in shard.microbatches]
        load = EXPERT_LOAD.of(result.artifacts)
        assert (load is None) == (rank != 0)
        if load is not None:
            packed = policy.sequence_packing.enabled
            expected = count_by_hand(noted, microbatches, trainer, packed=packed) if by_hand else None
            steps.append(Step(load.layers, load.counts.numpy().copy(), result.moe_metrics, expected, len(microbatches)))
            assert result.num_microbatches == len(microbatches)
    return steps


def cut(variant: Variant, trainer: MegatronTrainer, batch: TokenBatch) -> GlobalBatchShard:
    """Return this rank's microbatches of one global batch."""
    rank, size = trainer.coordinates.data_parallel_rank, trainer.coordinates.data_parallel_size
    if isinstance(variant.microbatches, Sequence):
        count = len(variant.microbatches) // size
        mine: Sequence[Sequence[int]] = variant.microbatches[rank * count : (rank + 1) * count]
    else:
        plan = plan_microbatches(
            batch.lengths.tolist(),
            num_data_parallel_ranks=size,
            global_batch_size=len(batch),
            batching=variant.microbatches,
            microbatch_multiple=trainer.config.pipeline_model_parallel_size,
        )
        mine = plan.global_batches[0][rank]
    shard = make_shard(batch, mine, batch)
    return replace(shard, microbatches=tuple(widen(each, variant.extra_columns) for each in shard.microbatches))


def widen(batch: TokenBatch, columns: int) -> TokenBatch:
    pad = torch.nn.functional.pad
    return replace(
        batch, input_ids=pad(batch.input_ids, (0, columns)), token_mask=pad(batch.token_mask, (0, columns), value=False)
    )


Noted = list[npt.NDArray[np.float32]]


@contextmanager
def noted_logits(trainer: MegatronTrainer) -> Iterator[Noted]:
    """Notes the logits of each router call, `[sequence, batch, experts]`, in the order in which they run."""
    routers = [module for chunk in trainer.chunks for module in chunk.modules() if hasattr(module, "gating")]
    noted: Noted = []

    def noting(gating: Any) -> Any:
        def gate(*args: Any, **kwargs: Any) -> Any:
            logits = gating(*args, **kwargs)
            noted.append(logits.detach().float().numpy().copy())
            return logits

        return gate

    for router in routers:
        router.gating = noting(router.gating)
    yield noted
    for router in routers:
        del router.gating


def count_by_hand(
    noted: Noted, microbatches: Sequence[TokenBatch], trainer: MegatronTrainer, *, packed: bool
) -> Counts:
    """Top-k of each real token's logits, and, with a capacity, what each expert keeps of it."""
    num_layers = len(noted) // len(microbatches)
    config = trainer.config
    counts = np.zeros((num_layers, config.num_moe_experts), dtype=np.int64)
    for index, logits in enumerate(noted):
        lengths = microbatches[index // num_layers].lengths.numpy()
        tokens = logits.reshape(-1, logits.shape[-1])
        # Packed sequences follow one another in one row.
        valid = np.array([lengths.sum()]) if packed else lengths
        real = (np.arange(logits.shape[0])[:, None] < valid[None]).reshape(-1)
        chosen = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(chosen, np.argsort(-tokens, axis=1, kind="stable")[:, :TOPK], True, axis=1)
        if config.moe_expert_capacity_factor is not None:
            chosen = kept(chosen, tokens, config.moe_expert_capacity_factor)
        counts[index % num_layers] += chosen[real].sum(0)
    return counts


def kept(chosen: npt.NDArray[np.bool_], logits: npt.NDArray[np.float32], factor: float) -> npt.NDArray[np.bool_]:
    """Each expert takes, of the tokens that chose it (padding too), those with the highest weights."""
    exponentials = np.where(chosen, np.exp(logits - logits.max(1, keepdims=True)), 0.0)
    weights = exponentials / exponentials.sum(1, keepdims=True)
    capacity = int(np.ceil(len(chosen) * TOPK / chosen.shape[1] * factor))
    best = np.argsort(-weights, axis=0, kind="stable")[:capacity]
    within = np.zeros_like(chosen)
    np.put_along_axis(within, best, True, axis=0)
    return chosen & within


@cache
def job(name: str, *, further: bool = False) -> dict[str, list[Step]]:
    """The variants of one layout of several ranks, or its further ones, in one job."""
    chosen = LAYOUTS[name]
    variants = {variant: VARIANTS[variant] for variant in (chosen.further if further else chosen.variants)}
    return run_ranks(run_variants, chosen.world_size, chosen.world_size, chosen.sizes, variants)[0]


def on_one_rank(variant: str) -> list[Step]:
    """What one rank reports of a variant."""
    return _job_on_one_rank(_lists_of(variant))[variant]


@cache
def _job_on_one_rank(lists: tuple[str, ...]) -> dict[str, list[Step]]:
    """The variants with these marks, in one job: the quick list runs those without."""
    every = {**VARIANTS, **ONE_RANK_ALONE}
    variants = {name: variant for name, variant in every.items() if _lists_of(name) == lists}
    return run_ranks(run_variants, 1, 1, {}, variants)[0]


def _lists_of(variant: str) -> tuple[str, ...]:
    return tuple(mark.name for mark in marks_on_one_rank(variant))


def marks_on_one_rank(variant: str) -> list[pytest.MarkDecorator]:
    if variant in FULL_ON_ONE_RANK:
        return [pytest.mark.full]
    return [] if variant in QUICK_ALONE or variant in ON_ONE_RANK else [pytest.mark.slow]


def is_of_a_microbatch(name: str) -> bool:
    """Auxiliary losses belong to a microbatch, and overload factors to a layout and a microbatch."""
    return "aux_loss" in name or "load_balancing_loss" in name or "overload" in name


def assert_same_loads(steps: list[Step], expected: list[Step], *, same_microbatches: bool = True) -> None:
    assert len(steps) > 0
    for step, wanted in zip(steps, expected, strict=False):
        assert step.layers == wanted.layers
        np.testing.assert_array_equal(step.counts, wanted.counts)
        assert step.metrics.keys() == wanted.metrics.keys()
        for name, value in step.metrics.items():
            if name.startswith("routing_confidence"):  # of scores in float32, not of counts
                assert value == pytest.approx(wanted.metrics[name], abs=1e-7), name
            elif not is_of_a_microbatch(name):
                assert value == wanted.metrics[name], name
            elif same_microbatches and "overload" not in name:
                assert value == pytest.approx(wanted.metrics[name], abs=2e-6), name


def marks_of(name: str, variant: str, *, further: bool) -> list[pytest.MarkDecorator]:
    """The quick list has one rank, and the layout whose microbatches pass a rank twice."""
    if name == "single":
        return marks_on_one_rank(variant)
    if further:
        return [pytest.mark.slow]
    return [] if name == "pp2_vpp2" else [pytest.mark.full]


@pytest.mark.parametrize(
    ("name", "variant", "further"),
    [
        pytest.param(name, variant, further, id=f"{name}-{variant}", marks=marks_of(name, variant, further=further))
        for name, chosen in LAYOUTS.items()
        for further, variants in ((False, chosen.variants), (True, chosen.further))
        for variant in variants
    ],
)
def test_layouts_count_as_one_rank_does(name: str, variant: str, further: bool) -> None:
    chosen = VARIANTS[variant]
    expected = on_one_rank(chosen.reference)
    found = on_one_rank(variant) if name == "single" else job(name, further=further)[variant]
    assert_same_loads(found, expected, same_microbatches=chosen.same_microbatches)


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=marks_on_one_rank(name)) for name in (*VARIANTS, *ONE_RANK_ALONE)]
)
def test_one_rank_counts_what_the_logits_call_for(variant: str) -> None:
    steps = on_one_rank(variant)
    reference = on_one_rank({**VARIANTS, **ONE_RANK_ALONE}[variant].reference)
    assert len(steps) > 0
    for step, wanted in zip(steps, reference, strict=False):
        assert step.counts.dtype == np.int64
        assert step.counts.shape == ((2 if variant == "dense_layers" else 4), 8)
        # A recomputed forward calls the routers a second time, in another order: there the plain run is the measure.
        np.testing.assert_array_equal(step.counts, wanted.by_hand if step.by_hand is None else step.by_hand)


@pytest.mark.full
def test_each_token_counts_as_often_as_it_is_routed() -> None:
    for index, step in enumerate(on_one_rank("auto")):
        num_tokens = int(tiny_batch(100 + index).lengths.sum())
        assert step.counts.sum(1).tolist() == [TOPK * num_tokens] * 4
    (together,) = on_one_rank("three_batches")
    assert together.num_microbatches == 3 * len(MICROBATCHES)
    num_tokens = sum(int(tiny_batch(100 + index).lengths.sum()) for index in range(3))
    assert together.counts.sum(1).tolist() == [TOPK * num_tokens] * 4
    (kept_alone,) = on_one_rank("capacity")
    assert 0 < kept_alone.counts.sum() < 4 * TOPK * 8 * 16, "some tokens must have been dropped"
    assert [step.layers for step in job("pp2")["dense_layers"]] == [(2, 3)]


def test_layer_specs_count_alike() -> None:
    assert_same_loads(on_one_rank("local"), on_one_rank("auto"))
