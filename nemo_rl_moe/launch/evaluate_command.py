# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts, options and checks of the command `nemo-rl-moe evaluate`. Imports no torch."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.files import WHERE_THE_SHIPPED_ARE_LISTED
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.config.schema import GRPOMasterConfig, RMMasterConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.launch.output_folder import require_free

SUMMARY = "validate a model without training it: accuracy, reward, pass@k and majority vote on the held-out data"
EXAMPLES = """\
Takes the configuration of a GRPO run and does what a validation of that run does, with the same prompts
(data.validation, grpo.max_val_samples), reward function (env), engine (policy.generation) and random numbers
(grpo.seed). Nothing is trained. It also reads

  grpo.val_num_generations   number n of responses to each prompt; pass@k is reported for k = 1, 2, 4, ... and n
  grpo.val_temperature       sampling temperature; 0: greedy, with one response
  policy.model_name          a model's folder, a checkpoint of a run, or a hub's name

A response passes if the reward function counts it as right (for a plain number: 1 or more), or, with --threshold R, if
its reward is at least R. pass@k is the unbiased estimate of Chen et al., arXiv:2107.03374, eq. 1. maj@n is the accuracy
of the most frequent answer (env.reward.kind exact or math; ties count in proportion). ± is the standard error over
prompts.

Writes results.json, samples.jsonl (prompt, response, reward) and the configuration, completely or not at all, to
--output, or to the next free LOG_DIR/eval_001, eval_002, ... with logger.log_dir for LOG_DIR.

With the configuration of a reward model (rm) it scores the held-out pairs (data.validation, rm.val_batches), and writes
scores.jsonl (sample_id, chosen, rejected). accuracy is the share of pairs whose chosen response scores higher.

examples:
  nemo-rl-moe evaluate --config grpo_tiny_moe.yaml
  nemo-rl-moe evaluate --config grpo_tiny_moe.yaml policy.model_name=results/grpo_tiny_moe/step_30 \\
      grpo.val_num_generations=8
  nemo-rl-moe evaluate --config my_run.yaml --output greedy grpo.val_temperature=0 grpo.val_num_generations=1
  nemo-rl-moe evaluate --config my_run.yaml --threshold 0.5 policy.generation.backend=vllm
  nemo-rl-moe evaluate --config rm_tiny_moe.yaml policy.model_name=results/rm_tiny_moe/final
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to the parser."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of GRPO or of a reward model, or the name of a shipped one such as grpo_tiny_moe.yaml",
    )
    parser.add_argument("--output", metavar="DIR", help="a new folder (default: the next LOG_DIR/eval_NNN)")
    parser.add_argument(
        "--threshold",
        type=_finite,
        metavar="R",
        help="a response passes if its reward is at least R (default: the reward function decides)",
    )


def load(options: argparse.Namespace, overrides: Sequence[str]) -> GRPOMasterConfig | RMMasterConfig:
    """Load and return the configuration, and check that it can be evaluated and that the output can be written."""
    if options.config is None:
        raise ConfigurationError(f"evaluate: --config FILE is missing{WHERE_THE_SHIPPED_ARE_LISTED}")
    config = load_any_config(options.config, overrides)
    if not isinstance(config, GRPOMasterConfig | RMMasterConfig):
        raise ConfigurationError(
            f"evaluate: {options.config} is for the algorithm {algorithm_of(config).name}, expected a configuration of"
            " grpo, which has prompts and an environment that scores, or of rm, which has pairs"
        )
    if isinstance(config, RMMasterConfig) and options.threshold is not None:
        raise ConfigurationError(
            f"--threshold: got {options.threshold:g}, expected none with a reward model, whose scores have no unit"
        )
    if config.data.validation is None:
        data = "pairs" if isinstance(config, RMMasterConfig) else "prompts"
        raise ConfigurationError(
            f"data.validation: got null, expected the {data} to evaluate with, such as data.validation.path=FILE.jsonl"
        )
    if options.output is not None:
        require_free(Path(options.output))
    return config


def run(options: argparse.Namespace, config: GRPOMasterConfig | RMMasterConfig) -> None:
    """Run the command with the configuration that `load` has returned."""
    output = Path(options.output) if options.output is not None else None
    if isinstance(config, RMMasterConfig):
        from nemo_rl_moe.launch.evaluate_rm import evaluate_rm

        evaluate_rm(config, output)
        return
    from nemo_rl_moe.launch.evaluate import evaluate

    evaluate(config, output, options.threshold)


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number")
    return number
