# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the models of a run are asked for, beside plain training: each function runs on every rank of a job, on the fake
card or over gloo, and returns numbers that must be the same."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_moe.algorithms.losses.distillation import TEACHER_LOGPROBS, DistillationLoss, shares_of_means
from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.algorithms.losses.value import ValueLoss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch, per_token
from nemo_rl_moe.models.candidates import CANDIDATE_IDS, candidate_column
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.megatron.training.measurements import candidate_logprobs, prefix_values, top_candidates
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.models.rank_results import RankTrainResult
from tests.gpu.models import with_routes
from tests.support.lora_models import lora, set_random
from tests.support.tiny_model import layout, parallel_job, shard_of_rank, tiny_batch, tiny_hf_config

Numbers = dict[str, npt.NDArray[Any]]
"""What one rank has found, by name."""
Role = Callable[[PolicyConfig], Numbers]

_VOCABULARY = 61  # with tensor parallelism, a row of the output layer is padding
_NUM_CANDIDATES = 4


def _trainer(policy: PolicyConfig, **options: Any) -> MegatronTrainer:
    return MegatronTrainer(policy, tiny_hf_config(vocab_size=_VOCABULARY), None, num_steps=10, **options)


def _shard(trainer: MegatronTrainer, batch: TokenBatch) -> GlobalBatchShard:
    place = trainer.coordinates
    return shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size)


def _batch() -> TokenBatch:
    return tiny_batch(3, _VOCABULARY)


def _rows(name: str, microbatches: Iterable[Tensor]) -> Numbers:
    return {f"{name} {number}": rows.numpy().copy() for number, rows in enumerate(microbatches)}


def _steps(results: Iterable[RankTrainResult]) -> Numbers:
    results = list(results)
    metrics = {f"{step} {name}": value for step, each in enumerate(results) for name, value in each.moe_metrics.items()}
    return {
        "losses": np.array([each.global_loss for each in results]),
        "gradient norms": np.array([each.grad_norm for each in results]),
        **{name: np.array(value) for name, value in metrics.items()},
    }


def logprobs(policy: PolicyConfig) -> Numbers:
    """Return log-probabilities before and after a step, and those of the reference, which stays."""
    with parallel_job(policy):
        trainer = _trainer(policy, keep_reference=True)
        shard = _shard(trainer, _batch())
        found = _rows("before", trainer.logprobs(shard.microbatches))
        found |= _steps([trainer.train([shard], sft_loss)])
        found |= _rows("after", trainer.logprobs(shard.microbatches))
        return found | _rows("reference", trainer.reference_logprobs(shard.microbatches))


def critic(policy: PolicyConfig) -> Numbers:
    """Return values before and after two steps towards returns that are a function of tokens and places."""
    with parallel_job(policy):
        trainer, batch = _trainer(policy, heads=(Head.VALUE,)), _batch()
        returns = torch.cos(batch.input_ids.float()) + torch.arange(batch.input_ids.shape[1]) / 10
        columns = {"returns": per_token(returns), "previous_values": per_token(0.9 * returns)}
        shard = _shard(trainer, batch.with_columns(**columns))
        found = _rows("before", trainer.measure(shard.microbatches, prefix_values))
        found |= _steps(trainer.train([shard], ValueLoss(0.5)) for _ in range(2))
        return found | _rows("after", trainer.measure(shard.microbatches, prefix_values))


def teacher(policy: PolicyConfig) -> Numbers:
    """Return what a teacher says of its likeliest tokens, and two steps of a student towards it."""
    with parallel_job(policy):
        batch, teaches = _batch(), _trainer(policy)
        likeliest = partial(top_candidates, k=_NUM_CANDIDATES, vocabulary_size=_VOCABULARY)
        top = teaches.measure(_shard(teaches, batch).microbatches, likeliest)
        ids, values = _of_the_rank_that_reports(
            teaches, _whole(batch, [pair for each in top for pair in zip(*each, strict=True)])
        )
        columns = {CANDIDATE_IDS: candidate_column(ids), TEACHER_LOGPROBS: per_token(values)}
        batch = batch.with_columns(**columns, **shares_of_means(batch.token_mask, [0]))
        student = _trainer(policy.model_copy(update={"init_seed": 77}))
        shard = _shard(student, batch)
        found = {"ids": ids.numpy(), "teacher": values.numpy()}
        found |= _rows("student", student.measure(shard.microbatches, candidate_logprobs))
        loss = DistillationLoss("mixed", 0.5, True, 1.0, 0.0, 0.1, None)
        return found | _steps(student.train([shard], loss) for _ in range(2))


