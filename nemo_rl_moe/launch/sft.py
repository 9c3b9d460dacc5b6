# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts a run of supervised fine-tuning together: data, workers, loggers, loop."""

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
from nemo_rl_moe.launch.driver_process import RunLaunch, StopSignals
from nemo_rl_moe.launch.setup import prepare_model, running_cluster, running_policy
from nemo_rl_moe.launch.training_run import end_run, keeping, open_run, prepared_run, restore
from nemo_rl_moe.loggers.console import ConsoleLogger


def run_sft(config: SFTMasterConfig, attempt: RunLaunch, stop_signals: StopSignals) -> None:
    """Runs supervised fine-tuning from start to end.

    Everything that can be wrong with the input is found before a worker starts or a file is written.

    Args:
        config: A checked configuration.
        attempt: Which run this is, and which of its attempts.
        stop_signals: Tell when the run is asked to stop.

    Raises:
        UserError: The model, the tokenizer or the data cannot be used.
        WorkerDiedError: A worker failed.
    """
    console = ConsoleLogger(total_steps=0, live=config.logger.console.live)
    model = prepare_model(config, console)
    tokenizer = model.tokenizer
    training = load_dataset(config, config.data.train, tokenizer, console)
    batch_size = config.policy.train_global_batch_size
    padding = pad_token_id(tokenizer)
    loader = GlobalBatchLoader(training, batch_size, padding, config.sft.seed, config.data.shuffle)
    validation = load_dataset(config, config.data.validation, tokenizer, console) if config.data.validation else None

    def validation_batches() -> Iterator[TokenBatch]:
        assert validation is not None
        return sequential_batches(validation, batch_size, padding, config.sft.val_batches)

    num_steps = num_training_steps(config.sft, len(loader))
    fingerprints = {
        TRAINING_DATA: samples_fingerprint(config.data.train.path, (example.input_ids for example in training)),
    }
    with prepared_run(config, attempt, stop_signals, console, num_steps, fingerprints) as run:
        if run.is_complete:
            return
        with (
            running_cluster(config, console) as cluster,
            running_policy(config, cluster, console, model, seed=config.sft.seed, num_steps=num_steps) as policy,
        ):
            restore(run, policy)
            with open_run(run, policy) as (run_folder, loggers), keeping(run, policy, run_folder, loggers) as recorder:
                summary = train_sft(config.sft, policy, loader, validation_batches if validation else None, recorder)
                ending = end_run(run, policy, summary, run_folder)
    console.message(ending)


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
