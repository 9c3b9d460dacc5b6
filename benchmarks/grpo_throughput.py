# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds a step of GRPO on CPU cores, and where they go. Prints one JSON line.

What runs is the real thing: Ray workers, Megatron-Core, generation, the environment's workers, the training loop and
the loggers, on a small Qwen3-MoE (4 layers, 8 experts, top 2) with random weights. A step is 8 prompts of 32 tokens x 4
responses of at most 64 tokens, rewarded for how often they hold one character, and one update.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from small_model import (
    MODEL,
    REPOSITORY,
    confine,
    family_cpu_seconds,
    open_loggers,
    positive,
    recorder_without_checkpoints,
    running_ray,
    write_model,
)

from nemo_rl_moe.algorithms.grpo import Rollouts, failure_rule, train_grpo
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.algorithms.run_observers import checked_refits
from nemo_rl_moe.algorithms.step_recorder import RecordSinks
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.data.tokenizer import load_tokenizer, pad_token_id
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.distributed.node_tools import threads_per_worker, usable_cores
from nemo_rl_moe.environments.interface import ScoringItem
from nemo_rl_moe.environments.scorer import EnvironmentScorer
from nemo_rl_moe.generation.registry import EngineSetup, find_engine
from nemo_rl_moe.launch.grpo import sampling_parameters
from nemo_rl_moe.launch.refit import make_refit_check
from nemo_rl_moe.loggers.artifacts import ArtifactTables
from nemo_rl_moe.models.hf_files import find_model, load_hf_config
from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy
from nemo_rl_moe.rollouts.environment import SingleTurn
from nemo_rl_moe.rollouts.source import SynchronousSource
from nemo_rl_moe.rollouts.worker import RolloutWorker
from nemo_rl_moe.run_folder.folder import collect_versions
from nemo_rl_moe.run_folder.metrics import RunOutcome
from nemo_rl_moe.run_folder.samples import SampleLog
from nemo_rl_moe.weight_sync.refit_check import RefitCheck

NUM_PROMPTS, NUM_GENERATIONS = 8, 4
PROMPT_LENGTH, MAX_NEW_TOKENS = 32, 64
STEP_KEY = "timing/step/seconds"
EXAMPLES = """\
examples:
  python benchmarks/grpo_throughput.py                       one worker with one thread
  python benchmarks/grpo_throughput.py --workers 2           data-parallel, one thread each
  taskset -c 0 python benchmarks/grpo_throughput.py          driver, Ray and workers on one core

seconds_per_step.median is the one to quote: of all measured steps, logging included. phase_shares are parts of the time
of all measured steps."""


@dataclass
class StepClock:
    """A logger that keeps what each step took.

    Attributes:
        steps: The metrics of each step, and under `seconds` the time since the step before it, logging included.
        counts_cpu_at: Steps at whose end the CPU time of all processes is looked up.
        cpu_seconds: What was found.
    """

    name = "clock"
    steps: list[Mapping[str, float]] = field(default_factory=list)
    counts_cpu_at: Sequence[int] = ()
    cpu_seconds: list[float] = field(default_factory=list)
    _last: float = field(default_factory=time.perf_counter)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ends a step and begins the next."""
        now = time.perf_counter()
        self.steps.append(dict(metrics) | {"seconds": now - self._last})
        if len(self.steps) in self.counts_cpu_at:
            self.cpu_seconds.append(family_cpu_seconds())
            now = time.perf_counter()
        self._last = now

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Does nothing."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Does nothing."""


class RandomPrompts:
    """Prompts of random tokens, in the form of a `PromptLoader`.

    Args:
        num_steps: Steps of the one epoch.
        num_prompts: Of a step.
    """

    def __init__(self, num_steps: int, num_prompts: int = NUM_PROMPTS):
        self._num_steps = num_steps
        self._num_prompts = num_prompts

    def __len__(self) -> int:
        return self._num_steps

    def epoch(self, epoch_index: int) -> Iterator[list[Prompt]]:
        """The prompts of each step."""
        generator = np.random.default_rng(epoch_index)
        for step in range(self._num_steps):
            tokens = generator.integers(4, 45, size=(self._num_prompts, PROMPT_LENGTH))
            yield [
                Prompt(f"random:{step}.{row}", "", tuple(ids), {"answer": ""})
                for row, ids in enumerate(tokens.tolist())
            ]


