# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rank 0 of a recipe at full size, without the other ranks: python -m tests.fake_card.full_size.rank RECIPE RESULTS.

The card's memory is counted and not touched. Of each phase of a run, the results have the bytes that torch's allocator
had handed out at the fullest moment, by terms of `plan`, and what `plan` says of the term.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_card.full_size.kernels import leave_out_kernels  # isort: skip  (before Megatron-Core)

leave_out_kernels()

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.checkpoint.save import CheckpointWrite
from nemo_rl_moe.models.megatron.model.memory_estimate import microbatch_tokens
from nemo_rl_moe.models.megatron.model.parallel_state import initialize_parallel_state
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.weight_sync.transport import TransportSpec
from nemo_rl_moe.weight_sync.transport_backends import DEVICE_BUCKET_BYTES, IpcTransport
from megatron.core.transformer.moe.router import TopKRouter
from tests.fake_card.full_size.history import History
from tests.fake_card.full_size.routes import HandedInLogits, experts_of_tokens, overload_of_capture, with_experts
from tests.fake_card.full_size.terms import sums_by_term
from tests.gpu.models import packed_shard, weights_from_the_device

MODEL = "examples/assets/model_configs/Qwen3-30B-A3B"
CAPTURE = Path("examples/audit/faults/healthy")
_PARTS = (2, 4, 4)
"""The microbatch has three sequences: a half and two quarters of its tokens."""


@contextmanager
def _without_other_ranks(config: Any) -> Iterator[None]:
    """Process groups of all ranks, of which this process is the first. Objects of the others are its own."""
    def all_gather_object(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [own] * len(found)

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", LOCAL_RANK="0")
    size = config.cluster.world_size
    os.environ["WORLD_SIZE"] = str(size)
    # No kernel has counted what the agreement of routers is a share of.
    report = mock.patch("nemo_rl_moe.routing.agreement.report.agreement_metrics", lambda *args, **kwargs: {})
    with mock.patch.object(dist, "all_gather_object", all_gather_object), report:
        initialize_parallel_state(config.policy.megatron_cfg, rank=0, world_size=size, local_rank=0, seed=0)
        yield


def _held(trainer: Any) -> dict[str, set[int]]:
    """Return the addresses of what is held between steps, by term."""
    buffers = [
        buffer for chunk in trainer.ddp_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    weights = [tensor for chunk in trainer.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    weights += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    found = {
        "weights": weights,
        "gradients": [buffer.grad_data for buffer in buffers],
        "optimizer": list(trainer.host_state._tensors()),
    }
    return {term: {tensor.untyped_storage().data_ptr() for tensor in tensors} for term, tensors in found.items()}


class _OwnMemory:
    """Device memory that a thread of this process opens in place of an engine on the same card."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def device(self) -> torch.device:
        return torch.device("cuda")

    def place(self) -> str:
        return "the card"

    def shared(self, buffer: Tensor) -> dict[str, int]:
        self._buffers[buffer.data_ptr()] = buffer
        return {"address": buffer.data_ptr()}

    @contextmanager
    def mapped(self, handle: Any) -> Iterator[Tensor]:
        yield self._buffers.pop(handle["address"])


def _save(trainer: Any, folder: Path) -> None:
    """Take the snapshot of a checkpoint, and write nothing."""
    with mock.patch.object(CheckpointWrite, "_write", lambda self: None):
        trainer.start_checkpoint(folder, with_optimizer=True)


def _refit(trainer: Any, folder: Path) -> None:
    """Send the weights to a receiver that reads nothing."""
    backend = IpcTransport(_OwnMemory())
    spec = TransportSpec(folder, trainer.num_updates, 1, 1, DEVICE_BUCKET_BYTES, backend=backend)
    receiver = Thread(target=spec.receive, args=(0, lambda tensors: [None for _ in tensors]))
    receiver.start()
    trainer.send_weights(spec)
    receiver.join()


def _shard(config: Any, hf_config: Any) -> GlobalBatchShard:
    """Return one microbatch, packed as full as the recipe allows."""
    tokens = microbatch_tokens(config)
    policy = config.policy.model_copy(update={"max_total_sequence_length": tokens})
    return packed_shard(config.model_copy(update={"policy": policy}), hf_config.vocab_size, 0, num_rows=1, parts=_PARTS)


def run(recipe: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return memory by phase and term, in bytes, and what `plan` says."""
    config = load_grpo_config(recipe, ["policy.init=random", f"policy.model_name={MODEL}", *overrides], check_paths=False)
    hf_config = load_hf_config(MODEL)
    ranks = config.policy.megatron_cfg.expert_model_parallel_size
    loss = PolicyGradientLoss(config.loss_fn, prev_is_current=True)
    history, shard, phases = History(), _shard(config, hf_config), []
    with tempfile.TemporaryDirectory() as folder, _without_other_ranks(config), weights_from_the_device():
        with history.phase("build") as phase:
            trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=100)
        phases += phase
        with history.phase("optimizer step") as phase:
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        phases += phase
        held = _held(trainer)
        logits = HandedInLogits([module for module in trainer.chunks[0].modules() if isinstance(module, TopKRouter)])
        for name, overload in (("balanced", 1.0), ("hottest", overload_of_capture(CAPTURE, ranks))):
            experts = experts_of_tokens(microbatch_tokens(config), hf_config, ranks, overload)
            routed = shard
            if config.policy.megatron_cfg.routing_replay == "none":
                logits.experts = experts
            else:
                routed = with_experts(shard, experts)
            with history.phase(f"log-probabilities, {name}") as phase:
                trainer.logprobs(routed.microbatches)
            phases += phase
            with history.phase(f"training step, {name}") as phase:
                trainer.train([routed], loss)
            phases += phase
        with history.phase("checkpoint") as phase:
            _save(trainer, Path(folder))
        phases += phase
        with history.phase("offload") as phase:
            trainer.offload_optimizer()
        phases += phase
        with history.phase("refit") as phase:
            _refit(trainer, Path(folder))
        phases += phase
        for each in phases:
            print(each.name, each.peak / 1e9, each.held / 1e9, each.reserved / 1e9, sums_by_term(each.blocks, held), flush=True)
    return []


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_card.full_size.rank", description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("results", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    options.results.write_text(json.dumps(run(options.recipe, options.overrides)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # there is nobody to say goodbye to


if __name__ == "__main__":
    main()
