# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning."""

import time
from collections.abc import Callable, Iterator

from nemo_rl_moe.algorithms.loop import RunSummary, num_training_steps, validation_is_due
from nemo_rl_moe.algorithms.losses import sft_loss
from nemo_rl_moe.algorithms.step_metrics import timing_metrics, training_metrics, validation_metrics
from nemo_rl_moe.config.schema import SFTConfig
from nemo_rl_moe.data.loader import GlobalBatchLoader
from nemo_rl_moe.distributed.token_batch import TokenBatch
from nemo_rl_moe.loggers.interface import MetricLogger
from nemo_rl_moe.models.policy.interfaces import ExpertLoad, PolicyInterface


def train_sft(
    config: SFTConfig,
    policy: PolicyInterface,
    loader: GlobalBatchLoader,
    validation_batches: Callable[[], Iterator[TokenBatch]] | None,
    logger: MetricLogger,
    log_expert_load: Callable[[int, ExpertLoad], None],
) -> RunSummary:
    """Trains for the configured steps, validates when due, and logs each step once.

    Args:
        config: The `sft` section.
        policy: What is trained.
        loader: The training batches.
        validation_batches: Makes one pass over the held-out batches; None without validation data.
        logger: Gets one record for each step; a validation before the first step is step 0.
        log_expert_load: Gets the load matrix of each step, where MoE metrics are tracked.
    """
    num_steps = num_training_steps(config, len(loader))
    validations: list[dict[str, float]] = []
    training: dict[str, float] = {}

    def validate() -> dict[str, float]:
        assert validation_batches is not None  # the schema asks for data where a validation is asked for
        validations.append(run_validation(policy, validation_batches()))
        return validations[-1]

    if config.val_at_start:
        logger.log_step(0, validate())
    for step, batch in _numbered_batches(loader, num_steps):
        started = time.perf_counter()
        result = policy.train(batch, sft_loss)
        training = training_metrics(result)
        metrics = training | timing_metrics("train", time.perf_counter() - started, result.num_tokens)
        if validation_is_due(config, step, num_steps):
            metrics |= validate()
        logger.log_step(step, metrics)
        if result.expert_load is not None:
            log_expert_load(step, result.expert_load)
    return RunSummary.of(num_steps, validations, training)


def run_validation(policy: PolicyInterface, batches: Iterator[TokenBatch]) -> dict[str, float]:
    """Loss and accuracy over all held-out batches, each weighed by its trained tokens."""
    started = time.perf_counter()
    totals: dict[str, float] = {}
    num_tokens = 0
    for batch in batches:
        measured = validation_metrics(policy.evaluate(batch, sft_loss))
        weight = batch.num_valid_tokens()
        num_tokens += weight
        for name in ("val/loss", "val/accuracy"):
            totals[name] = totals.get(name, 0.0) + measured[name] * weight
    means = {name: total / num_tokens for name, total in totals.items()}
    return means | timing_metrics("validation", time.perf_counter() - started)


def _numbered_batches(loader: GlobalBatchLoader, num_steps: int) -> Iterator[tuple[int, TokenBatch]]:
    step = 0
    while step < num_steps:
        for batch in loader.epoch(step // len(loader)):
            step += 1
            yield step, batch
            if step == num_steps:
                return
