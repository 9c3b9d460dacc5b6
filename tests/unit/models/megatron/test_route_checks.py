# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What real passes report beside the agreement statistics: rows of one rank, rows that repeat, float32."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import Destination, TokenBatch, per_token, with_empty_rows
from nemo_rl_moe.models.megatron.training.context_parallel import ContextPlace
from nemo_rl_moe.models.megatron.training.expert_writers import _writers_of_tokens
from nemo_rl_moe.models.megatron.training.microbatch import (
    MicrobatchShape,
    ModelMicrobatch,
    pack_microbatch,
    pad_microbatch,
)
from nemo_rl_moe.models.megatron.training.route_checks import NUM_TOKENS, RouteProbe
from nemo_rl_moe.models.megatron.training.router_hooks import (
    SequenceCut,
    fed_tokens,
    following_tokens,
    in_router_order,
    row_lags,
)
from nemo_rl_moe.routing.replay import ROUTED_EXPERTS, UNKNOWN
from nemo_rl_moe.runs.folder.artifacts import ROUTING
from nemo_rl_moe.token_lag import NO_LAG, TOKEN_LAG
from nemo_rl_moe.token_writers import ANSWER, TOKEN_WRITERS, WRITERS
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import parallel_job, tiny_batch, tiny_grpo_policy
from tests.support.training_run import tiny_trainer
from tests.unit.models.megatron.tiny_trainers import PACKED, shard_for

CPU = torch.device("cpu")


def parts_of(make: Any, batch: TokenBatch, size: int, context: int) -> Iterator[tuple[ModelMicrobatch, SequenceCut]]:
    """The microbatch and the cut of each rank, with sequence and context parallelism."""
    for context_rank, rank in product(range(context), range(size)):
        place = ContextPlace(context_rank, context)
        yield make(batch, MicrobatchShape(size * place.sequence_multiple, place=place), CPU), SequenceCut(rank, size)


def numbered_batch() -> TokenBatch:
    """Three sequences whose tokens say which they are."""
    batch = tiny_batch(3).select([0, 3, 5])
    return replace(batch, input_ids=1 + torch.arange(batch.input_ids.numel()).view(batch.input_ids.shape))


