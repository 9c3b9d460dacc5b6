# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of supervised fine-tuning: reads conversations, makes batches, then runs the loop."""

from collections.abc import Iterator

from nemo_rl_moe.algorithms.sft import train_sft
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.checkpoints.fingerprints import TRAINING_DATA, samples_fingerprint
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.config.schema_run import DataSourceConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader, sequential_batches, token_ids_and_images
from nemo_rl_moe.data.sft import TokenizedDataset, load_sft_dataset
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.launch.setup import read_samples
from nemo_rl_moe.launch.training_run import TrainingRun


def run_sft(config: SFTMasterConfig, run: TrainingRun) -> None:
    """Run supervised fine-tuning from start to end."""
    model = run.prepare_model()
    tokenizer = model.tokenizer

    def read(source: DataSourceConfig) -> TokenizedDataset:
        return read_samples(load_sft_dataset, config, source, tokenizer, run.console, model.image_rule, model.speech)

    training = read(config.data.train)
    batch_size, padding = config.policy.train_global_batch_size, pad_token_id(tokenizer)
    loader = GlobalBatchLoader(training, batch_size, padding, config.sft.seed, config.data.shuffle)
    held_out = None if config.data.validation is None else read(config.data.validation)

    def validation_batches() -> Iterator[TokenBatch]:
        assert held_out is not None
        return sequential_batches(held_out, batch_size, padding, config.sft.val_batches)

    fingerprint = samples_fingerprint(config.data.train.path, token_ids_and_images(training))
    run.begin(num_training_steps(config.sft, len(loader)), {TRAINING_DATA: fingerprint}, len(training))
    if run.is_complete:
        return
    policy = run.start_policy()
    run.restore()
    recorder = run.open()
    run.end(train_sft(config.sft, policy, loader, validation_batches if held_out else None, recorder))
