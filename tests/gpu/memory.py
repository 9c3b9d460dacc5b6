# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of one GPU: the optimizer's state that leaves for the host and comes back, and one long sequence."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.weight_sync.bucket import weighted_sum
from tests.gpu.models import (
    Failed,
    Numbers,
    let_go,
    memory_of,
    packed_shard,
    recipe_config,
    slice_config,
    timed,
    timed_step,
    weights_from_the_device,
    with_routes,
)
from tests.gpu.process import job_of_one

_FREED_SHARE = 0.95
"""Of the bytes that left: as much another process must be able to take."""
_HEAD_CHUNKS = (1024, 4096)


def host_state(*, rehearse: bool) -> Iterator[Numbers]:
    """Yield the speed of the state's ways to the host and back, and what they make free for other processes."""
    config = recipe_config(rehearse=rehearse, tokens=64 if rehearse else 4096)
    hf_config = slice_config(rehearse=rehearse)
    with job_of_one(config.policy), weights_from_the_device():
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=10)
        timed_step(trainer, packed_shard(config, hf_config.vocab_size, 0))
        state = list(trainer.host_state._tensors())
        before, kept = [_sum(tensor) for tensor in state], _reserved()
        first, _ = timed(trainer.offload_optimizer)  # takes the host's memory
        timed(trainer.onload_optimizer)
        trainer.empty_cache()
        free = _free()
        away, num_bytes = timed(trainer.offload_optimizer)
        freed = None if free is None else _free() - free
        back, _ = timed(trainer.onload_optimizer)
        changed = sum(_sum(tensor) != old for tensor, old in zip(state, before, strict=True))
    numbers = {
        "bytes": num_bytes,
        "freed_bytes": freed,
        "cached_bytes_after_a_step": kept,
        "first_seconds": round(first, 3),
        "leave_gb_per_second": round(num_bytes / away / 1e9, 2),
        "return_gb_per_second": round(num_bytes / back / 1e9, 2),
        "changed_tensors": changed,
    }
    if changed:
        raise Failed(f"{changed} of {len(state)} tensors came back as others", numbers)
    if freed is not None and freed < _FREED_SHARE * num_bytes:
        raise Failed(f"{num_bytes / 1e9:.1f} GB left, and other processes can take {freed / 1e9:.1f} GB", numbers)
    yield numbers


def _sum(tensor: Tensor) -> int:
    return weighted_sum(tensor.detach().contiguous().flatten().view(torch.uint8))


def _free() -> Any:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None


def _reserved() -> int | None:
    """Return what torch's allocator keeps without a tensor in it."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def long(*, rehearse: bool) -> Iterator[Numbers]:
    """Yield peak and seconds of one sequence of 32,768 tokens under replay, for sizes of the output layer's chunks."""
    tokens = 128 if rehearse else 32768
    for chunk in _HEAD_CHUNKS:
        chunk = chunk // 64 if rehearse else chunk
        config = recipe_config(
            rehearse=rehearse, tokens=tokens, logprob_chunk_size=chunk, megatron_cfg__routing_replay="rollout"
        )
        hf_config = slice_config(rehearse=rehearse)
        loss = PolicyGradientLoss(config.loss_fn, prev_is_current=True)
        with job_of_one(config.policy), weights_from_the_device():
            from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

            trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=10)
            shard = packed_shard(config, hf_config.vocab_size, 0, num_rows=1, parts=(1,))
            shard = with_routes(shard, hf_config)
            trainer.train([shard], loss)
            scored, _ = timed(trainer.logprobs, shard.microbatches)
            trained, result = timed(trainer.train, [shard], loss)
            numbers = {
                "tokens": tokens,
                "head_chunk": chunk,
                "logprob_seconds": round(scored, 3),
                "train_seconds": round(trained, 3),
                "rows_missing_share": result.moe_metrics["routing/rows_missing_share"],
                **memory_of(config, trainer, result),
            }
            let_go(trainer)
        yield numbers
