# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Ray actor: one rank of the policy. Thin: everything it does is in `models/megatron/trainer.py`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.rank_batch import GlobalBatchShard
from nemo_rl_moe.distributed.token_batch import TokenBatch
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.policy.interfaces import LossFunction


class MegatronPolicyWorker:  # pragma: no cover  (runs in another process)
    """One rank of the policy.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        policy: The `policy` section of the configuration.
        seed: Seed of dropout.
        num_steps: Optimizer steps of the whole run.
        keep_reference: Keep the first weights as the reference model.
        decodes_text: Every rank needs the tokenizer, for stop strings; otherwise the first, which saves it.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        policy: PolicyConfig,
        seed: int,
        num_steps: int,
        keep_reference: bool,
        decodes_text: bool,
    ):
        # Imported here: the driver names this class without paying for torch and Megatron.
        import torch

        from nemo_rl_moe.data.tokenizer import load_tokenizer
        from nemo_rl_moe.models.hf_files import load_hf_config, weights_folder
        from nemo_rl_moe.models.megatron.parallel_state import initialize_parallel_state
        from nemo_rl_moe.models.megatron.trainer import MegatronTrainer
        from nemo_rl_moe.models.policy.gloo_device import shared_gloo_device

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        with shared_gloo_device():
            initialize_parallel_state(policy.megatron_cfg, rank, world_size, int(os.environ["LOCAL_RANK"]), seed)
        # Loading it imports parts of transformers that take more than a second.
        settings, is_needed = policy.tokenizer, rank == 0 or decodes_text
        self._trainer = MegatronTrainer(
            policy,
            load_hf_config(policy.model_name),
            weights_folder(policy),
            num_steps,
            tokenizer=load_tokenizer(settings.name, settings.chat_template) if is_needed else None,
            keep_reference=keep_reference,
        )

    def describe(self) -> dict[str, Any]:
        """What this rank is: its place in the layout and the MoE configuration that is really in force."""
        from nemo_rl_moe.models.megatron.transformer_config import effective_moe_configuration

        return {
            "coordinates": self._trainer.coordinates,
            "moe_configuration": effective_moe_configuration(self._trainer.config),
        }

    def train(self, shards: Sequence[GlobalBatchShard], loss_function: LossFunction) -> Any:
        """One optimizer step for each global batch; a `RankTrainResult`."""
        return self._trainer.train(shards, loss_function)

    def evaluate(self, shard: GlobalBatchShard, loss_function: LossFunction) -> dict[str, MetricSeries]:
        """Forward passes only."""
        return self._trainer.evaluate(shard, loss_function)

    def logprobs(self, microbatches: Sequence[TokenBatch], reference: bool) -> Any:
        """Log-probability of every token, a tensor for each microbatch; of the reference model if that is asked for."""
        measure = self._trainer.reference_logprobs if reference else self._trainer.logprobs
        return measure(microbatches)

    def generate(self, request: GenerationRequest, max_batch_size: int | None) -> list[GeneratedSequence]:
        """Responses to this rank's share of the prompts."""
        return self._trainer.generate(request, max_batch_size)

    def export_weights(self) -> Any:
        """Full tensors by their Hugging Face names, over all ranks each once."""
        return self._trainer.export_weights()

    def save_weights(self, folder: Path) -> None:
        """Writes this rank's part of a Hugging Face folder."""
        self._trainer.save_weights(folder)

    def start_checkpoint(self, directory: Path, with_optimizer: bool) -> None:
        """Takes a snapshot of this rank's state and begins to write it."""
        self._trainer.start_checkpoint(directory, with_optimizer=with_optimizer)

    def checkpoint_is_written(self) -> bool:
        """Whether this rank's part of the last checkpoint is over, well or not."""
        return self._trainer.checkpoint_is_written

    def finish_checkpoint(self) -> str | None:
        """Completes the checkpoint; what went wrong on any rank, or None."""
        return self._trainer.finish_checkpoint()

    def load_checkpoint(self, directory: Path, with_optimizer: bool) -> str | None:
        """Goes back to a checkpoint; what is wrong with it, or None."""
        try:
            self._trainer.load_checkpoint(directory, with_optimizer=with_optimizer)
        except CheckpointError as error:
            return str(error)
        return None
