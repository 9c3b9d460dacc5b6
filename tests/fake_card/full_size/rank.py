# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rank 0 of a recipe at full size, without the other ranks.

    python -m tests.fake_card.full_size.rank RECIPE MODEL RESULTS

The card's memory is counted and not touched. Of each phase of a run, the results have the peak by torch's allocator and
by `plan`, and the terms at the fullest moment. Of a training step it is the output layer's fullest moment, because a
recomputed layer may have the peak.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import state_dict_utils
from megatron.core.dist_checkpointing.strategies import fully_parallel
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.config.schema_grpo import RolloutMegatronConfig, generating
from nemo_rl_moe.distributed.batch import GlobalBatchShard
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.megatron.checkpoint import save
from nemo_rl_moe.models.megatron.model.activation_estimate import head_activations, layer_activations
from nemo_rl_moe.models.megatron.model.memory_estimate import WorkerMemory, microbatch_tokens, worker_memory
from nemo_rl_moe.models.megatron.model.parallel_state import initialize_parallel_state
from nemo_rl_moe.models.megatron.training import trainer as trainer_module
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer
from nemo_rl_moe.routing.agreement import expected_agreement, report
from nemo_rl_moe.weight_sync.board import Board
from nemo_rl_moe.weight_sync.bucket import BucketLabel
from nemo_rl_moe.weight_sync.folder import MAX_UNACKNOWLEDGED
from nemo_rl_moe.weight_sync.manifest import read_manifest
from nemo_rl_moe.weight_sync.transport import TransportSpec
from nemo_rl_moe.weight_sync.transport_backends import DEVICE_BUCKET_BYTES, IpcTransport
from tests.fake_card.environment import LIBRARY_FOLDER
from tests.fake_card.full_size.history import History, Phase
from tests.fake_card.full_size.kernels import leave_out_kernels
from tests.fake_card.full_size.routes import HandedInLogits, experts_of_tokens, overload_of_capture, with_experts
from tests.fake_card.full_size.terms import sums_by_term
from tests.gpu.models import packed_shard, weights_from_the_device

CAPTURE = Path("examples/audit/faults/healthy")
_SENT = 1500
"""Tensors of the refit. The first is the embedding, and those of the experts fill more buckets than exist at a time."""
_PARTS = (2, 4, 4)
"""The microbatch has three sequences: a half and two quarters of its tokens."""


@contextmanager
def _without_other_ranks(config: Any) -> Iterator[None]:
    """Process groups of all ranks, of which this process is the first. Objects of the others are its own."""

    def all_gather_object(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [own] * len(found)

    size = config.cluster.world_size
    of_rank_0 = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(size),
    }
    os.environ.update(of_rank_0)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(dist, "all_gather_object", all_gather_object))
        for module in (report, expected_agreement):  # no kernel has counted what the shares are of
            patches.enter_context(mock.patch.object(module, "agreement_metrics", return_value={}))
        # It would begin a new count of the peak.
        patches.enter_context(mock.patch.object(trainer_module, "peak_memory_metrics", return_value={}))
        initialize_parallel_state(config.policy.megatron_cfg, rank=0, world_size=size, local_rank=0, seed=0)
        yield


