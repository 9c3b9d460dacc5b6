# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Generation of responses to prompts, as JSON lines."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_moe.atomic_writes import write_whole
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.errors import ConfigurationError, DataError, GenerationError, counted
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationEngine, SamplingParameters
from nemo_rl_moe.launch.grpo import announce_named_stops, sampling_parameters, start_engine
from nemo_rl_moe.launch.inference import answer_in_chunks, give_weights
from nemo_rl_moe.launch.prompts import read_training_prompts
from nemo_rl_moe.launch.setup import ModelRun, PreparedModel
from nemo_rl_moe.models.hf_files import load_config_json
from nemo_rl_moe.models.position_limit import position_limit
from nemo_rl_moe.rewards.interface import NoReward, Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.loops import CallersLoop
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.rollouts.supervisor import RolloutReports
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.loggers.console import ConsoleLogger


def generate(config: GRPOMasterConfig, output: Path | None, *, with_logprobs: bool) -> None:
    """Generate responses to the prompts of `data.train`, and write them.

    Args:
        config: A checked configuration. `grpo.val_num_generations`, `grpo.val_temperature` and `grpo.seed` set the
            number of responses to each prompt, and their sampling.
        output: A new file. None: standard output, to which responses are written in the order of the prompts as soon as
            they are ready.
        with_logprobs: Whether to write tokens and log-probabilities too.
    """
    # Standard output only gets responses, so messages go to standard error.
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
    """Return the configuration with `max_total_sequence_length` lowered to the model's limit."""
    policy = config.policy
    limit = position_limit(load_config_json(policy.model_name))
    if limit is None or limit >= policy.max_total_sequence_length:
        return config
    if policy.generation.max_new_tokens >= limit:
        raise ConfigurationError(
            f"policy.generation.max_new_tokens: got {policy.generation.max_new_tokens}, expected less than the"
            f" {limit} positions of {policy.model_name}, which hold the prompt too"
        )
    return config.model_copy(update={"policy": policy.model_copy(update={"max_total_sequence_length": limit})})


def _records(run: ModelRun, with_logprobs: bool) -> Iterator[dict[str, Any]]:
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
            f"data.train.path: {num_dropped} of the prompts are longer than {longest} tokens: a sequence has"
            f" {config.policy.max_total_sequence_length} tokens, of which {generation.max_new_tokens} are for the"
            " response (policy.generation.max_new_tokens)"
        )
    policy = run.start_policy()
    engine = start_engine(config, run, policy, model)
    give_weights(config, run, policy, engine, model)
    number = len(prompts) * samples
    with (
        run.console.phase(f"generating {counted(number, 'response')} to {counted(len(prompts), 'prompt')}") as progress,
        closing(runner_of(config, run, engine, model, datasets)) as runner,
    ):
        at_a_time = answer_in_chunks(config, engine)
        num_done = count(1)
        found = responses(
            runner,
            prompts,
            samples,
            sampling,
            config.grpo.seed,
            None if at_a_time is None else max(1, at_a_time // samples),
            lambda sequence: progress(next(num_done) / number),
        )
        for prompt, sample, trajectory in found:
            yield record_of(prompt, sample, trajectory, with_logprobs)


class OneResponse:
    """An environment that makes one response and does not score it."""

    async def rollout(self, session: Session) -> Trajectory:
        """Generate one response, and return it as a trajectory."""
        await session.generate()
        return session.finish(Score(0.0, is_correct=False))


def runner_of(
    config: GRPOMasterConfig, run: ModelRun, engine: GenerationEngine, model: PreparedModel, names: Iterable[str]
) -> RolloutRunner:
    """Return a runner that generates single responses, for the environments `names`."""
    environment = RunEnvironment(OneResponse(), NoReward())
    return RolloutRunner(
        engine,
        dict.fromkeys(names, environment),
        model.tokenizer.decode,
        partial(model.tokenizer.encode, add_special_tokens=False),
        config.policy.max_total_sequence_length,
        CallersLoop(),
        reports=RolloutReports(run.stop_reason, run.console.message, run.console.warn),
    )


def responses(
    runner: RolloutRunner,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: SamplingParameters,
    seed: int,
    at_a_time: int | None = None,
    note: Callable[[GeneratedSequence], object] = lambda sequence: None,
) -> Iterator[tuple[Prompt, int, Trajectory]]:
    """Generate responses, and yield each when it and all responses to earlier prompts are ready.

    Args:
        prompts: One or more prompts.
        at_a_time: Maximum number of prompts that are answered at the same time, since their images take memory. None:
            all.
        note: Function that is called with each response.

    Yields:
        The prompt, the number of the response among the prompt's responses, and the response.

    Raises:
        GenerationError: A response failed.
    """
    seeds = np.random.SeedSequence(seed).generate_state(len(prompts) * samples, np.uint64)
    by_prompt = seeds.reshape(len(prompts), samples).tolist()
    size, ready, position = at_a_time or len(prompts), dict[int, list[Trajectory]](), 0
    for start in range(0, len(prompts), size):
        part = slice(start, start + size)
        for index, group in runner.groups(prompts[part], by_prompt[part], sampling, note):
            ready[start + index] = group
            while position in ready:
                for sample, trajectory in enumerate(ready.pop(position)):
                    if trajectory.fault is not None:
                        raise GenerationError(f"{trajectory.sample_id}: {trajectory.fault_message}")
                    yield prompts[position], sample, trajectory
                position += 1


def record_of(prompt: Prompt, sample: int, trajectory: Trajectory, with_logprobs: bool) -> dict[str, Any]:
    """Return a response as a record of the output."""
    (sequence,) = trajectory.sequences
    token_ids = sequence.token_ids[sequence.loss_mask].tolist()
    record = {
        "sample_id": prompt.sample_id,
        "sample": sample,
        "prompt": prompt.text,
        "response": trajectory.response_text,
        "finish_reason": trajectory.finish_reason,
        "num_tokens": len(token_ids),
    }
    if with_logprobs:
        logprobs = sequence.logprobs[sequence.loss_mask]
        record |= {"token_ids": token_ids, "logprobs": [round(float(value), 7) for value in logprobs]}
    return record


def _print_lines(lines: Iterator[str]) -> None:
    try:
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_lines(lines: Iterator[str], output: Path) -> None:
    text = "".join(f"{line}\n" for line in lines)
    try:
        write_whole(output, text)
    except OSError as error:
        raise ConfigurationError(f"--output: {output}: {error.strerror}; no output is written") from error
