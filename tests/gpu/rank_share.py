# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One rank's share of the recipe for Qwen3-30B-A3B on 8 GPUs, on one GPU: speed, and memory against `plan`.

48 layers of 16 experts, 8 to a token: the parameters (5.17 billion), rows of each expert and memory of a rank with
`expert_model_parallel_size: 8`. What that rank also does is missing: it exchanges tokens with seven others.
"""

import gc
from collections.abc import Iterator
from typing import Any

import torch

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from tests.gpu.checks import memory_problem
from tests.gpu.models import (
    QWEN3_30B_A3B,
    Failed,
    Numbers,
    lengths_of,
    let_go,
    memory_of,
    packed_shard,
    recipe_config,
    slice_config,
    speed,
    timed,
    weights_from_the_device,
)
from tests.gpu.process import job_of_one

RECIPE = (8192, "moe")
CASES = (RECIPE, (4096, "full"), (16384, "moe"), (8192, "full"), (8192, "none"), (4096, "none"))
"""Tokens of a microbatch and what is computed again; in the order of what they are worth."""
_TOKENS_OF_A_STEP = 32768
_RANKS = 8
_LAUNCHES_SHOWN = 20


def rank_share(*, rehearse: bool, num_steps: int = 3) -> Iterator[Numbers]:
    """Yield each case; at the end fails what `plan` says wrongly, and a recipe without room."""
    problems = []
    for tokens, recompute in CASES[:1] if rehearse else CASES:
        is_recipe = (tokens, recompute) == RECIPE
        tokens = 64 if rehearse else tokens
        numbers: Numbers = {"tokens": tokens, "recompute": recompute}
        try:
            numbers |= _one(tokens, recompute, is_recipe, rehearse=rehearse, num_steps=num_steps)
            problem = memory_problem(numbers)
        except torch.cuda.OutOfMemoryError as error:
            numbers["error"] = str(error)[:200]
            problem = "no room" if is_recipe else None
        problems += [f"{tokens} tokens, recompute {recompute}: {problem}"] if problem else []
        yield numbers
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if problems:
        raise Failed("; ".join(problems), {})


def _one(tokens: int, recompute: str, shows_kernels: bool, *, rehearse: bool, num_steps: int) -> Numbers:
    config = recipe_config(rehearse=rehearse, tokens=tokens, megatron_cfg__activation_checkpointing=recompute)
    changes = {} if rehearse else {"num_hidden_layers": 48, "num_experts": QWEN3_30B_A3B["num_experts"] // _RANKS}
    hf_config = slice_config(rehearse=rehearse, **changes)
    rows = max(1, (128 if rehearse else _TOKENS_OF_A_STEP) // tokens)
    loss = PolicyGradientLoss(config.loss_fn, prev_is_current=True)
    with job_of_one(config.policy), weights_from_the_device():
        from nemo_rl_moe.models.megatron.model.memory_estimate import whole_model_parameters
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        built, trainer = timed(MegatronTrainer, config.policy, hf_config, None, 100)
        try:
            shards = [packed_shard(config, hf_config.vocab_size, step, num_rows=rows) for step in range(num_steps + 1)]
            steps = [timed(trainer.train, [shard], loss) for shard in shards]
            scored, _ = timed(trainer.logprobs, shards[0].microbatches)
            last = steps[-1][1]
            numbers = speed(trainer, shards[0], [seconds for seconds, _ in steps[1:]]) | memory_of(
                config, trainer, last
            )
            if shows_kernels:
                _show_kernels(lambda: trainer.train([shards[0]], loss))
            return numbers | {
                "parameters": whole_model_parameters(trainer.config, hf_config),
                "build_seconds": round(built, 1),
                "first_seconds": round(steps[0][0], 1),
                "logprob_tokens_per_second": round(sum(lengths_of(shards[0])) / scored, 1),
                "loss": last.global_loss,
            }
        finally:
            let_go(trainer)  # the next case begins with a free card


def _show_kernels(step: Any) -> None:
    """Print the kernels that take most of a step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=_LAUNCHES_SHOWN, max_name_column_width=60))
