# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""With `overlap_param_gather`, no weight is read before it has been gathered, whatever module reads it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from tests.support.family_models import FAMILY_MODELS
from tests.support.family_reference import trainer_of
from tests.support.gloo_ranks import run_ranks
from tests.support.mtp_layers import write_with_mtp_layers
from tests.support.quick_list import full, listed, some_of
from tests.support.tiny_model import parallel_job, tiny_batch, tiny_policy
from tests.support.training_run import tiny_trainer
from tests.support.vision_models import MODELS as VISION_MODELS
from tests.support.vision_models import mixed_batch, write_vision_model
from tests.unit.models.megatron.tiny_trainers import OVERLAP, ZERO_1, shard_for

LATE_WEIGHTS = {
    **ZERO_1,
    **OVERLAP,
    "distributed_data_parallel_config__overlap_param_gather": True,
    "distributed_data_parallel_config__bucket_size": 1000,  # the output layer has 2,048 weights, and so its own bucket
    "logprob_chunk_size": 7,
}
NUM_UPDATES = 3
QUICK = ("qwen3_moe", "nemotron_h")
IN_FULL = ("deepseek_v3", "gpt_oss", "qwen3_5_moe_text")
_ABOUT_A_TENSOR = {"__get__", "__hash__", "size", "dim"}


class _Reads(TorchFunctionMode):
    """Records the weights that a forward pass reads before their gather has ended."""

    def __init__(self, chunk: Any):
        super().__init__()
        self._groups = {id(weight): (name, group) for name, weight, group in _groups_of(chunk)}
        self.too_early: set[str] = set()
        self.in_time: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _ABOUT_A_TENSOR:
            for each in args:
                if (found := self._groups.get(id(each))) is not None:
                    parameter, group = found
                    is_there = group.param_gather_dispatched and group.param_gather_handle is None
                    (self.in_time if is_there else self.too_early).add(f"{parameter} ({name})")
        return func(*args, **(kwargs or {}))


def _groups_of(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
    for name, parameter in chunk.named_parameters():
        if parameter in chunk.param_to_bucket_group:
            yield name.removeprefix("module."), parameter, chunk.param_to_bucket_group[parameter]


@contextmanager
def _watched(trainer: MegatronTrainer) -> Iterator[_Reads]:
    (chunk,) = trainer.ddp_chunks
    reads = _Reads(chunk)
    handles = [
        chunk.register_forward_pre_hook(lambda *_: reads.__enter__() and None),
        chunk.register_forward_hook(lambda *_: reads.__exit__(None, None, None)),
    ]
    yield reads
    for handle in handles:
        handle.remove()


def _train(family: str | None, changes: dict[str, Any]) -> tuple[set[str], int, dict[str, np.ndarray]]:
    with tiny_trainer(tiny_policy(2, **changes), {} if family is None else family) as trainer:
        return _watch(trainer, [tiny_batch(3 + update, trainer.hf_config.vocab_size) for update in range(NUM_UPDATES)])


def _watch(trainer: MegatronTrainer, batches: Sequence[TokenBatch]) -> tuple[set[str], int, dict[str, np.ndarray]]:
    shards = [shard_for(trainer, batch) for batch in batches]
    shards = [replace(each, microbatches=tuple(rows.fetched(list) for rows in each.microbatches)) for each in shards]
    with _watched(trainer) as reads:
        trainer.train(shards, sft_loss)
    weights = {name: p.detach().float().numpy().copy() for name, p in trainer.chunks[0].named_parameters()}
    return reads.too_early, len(reads.in_time), weights


def _train_folder(folder: str, model_type: str, changes: dict[str, Any]) -> tuple[set[str], int, Any]:
    """Train a model with images, whose second global batch has none, or a text model."""
    with parallel_job(policy := tiny_policy(2, **changes)):
        trainer = trainer_of(Path(folder), policy, num_steps=1)
        plain = tiny_batch(3, 50)
        first = mixed_batch(model_type) if model_type in VISION_MODELS else plain
        return _watch(trainer, [first, plain, first])


@pytest.mark.parametrize("family", listed(FAMILY_MODELS, QUICK, IN_FULL))
def test_no_weight_is_read_before_it_is_there(family: str) -> None:
    for too_early, num_read, _ in run_ranks(_train, 2, family, LATE_WEIGHTS):
        assert too_early == set()
        assert num_read > 10


@pytest.mark.parametrize("overlaps", [True, full(False)])
def test_no_gate_of_shared_experts_is_read_before_it_is_there(overlaps: bool) -> None:
    """The gate is measured before the experts are called, which overlapped experts never are."""
    a_bucket_for_each = {"distributed_data_parallel_config__bucket_size": 20}
    changes = {**LATE_WEIGHTS, **a_bucket_for_each, "moe_shared_expert_overlap": overlaps}
    for too_early, num_read, _ in run_ranks(_train, 2, "qwen2_moe", changes):
        assert too_early == set()
        assert num_read > 10


@pytest.mark.parametrize("model_type", some_of(VISION_MODELS, 0, 1))
def test_no_weight_of_a_tower_is_read_before_it_is_there(model_type: str, tmp_path: Path) -> None:
    write_vision_model(model_type, tmp_path)
    for too_early, num_read, _ in run_ranks(_train_folder, 2, str(tmp_path), model_type, LATE_WEIGHTS):
        assert too_early == set()
        assert num_read > 10


@pytest.mark.full
@pytest.mark.parametrize("is_detached", [True, False])
def test_no_weight_of_an_mtp_layer_is_read_before_it_is_there(is_detached: bool, tmp_path: Path) -> None:
    write_with_mtp_layers("deepseek_v3", tmp_path)
    changes = {**LATE_WEIGHTS, "mtp_num_layers": 1, "mtp_detach_heads": is_detached}
    for too_early, num_read, _ in run_ranks(_train_folder, 2, str(tmp_path), "deepseek_v3", changes):
        assert too_early == set()
        assert num_read > 10


def test_replicas_agree_with_a_chunked_head() -> None:
    """Buckets change the order of sums of gradients, so the weights differ from other runs' in rounding."""
    (_, _, weights), (_, _, others) = run_ranks(_train, 2, None, LATE_WEIGHTS)
    (_, _, expected), _ = run_ranks(_train, 2, None, ZERO_1 | {"logprob_chunk_size": 7})
    for name, found in weights.items():
        np.testing.assert_array_equal(found, others[name], err_msg=name)
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=1e-6, err_msg=name)
