# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Validation of a model without training: scores responses to held-out prompts, and estimates means with standard
errors."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.algorithms.evaluation import Estimate, EvaluationSummary, summarise_evaluation
from nemo_rl_moe.algorithms.grpo_batch import failure_rule
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.config.loading import dump_resolved
from nemo_rl_moe.config.schema import GRPOMasterConfig, MasterConfig
from nemo_rl_moe.errors import ConfigurationError, counted
from nemo_rl_moe.launch.grpo import prepare_rollouts, start_rollouts
from nemo_rl_moe.launch.inference import answer_in_chunks, give_weights
from nemo_rl_moe.launch.output_folder import next_free, staged
from nemo_rl_moe.launch.setup import ModelRun, announce_moe
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.folder import write_run_files
from nemo_rl_moe.runs.folder.samples import SampleLog
from nemo_rl_moe.runs.folder.saved_samples import SAMPLES_FILE_NAME
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

RESULTS_FILE = "results.json"
OUTPUT_NAME = "eval"
"""Default name of an output folder in `logger.log_dir`. A number follows it."""


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation. It has the same metrics as a run's validation, and the trajectories in order of their
    groups."""

    summary: EvaluationSummary
    metrics: Mapping[str, float]
    trajectories: list[Trajectory]


def evaluate(config: GRPOMasterConfig, output: Path | None, threshold: float | None) -> None:
    """Evaluate the model of a GRPO configuration, print the result, and write it to a folder.

    Args:
        output: Folder of the output. None: the next free `eval_NNN` in `logger.log_dir`.
        threshold: A response passes if its reward is at least this. None: the environment decides.
    """
    console = ConsoleLogger(total_steps=0, live=config.logger.console.live)
    with ModelRun(config, console) as run:
        evaluation = run_evaluation(config, run, threshold)
    console.close()
    folder = output if output is not None else next_free(Path(config.logger.log_dir), OUTPUT_NAME)
    _write(config, evaluation, folder, console, threshold)
    for line in result_lines(config, evaluation, threshold):
        console.message(line)
    console.message(f"{folder / RESULTS_FILE}, and the responses, a line each: {folder / SAMPLES_FILE_NAME}")


def run_evaluation(config: GRPOMasterConfig, run: ModelRun, threshold: float | None) -> Evaluation:
    """Generate responses to the held-out prompts, let the environment score them, and return the result."""
    prepared = prepare_rollouts(config, run)
    policy = run.start_policy()
    announce_moe(run.console, policy.moe_configuration, policy.moe_configuration_sources)
    runner = start_rollouts(config, run, policy, prepared)
    give_weights(config, run, policy, runner.engine, prepared.model)
    prompts, samples = prepared.held_out[: config.grpo.max_val_samples], config.grpo.val_num_generations
    number = len(prompts) * samples
    with run.console.phase(
        f"generating {counted(number, 'response')} to {counted(len(prompts), 'prompt')}"
    ) as progress:
        answer_in_chunks(config, runner.engine)
        # With other drivers, the number of responses is unknown.
        is_known = all(env.driver.named is None for env in config.env.environments.values())
        failures = failure_rule(config)
        validate = Validator(
            config.grpo,
            runner,
            prompts,
            prepared.sampling,
            failures,
            lambda done: progress(done / number) if is_known else None,
        )
        metrics = validate()
    summary = summarise_evaluation(validate.trajectories, samples, threshold, failures)
    return Evaluation(summary, metrics, validate.trajectories)


def result_lines(config: GRPOMasterConfig, evaluation: Evaluation, threshold: float | None) -> list[str]:
    """Return the result as lines for the console."""
    summary, samples = evaluation.summary, config.grpo.val_num_generations
    num_prompts = len(evaluation.trajectories) // samples
    rows: list[tuple[str, Estimate | str]] = [
        ("accuracy", summary.accuracy),
        ("reward", summary.reward or "none, as no response could be scored"),
    ]
    rows += [(f"pass@{k}", value) for k, value in summary.pass_at_k.items() if samples > 1]
    if summary.majority is not None:
        rows.append((f"maj@{samples}", summary.majority))
    lines = [
        "",
        f"{model_of(config)}: {counted(num_prompts, 'prompt')}, {counted(samples, 'response')} each;"
        f" {pass_rule(threshold)}",
        *(f"  {name:<10}{value}" for name, value in rows),
        "  ± standard error over prompts",
    ]
    faults = {name: count for name, count in evaluation.metrics.items() if name.startswith("val/env/num_") and count}
    lines += [f"warning: {name.removeprefix('val/')}: {count:.0f} responses" for name, count in faults.items()]
    return lines


def model_of(config: MasterConfig) -> str:
    """Return the name of the policy's model, with its initial adapter if there is one."""
    adapter = adapter_of(config)
    return config.policy.model_name if adapter is None else f"{config.policy.model_name} with the adapter {adapter}"


def adapter_of(config: MasterConfig) -> str | None:
    """Return the folder of the policy's initial adapter, or None."""
    return None if config.policy.lora is None else config.policy.lora.path


def pass_rule(threshold: float | None) -> str:
    """Return the rule by which a response passes, in words."""
    if threshold is None:
        return "a response passes if the reward function counts it as right"
    return f"a response passes with a reward of at least {threshold:g}"


def _write(
    config: GRPOMasterConfig, evaluation: Evaluation, folder: Path, console: ConsoleLogger, threshold: float | None
) -> None:
    try:
        with staged(folder) as staging:
            staging.mkdir()
            write_run_files(staging, dump_resolved(config), {})
            num_to_print = config.logger.num_samples_to_print
            with SampleLog(staging, console, num_to_print, None) as samples:
                samples.write(0, "val", evaluation.trajectories)
            results = json.dumps(results_of(config, evaluation, threshold), indent=2)
            write_whole(staging / RESULTS_FILE, f"{results}\n")
    except OSError as error:
        raise ConfigurationError(f"--output: {folder}: {error.strerror}; no output is written") from error


def results_of(config: GRPOMasterConfig, evaluation: Evaluation, threshold: float | None) -> dict[str, Any]:
    """Return the content of `results.json`."""
    source, loop = config.data.validation, config.grpo
    assert source is not None  # the command has checked this
    summary = evaluation.summary
    return {
        "model": config.policy.model_name,
        "adapter": adapter_of(config),
        "backend": config.policy.generation.backend,
        "prompts_from": source.path or "sampled",
        "num_prompts": len(evaluation.trajectories) // loop.val_num_generations,
        "responses_per_prompt": loop.val_num_generations,
        "temperature": loop.val_temperature,
        "seed": loop.seed,
        "passes": pass_rule(threshold),
        "threshold": threshold,
        "accuracy": asdict(summary.accuracy),
        "reward": None if summary.reward is None else asdict(summary.reward),
        "pass_at_k": {str(k): asdict(value) for k, value in summary.pass_at_k.items()},
        "majority_vote": None if summary.majority is None else asdict(summary.majority),
        "metrics": dict(evaluation.metrics),
    }
