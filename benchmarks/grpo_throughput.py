# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds per step of GRPO on CPU cores, by phase. Prints one JSON line.

This runs the real program (Ray workers, Megatron-Core, generation, the reward workers, the training loop and the
loggers) on a small Qwen3-MoE (4 layers, 8 experts, top 2) with random weights. A step has 8 prompts, by default of 32
tokens x 4 responses of at most 64 tokens, rewarded for the share of one character, and one update.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from small_model import (
    CONFIGS,
    MODEL,
    TOKENIZER,
    StepClock,
    add_layer_spec,
    add_workers,
    confine,
    make_parser,
    one_epoch,
    open_loggers,
    overrides_of,
    positive,
    recorder_without_checkpoints,
    running_ray,
    start_policy,
    surroundings,
    write_model,
)

from nemo_rl_moe.algorithms.grpo import Rollouts, train_grpo
from nemo_rl_moe.algorithms.grpo_batch import failure_rule
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.algorithms.run_observers import checked_refits
from nemo_rl_moe.algorithms.step_recorder import RecordSinks
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.environments.rewards import CallableConfig
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.speech import describe_speech, load_published
from nemo_rl_moe.data.tokenizer import load_tokenizer, pad_token_id
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import threads_per_worker, usable_cores
from nemo_rl_moe.generation.refit_check import RefitCheck
from nemo_rl_moe.generation.registry import EngineSetup, make_engine
from nemo_rl_moe.launch.grpo import sampling_parameters
from nemo_rl_moe.launch.refit import make_refit_check
from nemo_rl_moe.launch.rollouts import plan_rollouts, running_source, state_at
from nemo_rl_moe.models.hf_files import find_model, load_hf_config
from nemo_rl_moe.rewards.interface import ScoringItem
from nemo_rl_moe.rewards.worker_pool import RewardWorkers
from nemo_rl_moe.rollouts.environment import SingleTurn
from nemo_rl_moe.rollouts.loops import CallersLoop
from nemo_rl_moe.rollouts.run_environment import RunEnvironment
from nemo_rl_moe.rollouts.runner import RolloutRunner
from nemo_rl_moe.runs.folder.samples import SampleLog
from nemo_rl_moe.runs.loggers.artifacts import ArtifactTables

NUM_PROMPTS = 8
STEP_KEY = "timing/step/seconds"
ONE_CHARACTER = {
    "env.reward.kind": "callable",
    "env.reward.function": "grpo_throughput:share_of_one_character",
    "env.reward.num_workers": 1,
    "env.score_truncated": True,
}
"""Overrides for rewards by `share_of_one_character`."""
EXAMPLES = """\
examples:
  python benchmarks/grpo_throughput.py                       one worker with one thread
  python benchmarks/grpo_throughput.py --workers 2           data-parallel, one thread each
  python benchmarks/grpo_throughput.py --size 512,128,8 --shared-prefix auto
  taskset -c 0 python benchmarks/grpo_throughput.py          driver, Ray and workers on one core

seconds_per_step.median is the one to quote: of all measured steps, logging included. phase_shares are parts of the time
of all measured steps."""


class Size(NamedTuple):
    """Tokens of a prompt, most tokens of a response, and responses to a prompt."""

    prompt: int
    response: int
    group: int

    @classmethod
    def of(cls, text: str) -> "Size":
        """Read a command-line option."""
        numbers = text.split(",")
        if len(numbers) != 3:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected three numbers, such as 512,128,8")
        return cls(*map(positive, numbers))


DEFAULT_SIZE = Size(32, 64, 4)


