# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the benchmarks: the small model, a local Ray, cores, loggers, command-line types."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil
import ray
import torch

from nemo_rl_moe.algorithms.step_recorder import RecordSinks, StepRecorder
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.local_ray import object_store_bytes
from nemo_rl_moe.runs.folder.folder import collect_versions
from nemo_rl_moe.runs.folder.metrics import JsonlLogger, RunOutcome
from nemo_rl_moe.runs.loggers.console import ConsoleLogger, Notices
from nemo_rl_moe.runs.loggers.fan_out import FanOutLogger
from nemo_rl_moe.runs.loggers.interface import MetricLogger

if TYPE_CHECKING:
    from nemo_rl_moe.config.schema import MasterConfig
    from nemo_rl_moe.distributed.cluster import RayCluster
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "examples" / "configs"
TOKENIZER = REPOSITORY / "examples" / "assets" / "tiny_qwen3_moe"
"""Configuration and tokenizer of the demo's model."""
CONSTANT_RATE = {
    "policy.megatron_cfg.optimizer.lr": 1e-4,
    "policy.megatron_cfg.optimizer.min_lr": 1e-4,
    "policy.megatron_cfg.scheduler.lr_decay_style": "constant",
    "policy.megatron_cfg.scheduler.lr_warmup_iters": 0,
}
VOCABULARY = 512
MODEL = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "router_aux_loss_coef": 0.01,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number, {least} or more")
    return int(text)


positive, not_negative = partial(_integer, least=1), partial(_integer, least=0)
"""Types of command-line options."""


