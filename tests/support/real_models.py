# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a job do with a released model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.model_files import write_model_files
from tests.support.family_outputs import files_beside, outputs_of_trainer, trainer_of
from tests.support.family_parity import responses_of_trainer
from tests.support.family_reference import ModelOutputs, Response
from tests.support.tiny_model import parallel_job, shard_of_rank, tiny_batch


@dataclass(frozen=True)
class RealRun:
    """What a trainer makes of a folder on rank 0: its outputs, and greedy responses."""

    outputs: ModelOutputs
    responses: list[Response]


def run_real(folder: str, policy: PolicyConfig, prompts: Sequence[Sequence[int]], exported: str) -> RealRun | None:
    """Run on every rank: outputs and responses of a folder's weights, which are then exported."""
    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy)
        outputs = outputs_of_trainer(trainer)
        responses = responses_of_trainer(trainer, prompts)
        trainer.save_weights(Path(exported), files_beside(Path(folder)))
        return None if outputs is None else RealRun(outputs, responses)


def run_adapter(folder: str, policy: PolicyConfig, merged: str) -> Any:
    """Run on every rank: outputs of a model with a fresh adapter, and after two steps, whose weights are written."""
    from nemo_rl_moe.models.megatron.lora.merge import merge_adapters
    from nemo_rl_moe.models.megatron.weights.hf_export import save_weights

    with parallel_job(policy):
        trainer = trainer_of(Path(folder), policy, num_steps=2)
        fresh = outputs_of_trainer(trainer)
        place, batch = trainer.coordinates, tiny_batch(11, trainer.hf_config.vocab_size)
        shard = shard_of_rank(batch, place.data_parallel_rank, place.data_parallel_size)
        for _ in range(2):
            trainer.train([shard], sft_loss)
        trained = outputs_of_trainer(trainer)
        merge_adapters(trainer.chunks, trainer.config)
        write_beside = partial(write_model_files, files_beside(Path(folder)))
        save_weights(trainer.chunks, trainer.config, trainer.hf_config, Path(merged), write_beside)
        return fresh, trained