def add_size_and_model(parser: argparse.ArgumentParser) -> None:
    """Add `--size` and `--model`."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a model with weights and tokenizer (default: the small random one)"
    )
    parser.add_argument(
        "--size",
        type=Size.of,
        default=DEFAULT_SIZE,
        metavar="P,R,G",
        help="tokens of a prompt, most tokens of a response, responses to a prompt (default: 32,64,4)",
    )


class RandomPrompts:
    """Prompts of random tokens, with the interface of a `PromptLoader` and one epoch."""

    def __init__(self, num_steps: int, num_prompts: int = NUM_PROMPTS, length: int = DEFAULT_SIZE.prompt):
        self._num_steps, self._num_prompts, self._length = num_steps, num_prompts, length

    def __len__(self) -> int:
        return self._num_steps

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """Yield the prompts of each step."""
        generator = np.random.default_rng(epoch_index)
        for step in range(self._num_steps):
            tokens = generator.integers(4, 45, size=(self._num_prompts, self._length))
            yield [
                Prompt(f"random:{step}.{row}", "", tuple(ids), {"answer": ""})
                for row, ids in enumerate(tokens.tolist())
            ]


def share_of_one_character(item: ScoringItem) -> float:
    """Return the share of the digit 1 in the response."""
    return item.response.count("1") / max(1, len(item.response))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    confine(options.workers)
    clock = StepClock(counts_cpu_at=(options.warmup, options.warmup + options.steps))
    with tempfile.TemporaryDirectory(prefix="grpo_throughput_") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model: dict[str, object] = {"folder": str(options.model)}
        if options.model is None:
            model = MODEL | {"num_parameters": write_model(folder / "model")}
        stack.enter_context(running_ray(options.workers))
        threads = threads_per_worker(usable_cores(), options.workers)
        config = make_config(options.model or folder / "model", options)
        prompts = RandomPrompts(options.warmup + options.steps, length=options.size.prompt)
        run(config, prompts, folder, clock, stack)
    result = summary(clock.steps[options.warmup :], NUM_PROMPTS * options.size.group) | {
        "cpu_seconds_per_step": round((clock.cpu_seconds[1] - clock.cpu_seconds[0]) / options.steps, 5),
        "steps": options.steps,
        "workers": options.workers,
        "threads_per_worker": threads,
        "layer_spec": options.layer_spec,
        "size": options.size,
        "shared_prefix": options.shared_prefix,
        "model": model | {"precision": "float32"},
        "peak_gigabytes": round(clock.peak_bytes / 1e9, 2),
        **surroundings(),
    }
    print(json.dumps({"name": "grpo_throughput"} | result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, EXAMPLES)
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="measured steps (default: 20)")
    parser.add_argument("--warmup", type=positive, default=3, metavar="N", help="steps before these (default: 3)")
    add_workers(parser)
    add_layer_spec(parser)
    add_size_and_model(parser)
    parser.add_argument(
        "--shared-prefix",
        choices=("false", "true", "auto"),
        default="false",
        help="policy.shared_prefix, with packed sequences unless false (default: false)",
    )
    return parser.parse_args(arguments)


def make_config(model: Path, options: argparse.Namespace) -> GRPOMasterConfig:
    """Return the demo's configuration with this benchmark's sizes."""
    size = options.size
    samples, longest = NUM_PROMPTS * size.group, size.prompt + size.response
    values: dict[str, Any] = {
        "grpo.num_prompts_per_step": NUM_PROMPTS,
        "grpo.num_generations_per_prompt": size.group,
        **one_epoch("grpo"),
        "policy.model_name": model,
        "policy.init": "random" if options.model is None else "pretrained",
        "policy.tokenizer.name": options.model or TOKENIZER,
        "policy.train_global_batch_size": samples,
        "policy.train_micro_batch_size": samples // options.workers,
        "policy.max_total_sequence_length": longest,
        "policy.shared_prefix": options.shared_prefix,
        "policy.generation.max_new_tokens": size.response,
        "policy.megatron_cfg.layer_spec": options.layer_spec,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        **ONE_CHARACTER,
        "cluster.cpu_workers_per_node": options.workers,
    }
    return load_grpo_config(CONFIGS / "grpo_tiny_moe.yaml", overrides_of(values), check_paths=False)


def run(
    config: GRPOMasterConfig,
    prompts: RandomPrompts,
    folder: Path,
    clock: StepClock,
    stack: ExitStack,
    changed: Callable[[RefitCheck | None], RefitCheck | None] = lambda check: check,
) -> None:
    """Train in the package's loop. `changed` may replace the refit check."""
    cluster, source = RayCluster(config.cluster), find_model(config.policy)
    policy = start_policy(config, cluster, stack, seed=config.grpo.seed, num_steps=len(prompts))
    assert isinstance(config.env.reward, CallableConfig)
    reward_function = RewardWorkers(config.env.reward, config.env)
    stack.callback(reward_function.shutdown)
    loggers, console = open_loggers(folder, clock, stack)
    samples = stack.enter_context(SampleLog(folder, console, num_to_print=0, num_to_save=None))
    tokenizer = load_tokenizer(config.policy.tokenizer.name)
    hf_config = load_hf_config(config.policy.model_name)
    speech = describe_speech(tokenizer, load_published(config.policy.model_name), {})
    sampling = sampling_parameters(config.policy.generation, speech, hf_config.vocab_size)
    engine = make_engine(EngineSetup(config, cluster, source, hf_config, tokenizer, policy, console.warn))
    stack.callback(engine.shutdown)
    longest = config.policy.max_total_sequence_length
    environments = {"": RunEnvironment(SingleTurn(), reward_function)}
    runner = RolloutRunner(engine, environments, tokenizer.decode, tokenizer.encode, longest, CallersLoop())
    stack.enter_context(closing(runner))
    plan, state, warn = plan_rollouts(config), state_at(config, LoopState(), None, prompts), console.warn
    groups = stack.enter_context(
        running_source(config, plan, runner, prompts, sampling, folder, state, warn, console.message)
    )
    train_grpo(
        config,
        policy,
        Rollouts(
            engine,
            groups,
            Validator(config.grpo, runner, (), sampling, failure_rule(config)),
            pad_token_id(tokenizer),
        ),
        recorder_without_checkpoints(
            config.policy,
            RecordSinks(loggers, ArtifactTables(folder, console.warn).write, samples.write),
        ),
        checked_refits(changed(make_refit_check(config, policy, engine, hf_config, console)), engine),
    )


def summary(steps: Sequence[Mapping[str, float]], num_samples: int) -> dict[str, Any]:
    """Return the speeds over all measured steps."""
    seconds = [step["seconds"] for step in steps]
    total = sum(seconds)
    phases = [key for key in steps[0] if key.startswith("timing/") and key.endswith("/seconds") and key != STEP_KEY]
    parts = {key.split("/")[1]: sum(step[key] for step in steps) for key in phases}
    tokens = sum(step["train/mean_gen_tokens_per_sample"] for step in steps) * num_samples
    return {
        "seconds_per_step": {"median": round(statistics.median(seconds), 4), "best": round(min(seconds), 4)},
        "generation_tokens_per_second": round(tokens / parts["generation"], 1),
        "generated_tokens_per_step": round(tokens / len(steps), 1),
        "phase_shares": {name: round(part / total, 4) for name, part in parts.items()}
        | {"other": round(1 - sum(parts.values()) / total, 4)},
    }


if __name__ == "__main__":
    main()
