# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Worker of one rank: starts the model, fetches what lies in Ray's object store, returns errors as values."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch import Tensor

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch
from nemo_rl_moe.distributed.object_store import fetch_objects
from nemo_rl_moe.distributed.stored_rows import StoredRows, put_together
from nemo_rl_moe.distributed.worker_process import keep_freed_memory
from nemo_rl_moe.errors import CheckpointError, UserError, WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, store_routes
from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.flops import ForwardFlops, forward_flops
from nemo_rl_moe.models.hf_files import ModelSource
from nemo_rl_moe.models.interfaces import Head, LossFunction
from nemo_rl_moe.routing.agreement.statistics import AgreementTotals
from nemo_rl_moe.weight_sync.transport import TransportSpec

if TYPE_CHECKING:
    from nemo_rl_moe.models.megatron.checkpoint import CheckpointWrite
    from nemo_rl_moe.models.megatron.model.parallel_state import ParallelCoordinates
    from nemo_rl_moe.models.megatron.training.trainer import RankTrainResult


@dataclass(frozen=True)
class WorkerDescription:
    """Description of a worker that has started.

    Attributes:
        coordinates: Its place in the layout.
        moe_configuration: The router and expert settings that are really in force.
        moe_configuration_sources: Who has set each of them.
        notices: What a user should know of the weights that were read.
        forward_flops: Operations of the whole model's forward pass.
        gpu: CUDA's name of the card that it computes on; None on a CPU.
    """

    coordinates: "ParallelCoordinates"
    moe_configuration: dict[str, Any] = field(default_factory=dict)
    moe_configuration_sources: dict[str, str] = field(default_factory=dict)
    notices: Sequence[str] = ()
    forward_flops: ForwardFlops | None = None
    gpu: str | None = None


def as_reported(result: "RankTrainResult", rank: int) -> "RankTrainResult":
    """Return what goes to the driver of a rank's result.

    MoE metrics are the same on all ranks, and thousands with each layer's: of a thousand ranks the driver would read
    100 MB a step to keep the first one's.
    """
    return result if rank == 0 else replace(result, moe_metrics={})


@dataclass(frozen=True)
class WeightsOutcome:
    """Outcome of writing a Hugging Face folder.

    Attributes:
        problem: What went wrong, on whichever rank; None when the folder is whole.
        left_out: Names of parameters that the family has no tensor for.
    """

    problem: str | None = None
    left_out: Sequence[str] = ()


@dataclass(frozen=True)
class SendOutcome:
    """End of one rank's part of a transfer of weights.

    Attributes:
        num_bytes: Bytes sent.
        problem: Reason for which the transfer failed, on whichever rank or engine worker; None when all has arrived.
    """

    num_bytes: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class LoadOutcome:
    """Outcome of loading a checkpoint.

    Attributes:
        weight_version: Optimizer steps that have changed the weights that are in place now.
        problem: What is wrong with the checkpoint; None when it was loaded.
    """

    weight_version: int
    problem: CheckpointError | None = None


