# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses of a model to prompts, as JSON lines."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt, prompt_inputs
from nemo_rl_moe.errors import ConfigurationError, DataError, counted
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, GenerationRequest, SamplingParameters
from nemo_rl_moe.generation.lockstep import generate_all
from nemo_rl_moe.launch.grpo import announce_named_stops, sampling_parameters, start_engine
from nemo_rl_moe.launch.inference import answer_in_chunks, give_weights
from nemo_rl_moe.launch.prompts import read_training_prompts
from nemo_rl_moe.launch.setup import ModelRun
from nemo_rl_moe.models.hf_files import load_config_json
from nemo_rl_moe.models.position_limit import sequence_limit
from nemo_rl_moe.rollouts.environment import Decode, response_text
from nemo_rl_moe.runs.loggers.console import ConsoleLogger


def generate(config: GRPOMasterConfig, output: Path | None, *, with_logprobs: bool) -> None:
    """Generate responses to the prompts of `data.train`, and write them.

    Args:
        config: A checked configuration. `grpo.val_num_generations`, `grpo.val_temperature` and `grpo.seed` say how
            many responses to each prompt are sampled, and how.
        output: A file that is not there yet; None: standard output, in the prompts' order as they are ready.
        with_logprobs: Write tokens and log-probabilities too.

    Raises:
        UserError: The model, the prompts or another input cannot be used.
        WorkerDiedError: A worker failed.
    """
    # Standard output is for the responses alone.
    console = ConsoleLogger(total_steps=0, live=config.logger.console.live, stream=sys.stderr)
    with ModelRun(_with_positions_of_the_model(config), console) as run:
        lines = (json.dumps(record, ensure_ascii=False) for record in _records(run, with_logprobs))
        if output is None:
            _print_lines(lines)
        else:
            _write_lines(lines, output)
    console.close()
    if output is not None:
        console.message(f"responses, a line each: {output}")


def _with_positions_of_the_model(config: GRPOMasterConfig) -> GRPOMasterConfig:
    """Return the configuration with sequences no longer than the model allows."""
    policy = config.policy
    limit = sequence_limit(load_config_json(policy.model_name))
    if limit is None or limit.tokens >= policy.max_total_sequence_length:
        return config
    if policy.generation.max_new_tokens >= limit.tokens:
        raise ConfigurationError(
            f"policy.generation.max_new_tokens: got {policy.generation.max_new_tokens}, expected less than the"
            f" {limit.tokens} {limit.name} of {policy.model_name}, which hold the prompt too"
        )
    return config.model_copy(update={"policy": policy.model_copy(update={"max_total_sequence_length": limit.tokens})})


def _records(run: ModelRun, with_logprobs: bool) -> Iterator[dict[str, Any]]:
    """Yield one record for each response, prompt after prompt."""
    config = run.config
    assert isinstance(config, GRPOMasterConfig)
    generation, samples = config.policy.generation, config.grpo.val_num_generations
    generation.engine.check_installation(config)
    model = run.prepare_model()
    generation.engine.check_model(config, model.hf_config)
    sampling = replace(
        sampling_parameters(generation, model.speech, model.hf_config.vocab_size),
        temperature=config.grpo.val_temperature,
    )
    announce_named_stops(generation, model.tokenizer, run.console)
    datasets = read_training_prompts(config, model.tokenizer, run.console, image_rule=model.image_rule, is_scored=False)
    prompts = [prompt for dataset in datasets.values() for prompt in dataset]
    if num_dropped := sum(dataset.report.num_dropped for dataset in datasets.values()):
        longest = config.policy.max_total_sequence_length - generation.max_new_tokens
        raise DataError(
            f"data.train.path: {num_dropped} of the prompts are longer than {longest} tokens, which is"
            f" what the {config.policy.max_total_sequence_length} of a sequence leave beside"
            f" policy.generation.max_new_tokens {generation.max_new_tokens}"
        )
    policy = run.start_policy()
    engine = start_engine(config, run, policy, model)
    give_weights(config, run, policy, engine, model)
    number = len(prompts) * samples
    with run.console.phase(
        f"generating {counted(number, 'response')} to {counted(len(prompts), 'prompt')}"
    ) as progress:
        chunk = answer_in_chunks(config, engine)
        found = responses(
            engine, prompts, samples, sampling, config.grpo.seed, chunk, lambda done: progress(done / number)
        )
        for prompt, sample, sequence in found:
            yield record_of(prompt, sample, sequence, sampling, model.tokenizer.decode, with_logprobs)


def responses(
    engine: GenerationEngine,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: SamplingParameters,
    seed: int,
    chunk: int | None = None,
    report_progress: Callable[[int], object] = lambda num_responses: None,
) -> Iterator[tuple[Prompt, int, GeneratedSequence]]:
    """Generate responses in the order of the prompts, each as soon as those before it are there.

    Args:
        prompts: At least one.
        chunk: Most requests that are made at a time, with their images; None: all.

    Yields:
        The prompt, the number of its response, and the response.
    """
    seeds = np.random.SeedSequence(seed).generate_state(len(prompts) * samples, np.uint64).tolist()
    asked = [(prompt, sample) for prompt in prompts for sample in range(samples)]
    size = chunk or len(asked)
    ready: dict[int, GeneratedSequence] = {}
    num_responses = position = 0
    engine.wake()
    for start in range(0, len(asked), size):
        part = slice(start, start + size)
        requests = requests_of([prompt for prompt, _ in asked[part]], seeds[part], sampling)
        for index, sequence in generate_all(engine, requests):
            num_responses += 1
            report_progress(num_responses)
            ready[start + index] = sequence
            while position in ready:
                yield *asked[position], ready.pop(position)
                position += 1


def requests_of(
    prompts: Sequence[Prompt], seeds: Sequence[int], sampling: SamplingParameters
) -> list[GenerationRequest]:
    """Make a request of each prompt; responses to one prompt share the arrays of its images."""
    distinct = {id(prompt): prompt for prompt in prompts}
    inputs = dict(zip(distinct, prompt_inputs(list(distinct.values())), strict=True))
    return [
        GenerationRequest(prompt.token_ids, seed, sampling, inputs[id(prompt)])
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def record_of(
    prompt: Prompt,
    sample: int,
    sequence: GeneratedSequence,
    sampling: SamplingParameters,
    decode: Decode,
    with_logprobs: bool,
) -> dict[str, Any]:
    """Return a response as it is written."""
    token_ids = tuple(sequence.token_ids.tolist())
    record = {
        "sample_id": prompt.sample_id,
        "sample": sample,
        "prompt": prompt.text,
        "response": response_text(token_ids, sampling, decode),
        "finish_reason": "length" if sequence.is_truncated else "stop",
        "num_tokens": len(token_ids),
    }
    if with_logprobs:
        record |= {"token_ids": list(token_ids), "logprobs": [round(float(value), 7) for value in sequence.logprobs]}
    return record


def _print_lines(lines: Iterator[str]) -> None:
    try:
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:  # who reads has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_lines(lines: Iterator[str], output: Path) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        write_whole(output, text)
    except OSError as error:
        raise ConfigurationError(f"--output: {output}: {error.strerror}; nothing is left") from error
