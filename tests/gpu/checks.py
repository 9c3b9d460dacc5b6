# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What `make test-gpu` checks of training, on one GPU. Each yields its numbers; `Failed` carries them too."""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from nemo_rl_moe.errors import ConfigurationError
from tests.gpu.models import (
    BF16_MOMENTS,
    Failed,
    Numbers,
    memory_of,
    packed_shard,
    run_config,
    slice_config,
    small_config,
    speed,
    timed_step,
    weights_from_the_device,
)
from tests.gpu.process import job_of_one

TRACKING_GOAL = 1.005
"""Seconds of a step with MoE metrics over those without."""
MEMORY_TOLERANCE = 0.05
"""Share by which what is held may differ from what `plan` says."""

# Sizes of tuned kernels for the tests' tiny families.
_LARGER: dict[str, int] = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 128,
    "num_local_experts": 128,
    "n_routed_experts": 128,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def family_config(name: str, *, rehearse: bool) -> Any:
    """Return the configuration of a family's tiny model, on a GPU with sizes that tuned kernels have."""
    from tests.support.family_models import FAMILY_MODELS

    hf_config = FAMILY_MODELS[name].hf_config()
    if not rehearse:
        for field, size in _LARGER.items():
            if getattr(hf_config, field, None) is not None:
                setattr(hf_config, field, size)
        if getattr(hf_config, "q_lora_rank", None) is not None:
            hf_config.q_lora_rank = 64
    return hf_config


def families(*, rehearse: bool, names: tuple[str, ...] | None = None) -> Iterator[Numbers]:
    """One optimizer step of a small model of every family, packed, on Transformer Engine's modules; all failures are
    reported."""
    from tests.support.family_models import FAMILY_MODELS
    from tests.support.tiny_model import forget_recorded_losses, shard_of_rank, tiny_batch

    engine = None if rehearse else _engine_release()
    losses: dict[str, float] = {}
    errors: dict[str, str] = {}
    config = run_config(rehearse=rehearse, train_global_batch_size=8)
    with job_of_one(config.policy):
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        for name in names or FAMILY_MODELS:
            try:
                hf_config = family_config(name, rehearse=rehearse)
                trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=2)
                # A token beyond the vocabulary would end the GPU's context, and with it all families behind this one.
                batch = tiny_batch(1, vocabulary_size=hf_config.vocab_size)
                losses[name] = trainer.train([shard_of_rank(batch)], sft_loss).global_loss
                if not 2.0 < losses[name] < 8.0:  # log(64) = 4.2 of random weights
                    errors[name] = f"its loss is {losses[name]}"
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"[:200]
            finally:
                forget_recorded_losses()  # its size is the first model's number of layers
    numbers = {"engine": engine, "losses": losses, "errors": errors}
    if errors:
        raise Failed(f"{len(errors)} of {len(errors.keys() | losses.keys())} families: {', '.join(errors)}", numbers)
    yield numbers


def _engine_release() -> str:
    import transformer_engine
    import transformer_engine.pytorch  # what a wrong build fails in

    return str(transformer_engine.__version__)


def slice_step(*, rehearse: bool, num_steps: int = 5) -> Iterator[Numbers]:
    """Steps of the slice: tokens a second, the share of the card's peak, and memory against `plan`'s arithmetic."""
    config = run_config(rehearse=rehearse, **({} if rehearse else BF16_MOMENTS))
    hf_config = slice_config(rehearse=rehearse)
    with job_of_one(config.policy), weights_from_the_device():
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=100)
        shards = [packed_shard(config, hf_config.vocab_size, seed) for seed in range(num_steps + 2)]
        steps = [timed_step(trainer, shard) for shard in shards]
        numbers = speed(trainer, shards[0], [seconds for seconds, _ in steps[2:]])
        numbers |= memory_of(config, trainer, steps[-1][1])
    numbers["losses"] = [result.global_loss for _, result in steps]
    if not all(torch.isfinite(torch.tensor(numbers["losses"]))):
        raise Failed("a loss is not finite", numbers)
    if wrong := memory_problem(numbers):
        raise Failed(wrong, numbers)
    yield numbers


def memory_problem(numbers: Numbers) -> str | None:
    """Return what `plan` says wrongly: what is held all the time, or a lower bound that is none."""
    held, planned = numbers["held_bytes"], numbers["planned_held_bytes"]
    peak, planned_peak = numbers["peak_bytes"], numbers["planned_peak_bytes_at_least"]
    if held is None:
        return None
    if abs(held / planned - 1) > MEMORY_TOLERANCE:
        return f"plan says that {planned / 1e9:.1f} GB are held all the time, and {held / 1e9:.1f} GB are"
    if peak < planned_peak * (1 - MEMORY_TOLERANCE):
        return f"plan says a peak of {planned_peak / 1e9:.1f} GB at least, and it was {peak / 1e9:.1f} GB"
    return None