class MegatronPolicyWorker:  # pragma: no cover  (runs in another process)
    """One rank of the policy, or of a role beside it.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        policy: The `policy` section of the configuration.
        source: Where the model is read from.
        hf_config: The model's configuration, of `plain_config`.
        seed: Seed of dropout.
        num_steps: Optimizer steps of the whole run; None: forward passes alone, without optimizer state.
        keep_reference: Keep the first weights as the reference model.
        decodes_text: Load the tokenizer, for stop strings.
        heads: Heads that the model has.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        policy: PolicyConfig,
        source: ModelSource,
        hf_config: Any,
        seed: int,
        num_steps: int | None,
        keep_reference: bool,
        decodes_text: bool,
        heads: Collection[Head],
    ):
        # Imported here: the driver names this class without paying for Megatron-Core and its layers.
        from nemo_rl_moe.data.tokenizer import load_tokenizer
        from nemo_rl_moe.models.hf_files import load_config_json, weights_folder
        from nemo_rl_moe.models.megatron.model.agreement import agree_on_model
        from nemo_rl_moe.models.megatron.model.parallel_state import initialize_parallel_state, shared_gloo_device
        from nemo_rl_moe.models.megatron.model.transformer_config import require_transformer_engine
        from nemo_rl_moe.models.megatron.training.megatron_model import MegatronModel
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        self._rank = rank
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        if not torch.cuda.is_available():
            keep_freed_memory()
        # What can fail on this machine alone comes before anything that ranks do together: it ends this process, of
        # which the driver hears at once. Behind it they would wait for this one, and its reason would be lost.
        folder = source.folder()
        self._config_json = load_config_json(str(folder))
        # Loading it imports parts of transformers that take more than a second.
        settings = policy.tokenizer
        tokenizer = load_tokenizer(settings.name, settings.chat_template) if decodes_text else None
        with shared_gloo_device():
            initialize_parallel_state(policy.megatron_cfg, rank, world_size, int(os.environ["LOCAL_RANK"]), seed)
        weights = weights_folder(policy, folder)
        self._problems: list[str] = []
        self._write: CheckpointWrite | None = None
        self._model: MegatronModel
        try:
            require_transformer_engine()
            agree_on_model(self._config_json, folder, with_weights=weights is not None)
            if num_steps is None:
                self._model = MegatronModel(policy, hf_config, weights, tokenizer=tokenizer, heads=heads)
            else:
                self._model = self._trainer = MegatronTrainer(
                    policy,
                    hf_config,
                    weights,
                    num_steps,
                    tokenizer=tokenizer,
                    keep_reference=keep_reference,
                    heads=heads,
                )
        except UserError as error:  # of the model and its weights; every rank finds the same
            self._problems = error.problems

    def describe(self) -> WorkerDescription | list[str]:
        """Return the description of this rank, or the problems that keep it from working, a line each."""
        from nemo_rl_moe.models.megatron.model.router_settings import setting_sources
        from nemo_rl_moe.models.megatron.model.transformer_config import attention_windows, effective_moe_configuration

        if self._problems:
            return self._problems
        model, config = self._model, self._model.config
        return WorkerDescription(
            coordinates=model.coordinates,
            moe_configuration=effective_moe_configuration(config),
            moe_configuration_sources=setting_sources(model.policy, model.hf_config, self._config_json, config),
            notices=model.notices,
            forward_flops=forward_flops(config, model.hf_config.vocab_size, attention_windows(config)),
            gpu=torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None,
        )

    def train(self, shards: Sequence[GlobalBatchShard], loss_function: LossFunction) -> "RankTrainResult":
        """Take one optimizer step for each global batch."""
        at_hand = [replace(shard, microbatches=self._fetched(shard.microbatches)) for shard in shards]
        result = self._trainer.train(at_hand, loss_function)
        return as_reported(result, self._rank)

    def evaluate(self, shard: GlobalBatchShard, loss_function: LossFunction) -> dict[str, MetricSeries]:
        """Run forward passes only."""
        at_hand = replace(shard, microbatches=self._fetched(shard.microbatches))
        return self._model.evaluate(at_hand, loss_function)

    def logprobs(self, microbatches: Sequence[TokenBatch], reference: bool) -> list[Tensor]:
        """Return the log-probability of every token by microbatch; of the reference model if that is asked for."""
        measure = self._trainer.reference_logprobs if reference else self._model.logprobs
        return measure(self._fetched(microbatches))

    def values(self, microbatches: Sequence[TokenBatch]) -> list[Tensor]:
        """Return the value of the state in which every token is chosen, by microbatch."""
        return self._model.values(self._fetched(microbatches))

    def logprobs_and_routes(self, microbatches: Sequence[TokenBatch]) -> tuple[list[Tensor], list[StoredRows]]:
        """Return the log-probability of every token, and handles to the routed experts of each sequence."""
        found, routes = self._model.logprobs_and_routes(self._fetched(microbatches))
        return found, put_together(routes, ray.put)

    def compare_routes(
        self, microbatches: Sequence[TokenBatch], reference: bool
    ) -> tuple[list[Tensor], AgreementTotals]:
        """Return the log-probability of every token, and compare its experts with those that the batch brings."""
        compare = self._trainer.compare_reference_routes if reference else self._model.compare_routes
        return compare(self._fetched(microbatches))

    def generate(self, request: GenerationBatch, max_batch_size: int | None) -> list[GeneratedSequence]:
        """Generate this rank's share of responses; their routed experts lie in Ray's object store."""
        at_hand = request.fetched(fetch_objects) if self._model.has_tower else request
        return store_routes(self._model.generate(at_hand, max_batch_size), ray.put)

    def send_weights(self, transfer: TransportSpec, altered: bool) -> SendOutcome:
        """Send this rank's part of the weights, or others in its place, to the workers of a generation
        engine.
        """
        try:
            return SendOutcome(num_bytes=self._model.send_weights(transfer, altered=altered))
        except WeightSyncError as error:
            return SendOutcome(problem=str(error))

    def weight_fingerprints(self, number_format: str) -> dict[str, str]:
        """Return the fingerprints of this rank's part of the weights."""
        return self._model.weight_fingerprints(number_format)

    def offload_optimizer(self) -> int:
        """Move the optimizer's state to the host; return the bytes that this rank's device gained."""
        return self._trainer.host_state.leave()

    def onload_optimizer(self) -> None:
        """Move it back."""
        self._trainer.host_state.come_back()

    def empty_cache(self) -> None:
        """Give the device's memory back that torch's allocator keeps for later."""
        torch.cuda.empty_cache()

    def save_weights(self, folder: Path, model_files: Mapping[str, bytes]) -> WeightsOutcome:
        """Write this rank's part of a Hugging Face folder."""
        try:
            return WeightsOutcome(left_out=self._model.save_weights(folder, model_files))
        except CheckpointError as error:
            return WeightsOutcome(problem=str(error))

    def start_checkpoint(self, directory: Path, with_optimizer: bool) -> None:
        """Take a snapshot of this rank's state and begin to write it."""
        self._write = self._trainer.start_checkpoint(directory, with_optimizer=with_optimizer)

    def checkpoint_is_written(self) -> bool:
        """Return whether this rank has finished its part of the last checkpoint, well or not."""
        return self._write is None or self._write.is_written

    def finish_checkpoint(self) -> str | None:
        """Return the complete the checkpoint; return what went wrong on any rank, or None."""
        assert self._write is not None  # one was started
        write, self._write = self._write, None
        return write.finish()

    def load_checkpoint(self, directory: Path, with_optimizer: bool) -> LoadOutcome:
        """Go back to a checkpoint."""
        problem = None
        try:
            self._trainer.load_checkpoint(directory, with_optimizer=with_optimizer)
        except CheckpointError as error:
            problem = type(error)(error.problems)  # alone: what it came from may not travel
        return LoadOutcome(self._trainer.num_updates, problem)

    def _fetched(self, microbatches: Sequence[TokenBatch]) -> tuple[TokenBatch, ...]:
        """Fetch the microbatches' stored columns, and images where they are read."""
        reads_images = self._model.has_tower
        return tuple(batch.fetched(fetch_objects, with_shared=reads_images) for batch in microbatches)
