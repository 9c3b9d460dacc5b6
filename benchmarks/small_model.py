# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the small model, a local Ray, cores, loggers, the command line's numbers."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

import psutil
import ray
import torch

from nemo_rl_moe.algorithms.step_recorder import RecordSinks, StepRecorder
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.local_ray import object_store_bytes
from nemo_rl_moe.loggers.console import ConsoleLogger, Notices
from nemo_rl_moe.loggers.fan_out import FanOutLogger
from nemo_rl_moe.loggers.interface import MetricLogger
from nemo_rl_moe.run_folder.metrics import JsonlLogger

REPOSITORY = Path(__file__).resolve().parents[1]
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


def confine(num_cores: int) -> set[int]:
    """Confines this process, and with it all that it starts, to some of its cores, of which each worker gets a share.

    Returns:
        The cores that it had before.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:num_cores])
    return cores


def release(cores: set[int]) -> None:
    """Lets everything run where it likes again: the workers have chosen their number of threads."""
    for process in family():
        with suppress(psutil.NoSuchProcess):
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)


def write_model(folder: Path, **changes: int) -> int:
    """Writes the model's `config.json`, with other values if asked for, and returns its number of parameters."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**{**MODEL, **changes}, architectures=["Qwen3MoeForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def one_epoch_of_sft(model: Path) -> dict[str, object]:
    """Overrides for one epoch of fine-tuning without validation and checkpoints, of a model that has no tokenizer."""
    return {
        "sft.max_num_epochs": 1,
        "sft.max_num_steps": "null",
        "sft.val_period": 0,
        "sft.val_at_start": False,
        "sft.val_at_end": False,
        "checkpointing.enabled": False,
        "policy.model_name": model,
        "policy.tokenizer.name": REPOSITORY / "examples" / "assets" / "tiny_qwen3_moe",
    }


@contextmanager
def running_ray(num_cpus: int) -> Iterator[None]:
    """A local Ray with room for the workers of both policies, only one of which works at a time."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=object_store_bytes(),
        # Ray's workers give way to all other programs unless told not to; what this is compared with does not.
        _system_config={"worker_niceness": 0},
    )
    try:
        yield
    finally:
        ray.shutdown()


def nowhere() -> TextIO:
    """A stream that keeps nothing."""
    return Path(os.devnull).open("w", encoding="utf-8")


def family() -> list[psutil.Process]:
    """This process and all that it has started."""
    driver = psutil.Process()
    return [driver, *driver.children(recursive=True)]


def family_cpu_seconds() -> float:
    """CPU time that they have used so far."""
    total = 0.0
    for process in family():
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def open_loggers(folder: Path, clock: MetricLogger, stack: ExitStack) -> tuple[FanOutLogger, ConsoleLogger]:
    """A console that nobody sees, `metrics.jsonl`, and last of all the clock; the stack closes them."""
    console = ConsoleLogger(total_steps=0, live="never", stream=stack.enter_context(nowhere()))
    notices = Notices(console.message, lambda warning: print(warning, file=sys.stderr))
    direct: list[MetricLogger] = [console, JsonlLogger(folder, notices.warn, notices.message), clock]
    return stack.enter_context(FanOutLogger(direct, notices)), console


def recorder_without_checkpoints(policy: PolicyConfig, sinks: RecordSinks) -> StepRecorder:
    """Ends each step as a run does that saves nothing."""
    return StepRecorder(sinks, None, lambda: None, policy.max_consecutive_skipped_updates, LoopState())