def share_of_one_character(item: ScoringItem) -> float:
    """Share of the response that is the digit 1."""
    return item.response.count("1") / max(1, len(item.response))


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line, runs, and prints the result."""
    options = parse_arguments(arguments)
    confine(options.workers)
    clock = StepClock(counts_cpu_at=(options.warmup, options.warmup + options.steps))
    with tempfile.TemporaryDirectory(prefix="grpo_throughput_") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        num_parameters = write_model(folder / "model")
        stack.enter_context(running_ray(options.workers))
        threads = threads_per_worker(usable_cores(), options.workers)
        config = make_config(folder / "model", options)
        run(config, RandomPrompts(options.warmup + options.steps), folder, clock, stack)
    result = summary(clock.steps[options.warmup :]) | {
        "cpu_seconds_per_step": round((clock.cpu_seconds[1] - clock.cpu_seconds[0]) / options.steps, 5),
        "steps": options.steps,
        "workers": options.workers,
        "threads_per_worker": threads,
        "layer_spec": options.layer_spec,
        "model": MODEL | {"num_parameters": num_parameters, "precision": "float32"},
        "load_average": round(os.getloadavg()[0], 2),
        "versions": collect_versions(),
    }
    print(json.dumps({"name": "grpo_throughput"} | result))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="measured steps (default: 20)")
    parser.add_argument("--warmup", type=positive, default=3, metavar="N", help="steps before those (default: 3)")
    parser.add_argument(
        "--workers", type=int, choices=(1, 2, 4, 8), default=1, help="data-parallel ranks, one thread each (default: 1)"
    )
    parser.add_argument(
        "--layer-spec",
        choices=("auto", "local"),
        default="auto",
        help="auto: the fastest modules there are; local: Megatron-Core's own (default: auto)",
    )
    return parser.parse_args(arguments)


def make_config(model: Path, options: argparse.Namespace) -> GRPOMasterConfig:
    """The demo's configuration with this benchmark's sizes."""
    samples = NUM_PROMPTS * NUM_GENERATIONS
    values: dict[str, Any] = {
        "grpo.num_prompts_per_step": NUM_PROMPTS,
        "grpo.num_generations_per_prompt": NUM_GENERATIONS,
        "grpo.max_num_epochs": 1,
        "grpo.max_num_steps": "null",
        "grpo.val_period": 0,
        "grpo.val_at_start": False,
        "grpo.val_at_end": False,
        "checkpointing.enabled": False,
        "policy.model_name": model,
        "policy.init": "random",
        "policy.tokenizer.name": REPOSITORY / "examples" / "assets" / "tiny_qwen3_moe",
        "policy.train_global_batch_size": samples,
        "policy.train_micro_batch_size": samples // options.workers,
        "policy.max_total_sequence_length": PROMPT_LENGTH + MAX_NEW_TOKENS,
        "policy.generation.max_new_tokens": MAX_NEW_TOKENS,
        "policy.megatron_cfg.layer_spec": options.layer_spec,
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
        "env.name": "callable",
        "env.callable": "{function: 'grpo_throughput:share_of_one_character'}",
        "env.answer_after": "null",
        "env.score_truncated": True,
        "data.validation": "null",
        "cluster.cpu_workers_per_node": options.workers,
    }
    overrides = [f"{key}={value}" for key, value in values.items()]
    return load_grpo_config(REPOSITORY / "examples" / "configs" / "grpo_tiny_moe.yaml", overrides, check_paths=False)


def run(
    config: GRPOMasterConfig,
    prompts: RandomPrompts,
    folder: Path,
    clock: StepClock,
    stack: ExitStack,
    changed: Callable[[RefitCheck | None], RefitCheck | None] = lambda check: check,
) -> None:
    """Trains in the product's own loop; changed: makes another refit check of the configured one."""
    cluster = RayCluster(config.cluster)
    stack.callback(cluster.shutdown)
    source = find_model(config.policy)
    model_files = {"config.json": (source.folder() / "config.json").read_bytes()}
    policy = MegatronPolicy(
        config, cluster, seed=config.grpo.seed, num_steps=len(prompts), source=source, model_files=model_files
    )
    stack.callback(policy.shutdown)
    scorer = EnvironmentScorer(config.env)
    stack.callback(scorer.shutdown)
    loggers, console = open_loggers(folder, clock, stack)
    samples = stack.enter_context(SampleLog(folder, console, num_to_print=0, num_to_save=None))
    tokenizer = load_tokenizer(config.policy.tokenizer.name)
    hf_config = load_hf_config(config.policy.model_name)
    sampling = sampling_parameters(config.policy.generation, tokenizer, hf_config.vocab_size)
    make_engine = find_engine(config.policy.generation.backend, on_gpus=False)
    engine = make_engine(EngineSetup(config, cluster, source, hf_config, tokenizer, policy, console.warn))
    stack.callback(engine.shutdown)
    longest = config.policy.max_total_sequence_length
    worker = RolloutWorker(engine, scorer, SingleTurn(), tokenizer.decode, tokenizer.encode, longest)
    train_grpo(
        config,
        policy,
        Rollouts(
            engine,
            SynchronousSource(config.grpo, worker, prompts, sampling, failure_rule(config)),
            Validator(config.grpo, worker, (), sampling, failure_rule(config)),
            pad_token_id(tokenizer),
        ),
        recorder_without_checkpoints(
            config.policy,
            RecordSinks(loggers, ArtifactTables(folder, console.warn).write, samples.write),
        ),
        checked_refits(changed(make_refit_check(config, policy, engine, hf_config, console)), engine),
    )


def summary(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Speeds over all measured steps."""
    seconds = [step["seconds"] for step in steps]
    total = sum(seconds)
    phases = [key for key in steps[0] if key.startswith("timing/") and key.endswith("/seconds") and key != STEP_KEY]
    parts = {key.split("/")[1]: sum(step[key] for step in steps) for key in phases}
    tokens = sum(step["train/mean_gen_tokens_per_sample"] for step in steps) * NUM_PROMPTS * NUM_GENERATIONS
    return {
        "seconds_per_step": {"median": round(statistics.median(seconds), 4), "best": round(min(seconds), 4)},
        "generation_tokens_per_second": round(tokens / parts["generation"], 1),
        "generated_tokens_per_step": round(tokens / len(steps), 1),
        "phase_shares": {name: round(part / total, 4) for name, part in parts.items()}
        | {"other": round(1 - sum(parts.values()) / total, 4)},
    }


if __name__ == "__main__":
    main()
