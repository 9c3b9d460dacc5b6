# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Ray actor: one rank of the policy. Thin: everything it does is in `models/megatron/training/trainer.py`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch
from nemo_rl_moe.distributed.object_store import fetch_objects
from nemo_rl_moe.distributed.stored_rows import put_together
from nemo_rl_moe.distributed.worker_process import keep_freed_memory
from nemo_rl_moe.errors import CheckpointError, UserError, WeightSyncError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, store_routes
from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.flops import ForwardFlops, forward_flops
from nemo_rl_moe.models.hf_files import ModelSource
from nemo_rl_moe.models.interfaces import LossFunction
from nemo_rl_moe.weight_sync.transport import TransportSpec


@dataclass(frozen=True)
class WorkerDescription:
    """Description of a worker that has started.

    Attributes:
        problems: Why it cannot work, a line each; then there is nothing else.
        coordinates: Its place in the layout, a `ParallelCoordinates`.
        moe_configuration: The router and expert settings that are really in force.
        moe_configuration_sources: Who has set each of them.
        notices: What a user should know of the weights that were read.
        forward_flops: Operations of the whole model's forward pass.
        gpu: CUDA's name of the card that it computes on; None on a CPU.
    """

    problems: Sequence[str] = ()
    coordinates: Any = None
    moe_configuration: dict[str, Any] = field(default_factory=dict)
    moe_configuration_sources: dict[str, str] = field(default_factory=dict)
    notices: Sequence[str] = ()
    forward_flops: ForwardFlops | None = None
    gpu: str | None = None


