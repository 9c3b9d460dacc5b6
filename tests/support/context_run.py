# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps and passes of the tiny model whose sequences several ranks share, and all that goes through whole rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.batch import Destination, TokenBatch, per_sequence, per_token
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import Head, LossInputs, LossOutputs
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS
from nemo_rl_moe.runs.folder.artifacts import EXPERT_LOAD
from nemo_rl_moe.token_writers import TOKEN_WRITERS
from tests.support.gloo_ranks import run_ranks_with_engine
from tests.support.tiny_model import (
    MICROBATCHES,
    logprobs_by_sequence,
    parallel_job,
    shard_of_rank,
    sharing_sequences,
    tiny_batch,
    tiny_grpo_policy,
    tiny_hf_config,
)
from tests.support.training_run import RankRun, full_weights

NUM_STEPS = 2


class WholeSequenceLoss:
    """A loss whose gradient at a token depends on all others of its sequence, as DPO's does, and on entropies."""

    needs = frozenset({Head.ENTROPY})

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return the mean over sequences of the square of their log-probability a target, less a bonus."""
        assert inputs.entropy is not None
        mask = inputs.token_mask
        means = (inputs.logprobs * mask).sum(1) / mask.sum(1).clamp(min=1)
        loss = means.square().sum() / inputs.global_sequences
        loss = loss - 0.1 * (inputs.entropy * mask).sum() / inputs.global_valid_tokens
        return LossOutputs(loss, {"mean_square": (means.detach().square().sum(), Reduction.SUM)})


@dataclass(frozen=True)
class Observed:
    """Numbers of one rank.

    Attributes:
        run: Losses, gradient norms, MoE metrics and trained weights.
        counts: The load matrix of each step, on rank 0.
        logprobs: By sequence, before training; with random routes, and with the routers' own.
        routes: The routers' own, by sequence.
        compared: Counts of the comparison of the routers' choice with the random routes.
        sampled: Routes of the capture and of the routers by which the last step's rows are known.
        evaluated: Metrics of evaluation, of the ranks that report.
        loss_metrics: Of the trained loss, of the ranks that report.
    """

    run: RankRun
    counts: list[list[list[int]]]
    logprobs: dict[int, np.ndarray]
    own_logprobs: dict[int, np.ndarray]
    routes: dict[int, np.ndarray]
    compared: dict[str, list[Any]]
    sampled: list[Any]
    evaluated: dict[str, float]
    loss_metrics: list[dict[str, float]]


def batch_of_step(step: int, lengths: Mapping[str, int], capture: bool) -> TokenBatch:
    """Return the eight sequences with advantages and, where asked for, experts that no router would choose."""
    batch = tiny_batch(30 + step, **lengths)
    generator = torch.Generator().manual_seed(step)
    writers = (torch.arange(batch.input_ids.numel()) % 4).view(batch.input_ids.shape)
    columns = {
        "advantages": per_sequence(torch.randn(len(batch), generator=generator)),
        TOKEN_WRITERS: per_token(writers.to(torch.int8)),
    }
    if capture:
        shape = (*batch.input_ids.shape, 4, 8)
        sampled = torch.rand(shape, generator=generator).topk(2, -1).indices.to(torch.int16)
        fed = torch.arange(batch.input_ids.shape[1]) < (batch.lengths - 1)[:, None]
        routes = sampled.where(fed[:, :, None, None], -1)
        columns[ROUTED_EXPERTS] = per_token(routes, Destination.MODEL, fill=-1)
    return replace(batch.with_columns(**columns), sample_ids=tuple(f"prompt {index % 2}" for index in range(8)))


def observe(policy: Any, lengths: Mapping[str, int], capture: bool) -> Observed:
    """Run on every rank of the job: passes of all kinds, then optimizer steps.

    Args:
        policy: The configuration.
        lengths: Arguments of `tiny_batch`.
        capture: Replay random routes.
    """
    with parallel_job(policy):
        trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=10)
        place = trainer.coordinates

        def shard(batch: TokenBatch) -> Any:
            return shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size)

        first = batch_of_step(0, lengths, capture)
        logprobs = logprobs_by_sequence(trainer, shard(first), first, MICROBATCHES)
        evaluated = {name: series.reduce() for name, series in trainer.evaluate(shard(first), sft_loss).items()}
        own, routes, compared = {}, {}, {}
        if capture:
            plain = batch_of_step(0, lengths, capture=False)
            found, of_sequences = trainer.logprobs_and_routes(shard(plain).microbatches)
            mine = [
                index
                for indices in shard_indices(place.data_parallel_rank, place.data_parallel_size)
                for index in indices
            ]
            rows = (row for values in found for row in values)
            own = {index: row[: int(first.lengths[index])].numpy() for index, row in zip(mine, rows, strict=False)}
            routes = dict(zip(mine, (rows.pieces[0].source for rows in of_sequences), strict=False))
            _, totals = trainer.compare_routes(shard(first).microbatches)
            compared = {
                name: getattr(totals, name).tolist() for name in ("rows", "captured_experts", "live_experts", "tokens")
            }
        run, counts, of_loss = _train(
            trainer, [shard(batch_of_step(step, lengths, capture)) for step in range(NUM_STEPS)]
        )
        sampled = []
        if trainer._hooks is not None:
            sample = trainer._hooks.probe.reduced()
            sampled = np.stack([sample.capture, sample.live], 1).tolist()
        return Observed(run, counts, logprobs, own, routes, compared, sampled, evaluated, of_loss)


def shard_indices(rank: int, size: int) -> Sequence[Sequence[int]]:
    """Return the sequences of a data-parallel rank's microbatches."""
    count = len(MICROBATCHES) // size
    return MICROBATCHES[rank * count : (rank + 1) * count]


