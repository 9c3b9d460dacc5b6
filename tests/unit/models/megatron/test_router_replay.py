# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Replay of random routes, in every layout: a pass that did not replay would give other numbers.

Loss and counts cannot see a replay that is lost in the backward pass; the norm of the gradient does.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch, stored_per_token
from nemo_rl_moe.distributed.stored_rows import StoredRows
from nemo_rl_moe.models.megatron.training.router_hooks import RouterHooks
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.routing.agreement.statistics import AgreementTotals
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.runs.folder.artifacts import ROUTING
from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import full, slow
from tests.support.tiny_model import MICROBATCHES, layout, logprobs_by_sequence, tiny_batch, tiny_grpo_policy
from tests.support.training_run import prompts, request_of, tiny_trainer
from tests.unit.models.megatron.tiny_trainers import (
    NUM_EXPERTS,
    NUM_LAYERS,
    PACKED,
    load_counts,
    random_routes,
    replay_policy,
    shard_for,
    with_random_routes,
)

# Megatron-Core's loss counts the best experts by score, without groups and bias; under replay it counts those in use.
WITHOUT_LOSS = {"moe_aux_loss_coeff": 0.0}
IN_BFLOAT16 = {"precision": "bfloat16", "activation_checkpointing": "full"}
ONE_SHARE = (tuple(range(6)),)
UNEVEN_SHARES = ((0, 2, 3, 4, 5), (1,))


@dataclass(frozen=True)
class Trained:
    """Numbers of one rank.

    `own_logprobs` and `compared` are of the routers' own experts, the latter against the random ones.
    """

    logprobs: dict[int, np.ndarray]
    own_logprobs: dict[int, np.ndarray]
    own_routes: dict[int, np.ndarray]
    compared: AgreementTotals
    loss: float
    grad_norm: float
    counts: list[list[int]]
    metrics: dict[str, float]
    router: str


def batch_with_routes() -> TokenBatch:
    return with_random_routes(tiny_batch(3))


def train(policy: PolicyConfig, microbatches: Any) -> Trained:
    with tiny_trainer(policy) as trainer:
        whole = batch_with_routes()
        shard = shard_for(trainer, whole, microbatches)
        logprobs = logprobs_by_sequence(trainer, shard, whole, microbatches)
        own_logprobs, own_routes = own_choice(trainer, shard, microbatches)
        _, compared = trainer.compare_routes(shard.microbatches)
        result = trainer.train([shard], sft_loss)
        counts = load_counts(result)
        router = type(trainer.chunks[0].decoder.layers[0].mlp.router).__name__
        return Trained(
            logprobs,
            own_logprobs,
            own_routes,
            compared,
            result.global_loss,
            result.grad_norm,
            [] if counts is None else counts.tolist(),
            result.moe_metrics,
            router,
        )


