# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a reward model without training: the share of held-out pairs whose chosen response scores higher."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nemo_rl_moe.algorithms.evaluation import Estimate, estimate
from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.config.loading import dump_resolved
from nemo_rl_moe.config.schema import RMMasterConfig
from nemo_rl_moe.data.loader import sequential_batches
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.errors import ConfigurationError, counted
from nemo_rl_moe.launch.evaluate import OUTPUT_NAME, RESULTS_FILE, adapter_of, model_of
from nemo_rl_moe.launch.output_folder import next_free, staged
from nemo_rl_moe.launch.rm import collating, reading
from nemo_rl_moe.launch.setup import ModelRun, announce_moe, read_samples
from nemo_rl_moe.models.classifiers import classifier_problem
from nemo_rl_moe.models.hf_files import load_config_json
from nemo_rl_moe.models.peft_files import scores_sequences
from nemo_rl_moe.runs.folder.folder import write_run_files
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

SCORES_FILE = "scores.jsonl"


def evaluate_rm(config: RMMasterConfig, output: Path | None) -> None:
    """Score the held-out pairs with the reward model of a configuration, print the result, and write it to a folder.

    Args:
        output: Folder of the output. None: the next free `eval_NNN` in `logger.log_dir`.
    """
    console = ConsoleLogger(total_steps=0, live=config.logger.console.live)
    with ModelRun(config, console) as run:
        scores = score_pairs(config, run)
    console.close()
    _require_finite(model_of(config), scores)
    folder = output if output is not None else next_free(Path(config.logger.log_dir), OUTPUT_NAME)
    estimates = estimates_of(torch.tensor(list(scores.values()), dtype=torch.float64))
    _write(config, scores, estimates, folder)
    console.message(f"\n{model_of(config)}: {counted(len(scores), 'pair')}")
    for name, value in estimates.items():
        console.message(f"  {name:<22}{value}")
    console.message("  ± standard error over pairs")
    console.message(f"{folder / RESULTS_FILE}, and the scores, a line for each pair: {folder / SCORES_FILE}")


def score_pairs(config: RMMasterConfig, run: ModelRun) -> dict[str, list[float]]:
    """Return id of a held-out pair -> score of its chosen and of its rejected response."""
    model, source = run.prepare_model(), config.data.validation
    assert source is not None  # the command has checked this
    adapter = adapter_of(config)
    brings_head = adapter is not None and scores_sequences(Path(adapter))
    problem = classifier_problem(load_config_json(str(model.source.folder())), model.hf_config)
    if problem is not None and not brings_head:
        raise ConfigurationError(f"policy.model_name: got {config.policy.model_name}, {problem}")
    pairs = read_samples(reading(config), config, source, model.tokenizer, run.console, model.image_rule, model.speech)
    policy = run.start_policy()
    announce_moe(run.console, policy.moe_configuration, policy.moe_configuration_sources)
    size, padding = config.policy.train_global_batch_size, pad_token_id(model.tokenizer)
    scores: dict[str, list[float]] = {}
    with run.console.phase(f"scoring {counted(len(pairs), 'pair')}"):
        for batch in sequential_batches(pairs, size, padding, config.rm.val_batches, collating(model)):
            names = [name.removesuffix(" (chosen)") for name in batch.sample_ids[0::2]]
            scores |= zip(names, policy.scores(batch).view(-1, 2).tolist(), strict=True)
    return scores


def _require_finite(model: str, scores: Mapping[str, list[float]]) -> None:
    """Raise a `ConfigurationError` if scores are NaN or infinite: they compare with no other, and JSON has no such
    numbers."""
    if broken := {name: pair for name, pair in scores.items() if not all(map(math.isfinite, pair))}:
        name, (chosen, rejected) = next(iter(broken.items()))
        raise ConfigurationError(
            f"policy.model_name: got {model}, which scores {len(broken):,} of {counted(len(scores), 'pair')} with NaN"
            f" or infinity, expected finite scores; the first: {name} (chosen {chosen:g}, rejected {rejected:g})"
        )


def estimates_of(scores: Float[Tensor, "pairs 2"]) -> dict[str, Estimate]:
    """Return the metrics of a validation, each a mean over pairs. Equal scores count as wrong."""
    chosen, rejected = scores.T
    return {
        "accuracy": estimate((chosen > rejected).double()),
        "reward_margin": estimate(chosen - rejected),
        "rewards_chosen_mean": estimate(chosen),
        "rewards_rejected_mean": estimate(rejected),
    }


def _write(
    config: RMMasterConfig, scores: Mapping[str, list[float]], estimates: Mapping[str, Estimate], folder: Path
) -> None:
    source = config.data.validation
    assert source is not None
    results: dict[str, Any] = {
        "model": config.policy.model_name,
        "adapter": adapter_of(config),
        "pairs_from": source.path,
        "num_pairs": len(scores),
        **{name: asdict(value) for name, value in estimates.items()},
    }
    lines = [
        json.dumps({"sample_id": name, "chosen": chosen, "rejected": rejected})
        for name, (chosen, rejected) in scores.items()
    ]
    try:
        with staged(folder) as staging:
            staging.mkdir()
            write_run_files(staging, dump_resolved(config), {})
            write_whole(staging / SCORES_FILE, "".join(f"{line}\n" for line in lines))
            write_whole(staging / RESULTS_FILE, f"{json.dumps(results, indent=2)}\n")
    except OSError as error:
        raise ConfigurationError(f"--output: {folder}: {error.strerror}; no output is written") from error
