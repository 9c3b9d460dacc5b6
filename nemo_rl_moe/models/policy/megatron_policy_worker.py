# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The Ray actor: one rank of the policy. Thin: everything it does is in `models/megatron/trainer.py`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.rank_batch import GlobalBatchShard
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
    """

    def __init__(self, rank: int, world_size: int, *, policy: PolicyConfig, seed: int, num_steps: int):
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
        # Only the first rank saves it; loading it imports parts of transformers that take more than a second.
        settings = policy.tokenizer
        self._tokenizer = load_tokenizer(settings.name, settings.chat_template) if rank == 0 else None
        self._trainer = MegatronTrainer(policy, load_hf_config(policy.model_name), weights_folder(policy), num_steps)

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

    def save_weights(self, folder: Path) -> None:
        """Writes this rank's part of a Hugging Face folder."""
        self._trainer.save_weights(self._tokenizer, folder)
