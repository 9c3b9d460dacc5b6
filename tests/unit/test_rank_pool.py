# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Ranks that are used again are as good as new ones."""

import logging
import os
import random
import signal
import sys
import time
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import gloo_ranks, tiny_model
from tests.support.gloo_ranks import RankError, run_ranks
from tests.support.quick_list import full

pytestmark = pytest.mark.megatron

NOTED: list[int] = []


@pytest.fixture(autouse=True)
def no_other_ranks() -> None:
    """So that a second call meets the processes of the first."""
    gloo_ranks.end_idle_ranks()


def disturb() -> int:
    """Changes all that a test may change, and leaves it so."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    os.environ["DISTURBED"] = "1"
    os.chdir("/")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    warnings.simplefilter("error")
    logging.getLogger("megatron").setLevel(logging.DEBUG)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    torch.set_grad_enabled(False)
    dist.all_reduce = None
    tiny_model.MICROBATCHES = ()
    tiny_model.ADDED = 1  # type: ignore[attr-defined]
    NOTED.append(1)
    TopKRouter.forward = None
    return os.getpid()


def what_is_found() -> tuple[int, dict[str, object]]:
    """Return what a call finds, beside its process."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter

    return os.getpid(), {
        "groups": dist.is_initialized() or parallel_state.model_parallel_is_initialized(),
        "variable": os.environ.get("DISTURBED"),
        "folder": os.getcwd(),  # noqa: PTH109
        "signal": str(signal.getsignal(signal.SIGXFSZ)),
        "warnings": len(warnings.filters),
        "level": logging.getLogger("megatron").level,
        "numbers": torch.rand(2).tolist(),
        "gradients": torch.is_grad_enabled(),
        "all_reduce": callable(dist.all_reduce),
        "names": (tiny_model.MICROBATCHES, hasattr(tiny_model, "ADDED"), list(NOTED)),
        "router": callable(TopKRouter.forward),
    }


def test_a_rank_that_is_used_again_is_as_a_fresh_one() -> None:
    fresh = [found for _, found in run_ranks(what_is_found, 2, fresh=True)]
    disturbed = run_ranks(disturb, 2)
    again = run_ranks(what_is_found, 2)
    assert {process for process, _ in again} == set(disturbed), "this test needs the same processes"
    assert [found for _, found in again] == fresh


def rank_that_fails(how: str) -> int:
    if how == "raises" and os.environ["RANK"] == "1":
        raise ValueError("on purpose")
    if how == "dies" and os.environ["RANK"] == "1":
        os._exit(3)
    if how == "hangs":
        time.sleep(60)
    return os.getpid()


@pytest.mark.parametrize(
    ("how", "words"),
    [full("raises", "on purpose"), ("dies", "died without an answer"), full("hangs", "rank_that_fails")],
)
def test_a_call_that_fails_costs_its_processes(how: str, words: str) -> None:
    before = run_ranks(rank_that_fails, 2, "not at all")
    with pytest.raises(RankError, match=words):
        run_ranks(rank_that_fails, 2, how, timeout_s=280.0 if how != "hangs" else 10.0)
    assert not set(before) & set(run_ranks(rank_that_fails, 2, "not at all"))


def test_arguments_that_are_not_understood_are_reported() -> None:
    with pytest.raises(RankError, match="cannot be read here"):
        run_ranks(rank_that_fails, 1, Unreadable())


class Unreadable:
    def __reduce__(self) -> object:
        return fail_where_it_is_read, (os.getpid(),)


def fail_where_it_is_read(writer: int) -> None:
    if os.getpid() != writer:
        raise ValueError(f"cannot be read here, by {sys.executable}")
