# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts a run of GRPO together: prompts, environment, workers, generation, loggers, loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemo_rl_moe.algorithms.grpo import Observers, num_updates_per_step, train_grpo
from nemo_rl_moe.algorithms.loop import num_training_steps
from nemo_rl_moe.algorithms.rollouts import Roller
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_grpo import GenerationConfig, PromptSourceConfig
from nemo_rl_moe.data.prompts import PromptDataset, PromptLoader, load_prompts
from nemo_rl_moe.data.tokenizer import load_tokenizer, pad_token_id
from nemo_rl_moe.environments.registry import validate_environment
from nemo_rl_moe.environments.scorer import EnvironmentScorer
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.generation.megatron_backend import MegatronGeneration
from nemo_rl_moe.launch.common import (
    check_model,
    final_weights_folder,
    open_run,
    running_cluster,
    running_policy,
    save_final_weights,
    summarise,
)
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.loggers.expert_load import ExpertLoadWriter
from nemo_rl_moe.loggers.samples import SampleLog

_ENGINES = {"megatron": MegatronGeneration}
"""By the name of `policy.generation.backend`."""


def run_grpo(config: GRPOMasterConfig) -> None:
    """Runs GRPO from start to end.

    Everything that can be wrong with the input is found before a worker starts or a file is written.

    Args:
        config: A checked configuration.

    Raises:
        UserError: The model, the tokenizer, the environment or the prompts cannot be used.
        WorkerDiedError: A worker failed.
    """
    console = ConsoleLogger(total_steps=0, live=config.logger.console.live)
    validate_environment(config.env)
    check_model(config, console)
    tokenizer = load_tokenizer(config.policy.tokenizer.name, config.policy.tokenizer.chat_template)
    sampling = sampling_parameters(config.policy.generation, tokenizer)
    training = read_prompts(config, config.data.train, tokenizer, console)
    loader = PromptLoader(training, config.grpo.num_prompts_per_step, config.grpo.seed, config.data.shuffle)
    held_out = read_prompts(config, config.data.validation, tokenizer, console) if config.data.validation else None
    num_steps = num_training_steps(config.grpo, len(loader))
    console.begin(num_steps)
    with (
        running_cluster(config, console) as cluster,
        running_policy(
            config,
            cluster,
            console,
            seed=config.grpo.seed,
            num_steps=num_steps * num_updates_per_step(config),
            keep_reference=config.loss_fn.reference_policy_kl_penalty > 0,
        ) as policy,
        running_scorer(config, console) as scorer,
        open_run(config, policy, console) as (run_folder, loggers),
        SampleLog(
            run_folder, console, config.logger.num_samples_to_print, config.logger.num_samples_to_save
        ) as samples,
    ):
        weights = final_weights_folder(config, run_folder)
        summary = train_grpo(
            config,
            policy,
            Roller(_ENGINES[config.policy.generation.backend](policy), scorer, tokenizer.decode),
            loader,
            held_out,
            sampling,
            pad_token_id(tokenizer),
            loggers,
            Observers(
                log_expert_load=ExpertLoadWriter(run_folder, console.warn).write,
                log_samples=samples.write,
                save=lambda: save_final_weights(policy, weights, console),
            ),
        )
    if summary.num_steps < num_steps:
        console.warn(
            f"dynamic sampling used up the prompts of all epochs after {summary.num_steps} of {num_steps} steps"
        )
    console.message(summarise(config, summary, run_folder, weights))


def sampling_parameters(generation: GenerationConfig, tokenizer: Any) -> SamplingParameters:
    """How training responses are drawn.

    Raises:
        ConfigurationError: Nothing would end a response.
    """
    stop_token_ids = generation.stop_token_ids
    if stop_token_ids is None:
        if tokenizer.eos_token_id is None:
            raise ConfigurationError(
                "policy.generation.stop_token_ids: null means the tokenizer's end token; it has none, so name token ids"
            )
        stop_token_ids = [tokenizer.eos_token_id]
    return SamplingParameters(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        stop_token_ids=tuple(stop_token_ids),
        stop_strings=tuple(generation.stop_strings or ()),
    )


def read_prompts(
    config: GRPOMasterConfig, source: PromptSourceConfig, tokenizer: Any, console: ConsoleLogger
) -> PromptDataset:
    """Reads, or draws, and tokenises one set of prompts, and tells what was left out.

    Raises:
        DataError: A file is missing or a line cannot be used.
    """
    longest = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    what = f"reading {source.path}" if source.path else f"drawing {source.num_items} prompts"
    with console.phase(what):
        prompts = load_prompts(source, config.data, tokenizer, longest, config.env)
    console.message(prompts.report.summary())
    return prompts


@contextmanager
def running_scorer(config: GRPOMasterConfig, console: ConsoleLogger) -> Iterator[EnvironmentScorer]:
    """Starts the environment's workers, and stops them whatever happens."""
    with console.phase(f"starting the environment ({config.env.name})"):
        scorer = EnvironmentScorer(config.env)
    try:
        yield scorer
    finally:
        scorer.shutdown()