@pytest.mark.parametrize("make", [pad_microbatch, pack_microbatch])
@pytest.mark.parametrize(("size", "context"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_row_has_the_lag_of_the_token_after_it(make: Any, size: int, context: int) -> None:
    """On each rank's own tokens every lag is that of its column."""
    batch = numbered_batch()
    batch = batch.with_columns(**{TOKEN_LAG: per_token(batch.input_ids.int(), fill=NO_LAG)})
    seen: list[int] = []
    for microbatch, cut in parts_of(make, batch, size, context):
        lags = row_lags(microbatch, cut)
        assert lags is not None
        tokens, fed = in_router_order(microbatch.input_ids, cut), fed_tokens(microbatch, cut)
        assert (lags[fed] == tokens[fed] + 1).all()
        assert (lags[~fed] == NO_LAG).all()
        seen += tokens[fed].tolist()
    assert len(seen) == int((batch.lengths - 1).sum())


@pytest.mark.parametrize("make", [pad_microbatch, pack_microbatch])
@pytest.mark.parametrize(("size", "context"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_the_token_before_is_that_of_the_same_sequence(make: Any, size: int, context: int) -> None:
    batch = numbered_batch()
    last_tokens = batch.input_ids.gather(1, batch.lengths[:, None] - 1)[:, 0].tolist()
    real = batch.input_ids[torch.arange(batch.input_ids.shape[1]) < batch.lengths[:, None]].tolist()
    of_sequences = {
        int(batch.input_ids[row, column]): int(batch.input_ids[row, column - 1])
        for row in range(3)
        for column in range(1, int(batch.lengths[row]))
    }
    found_fed: list[int] = []
    for microbatch, cut in parts_of(make, batch, size, context):
        rows = microbatch.input_ids.shape[0]
        tokens, follows = in_router_order(microbatch.input_ids, cut), following_tokens(microbatch, cut).tolist()
        found_fed += tokens[fed_tokens(microbatch, cut)].tolist()
        for place_of_token, token in enumerate(tokens.tolist()):
            # Where chunks meet the rank may see the one before as well, but not as many places before as it has rows.
            before = tokens[place_of_token - rows] if place_of_token >= rows else None
            if token in of_sequences:
                assert follows[place_of_token] == (before == of_sequences[token])
            elif token in batch.input_ids[:, 0].tolist():
                assert not follows[place_of_token]
    assert sorted(found_fed) == sorted(set(real) - set(last_tokens))


@pytest.mark.parametrize("make", [pad_microbatch, pack_microbatch])
@pytest.mark.parametrize(("size", "context"), [(1, 1), (2, 2)])
def test_no_token_of_an_empty_row_counts(make: Any, size: int, context: int) -> None:
    """Ranks that lack a sequence of trajectories run such rows: their padding is no token."""
    sequences = tiny_batch(3).select([0, 3, 5])
    written = sequences.with_columns(
        **{
            TOKEN_WRITERS: per_token(torch.full_like(sequences.input_ids, ANSWER, dtype=torch.int8)),
            TOKEN_LAG: per_token(torch.ones_like(sequences.input_ids, dtype=torch.int32), fill=NO_LAG),
        }
    )
    batch, num_tokens = with_empty_rows(written, 2), int(sequences.lengths.sum())
    num_fed = num_lags = num_written = 0
    for microbatch, cut in parts_of(make, batch, size, context):
        lags = row_lags(microbatch, cut)
        assert lags is not None
        num_fed += int(fed_tokens(microbatch, cut).sum())
        num_lags += int((lags != NO_LAG).sum())
        num_written += int((_writers_of_tokens(microbatch, len(WRITERS), cut) < len(WRITERS)).sum())
    assert (num_fed, num_lags, num_written) == (num_tokens - 3, num_tokens - 3, num_tokens)


def known_of_an_empty_row(policy: PolicyConfig) -> list[int]:
    """Number of rows that the sample has of a sequence and of an empty row beside it."""
    with parallel_job(policy):
        batch = with_empty_rows(tiny_batch(3).select([0]), 1)
        found = []
        for make in (pad_microbatch, pack_microbatch):
            microbatch = make(batch, MicrobatchShape(1), CPU)
            routes = torch.zeros(2, 1, microbatch.input_ids.numel(), dtype=torch.int32)
            probe = RouteProbe(num_layers=1, topk=2, device=CPU)
            probe.add(torch.tensor([0]), routes, routes, microbatch, SequenceCut(0, 1))
            known = (probe.reduced().live != UNKNOWN).all((2, 3))
            assert known[0].sum() == min(int(batch.lengths[0]) - 1, NUM_TOKENS)
            found.append(int(known[1].sum()))
    return found


def test_no_token_of_an_empty_row_is_sampled() -> None:
    assert run_ranks(known_of_an_empty_row, 1, tiny_grpo_policy(1)) == [[0, 0]]


def trained(policy: PolicyConfig, fault: str) -> tuple[dict[str, float], list[str]]:
    """Metrics and anomalies of a step that replays what its own weights have chosen before, with a fault."""
    with tiny_trainer(policy) as trainer:
        is_lost = fault == "rank" and trainer.coordinates.data_parallel_rank == 1
        shard = shard_for(trainer, tiny_batch(3))
        _, routes = trainer.logprobs_and_routes(shard.microbatches)
        taken = iter([rows.pieces[0].source for rows in routes])
        microbatches = [_with_capture(batch, taken, lost=is_lost) for batch in shard.microbatches]
        if fault == "weights":
            with torch.no_grad():
                for name, parameter in trainer.chunks[0].named_parameters():
                    if "router" in name:
                        parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        shard = replace(shard, microbatches=tuple(microbatches))
        result = trainer.train([shard] if fault != "updates" else [shard, shard], sft_loss)
        report = ROUTING.of(result.artifacts)
        return result.moe_metrics, [] if report is None else [anomaly.text for anomaly in report.anomalies]


def _with_capture(batch: TokenBatch, routes: Any, *, lost: bool) -> TokenBatch:
    capture = torch.full((*batch.input_ids.shape, 4, 2), -1, dtype=torch.int16)
    for row in range(len(batch)):
        rows = torch.from_numpy(next(routes))
        if not lost:
            capture[row, : len(rows)] = rows
    return batch.with_columns(**{ROUTED_EXPERTS: per_token(capture, Destination.MODEL, fill=-1)})


def test_a_healthy_step_has_none_of_their_metrics() -> None:
    metrics, anomalies = run_ranks(trained, 2, tiny_grpo_policy(2), "none")[0]
    assert metrics["routing/live_agreement"] == 1
    assert anomalies == []
    absent = {"float32_flips_share", "rows_missing_in_one_rank", "rank_with_missing_rows"}
    assert not {f"routing/{name}" for name in absent} & metrics.keys()
    assert "expert_bias_frozen_layers" not in metrics


@pytest.mark.parametrize("changes", [{}, PACKED])
def test_the_rank_that_lacks_its_rows_is_named(changes: dict[str, Any]) -> None:
    """Missing rows are no anomaly, as an engine may have been lost: that they are one rank's is a metric."""
    metrics, anomalies = run_ranks(trained, 2, tiny_grpo_policy(2, **changes), "rank")[0]
    assert metrics["routing/rows_missing_in_one_rank"] == 1
    assert metrics["routing/rank_with_missing_rows"] == 1
    assert anomalies == []


@pytest.mark.full
def test_routers_of_other_weights_are_seen_in_float32_alone() -> None:
    (found,) = run_ranks(trained, 1, tiny_grpo_policy(1), "weights")
    agreement = found[0]["routing/live_agreement"]
    assert found[0]["routing/float32_flips_share"] == pytest.approx(1 - agreement)
    assert 0.5 < agreement < 0.98
    (found,) = run_ranks(trained, 1, tiny_grpo_policy(1), "updates")
    assert found[0]["routing/live_agreement"] < 1, "weights have moved between the updates of the step"
    assert "routing/float32_flips_share" not in found[0]
