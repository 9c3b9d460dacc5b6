# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of direct preference optimization: makes batches of pairs, computes the reference's log-probabilities,
then runs the loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.algorithms.dpo import batches_to_measure, precompute_reference_sums, train_dpo
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.checkpoints.fingerprints import MODEL, TRAINING_DATA, model_fingerprint, samples_fingerprint
from nemo_rl_moe.config.schema import DPOMasterConfig
from nemo_rl_moe.config.schema_run import DataSourceConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader, sequential_batches, token_ids_and_images
from nemo_rl_moe.data.preferences import PreferenceDataset, collate_pairs, load_preferences
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.distributed.batch import TokenBatch
from nemo_rl_moe.launch.setup import read_samples
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


@dataclass(frozen=True)
class Pairs:
    """The preference pairs of a run, and functions that make batches of them.

    Attributes:
        validation: The held-out pairs. None: no validation.
    """

    config: DPOMasterConfig
    pad_token_id: int
    training: PreferenceDataset
    validation: PreferenceDataset | None

    def loader(self) -> GlobalBatchLoader:
        """Return the loader of training batches."""
        config, size = self.config, self.config.policy.train_global_batch_size
        return GlobalBatchLoader(
            self.training, size, self.pad_token_id, config.dpo.seed, config.data.shuffle, collate_pairs
        )

    def validation_batches(self) -> Callable[[], Iterator[TokenBatch]] | None:
        """Return a function that makes one pass over the held-out batches, or None without validation data."""
        if self.validation is None:
            return None
        size = self.config.policy.train_global_batch_size
        return partial(
            sequential_batches, self.validation, size, self.pad_token_id, self.config.dpo.val_batches, collate_pairs
        )

    def measured(self, policy: "MegatronPolicy", steps: range, console: ConsoleLogger) -> "Pairs":
        """Return the pairs with the reference model's log-probabilities added to all pairs that the run will use.

        Args:
            policy: The policy. It must still have the weights with which the run began.
            steps: The remaining steps.
        """

        def measure(pairs: PreferenceDataset, batches: Sequence[Sequence[int]], name: str) -> PreferenceDataset:
            with console.phase(f"measuring {sum(map(len, batches)):,} {name} pairs with the reference model"):
                return precompute_reference_sums(policy.logprobs, pairs, batches, self.pad_token_id)

        training = measure(self.training, batches_to_measure(self.loader(), steps), "training")
        validation = self.validation
        if validation is not None and steps:
            size = self.config.policy.train_global_batch_size
            starts = range(0, len(validation), size)[: self.config.dpo.val_batches]
            batches = [range(start, min(start + size, len(validation))) for start in starts]
            validation = measure(validation, batches, "validation")
        return Pairs(self.config, self.pad_token_id, training, validation)


def run_dpo(config: DPOMasterConfig, run: TrainingRun) -> None:
    """Run direct preference optimization from start to end."""
    model = run.prepare_model()
    tokenizer = model.tokenizer

    def read(source: DataSourceConfig) -> PreferenceDataset:
        return read_samples(load_preferences, config, source, tokenizer, run.console, model.image_rule, model.speech)

    training = read(config.data.train)
    held_out = None if config.data.validation is None else read(config.data.validation)
    pairs = Pairs(config, pad_token_id(tokenizer), training, held_out)
    fingerprints = {
        TRAINING_DATA: samples_fingerprint(config.data.train.path, _token_ids(training)),
        MODEL: model_fingerprint(config.policy.model_name),  # these weights are the reference model
    }
    run.begin(num_training_steps(config.dpo, len(pairs.loader())), fingerprints, len(training))
    if run.is_complete:
        return
    policy = run.start_policy()
    if config.dpo.reference_logprobs == "precompute":
        # Until a checkpoint is loaded, the policy has the reference's weights, also after a restart.
        pairs = pairs.measured(policy, run.remaining_steps, run.console)
    run.restore()
    recorder = run.open()
    run.end(train_dpo(config.dpo, policy, pairs.loader(), pairs.validation_batches(), recorder))


def _token_ids(pairs: PreferenceDataset) -> Iterator[Any]:
    for pair in pairs:
        yield from token_ids_and_images((pair.chosen, pair.rejected))