def _held(trainer: Any) -> dict[str, set[int]]:
    """Return the addresses of what is held between steps, by term."""
    buffers = [buffer for chunk in trainer.ddp_chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = [tensor for chunk in trainer.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    weights += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    found = {
        "weights": weights,
        "gradients": [buffer.grad_data for buffer in buffers],
        "optimizer": list(trainer.host_state._tensors()),
    }
    return {term: {tensor.untyped_storage().data_ptr() for tensor in tensors} for term, tensors in found.items()}


def _require_libraries_of_torch() -> None:
    """Fail if Transformer Engine has loaded a library of a toolkit on this machine in place of the fake card's."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    named = {Path(each) for each in mapped if re.search(r"lib(cu[a-z]+|nvrtc|nccl)[-_.]", each.rpartition("/")[2])}
    if foreign := sorted(str(path) for path in named if path.parent != LIBRARY_FOLDER.resolve()):
        raise SystemExit(f"these libraries are not the fake card's: {', '.join(foreign)}")


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


def _plan_of_one_rank(
    state: Any, writer: Any, process_group: Any, coordinator: int, planner: Any
) -> tuple[tuple[None, Any, None]]:
    """Plan the write of this rank without the plans of the others, as `save_state_dict_async_plan` does with them."""
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = planner.create_decentralized_global_plan(writer.prepare_local_plan(planner.create_local_plan()))
    plan = planner.finish_plan(writer.prepare_decentralized_global_plan(plan))
    writer.prepare_write_data(plan, planner)
    return ((None, plan, None),)


def _save(trainer: Any, folder: Path) -> None:
    """Take the snapshot of a checkpoint, and write nothing."""
    with ExitStack() as patches:
        for module in (fully_parallel, state_dict_utils):  # the ranks that this process plays all have the same parts
            check = mock.patch.object(module, "validate_sharding_integrity", return_value=None)
            patches.enter_context(check)
        patches.enter_context(mock.patch.object(save, "save_state_dict_async_plan", _plan_of_one_rank))
        patches.enter_context(mock.patch.object(save.CheckpointWrite, "_write", return_value=None))
        trainer.start_checkpoint(folder, with_optimizer=True)


class _UncheckedTransport(IpcTransport):
    """CUDA IPC without checksums, which no kernel computes."""

    @contextmanager
    def opened(self, board: Board, name: str, label: BucketLabel, receiver: int) -> Iterator[dict[str, Tensor]]:
        manifest = read_manifest(name, board.read(name), label)
        with self.memory.mapped(manifest.handle) as buffer:
            yield manifest.packing.cut(buffer[: manifest.packing.num_bytes])


def _refit(trainer: Any, folder: Path) -> None:
    """Send the weights to a receiver that reads nothing. Buckets for NCCL and CUDA IPC have the same memory."""
    backend = _UncheckedTransport(_OwnMemory())
    spec = TransportSpec(folder, trainer.num_updates, 1, 1, DEVICE_BUCKET_BYTES, backend=backend)
    receiver = Thread(target=spec.receive, args=(0, lambda tensors: [None for _ in tensors]))
    receiver.start()
    sent = trainer._sent_tensors
    # The ranks that this process plays would all send the same names.
    with mock.patch.object(trainer, "_sent_tensors", lambda **options: _numbered(sent(**options))):
        trainer.send_weights(spec)
    receiver.join()


def _numbered(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for number, (name, tensor) in enumerate(islice(tensors, _SENT)):
        yield f"{number} {name}", tensor


def _shard(config: Any, hf_config: Any) -> GlobalBatchShard:
    """Return one microbatch, packed as full as the recipe allows."""
    tokens = microbatch_tokens(config)
    policy = config.policy.model_copy(update={"max_total_sequence_length": tokens})
    return packed_shard(config.model_copy(update={"policy": policy}), hf_config.vocab_size, 0, num_rows=1, parts=_PARTS)


def _is_replayed(config: MasterConfig) -> bool:
    megatron = config.policy.megatron_cfg
    return isinstance(megatron, RolloutMegatronConfig) and megatron.routing_replay != "none"


def planned(name: str, worker: WorkerMemory, transformer: Any, config: Any, vocabulary: int) -> dict[str, int]:
    """Return the bytes that `plan` counts in a phase, by term. The moment of a training step is the output layer's."""
    tokens, layers = microbatch_tokens(config), range(transformer.num_layers)
    weights = {"weights": worker.weights}
    held = weights | {"gradients": worker.gradients, "optimizer": worker.optimizer.state}
    if name == "build" or name.startswith("log-probabilities"):
        return {}  # less than in other phases
    if name == "after offload":
        return weights
    if name == "refit":
        kept = weights if worker.is_moved else held
        return kept | {"buckets": (MAX_UNACKNOWLEDGED + 1) * DEVICE_BUCKET_BYTES}
    if name == "optimizer step":
        copies = {"moments": worker.optimizer.float32_moments, "copied_gradients": worker.optimizer.float32_gradients}
        return held | copies
    if not name.startswith("training"):
        return held
    is_replayed = _is_replayed(config)
    is_packed = config.policy.sequence_packing.enabled
    of_layer = [
        asdict(layer_activations(transformer, index, is_replayed=is_replayed, is_packed=is_packed)) for index in layers
    ]
    of_layers = {term: tokens * sum(each[term] for each in of_layer) for term in of_layer[0]}
    is_frozen = config.policy.frozen_parts.language_model
    chunk = config.policy.logprob_chunk_size
    head = head_activations(transformer, tokens, vocabulary, chunk, is_frozen=is_frozen)
    # The lines that make inputs of layers make that of the last norm, too.
    of_last_norm = tokens * transformer.hidden_size * transformer.params_dtype.itemsize
    of_layers["input"] += of_last_norm
    return held | of_layers | {"head": head - of_last_norm}


def run(recipe: str, model: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the phases with their terms, and what `plan` says, in bytes."""
    config = load_any_config(
        recipe, ["policy.init=random", f"policy.model_name={model}", *overrides], check_paths=False
    )
    hf_config = load_hf_config(model)
    ranks = config.policy.megatron_cfg.expert_model_parallel_size
    generates, is_replayed = generating(config.policy), _is_replayed(config)
    is_grpo = isinstance(config, GRPOMasterConfig)
    loss = PolicyGradientLoss(config.loss_fn, prev_is_current=True) if is_grpo else sft_loss
    _require_libraries_of_torch()
    history, shard = History(), _shard(config, hf_config)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, _without_other_ranks(config), weights_from_the_device():
        with history.phase() as phase:
            trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=100)
        found.append(_phase("build", phase, trainer))

        def measure(name: str, work: Callable[[], object]) -> None:
            with history.phase() as phase:
                work()
            found.append(_phase(name, phase, trainer))
            print(found[-1], file=sys.stderr, flush=True)

        logits = HandedInLogits([module for module in trainer.chunks[0].modules() if isinstance(module, TopKRouter)])
        trainer.optimizer.step()  # which makes the optimizer's state
        measure("optimizer step", trainer.optimizer.step)
        trainer.optimizer.zero_grad()
        for name, overload in (("balanced", 1.0), ("hottest rank", overload_of_capture(CAPTURE, ranks))):
            experts = experts_of_tokens(microbatch_tokens(config), trainer.config, ranks, overload)
            routed = with_experts(shard, experts) if is_replayed else shard
            logits.experts = None if is_replayed else experts
            measure(f"log-probabilities, {name}", partial(trainer.logprobs, routed.microbatches))
            measure(f"training step, {name}", partial(trainer.train, [routed], loss))
        measure("checkpoint", partial(_save, trainer, Path(folder)))
        if generates is not None and generates.offload_optimizer_for_generation:
            trainer.offload_optimizer()
            measure("after offload", lambda: None)
        if generates is not None and generates.generation.backend == "vllm":
            measure("refit", partial(_refit, trainer, Path(folder)))
        worker = worker_memory(config, trainer.config, hf_config, 0)
        for each in found:
            each["planned"] = planned(each["name"], worker, trainer.config, config, hf_config.vocab_size)
            is_training = each["name"].startswith("training")
            each["planned_peak"] = worker.while_training_at_least if is_training else sum(each["planned"].values())
        return found


def _phase(name: str, phase: Phase, trainer: MegatronTrainer) -> dict[str, Any]:
    terms = sums_by_term(phase.blocks, _held(trainer))
    return {"name": name, "peak": phase.peak, "held": phase.held, "reserved": phase.reserved, "terms": terms}


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_card.full_size.rank", description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("model", help="folder with its config.json")
    parser.add_argument("results", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    leave_out_kernels()
    options.results.write_text(json.dumps(run(options.recipe, options.model, options.overrides)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # there is nobody to say goodbye to


if __name__ == "__main__":
    main()