def _train(trainer: MegatronTrainer, shards: Sequence[Any]) -> tuple[RankRun, list[Any], list[dict[str, float]]]:
    losses, norms, metrics, counts, of_loss = [], [], [], [], []
    for shard in shards:
        result = trainer.train([shard], WholeSequenceLoss())
        losses.append(result.global_loss)
        norms.append(result.grad_norm)
        metrics.append({name: value for name, value in result.moe_metrics.items() if "seconds" not in name})
        load = EXPERT_LOAD.of(result.artifacts)
        counts.append([] if load is None else load.counts.tolist())
        of_loss.append({name: series.reduce() for name, series in result.microbatch_metrics.items()})
    pieces, cuts = {}, {}
    for piece in parameter_pieces(trainer.chunks, trainer.config):
        pieces[piece.name, piece.shard_rank] = piece.local.float().numpy().copy()
        cuts[piece.name] = (piece.shard_dimension, piece.num_shards, piece.sections)
    return RankRun(losses, norms, metrics, pieces, cuts), counts, of_loss


def exported(policy: Any, folder: str) -> Mapping[str, np.ndarray] | None:
    with parallel_job(policy) as rank:
        trainer = MegatronTrainer(policy, tiny_hf_config(), None, num_steps=10)
        trainer.save_weights(Path(folder), {})
        if rank > 0:
            return None
        return {name: t.numpy() for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}


CAPTURE = {"routing_replay": "rollout", "activation_checkpointing": "none"}
# Whole routes and rows matter to them: which experts serve which advantages, and gradients of the routers by source.
MEASURED = {
    "experts_by_advantage": True,
    "experts_by_writer": True,
    "moe_per_layer_logging": True,
    "router_gradients__every_n_steps": 1,
    "router_gradients__num_microbatches": None,
}


def shared_run(
    world_size: int, context: int = 1, lengths: Any = None, capture: bool = True, **changes: Any
) -> list[Observed]:
    chosen = {**(CAPTURE if capture else {}), **MEASURED, **changes}
    policy = sharing_sequences(tiny_grpo_policy(world_size, **chosen), context)
    ranks: list[Observed] = run_ranks_with_engine(observe, world_size, policy, lengths or {}, capture)
    return ranks


@cache
def one_rank() -> Observed:
    return shared_run(1)[0]


def assert_as_one_rank(found: list[Observed], expected: Observed) -> None:
    """Compare all that the ranks of a job have observed with what one rank has."""
    first = found[0]
    assert first.run.losses == pytest.approx(expected.run.losses, rel=1e-6)
    assert first.run.grad_norms == pytest.approx(expected.run.grad_norms, rel=1e-5)
    assert first.counts == expected.counts
    weights, wanted = full_weights([rank.run for rank in found]), full_weights([expected.run])
    assert weights.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(weights[name][: len(values)], values, atol=1e-5, err_msg=name)
    for of_step, wanted_of_step in zip(first.run.moe_metrics, expected.run.moe_metrics, strict=True):
        assert of_step.keys() == wanted_of_step.keys()
        for name, value in wanted_of_step.items():
            if "overload" not in name:  # which compares ranks
                assert of_step[name] == pytest.approx(value, rel=1e-4, abs=2e-6), name
    for name in ("logprobs", "own_logprobs", "routes"):
        of_ranks = {index: values for rank in found for index, values in getattr(rank, name).items()}
        assert of_ranks.keys() == getattr(expected, name).keys()
        for index, values in getattr(expected, name).items():
            np.testing.assert_allclose(of_ranks[index], values, atol=0 if name == "routes" else 2e-5)
    assert first.compared == expected.compared
    if len(first.sampled) == len(expected.sampled):  # as many data-parallel ranks sample
        assert first.sampled == expected.sampled
    # Once for each share of the batch.
    evaluated = [rank.evaluated for rank in found if rank.evaluated]
    for name, value in expected.evaluated.items():
        assert sum(of_rank[name] for of_rank in evaluated) == pytest.approx(value, rel=1e-5), name
    squares = [[step["mean_square"] for step in rank.loss_metrics] for rank in found if rank.loss_metrics[0]]
    of_one = [step["mean_square"] for step in expected.loss_metrics]
    assert np.sum(squares, axis=0).tolist() == pytest.approx(of_one, rel=1e-5)