def _whole(batch: TokenBatch, rows: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the candidates and their log-probabilities of rows of a microbatch's width, in the batch's width."""
    shape = (*batch.input_ids.shape, _NUM_CANDIDATES)
    ids, values = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
    for row, (chosen, said) in enumerate(rows):
        ids[row, : len(chosen)], values[row, : len(said)] = chosen, said
    return ids, values


def _of_the_rank_that_reports(trainer: MegatronTrainer, own: Any) -> Any:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own if trainer.coordinates.reports_loss else None)
    return next(each for each in every if each is not None)


def adapters(policy: PolicyConfig) -> Numbers:
    """Return two steps of adapters, and log-probabilities with and without them."""
    with parallel_job(policy):
        trainer = _trainer(policy, keep_reference=True)
        set_random(trainer.chunks)
        trainer.optimizer.reload_model_params()
        shard = _shard(trainer, _batch())
        found = _steps(trainer.train([shard], sft_loss) for _ in range(2))
        found |= _rows("with", trainer.logprobs(shard.microbatches))
        return found | _rows("without", trainer.reference_logprobs(shard.microbatches))


def replay(policy: PolicyConfig) -> Numbers:
    """Return a step and log-probabilities through experts that are given, token by token."""
    with parallel_job(policy):
        trainer = _trainer(policy)
        shard = with_routes(_shard(trainer, _batch()), trainer.hf_config)
        found = _rows("replayed", trainer.logprobs(shard.microbatches))
        found |= _steps([trainer.train([shard], sft_loss)])
        plain = _shard(trainer, _batch())
        return found | _rows("own", trainer.logprobs(plain.microbatches))


REPLAYING: Mapping[str, Any] = {"routing_replay": "rollout", "activation_checkpointing": "full"}
ROLES: Mapping[str, tuple[Role, int, Mapping[str, Any]]] = {
    "logprobs": (logprobs, 2, layout(tp=2)),
    "critic": (critic, 2, layout(pp=2)),
    "teacher": (teacher, 2, layout(tp=2)),
    "adapters": (adapters, 2, layout(ep=2) | lora()),
    "replay": (replay, 2, layout(ep=2) | REPLAYING),
}
"""Function, number of ranks, and changes of the policy."""


def state_away(policy: PolicyConfig, folder: str) -> Numbers:
    """Return three steps. The optimizer's state is on the host between them, and a checkpoint is saved meanwhile."""
    with parallel_job(policy):
        trainer = _trainer(policy)
        shard = _shard(trainer, _batch())
        results = [trainer.train([shard], sft_loss)]
        on_card = trainer.device.type == "cuda"
        before = torch.cuda.memory_allocated() if on_card else 0
        left = trainer.host_state.leave()
        if on_card:
            _check_room(trainer, left, before - torch.cuda.memory_allocated())
        found = _rows("away", trainer.logprobs(shard.microbatches))
        trainer.start_checkpoint(Path(folder), with_optimizer=True)
        problem = trainer.finish_checkpoint()
        assert problem is None, problem
        trainer.host_state.come_back()
        results += [trainer.train([shard], sft_loss) for _ in range(2)]
        return found | _steps(results)


def _check_room(trainer: MegatronTrainer, left: int, freed: int) -> None:
    """Fail unless what has left is free on the card and lies in pinned memory. Blocks have sizes in steps of 512."""
    tensors = trainer.host_state._moved
    assert 0 < left <= freed <= left + 512 * (2 * len(tensors) + 8), (left, freed, len(tensors))
    assert tensors
    assert all(tensor.is_pinned() for tensor in tensors)


def resumed(policy: PolicyConfig, folder: str) -> Numbers:
    """Return the steps behind the checkpoint of `state_away`, by a trainer with other weights and moments before."""
    with parallel_job(policy):
        trainer = _trainer(policy)
        batch = _batch()
        other = replace(batch, input_ids=batch.input_ids.flip(0), lengths=batch.lengths.flip(0))
        trainer.train([_shard(trainer, replace(other, token_mask=batch.token_mask.flip(0)))], sft_loss)
        trainer.load_checkpoint(Path(folder), with_optimizer=True)
        shard = _shard(trainer, batch)
        return _steps(trainer.train([shard], sft_loss) for _ in range(2))
