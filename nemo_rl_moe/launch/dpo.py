# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts a run of direct preference optimization together: pairs, workers, reference, loggers, loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_rl_moe.algorithms.dpo import batches_to_measure, measured_beforehand, train_dpo
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.checkpoints.changes import MODEL, TRAINING_DATA, model_fingerprint, samples_fingerprint
from nemo_rl_moe.config.schema import DPOMasterConfig
from nemo_rl_moe.config.schema_run import DataSourceConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader, sequential_batches
from nemo_rl_moe.data.preferences import PreferenceDataset, collate_pairs, load_preferences
from nemo_rl_moe.data.sources import load_limit
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.launch.driver_process import RunLaunch, StopSignals
from nemo_rl_moe.launch.setup import prepare_model, running_cluster, running_policy
from nemo_rl_moe.launch.training_run import end_run, keeping, open_run, prepared_run, restore
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.models.interfaces import PolicyInterface


@dataclass(frozen=True)
class Pairs:
    """The data of a run.

    Attributes:
        config: The whole configuration.
        pad_token_id: What stands after a sequence's end.
        training: The pairs to train on.
        validation: The pairs that are held out; None: no validation.
    """

    config: DPOMasterConfig
    pad_token_id: int
    training: PreferenceDataset
    validation: PreferenceDataset | None

    def loader(self) -> GlobalBatchLoader:
        """The training batches.

        Raises:
            DataError: The pairs do not fill one.
        """
        config, size = self.config, self.config.policy.train_global_batch_size
        return GlobalBatchLoader(
            self.training, size, self.pad_token_id, config.dpo.seed, config.data.shuffle, collate_pairs
        )

    def validation_batches(self) -> Callable[[], Iterator[TokenBatch]] | None:
        """Makes one pass over the held-out batches; None without validation data."""
        if self.validation is None:
            return None
        size = self.config.policy.train_global_batch_size
        return partial(
            sequential_batches, self.validation, size, self.pad_token_id, self.config.dpo.val_batches, collate_pairs
        )

    def measured(self, policy: PolicyInterface, steps: range, console: ConsoleLogger) -> "Pairs":
        """The same pairs with what the reference gives those that are going to be used.

        Args:
            policy: Has the weights that the run began with.
            steps: From the steps that are done to the last one.
            console: Shows how far it is.
        """
        measure = partial(_measure, policy, self.pad_token_id, console)
        training = measure(self.training, batches_to_measure(self.loader(), steps), "training")
        validation = self.validation
        if validation is not None and steps:
            size = self.config.policy.train_global_batch_size
            starts = range(0, len(validation), size)[: self.config.dpo.val_batches]
            batches = [range(start, min(start + size, len(validation))) for start in starts]
            validation = measure(validation, batches, "validation")
        return Pairs(self.config, self.pad_token_id, training, validation)


def run_dpo(config: DPOMasterConfig, attempt: RunLaunch, stop_signals: StopSignals) -> None:
    """Runs direct preference optimization from start to end.

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
    training = load_pairs(config, config.data.train, tokenizer, console)
    held_out = load_pairs(config, config.data.validation, tokenizer, console) if config.data.validation else None
    pairs = Pairs(config, pad_token_id(tokenizer), training, held_out)
    num_steps = num_training_steps(config.dpo, len(pairs.loader()))
    fingerprints = {
        TRAINING_DATA: samples_fingerprint(config.data.train.path, _token_ids(training)),
        MODEL: model_fingerprint(config.policy.model_name),
    }
    with prepared_run(config, attempt, stop_signals, console, num_steps, fingerprints) as run:
        if run.is_complete:
            return
        in_step = config.dpo.reference_logprobs == "in_step"
        with (
            running_cluster(config, console) as cluster,
            running_policy(
                config, cluster, console, model, seed=config.dpo.seed, num_steps=num_steps, keep_reference=in_step
            ) as policy,
        ):
            if not in_step:
                # Until a checkpoint is loaded, the policy is the reference, after a restart too.
                steps = range(run.resume.step if run.resume is not None else 0, num_steps)
                pairs = pairs.measured(policy, steps, console)
            restore(run, policy)
            with open_run(run, policy) as (run_folder, loggers), keeping(run, policy, run_folder, loggers) as recorder:
                summary = train_dpo(config.dpo, policy, pairs.loader(), pairs.validation_batches(), recorder)
                ending = end_run(run, policy, summary, run_folder)
    console.message(ending)


def load_pairs(
    config: DPOMasterConfig, source: DataSourceConfig, tokenizer: Any, console: ConsoleLogger
) -> PreferenceDataset:
    """Reads and tokenises one set of pairs, and tells what was cut, dropped or skipped.

    Raises:
        DataError: A file is missing or a line cannot be used.
    """
    with console.phase(f"reading {source.path}"), load_limit(config.data.load_timeout_s, source.path):
        pairs = load_preferences(
            source.path, source.split, tokenizer, config.policy.max_total_sequence_length, config.data.on_bad_line
        )
    console.message(pairs.report.summary())
    return pairs


def _measure(
    policy: PolicyInterface,
    pad_token_id: int,
    console: ConsoleLogger,
    pairs: PreferenceDataset,
    batches: Sequence[Sequence[int]],
    name: str,
) -> PreferenceDataset:
    with console.phase(f"measuring {sum(map(len, batches)):,} {name} pairs with the reference model"):
        return measured_beforehand(policy.logprobs, pairs, batches, pad_token_id)


def _token_ids(pairs: PreferenceDataset) -> Iterator[Any]:
    for pair in pairs:
        yield from (pair.chosen.input_ids, pair.rejected.input_ids)