def make_parser(description: str | None, examples: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with a benchmark's docstring, and examples after its options."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, epilog=examples, formatter_class=formatter)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add `--workers`."""
    parser.add_argument(
        "--workers", type=int, choices=(1, 2, 4, 8), default=1, help="data-parallel ranks, one thread each (default: 1)"
    )


def add_layer_spec(parser: argparse.ArgumentParser) -> None:
    """Add `--layer-spec`."""
    parser.add_argument(
        "--layer-spec",
        choices=("auto", "local"),
        default="auto",
        help="auto: the fastest available modules; local: Megatron-Core's (default: auto)",
    )


def require_whole_microbatches(
    parser: argparse.ArgumentParser, options: argparse.Namespace, size: int, what: str
) -> None:
    """End with an error if workers and microbatches do not divide a step."""
    if size % (options.micro_batch_size * options.workers):
        parser.error(
            f"--micro-batch-size {options.micro_batch_size} x --workers {options.workers} does not divide the"
            f" {size} {what} of a step; nearest: --micro-batch-size {size // options.workers}"
        )


def surroundings() -> dict[str, object]:
    """Return the machine's load and the versions of packages, for a result."""
    return {"load_average": round(os.getloadavg()[0], 2), "versions": collect_versions()}


def confine(num_cores: int) -> set[int]:
    """Confine this process and its future children to some of its cores, and return its former cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:num_cores])
    return cores


def release(cores: set[int]) -> None:
    """Let all processes use these cores again, after the workers have chosen their number of threads."""
    for process in family():
        with suppress(psutil.NoSuchProcess):
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)


def write_model(folder: Path, **changes: int) -> int:
    """Write the model's `config.json`, with changes, and return its number of parameters."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**{**MODEL, **changes}, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def one_epoch(algorithm: str) -> dict[str, object]:
    """Return overrides for one epoch without validation and checkpoints."""
    return {
        f"{algorithm}.max_num_epochs": 1,
        f"{algorithm}.max_num_steps": "null",
        f"{algorithm}.val_period": 0,
        f"{algorithm}.val_at_start": False,
        f"{algorithm}.val_at_end": False,
        "checkpointing.enabled": False,
        "data.validation": "null",
    }


def overrides_of(values: Mapping[str, object]) -> list[str]:
    """Return overrides as command-line arguments."""
    return [f"{key}={value}" for key, value in values.items()]


@contextmanager
def running_ray(num_cpus: int) -> Iterator[None]:
    """Run a local Ray with room for the workers of two policies, only one of which works at a time."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=object_store_bytes(),
        # By default, Ray's workers have a lower priority than the programs with which they are compared.
        _system_config={"worker_niceness": 0},
    )
    try:
        yield
    finally:
        ray.shutdown()


def nowhere() -> TextIO:
    """Return a stream that drops its input."""
    return Path(os.devnull).open("w", encoding="utf-8")


def family() -> list[psutil.Process]:
    """Return this process and all its descendants."""
    driver = psutil.Process()
    return [driver, *driver.children(recursive=True)]


def family_cpu_seconds() -> float:
    """Return the CPU time of this process and all its descendants so far."""
    total = 0.0
    for process in family():
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def peak_resident_bytes(process: psutil.Process) -> int:
    """Return the largest resident memory that a process has had, 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def open_loggers(folder: Path, clock: MetricLogger, stack: ExitStack) -> tuple[FanOutLogger, ConsoleLogger]:
    """Return a hidden console, `metrics.jsonl`, and the clock, which is last. The stack closes them."""
    console = ConsoleLogger(total_steps=0, live="never", stream=stack.enter_context(nowhere()))
    notices = Notices(console.message, lambda warning: print(warning, file=sys.stderr))
    direct: list[MetricLogger] = [console, JsonlLogger(folder, notices.warn, notices.message), clock]
    return stack.enter_context(FanOutLogger(direct, notices)), console


@dataclass
class StepClock:
    """A logger that keeps the metrics of each step. It is called last, so that two calls are a full step apart.

    Attributes:
        steps: The metrics of each step, and as `seconds` the time since the previous step, with logging.
        counts_cpu_at: Steps after which the CPU time of all processes is measured.
        cpu_seconds: These measurements.
        peak_bytes: Sum of the largest resident memory of each process so far.
    """

    name = "clock"
    steps: list[Mapping[str, float]] = field(default_factory=list)
    counts_cpu_at: Sequence[int] = ()
    cpu_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    _last: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        """Forget all steps, and begin one."""
        self.steps, self._last = [], time.perf_counter()

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a step and begin the next one."""
        now = time.perf_counter()
        self.steps.append(dict(metrics) | {"seconds": now - self._last})
        if len(self.steps) in self.counts_cpu_at:
            self.cpu_seconds.append(family_cpu_seconds())
            self.peak_bytes = sum(peak_resident_bytes(process) for process in family())
            now = time.perf_counter()
        self._last = now

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Do nothing."""

    def close(self, outcome: RunOutcome = "finished") -> None:
        """Do nothing."""


@contextmanager
def one_rank(policy: PolicyConfig) -> Iterator[None]:
    """Run a job of only this process, on any free port."""
    from nemo_rl_moe.models.megatron.model.parallel_state import destroy_parallel_state, initialize_parallel_state

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    initialize_parallel_state(policy.megatron_cfg, rank=0, world_size=1, local_rank=0, seed=0)
    try:
        yield
    finally:
        destroy_parallel_state()


def start_policy(
    config: "MasterConfig",
    cluster: "RayCluster",
    stack: ExitStack,
    *,
    seed: int,
    num_steps: int | None,
    keep_reference: bool = False,
) -> "MegatronPolicy":
    """Start the workers of a policy. The stack ends them and the cluster."""
    from nemo_rl_moe.models.hf_files import find_model
    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy

    stack.callback(cluster.shutdown)
    source = find_model(config.policy)
    model_files = {"config.json": (source.folder() / "config.json").read_bytes()}
    policy = MegatronPolicy(
        config,
        cluster,
        seed=seed,
        num_steps=num_steps,
        source=source,
        model_files=model_files,
        keep_reference=keep_reference,
    )
    stack.callback(policy.shutdown)
    return policy


def recorder_without_checkpoints(policy: PolicyConfig, sinks: RecordSinks) -> StepRecorder:
    """Return the recorder of a run that saves nothing."""
    return StepRecorder(sinks, None, lambda: None, policy.max_consecutive_skipped_updates, LoopState())
