# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Puts a run of GRPO together: prompts, environment, workers, generation, loggers, loop."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nemo_rl_moe.algorithms.grpo import train_grpo
from nemo_rl_moe.algorithms.step_recorder import num_training_steps
from nemo_rl_moe.checkpoints.changes import MODEL, TRAINING_DATA, model_fingerprint, samples_fingerprint
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.config.schema_grpo import GenerationConfig, PromptSourceConfig
from nemo_rl_moe.data.prompts import Prompt, PromptDataset, PromptLoader, load_prompts, without_training_prompts
from nemo_rl_moe.data.sources import load_limit
from nemo_rl_moe.data.tokenizer import pad_token_id
from nemo_rl_moe.environments.registry import validate_environment
from nemo_rl_moe.environments.scorer import EnvironmentScorer
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GenerationInterface, SamplingParameters
from nemo_rl_moe.generation.megatron import MegatronGeneration
from nemo_rl_moe.launch.driver_process import RunLaunch, StopSignals
from nemo_rl_moe.launch.setup import prepare_model, running_cluster, running_policy
from nemo_rl_moe.launch.training_run import end_run, keeping, open_run, prepared_run, restore
from nemo_rl_moe.loggers.console import ConsoleLogger
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.rollouts.rollouts import Roller
from nemo_rl_moe.run_folder.samples import SampleLog

_ENGINES = {"megatron": MegatronGeneration}
"""By the name of `policy.generation.backend`."""


def run_grpo(config: GRPOMasterConfig, attempt: RunLaunch, stop_signals: StopSignals) -> None:
    """Runs GRPO from start to end.

    Everything that can be wrong with the input is found before a worker starts or a file is written.

    Args:
        config: A checked configuration.
        attempt: Which run this is, and which of its attempts.
        stop_signals: Tell when the run is asked to stop.

    Raises:
        UserError: The model, the tokenizer, the environment or the prompts cannot be used.
        WorkerDiedError: A worker failed.
    """
    console = ConsoleLogger(total_steps=0, live=config.logger.console.live)
    validate_environment(config.env)
    model = prepare_model(config, console)
    tokenizer = model.tokenizer
    padding = pad_token_id(tokenizer)
    sampling = sampling_parameters(config.policy.generation, tokenizer, model.hf_config.vocab_size)
    training = read_prompts(config, config.data.train, tokenizer, console)
    loader = PromptLoader(training, config.grpo.num_prompts_per_step, config.grpo.seed, config.data.shuffle)
    held_out = None
    if config.data.validation is not None:
        held_out = read_prompts(config, config.data.validation, tokenizer, console, training)
    num_steps = num_training_steps(config.grpo, len(loader))
    fingerprints = {
        TRAINING_DATA: samples_fingerprint(config.data.train.path or "drawn", (p.token_ids for p in training)),
    }
    keeps_reference = config.loss_fn.reference_policy_kl_penalty > 0
    if keeps_reference:
        fingerprints[MODEL] = model_fingerprint(config.policy.model_name)
    with prepared_run(config, attempt, stop_signals, console, num_steps, fingerprints) as run:
        if run.is_complete:
            return
        with (
            running_cluster(config, console) as cluster,
            running_policy(
                config,
                cluster,
                console,
                model,
                seed=config.grpo.seed,
                num_steps=num_steps * config.updates_per_step,
                keep_reference=keeps_reference,
            ) as policy,
            running_scorer(config, console) as scorer,
        ):
            restore(run, policy)
            with (
                open_run(run, policy) as (run_folder, loggers),
                running_generation(config, policy) as generation,
                SampleLog(
                    run_folder, console, config.logger.num_samples_to_print, config.logger.num_samples_to_save
                ) as samples,
                keeping(run, policy, run_folder, loggers, samples.write) as recorder,
            ):
                summary = train_grpo(
                    config,
                    policy,
                    Roller(generation, scorer, tokenizer.decode),
                    loader,
                    held_out,
                    sampling,
                    padding,
                    recorder,
                )
                ending = end_run(run, policy, summary, run_folder)
        if summary.stopped_for is None and summary.num_steps < num_steps:
            console.warn(
                f"dynamic sampling used up the prompts of all epochs after {summary.num_steps} of {num_steps} steps"
            )
    console.message(ending)


def sampling_parameters(generation: GenerationConfig, tokenizer: Any, vocabulary_size: int) -> SamplingParameters:
    """How training responses are drawn.

    Args:
        generation: What the user wants.
        tokenizer: Has the end token that ends responses where the user names none.
        vocabulary_size: Token ids that the model can draw are below this.

    Raises:
        ConfigurationError: Nothing would end a response, or a token that is to end it can never be drawn.
    """
    stop_token_ids = generation.stop_token_ids
    if stop_token_ids is None:
        if tokenizer.eos_token_id is None:
            raise ConfigurationError(
                "policy.generation.stop_token_ids: null means the tokenizer's end token; it has none, so name token ids"
            )
        stop_token_ids = [tokenizer.eos_token_id]
    elif not stop_token_ids and not generation.stop_strings:
        raise ConfigurationError(
            "policy.generation.stop_token_ids: got [], and policy.generation.stop_strings has none either, so that"
            " nothing would end a response; expected token ids, or null for the tokenizer's end token"
        )
    if never_drawn := [token for token in stop_token_ids if token >= vocabulary_size]:
        whose = "null, the tokenizer's end token " if generation.stop_token_ids is None else ""
        raise ConfigurationError(
            f"policy.generation.stop_token_ids: got {whose}{', '.join(map(str, never_drawn))}, expected ids from 0 to"
            f" {vocabulary_size - 1}: the model has {vocabulary_size} tokens"
        )
    return SamplingParameters(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_k=generation.top_k,
        top_p=generation.top_p,
        stop_token_ids=tuple(stop_token_ids),
        stop_strings=tuple(generation.stop_strings or ()),
    )


def read_prompts(
    config: GRPOMasterConfig,
    source: PromptSourceConfig,
    tokenizer: Any,
    console: ConsoleLogger,
    training: Iterable[Prompt] = (),
) -> PromptDataset:
    """Reads, or draws, and tokenises one set of prompts, without the training prompts, and tells what was left out.

    Raises:
        DataError: A file is missing, a line cannot be used, or no prompt is left.
    """
    longest = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    what = f"reading {source.path}" if source.path else f"drawing {source.num_items} prompts"
    with console.phase(what), load_limit(config.data.load_timeout_s, source.path or "drawn prompts"):
        prompts = load_prompts(source, config.data, tokenizer, longest, config.env)
        prompts = without_training_prompts(prompts, training)
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


@contextmanager
def running_generation(config: GRPOMasterConfig, policy: MegatronPolicy) -> Iterator[GenerationInterface]:
    """Starts the generation engine, and lets go of it whatever happens."""
    engine = _ENGINES[config.policy.generation.backend](policy)
    try:
        yield engine
    finally:
        engine.shutdown()