def save_and_resume(*, rehearse: bool) -> Iterator[Numbers]:
    """A checkpoint read back: the weights to the last bit, and a step behind it that equals the run that went on."""
    config = run_config(rehearse=rehearse, **({} if rehearse else BF16_MOMENTS))
    hf_config = small_config(rehearse=rehearse)
    shards = [packed_shard(config, hf_config.vocab_size, seed) for seed in range(3)]
    with job_of_one(config.policy), tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        first, second = (MegatronTrainer(config.policy, hf_config, None, num_steps=10) for _ in range(2))
        for shard in shards[:2]:
            first.train([shard], sft_loss)
        began = time.perf_counter()
        first.start_checkpoint(Path(folder), with_optimizer=True)
        problem = first.finish_checkpoint()
        saved = time.perf_counter()
        if problem is not None:
            raise Failed(problem, {})
        second.train([shards[2]], sft_loss)  # moments and weights that must leave no trace
        loading = time.perf_counter()
        second.load_checkpoint(Path(folder), with_optimizer=True)
        loaded = time.perf_counter()
        differing = sum(
            not torch.equal(left, right)
            for a, b in zip(first.chunks, second.chunks, strict=True)
            for left, right in zip(a.parameters(), b.parameters(), strict=True)
        )
        on, resumed = (trainer.train([shards[2]], sft_loss) for trainer in (first, second))
    gap = abs(on.global_loss - resumed.global_loss) / on.global_loss
    norm_gap = abs(on.grad_norm - resumed.grad_norm) / on.grad_norm
    numbers = {
        "differing_tensors": differing,
        "loss_gap": gap,
        "grad_norm_gap": norm_gap,
        "save_seconds": round(saved - began, 3),
        "load_seconds": round(loaded - loading, 3),
    }
    if differing:
        raise Failed(f"{differing} tensors are not what was saved", numbers)
    # Sums on a GPU are not taken in one order.
    if gap > 1e-3 or norm_gap > 2e-2:
        raise Failed("the step behind the checkpoint differs from that of the run that went on", numbers)
    yield numbers


def refusal_without_engine(*, rehearse: bool) -> Iterator[Numbers]:
    """A GPU without Transformer Engine: refused in one line, before a model is built."""
    message = None
    with _hidden("transformer_engine"):
        from nemo_rl_moe.models.megatron.cpu import cpu_backend
        from nemo_rl_moe.models.megatron.model.transformer_engine import require_transformer_engine

        was_active, cpu_backend.ACTIVE = cpu_backend.ACTIVE, cpu_backend.ACTIVE and not rehearse
        try:
            require_transformer_engine()
        except ConfigurationError as error:
            message = str(error)
        finally:
            cpu_backend.ACTIVE = was_active
    if message is None or "needs Transformer Engine" not in message:
        raise Failed("training on a GPU without Transformer Engine is not refused", {"message": message})
    yield {"message": message}


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """A frame in which a package cannot be imported."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    sys.modules.update(dict.fromkeys([package, *kept]))  # type: ignore[arg-type]  # None: not to be found
    try:
        yield
    finally:
        sys.modules.pop(package)
        sys.modules.update(kept)


def tracking_cost(*, rehearse: bool, num_pairs: int = 20) -> Iterator[Numbers]:
    """Seconds of a step with MoE metrics over those of one without, in turns on the same batches."""
    num_pairs = 2 if rehearse else num_pairs
    hf_config = slice_config(rehearse=rehearse, num_hidden_layers=2)
    configs = [run_config(rehearse=rehearse, megatron_cfg__track_moe_metrics=tracked) for tracked in (False, True)]
    seconds: tuple[list[float], list[float]] = ([], [])
    with job_of_one(configs[0].policy), weights_from_the_device():
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        trainers = [MegatronTrainer(config.policy, hf_config, None, num_steps=100) for config in configs]
        num_metrics = []
        for number in range(-2, num_pairs):
            shard = packed_shard(configs[0], hf_config.vocab_size, number + 2)
            results = {}
            for index in (0, 1) if number % 2 else (1, 0):
                taken, results[index] = timed_step(trainers[index], shard)
                if number >= 0:
                    seconds[index].append(taken)
            num_metrics = [len(results[index].moe_metrics) for index in (0, 1)]
    ratio = statistics.median(on / off for off, on in zip(*seconds, strict=True))
    numbers = {
        "on_to_off": round(ratio, 4),
        "goal": TRACKING_GOAL,
        "seconds_off": round(statistics.median(seconds[0]), 4),
        "seconds_on": round(statistics.median(seconds[1]), 4),
        "metrics": num_metrics,
    }
    if not num_metrics[1] > num_metrics[0]:
        raise Failed("the tracked steps have no more metrics than the others", numbers)
    if not rehearse and ratio > TRACKING_GOAL:
        raise Failed(f"tracking costs {ratio - 1:.2%} of a step, more than {TRACKING_GOAL - 1:.1%}", numbers)
    yield numbers