def as_reported(result: Any, rank: int) -> Any:
    """A rank's `RankTrainResult` as it goes to the driver.

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


class MegatronPolicyWorker:  # pragma: no cover  (runs in another process)
    """One rank of the policy.

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
    ):
        # Imported here: the driver names this class without paying for torch and Megatron.
        import torch

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
        try:
            require_transformer_engine()
            agree_on_model(self._config_json, folder, with_weights=weights is not None)
            self._trainer: Any
            if num_steps is None:
                self._trainer = MegatronModel(policy, hf_config, weights, tokenizer=tokenizer)
            else:
                self._trainer = MegatronTrainer(
                    policy, hf_config, weights, num_steps, tokenizer=tokenizer, keep_reference=keep_reference
                )
        except UserError as error:  # of the model and its weights; every rank finds the same
            self._problems = error.problems

    def describe(self) -> WorkerDescription:
        """Description of this rank, or the problems that keep it from working."""
        import torch

        from nemo_rl_moe.models.megatron.model.router_settings import setting_sources
        from nemo_rl_moe.models.megatron.model.transformer_config import attention_windows, effective_moe_configuration

        if self._problems:
            return WorkerDescription(problems=self._problems)
        trainer, policy = self._trainer, self._trainer.policy
        return WorkerDescription(
            coordinates=trainer.coordinates,
            moe_configuration=effective_moe_configuration(trainer.config),
            moe_configuration_sources=setting_sources(policy, trainer.hf_config, self._config_json, trainer.config),
            notices=trainer.notices,
            forward_flops=forward_flops(
                trainer.config, trainer.hf_config.vocab_size, attention_windows(trainer.config)
            ),
            gpu=torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else None,
        )

    def train(self, shards: Sequence[GlobalBatchShard], loss_function: LossFunction) -> Any:
        """One optimizer step for each global batch; a `RankTrainResult`."""
        at_hand = [replace(shard, microbatches=self._fetched(shard.microbatches)) for shard in shards]
        result = self._trainer.train(at_hand, loss_function)
        return as_reported(result, self._rank)

    def evaluate(self, shard: GlobalBatchShard, loss_function: LossFunction) -> dict[str, MetricSeries]:
        """Forward passes only."""
        at_hand = replace(shard, microbatches=self._fetched(shard.microbatches))
        return self._trainer.evaluate(at_hand, loss_function)

    def logprobs(self, microbatches: Sequence[TokenBatch], reference: bool) -> Any:
        """Log-probability of every token, a tensor for each microbatch; of the reference model if that is asked for."""
        measure = self._trainer.reference_logprobs if reference else self._trainer.logprobs
        return measure(self._fetched(microbatches))

    def logprobs_and_routes(self, microbatches: Sequence[TokenBatch], _: None) -> Any:
        """Log-probability of every token, and the routed experts of each sequence, in Ray's object store."""
        found, routes = self._trainer.logprobs_and_routes(self._fetched(microbatches))
        return found, put_together(routes, ray.put)

    def compare_routes(self, microbatches: Sequence[TokenBatch], reference: bool) -> Any:
        """Log-probability of every token, and the experts against those of the batch's tape."""
        compare = self._trainer.compare_reference_routes if reference else self._trainer.compare_routes
        return compare(self._fetched(microbatches))

    def generate(self, request: GenerationBatch, max_batch_size: int | None) -> list[GeneratedSequence]:
        """Responses to this rank's share of the prompts; their routed experts lie in Ray's object store."""
        at_hand = request.fetched(fetch_objects) if self._trainer.has_tower else request
        return store_routes(self._trainer.generate(at_hand, max_batch_size), ray.put)

    def send_weights(self, transfer: TransportSpec, altered: bool) -> SendOutcome:
        """Sends this rank's part of the weights, or others in its place, to the workers of a generation engine."""
        try:
            return SendOutcome(num_bytes=self._trainer.send_weights(transfer, altered=altered))
        except WeightSyncError as error:
            return SendOutcome(problem=str(error))

    def weight_fingerprints(self, number_format: str) -> dict[str, str]:
        """Return the fingerprints of this rank's part of the weights."""
        return self._trainer.weight_fingerprints(number_format)

    def offload_optimizer(self) -> int:
        """Moves the optimizer's state to the host; the bytes that this rank's device gained."""
        return self._trainer.offload_optimizer()

    def onload_optimizer(self) -> None:
        """Moves it back."""
        self._trainer.onload_optimizer()

    def empty_cache(self) -> None:
        """Gives the device's memory back that torch's allocator keeps for later."""
        import torch

        torch.cuda.empty_cache()

    def weight_version(self) -> int:
        """Optimizer steps that changed the weights since the start of training."""
        return self._trainer.num_updates

    def save_weights(self, folder: Path, model_files: Mapping[str, bytes]) -> WeightsOutcome:
        """Writes this rank's part of a Hugging Face folder."""
        try:
            return WeightsOutcome(left_out=self._trainer.save_weights(folder, model_files))
        except CheckpointError as error:
            return WeightsOutcome(problem=str(error))

    def start_checkpoint(self, directory: Path, with_optimizer: bool) -> None:
        """Takes a snapshot of this rank's state and begins to write it."""
        self._trainer.start_checkpoint(directory, with_optimizer=with_optimizer)

    def checkpoint_is_written(self) -> bool:
        """True when this rank has finished its part of the last checkpoint, well or not."""
        return self._trainer.checkpoint_is_written

    def finish_checkpoint(self) -> str | None:
        """Completes the checkpoint; what went wrong on any rank, or None."""
        return self._trainer.finish_checkpoint()

    def load_checkpoint(self, directory: Path, with_optimizer: bool) -> CheckpointError | None:
        """Goes back to a checkpoint; what is wrong with it, or None."""
        try:
            self._trainer.load_checkpoint(directory, with_optimizer=with_optimizer)
        except CheckpointError as error:
            return type(error)(error.problems)  # alone: what it came from may not travel
        return None

    def _fetched(self, microbatches: Sequence[TokenBatch]) -> tuple[TokenBatch, ...]:
        """Microbatches whose stored columns are at hand, and pictures where they are read."""
        reads_pictures = self._trainer.has_tower
        return tuple(batch.fetched(fetch_objects, with_shared=reads_pictures) for batch in microbatches)
