# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Waits of the host in a step, as CUDA reports them: the number of this project's own must not grow with microbatches.

Those of a backward pass are reported when it has ended, and counted for who asked for it.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from tests.gpu.models import Failed, Numbers, packed_shard, recipe_config, slice_config, weights_from_the_device
from tests.gpu.process import job_of_one
from tests.support.pretended_gpu import Wait, by_owner, caller

_SAID = "synchronizing CUDA operation"
_ROWS = (2, 4)


@contextmanager
def waits_counted() -> Iterator[Counter[Wait]]:
    """Count the warnings of CUDA's debug mode by the function that they are for."""
    found: Counter[Wait] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if _SAID in str(message):
            found[Wait(*caller(beyond=(__file__, warnings.__file__)), "synchronizes")] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        _set_debug_mode("warn")
        try:
            yield found
        finally:
            _set_debug_mode("default")


def _set_debug_mode(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def growing(few: Counter[Wait], many: Counter[Wait]) -> dict[str, int]:
    """Return this project's waits that are more with more microbatches, and how many more."""
    fewer, found = (by_owner(waits.items(), "ours") for waits in (few, many))
    more = {place: count - fewer.get((place, kind), 0) for (place, kind), count in found.items()}
    return {place: count for place, count in more.items() if count > 0}


def sync(*, rehearse: bool) -> Iterator[Numbers]:
    """Count the waits of steps with two and with four packed microbatches."""
    config = recipe_config(rehearse=rehearse, tokens=64 if rehearse else 4096)
    hf_config = slice_config(rehearse=rehearse, num_hidden_layers=2)
    loss = PolicyGradientLoss(config.loss_fn, prev_is_current=True)
    with job_of_one(config.policy), weights_from_the_device():
        from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

        trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=10)
        found = []
        for rows in (*_ROWS, *_ROWS):  # the first of each size compile
            shard = packed_shard(config, hf_config.vocab_size, rows, num_rows=rows)
            with waits_counted() as waits:
                trainer.train([shard], loss)
            found.append(waits)
    few, many = found[-2:]
    numbers = {
        "microbatches": _ROWS[-1],
        "waits": {f"{wait.owner}: {wait.function}": count for wait, count in sorted(many.items())},
        "growing": growing(few, many),
    }
    if numbers["growing"]:
        raise Failed("the host waits for the GPU more often with more microbatches", numbers)
    yield numbers
