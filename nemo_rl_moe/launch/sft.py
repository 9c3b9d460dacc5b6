# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of supervised fine-tuning: conversations in batches, then the loop."""

from collections.abc import Iterator
from typing import Any

from nemo_rl_moe.algorithms.sft import train_sft
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.checkpoints.changes import TRAINING_DATA, samples_fingerprint
from nemo_rl_moe.config.schema import SFTMasterConfig
from nemo_rl_moe.config.schema_run import DataSourceConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader, sequential_batches
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.data.sources import load_limit
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.loggers.console import ConsoleLogger


def run_sft(config: SFTMasterConfig, run: TrainingRun) -> None:
    """Runs supervised fine-tuning from start to end.

    Raises:
        UserError: The model, the tokenizer or the data cannot be used.
        WorkerDiedError: A worker failed.
    """
    tokenizer = run.prepare_model().tokenizer
    training = load_dataset(config, config.data.train, tokenizer, run.console)
    batch_size, padding = config.policy.train_global_batch_size, pad_token_id(tokenizer)
    loader = GlobalBatchLoader(training, batch_size, padding, config.sft.seed, config.data.shuffle)
    held_out = load_dataset(config, config.data.validation, tokenizer, run.console) if config.data.validation else None

    def validation_batches() -> Iterator[TokenBatch]:
        assert held_out is not None
        return sequential_batches(held_out, batch_size, padding, config.sft.val_batches)

    fingerprint = samples_fingerprint(config.data.train.path, (example.input_ids for example in training))
    run.begin(num_training_steps(config.sft, len(loader)), {TRAINING_DATA: fingerprint})
    if run.is_complete:
        return
    policy = run.start_policy()
    run.restore()
    recorder = run.open()
    run.end(train_sft(config.sft, policy, loader, validation_batches if held_out else None, recorder))


def load_dataset(config: SFTMasterConfig, source: DataSourceConfig, tokenizer: Any, console: ConsoleLogger) -> Any:
    """Reads and tokenises one set of samples, and tells what was cut, dropped or skipped.

    Raises:
        DataError: A file is missing or a line cannot be used.
    """
    with console.phase(f"reading {source.path}"), load_limit(config.data.load_timeout_s, source.path):
        dataset = load_sft_dataset(
            source.path,
            source.split,
            tokenizer,
            config.policy.max_total_sequence_length,
            config.data.on_bad_line,
        )
    console.message(dataset.report.summary())
    return dataset