def own_choice(
    trainer: MegatronTrainer, shard: GlobalBatchShard, microbatches: Any
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Log-probabilities and experts of this rank's sequences, by the routers' own choice; empty where none reports."""
    place = trainer.coordinates
    count = len(shard.microbatches)
    mine = microbatches[place.data_parallel_rank * count :][:count]
    indices = [index for of_microbatch in mine for index in of_microbatch]
    logprobs, routes = trainer.logprobs_and_routes([without_routes(batch) for batch in shard.microbatches])
    experts = [stored.pieces[0].source for stored in routes]
    lengths = torch.cat([batch.lengths for batch in shard.microbatches]).tolist()
    rows = (row.numpy() for of_microbatch in logprobs for row in of_microbatch)
    by_sequence = (row[:length] for row, length in zip(rows, lengths, strict=False))  # none where none reports
    return dict(zip(indices, by_sequence, strict=False)), dict(zip(indices, experts, strict=False))


def without_routes(batch: TokenBatch) -> TokenBatch:
    return replace(batch, columns={name: column for name, column in batch.columns.items() if name != ROUTED_EXPERTS})


def run(world_size: int = 1, microbatches: Any = MICROBATCHES, **changes: Any) -> Trained:
    ranks = run_ranks(train, world_size, replay_policy(world_size, **changes), microbatches)
    logprobs, own_logprobs, own_routes = (
        {index: values for rank in ranks for index, values in getattr(rank, name).items()}
        for name in ("logprobs", "own_logprobs", "own_routes")
    )
    return replace(ranks[0], logprobs=logprobs, own_logprobs=own_logprobs, own_routes=own_routes)


@pytest.fixture(scope="module")
def expected() -> Trained:
    """Return the result of one rank, padded."""
    return run()


def test_every_row_is_taken_and_none_would_be_chosen(expected: Trained) -> None:
    metrics = expected.metrics
    assert expected.router == "IndexTopKRouter"
    num_fed = int((tiny_batch(3).lengths - 1).sum())
    assert metrics["routing/rows_expected"] == num_fed * NUM_LAYERS
    assert metrics["routing/rows_usable_share"] == 1
    assert metrics["routing/agreement"] == 1
    # Two random sets of 2 of 8 experts are equal in 1 of 28 cases.
    assert metrics["routing/live_agreement"] == pytest.approx(1 / 28, abs=0.03)
    assert abs(metrics["routing/slot_kappa"]) < 0.1
    without = run(routing_replay="none")
    for index, values in expected.logprobs.items():  # passes without a backward pass replay what they are given
        np.testing.assert_allclose(without.logprobs[index], values, atol=1e-6)
        assert np.abs(expected.own_logprobs[index] - values)[1:].max() > 1e-2
    assert without.metrics["routing/agreement"] == without.metrics["routing/live_agreement"] < 0.1
    assert abs(without.loss - expected.loss) > 1e-3
    assert abs(without.grad_norm / expected.grad_norm - 1) > 1e-3


def test_comparison_counts_as_brute_force_does(expected: Trained) -> None:
    batch = tiny_batch(3)
    random = np.sort(random_routes(batch).numpy(), -1)
    differing, differing_tokens = 0, 0
    for index, own in expected.own_routes.items():
        rows = (np.sort(own, -1) != random[index, : len(own)]).any(-1)
        differing += rows.sum()
        differing_tokens += rows.any(-1).sum()
    num_fed = int((batch.lengths - 1).sum())
    compared = expected.compared
    assert compared.rows_differing == pytest.approx(differing / (num_fed * NUM_LAYERS), abs=1e-15)
    assert compared.tokens.tolist() == [num_fed, differing_tokens]
    assert compared.tokens_differing == expected.metrics["routing/tokens_differing_share"]
    assert not compared.margins.any(), "margins that nobody reads cost one more search of the routers"


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        full(1, {"layer_spec": "local"}),
        full(1, PACKED),
        full(1, {"activation_checkpointing": "full"}),
        full(1, {"activation_checkpointing": "moe"}),
        full(1, {"layer_spec": "local", "activation_checkpointing": "full"}),
        full(2, {}),
        full(2, layout(tp=2)),
        full(2, layout(tp=2) | PACKED),
        full(2, layout(ep=2)),
        full(2, layout(pp=2)),
        full(2, layout(pp=2) | {"activation_checkpointing": "full"}),
        full(2, layout(pp=2) | {"activation_checkpointing": "moe"}),
        full(2, layout(pp=2) | PACKED | {"activation_checkpointing": "full"}),
        full(2, layout(pp=2, vpp=2)),
        (2, layout(pp=2, vpp=2) | {"activation_checkpointing": "full"}),
        slow(4, layout(pp=2, ep=2) | {"activation_checkpointing": "full"}),
        slow(4, layout(pp=2, tp=2) | {"activation_checkpointing": "full"}),
    ],
)
def test_layout_replays_as_one_rank_does(world_size: int, changes: dict[str, Any], expected: Trained) -> None:
    found = run(world_size, **changes)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert found.counts == expected.counts
    for index, values in expected.logprobs.items():
        np.testing.assert_allclose(found.logprobs[index], values, atol=2e-5)
        np.testing.assert_allclose(found.own_logprobs[index], expected.own_logprobs[index], atol=2e-5)
        np.testing.assert_array_equal(found.own_routes[index], expected.own_routes[index])
    for name in ("rows", "captured_experts", "live_experts", "tokens"):
        assert getattr(found.compared, name).tolist() == getattr(expected.compared, name).tolist(), name
    for name, value in expected.metrics.items():
        if name.startswith("routing/"):
            assert found.metrics[name] == pytest.approx(value, abs=1e-12), name


class _LostInTheBackwardPass(RouterHooks):
    """Replays in the forward pass alone, as Megatron-Core's REPLAY_FORWARD does."""

    def watch_backward(self, heads: Any, chunk: int, microbatch: Any) -> None:
        """Forgets it."""


class _OfTheLastMicrobatch(_LostInTheBackwardPass):
    """Leaves the routes of a forward pass in place until the next one."""

    def _give(self, chunk: int, routes: Any) -> None:
        if routes is not None:
            super()._give(chunk, routes)


def train_with_fault(policy: PolicyConfig, fault: type[RouterHooks]) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_rl_moe.models.megatron.training.router_hooks.RouterHooks", fault)
        return train(policy, MICROBATCHES)


@pytest.mark.parametrize(
    ("world_size", "changes", "fault"), [(1, {}, _LostInTheBackwardPass), full(2, layout(pp=2), _OfTheLastMicrobatch)]
)
def test_a_replay_that_recomputation_loses_is_seen_in_the_gradient_alone(
    world_size: int, changes: dict[str, Any], fault: type[RouterHooks], expected: Trained
) -> None:
    policy = tiny_grpo_policy(world_size, activation_checkpointing="full", routing_replay="rollout", **changes)
    found = run_ranks(train_with_fault, world_size, policy, fault)[0]
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.counts == expected.counts
    assert abs(found.grad_norm / expected.grad_norm - 1) > 0.01


@pytest.mark.full
def test_the_load_that_auxiliary_losses_count() -> None:
    """The replayed routes are all of the load `replayed`, and do not count in `live`."""
    live = {spec: run(layer_spec=spec).metrics["load_balancing_loss"] for spec in ("auto", "local")}
    replayed = {
        spec: run(layer_spec=spec, routing_replay_load="replayed").metrics["load_balancing_loss"]
        for spec in ("auto", "local")
    }
    assert live["auto"] == pytest.approx(live["local"], rel=1e-5)
    assert replayed["auto"] == pytest.approx(replayed["local"], rel=1e-5)
    assert abs(live["auto"] - replayed["auto"]) > 1e-3


def _of_the_layer_before(routes: dict[int, np.ndarray]) -> None:
    for rows in routes.values():
        rows[:, 3] = rows[:, 2]


def _one_token_late(routes: dict[int, np.ndarray]) -> None:
    for rows in routes.values():
        rows[1:] = rows[:-1].copy()


def _swapped(routes: dict[int, np.ndarray]) -> None:
    count = min(len(routes[0]), len(routes[1]))
    routes[0][:count], routes[1][:count] = routes[1][:count].copy(), routes[0][:count].copy()


def _permuted_ids(routes: dict[int, np.ndarray]) -> None:
    for rows in routes.values():
        rows[:, 2] = (3 * rows[:, 2] + 1) % NUM_EXPERTS


def _never_written(routes: dict[int, np.ndarray]) -> None:
    for rows in routes.values():
        rows[:, 1] = 0


FAULTS = {
    _of_the_layer_before: ["layer 3 carries layer 2's routes"],
    _one_token_late: ["routes are one token late"],
    _swapped: [
        "sequence 0 (data-parallel rank 0) carries the routes of sequence 1 (data-parallel rank 0)",
        "sequence 1 (data-parallel rank 0) carries the routes of sequence 0 (data-parallel rank 0)",
    ],
    _permuted_ids: ["layer 2: captured expert ids are a permutation of the router's ("],
    _never_written: ["rows hold expert 0 alone, in layers 1"],
}


def generate_and_train(
    policy: PolicyConfig, shares: Any, model: dict[str, Any] | str, fault: Any = None
) -> tuple[dict[str, float], list[str]]:
    """Metrics and anomalies of a training pass over responses that the same weights have just made, with their routes.

    Each data-parallel rank has a share of the prompts. A fault spoils the routes, by sequence, before the training.
    """
    with tiny_trainer(policy, model) as trainer:
        place = trainer.coordinates
        share = shares[place.data_parallel_rank]
        made = trainer.generate(request_of(share), 4)
        sequences: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        by_rank: list[Any] = [None] * dist.get_world_size()
        own = {}
        for index, sequence in zip(share, made, strict=False):  # none on ranks that do not report
            assert sequence.routed_experts is not None
            (piece,) = sequence.routed_experts.pieces
            own[index] = (prompts()[index] + tuple(sequence.token_ids.tolist()), piece.source)
        dist.all_gather_object(by_rank, own)
        for found in by_rank:
            sequences |= found
        if fault is not None:
            fault({index: routes for index, (_, routes) in sequences.items()})
        lengths = torch.tensor([len(sequences[index][0]) for index in range(len(sequences))])
        input_ids = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
        for index, (token_ids, _) in sequences.items():
            input_ids[index, : len(token_ids)] = torch.tensor(token_ids)
        capture = stored_per_token([StoredRows.of(sequences[index][1]) for index in range(len(sequences))], fill=-1)
        assert capture is not None
        real = torch.arange(input_ids.shape[1]) < lengths[:, None]
        batch = TokenBatch(
            input_ids, lengths, real, tuple(map(str, range(len(lengths)))), stored={ROUTED_EXPERTS: capture}
        )
        batch = batch.fetched(list)
        shard = shard_for(trainer, batch, ((0, 1, 2), (3, 4, 5)))
        result = trainer.train([shard], sft_loss)
        report = ROUTING.of(result.artifacts)
        return result.moe_metrics, [] if report is None else [anomaly.text for anomaly in report.anomalies]


@pytest.mark.parametrize("layer_spec", ["auto", full("local")])
@pytest.mark.parametrize(
    ("world_size", "changes", "shares", "model"),
    [
        (1, {}, ONE_SHARE, {}),
        full(2, {}, UNEVEN_SHARES, {}),
        (2, layout(ep=2), UNEVEN_SHARES, {}),
        full(2, layout(tp=2), ONE_SHARE, {}),
        full(2, layout(pp=2), ONE_SHARE, {}),
        full(2, layout(pp=2), ONE_SHARE, {"mlp_only_layers": [2, 3]}),
        full(2, layout(pp=2, vpp=2), ONE_SHARE, {}),
        slow(4, layout(pp=2, tp=2), ONE_SHARE, {}),
        # Groups with an expert bias, the bias behind norms of all heads, latent attention, some layers with an indexer.
        full(2, layout(ep=2), UNEVEN_SHARES, "glm4_moe_norms_groups"),
        slow(2, layout(tp=2), ONE_SHARE, "minimax_m2"),
        slow(2, layout(pp=2, vpp=2), ONE_SHARE, "glm4_moe_lite"),
        slow(2, layout(pp=2), ONE_SHARE, "glm_moe_dsa"),
        slow(1, {}, ONE_SHARE, "kimi_k2"),
        # States of earlier tokens behind prompts of different lengths.
        full(2, layout(ep=2), UNEVEN_SHARES, "qwen3_5_moe_text"),
        slow(2, layout(tp=2), ONE_SHARE, "qwen3_next"),
        # Routers in some layers of each stage, whose last layer has nothing but experts.
        full(2, layout(pp=2), ONE_SHARE, "nemotron_h"),
        slow(2, layout(ep=2), UNEVEN_SHARES, "nemotron_h"),
    ],
)
def test_routes_of_generation_are_those_of_training(
    world_size: int, changes: dict[str, Any], shares: Any, model: dict[str, Any] | str, layer_spec: str
) -> None:
    policy = tiny_grpo_policy(world_size, layer_spec=layer_spec, **changes)
    metrics, anomalies = run_ranks(generate_and_train, world_size, policy, shares, model)[0]
    assert anomalies == []
    assert metrics["routing/anomalies"] == 0
    assert metrics["routing/rows_usable_share"] == 1
    assert metrics["routing/rows_unexpected"] == 0
    assert metrics["routing/agreement"] == metrics["routing/live_agreement"] == 1


@pytest.mark.parametrize(
    "fault", [pytest.param(each, marks=() if each is _one_token_late else pytest.mark.full) for each in FAULTS]
)
@pytest.mark.parametrize(
    ("world_size", "changes", "shares"),
    [
        (1, {}, ONE_SHARE),
        full(2, layout(tp=2) | PACKED, ONE_SHARE),
        (2, layout(pp=2, vpp=2), ONE_SHARE),
        full(2, layout(pp=2) | IN_BFLOAT16, ONE_SHARE),
    ],
)
def test_a_fault_of_the_capture_is_named(world_size: int, changes: dict[str, Any], shares: Any, fault: Any) -> None:
    """From the passes of a layout, where no rank has all layers or all tokens."""
    policy = tiny_grpo_policy(world_size, **changes)
    metrics, anomalies = run_ranks(generate_and_train, world_size, policy, shares, {}, fault)[0]
    assert metrics["routing/anomalies"] == len(FAULTS[fault])
    for text, expected in zip(anomalies, FAULTS[fault], strict=True):
        assert expected in text


def replay_own_routes(policy: PolicyConfig, model: dict[str, Any] | str) -> tuple[float, float, dict[str, float]]:
    """A step that replays what the log-probability pass before it has chosen, on the same weights."""
    with tiny_trainer(policy, model) as trainer:
        whole = tiny_batch(3)
        place = trainer.coordinates
        count = len(MICROBATCHES) // place.data_parallel_size
        mine = MICROBATCHES[place.data_parallel_rank * count :][:count]
        _, routes = trainer.logprobs_and_routes([whole.select(indices) for indices in mine])
        by_rank: list[Any] = [None] * dist.get_world_size()
        places = [index for indices in mine for index in indices]
        dist.all_gather_object(by_rank, dict(zip(places, routes, strict=False)))  # none on ranks that do not report
        found = {index: rows for of_rank in by_rank for index, rows in of_rank.items()}
        if policy.megatron_cfg.routing_replay != "none":  # type: ignore[attr-defined]
            capture = stored_per_token([found[index] for index in range(len(whole))], fill=-1)
            assert capture is not None
            whole = whole.with_stored(ROUTED_EXPERTS, capture).fetched(list)
        shard = shard_for(trainer, whole)
        result = trainer.train([shard], sft_loss)
        return result.global_loss, result.grad_norm, result.moe_metrics


@pytest.mark.parametrize(
    ("world_size", "changes", "model"),
    [
        full(1, {}, {}),
        full(1, {"layer_spec": "local"}, {}),
        full(2, layout(tp=2) | PACKED, {}),
        full(2, layout(pp=2), {}),
        full(2, layout(pp=2), {"mlp_only_layers": [2, 3]}),
        full(2, layout(pp=2), {"mlp_only_layers": [0, 1]}),
        (2, layout(pp=2, vpp=2), {}),
        slow(4, layout(pp=2, tp=2), {}),
        slow(2, layout(pp=2) | WITHOUT_LOSS, "glm4_moe_norms_groups"),
        slow(2, layout(tp=2) | PACKED, "glm4_moe_lite"),
        slow(2, layout(pp=2, vpp=2), "minimax_m2"),
        slow(2, layout(ep=2) | WITHOUT_LOSS, "deepseek_v32"),
        slow(2, layout(tp=2) | PACKED, "qwen3_5_moe_text"),
    ],
)
def test_replay_of_the_own_routes_changes_no_bit(
    world_size: int, changes: dict[str, Any], model: dict[str, Any] | str
) -> None:
    """The old policy's choice (R2), at the first update, is that of the routers."""
    policies = [
        tiny_grpo_policy(world_size, routing_replay=replay, **changes)  # a rule of the whole run asks for two updates
        for replay in ("none", "rollout")
    ]
    plain, replayed = (run_ranks(replay_own_routes, world_size, policy, model)[0] for policy in policies)
    assert replayed[:2] == plain[:2]
    assert replayed[2]["routing/rows_usable_share"] == 1
    assert replayed[2]["routing/agreement"] == replayed[2]["routing/live_agreement"] == 1
    assert replayed[2].get("load_balancing_loss") == plain[2].get("load_balancing_loss")
