# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The learning rate of every step: by hand, and against Megatron-Core's own schedule tick by tick."""

import math
from functools import cache
from typing import Any, Literal

import pytest
import torch

from nemo_rl_moe.config.schema_policy import PolicyConfig, SchedulerConfig
from nemo_rl_moe.models.megatron.training.optimizer import build_scheduler
from tests.support.tiny_model import tiny_policy

# isort: split
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

LR, MIN_LR = 1.0, 0.1
Style = Literal["constant", "linear", "cosine", "inverse-square-root"]
STYLES: tuple[Style, ...] = ("constant", "linear", "cosine", "inverse-square-root")


@cache
def base_policy() -> PolicyConfig:
    return tiny_policy(optimizer__lr=LR, optimizer__min_lr=MIN_LR)


def schedule(
    num_steps: int, style: Style, warmup: int, decay: int | None = None
) -> tuple[Any, OptimizerParamScheduler]:
    """An optimizer and the schedule of a run of so many steps."""
    policy = base_policy()
    chosen = SchedulerConfig(lr_decay_style=style, lr_warmup_iters=warmup, lr_decay_iters=decay)
    megatron = policy.megatron_cfg.model_copy(update={"scheduler": chosen})
    optimizer: Any = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    return optimizer, build_scheduler(policy.model_copy(update={"megatron_cfg": megatron}), optimizer, num_steps)


def megatrons(
    num_steps: int, style: Style, warmup: int, decay: int | None = None
) -> tuple[Any, OptimizerParamScheduler]:
    """An optimizer and Megatron-Core's own schedule, at tick 0."""
    optimizer: Any = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    end = decay or num_steps
    return optimizer, OptimizerParamScheduler(optimizer, 0.0, LR, MIN_LR, warmup, end, style, 0.0, 0.0, end, "constant")


def remaining(optimizer: Any, scheduler: OptimizerParamScheduler, num_steps: int) -> list[float]:
    """The learning rate that each of so many further steps trains at."""
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return found


def rates(num_steps: int, style: Style, warmup: int, decay: int | None = None) -> list[float]:
    """The learning rate that each step of a run trains at."""
    optimizer, scheduler = schedule(num_steps, style, warmup, decay)
    return remaining(optimizer, scheduler, num_steps)


@pytest.mark.parametrize(
    ("style", "warmup", "expected"),
    [
        ("linear", 0, [1.0, 0.82, 0.64, 0.46, 0.28]),
        ("linear", 2, [0.5, 1.0, 0.7, 0.4, 0.1]),
        ("constant", 0, [1.0] * 5),
        ("constant", 4, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ("inverse-square-root", 0, [1.0, 1.0, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5]),
        ("inverse-square-root", 1, [1.0, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5, 1 / math.sqrt(5)]),
        ("cosine", 0, [0.1 + 0.45 * (1 + math.cos(math.pi * k / 5)) for k in range(5)]),
        ("cosine", 1, [0.1 + 0.45 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]),
    ],
)
def test_five_steps_by_hand(style: Style, warmup: int, expected: list[float]) -> None:
    assert rates(5, style, warmup) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_a_run_of_one_step_without_warm_up_trains_at_lr(style: Style) -> None:
    assert rates(1, style, 0) == [LR]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("num_steps", [1, 3, 20])
def test_a_run_cut_short_sees_the_beginning_of_the_warm_up(style: Style, num_steps: int) -> None:
    assert rates(num_steps, style, 20) == pytest.approx([step / 20 for step in range(1, num_steps + 1)], rel=1e-12)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("decay", [None, 15])
def test_every_step_is_a_tick_of_megatrons(style: Style, warmup: int, decay: int | None) -> None:
    num_steps = 25
    optimizer, own = megatrons(num_steps, style, warmup, decay)
    own.step(1 if warmup else 0)
    assert rates(num_steps, style, warmup, decay) == remaining(optimizer, own, num_steps)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("steps_done", [1, 3, 6])
def test_a_resumed_run_goes_on_where_it_was(style: Style, warmup: int, steps_done: int) -> None:
    num_steps = 10
    _, first = schedule(num_steps, style, warmup)
    for _ in range(steps_done):
        first.step(1)
    optimizer, second = schedule(num_steps, style, warmup)
    # As a checkpoint is restored, which holds the ticks alone.
    second.num_steps = first.num_steps
    second.step(0)
    assert remaining(optimizer, second, num_steps - steps_done) == rates(num_steps, style, warmup)[steps_done:]

    optimizer, own = megatrons(num_steps, style, warmup)
    own.load_state_dict(first.state_dict())
    assert remaining(optimizer, own, num_steps - steps_done) == rates(num_steps, style, warmup)[steps_done:]


def test_min_lr_null_is_a_tenth_of_lr_as_it_is_written() -> None:
    for written, tenth in ((3.0e-3, 3.0e-4), (1.0e-5, 1.0e-6), (5.0e-7, 5.0e-8), (3.0e-4, 3.0e-5), (1.0e-6, 1.0e-7)):
        optimizer = tiny_policy(optimizer__lr=written, optimizer__min_lr=None).megatron_cfg.optimizer
        assert optimizer.end_lr == tenth
    explicit = tiny_policy(optimizer__lr=1.0e-4, optimizer__min_lr=0.0).megatron_cfg.optimizer
    assert explicit.end_lr == 0.0
