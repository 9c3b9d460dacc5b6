# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Entry point of direct preference optimization: makes batches of pairs, computes the reference's log-probabilities,
then runs the loop."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nemo_rl_moe.algorithms.dpo import batches_to_measure, precompute_reference_sums, train_dpo
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.checkpoints.fingerprints import MODEL, model_fingerprint
from nemo_rl_moe.config.schema import DPOMasterConfig
from nemo_rl_moe.data.preferences import PreferenceDataset
from nemo_rl_moe.launch.pairs import Pairs, read_pairs
from nemo_rl_moe.launch.training_run import TrainingRun
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

if TYPE_CHECKING:
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


def run_dpo(config: DPOMasterConfig, run: TrainingRun) -> None:
    """Run direct preference optimization from start to end."""
    pairs = read_pairs(config, config.dpo, run.prepare_model(), run.console)
    # The model's first weights are the reference model.
    fingerprints = {**pairs.fingerprints(), MODEL: model_fingerprint(config.policy.model_name)}
    run.begin(num_training_steps(config.dpo, len(pairs.loader())), fingerprints, len(pairs.training))
    if run.is_complete:
        return
    policy = run.start_policy()
    if config.dpo.reference_logprobs == "precompute":
        # Until a checkpoint is loaded, the policy has the reference's weights, also after a restart.
        pairs = with_reference_sums(pairs, policy, run.remaining_steps, run.console)
    run.restore()
    recorder = run.open()
    run.end(train_dpo(config.dpo, policy, pairs.loader(), pairs.validation_batches(), recorder))


def with_reference_sums(pairs: Pairs, policy: "MegatronPolicy", steps: range, console: ConsoleLogger) -> Pairs:
    """Return the pairs with the reference model's log-probabilities added to all pairs that the run will use.

    Args:
        policy: The policy. It must still have the weights with which the run began.
        steps: The remaining steps.
    """

    def measure(dataset: PreferenceDataset, batches: Sequence[Sequence[int]], name: str) -> PreferenceDataset:
        with console.phase(f"measuring {sum(map(len, batches)):,} {name} pairs with the reference model"):
            return precompute_reference_sums(policy.logprobs, dataset, batches, pairs.pad_token_id)

    training = measure(pairs.training, batches_to_measure(pairs.loader(), steps), "training")
    validation = pairs.validation
    if validation is not None and steps:
        size = pairs.batch_size
        starts = range(0, len(validation), size)[: pairs.schedule.val_batches]
        batches = [range(start, min(start + size, len(validation))) for start in starts]
        validation = measure(validation, batches, "validation")
    return replace(pairs, training=training, validation=validation)
