# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The loop of GRPO over a source that runs ahead: the versions of a batch decide on its loss, and not the settings."""

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.algorithms.grpo import Rollouts, train_grpo
from nemo_rl_moe.algorithms.grpo_batch import failure_rule, make_loss
from nemo_rl_moe.algorithms.grpo_metrics import Validator
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.checkpoints.state import LoopState
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.data.prompts import PromptLoader
from nemo_rl_moe.distributed.batch import per_token
from nemo_rl_moe.launch.rollouts import plan_rollouts, running_source, state_at
from nemo_rl_moe.models.interfaces import LossInputs
from nemo_rl_moe.rollouts.loops import CallersLoop, LoopThread
from nemo_rl_moe.rollouts.source import RolloutSource
from tests.support.grpo_fakes import (
    PAD_TOKEN,
    SAMPLING,
    FakeEngine,
    FakePolicy,
    FakeRewardFunction,
    ListLogger,
    make_runner,
    prompts,
    small_config,
)
from tests.support.loggers import DiaryOfCheckpoints, make_recorder
from tests.support.scripted_rollouts import ScriptedEngine

VALIDATES = ("grpo.val_at_start=true", "grpo.val_at_end=true")
ASYNCHRONOUS = ("grpo.rollouts.mode=asynchronous", "policy.generation.backend=vllm")
LOCKSTEP = ("grpo.rollouts.mode=asynchronous", "grpo.rollouts.max_staleness=0")


class RefittedEngine(ScriptedEngine):
    """Gets its weights from the loop."""

    def update_weights(self, transport: Any, version: int) -> None:
        transport.send()
        self.version = version


@dataclass
class Run:
    """One run of the loop, of a synchronous or an asynchronous source."""

    config: GRPOMasterConfig
    folder: Path
    engine: Any = None
    diary: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = FakeEngine(self.diary) if self.engine is None else self.engine
        self.policy = FakePolicy(self.diary, updates_of_call=self.config.updates_per_step)
        self.logger = ListLogger(diary=self.diary)
        loop = CallersLoop() if self.engine.shares_weights else LoopThread()
        runner = make_runner(self.engine, FakeRewardFunction(diary=self.diary), loop=loop)
        loader = PromptLoader(prompts(7), self.config.grpo.num_prompts_per_step, self.config.grpo.seed, shuffle=True)
        validate = Validator(self.config.grpo, runner, prompts(2, "val"), SAMPLING, failure_rule(self.config))
        plan, state = plan_rollouts(self.config), state_at(self.config, LoopState(), None, loader)
        with (
            closing(runner),
            running_source(self.config, plan, runner, loader, SAMPLING, self.folder, state, print, print) as source,
        ):
            self._train(source, validate)

    def _train(self, source: RolloutSource, validate: Validator) -> None:
        recorder = make_recorder(self.logger, [], lambda *samples: None, DiaryOfCheckpoints(self.diary), lambda: None)
        self.summary = train_grpo(
            self.config, self.policy, Rollouts(self.engine, source, validate, PAD_TOKEN), recorder
        )

    def series(self, name: str) -> list[float]:
        """Return a metric of each step that has it."""
        return [metrics[name] for _, metrics in self.logger.records if name in metrics]


def without_times(records: list[tuple[int, dict[str, float]]]) -> list[tuple[int, dict[str, float]]]:
    left_out = ("timing/", "train/staleness/", "train/rollouts/")
    return [
        (step, {name: value for name, value in metrics.items() if not name.startswith(left_out)})
        for step, metrics in records
    ]


def test_without_staleness_the_loop_does_the_same_in_the_same_order(tmp_path: Path) -> None:
    synchronous = Run(small_config("grpo.max_num_steps=3", *VALIDATES), tmp_path)
    asynchronous = Run(small_config("grpo.max_num_steps=3", *VALIDATES, *LOCKSTEP), tmp_path)
    assert asynchronous.diary == synchronous.diary
    assert "logprobs" not in asynchronous.diary
    assert without_times(asynchronous.logger.records) == without_times(synchronous.logger.records)
    for ours, theirs in zip(asynchronous.policy.batches, synchronous.policy.batches, strict=True):
        assert torch.equal(ours.input_ids, theirs.input_ids)
    assert asynchronous.policy.losses == synchronous.policy.losses


def test_the_versions_of_a_batch_decide_on_its_ratio(tmp_path: Path) -> None:
    """A19: the ratio is 1 without a lag alone; the first step of a run ahead has none."""
    run = Run(small_config("grpo.max_num_steps=3", *ASYNCHRONOUS), tmp_path, RefittedEngine(token_s=0.0))
    lags = run.series("train/staleness/max")
    assert lags[0] == 0
    assert max(lags) == 1
    losses = [loss for loss in run.policy.losses if isinstance(loss, PolicyGradientLoss)]
    assert [loss.ratio_to_generation for loss in losses] == [lag > 0 for lag in lags]
    assert "logprobs" not in run.diary  # a step is one update: the training pass gives those before it
    assert not any("prev_logprobs" in batch.columns for batch in run.policy.batches)


@pytest.mark.parametrize(
    ("overrides", "is_on_policy", "is_current", "to_generation"),
    [
        ((), True, True, False),
        ((), False, True, True),
        (("loss_fn.importance_sampling_correction=truncated",), False, True, False),
        (("loss_fn.force_on_policy_ratio=never",), True, False, False),
        (("loss_fn.force_on_policy_ratio=never",), False, False, True),
    ],
)
def test_ratio_of_old_tokens(
    overrides: tuple[str, ...], is_on_policy: bool, is_current: bool, to_generation: bool
) -> None:
    loss = make_loss(small_config(*overrides), is_on_policy=is_on_policy)
    assert (loss.prev_is_current, loss.ratio_to_generation) == (is_current, to_generation)


def test_the_ratio_of_old_tokens_is_to_who_sampled_them() -> None:
    config = small_config("loss_fn.force_on_policy_ratio=never")
    columns = {
        "generation_logprobs": per_token(torch.tensor([[-1.0, -1.0]])),
        "prev_logprobs": per_token(torch.tensor([[-9.0, -9.0]])),
        "advantages": per_token(torch.tensor([[1.0, 1.0]])),
    }
    inputs = LossInputs(
        logprobs=torch.tensor([[-0.5, -0.75]]),
        token_mask=torch.tensor([[True, True]]),
        global_valid_tokens=2,
        global_sequences=1,
        greedy_matches=None,
        columns=columns,
    )
    metrics = make_loss(config, is_on_policy=False)(inputs).metrics
    expected = float(np.exp([0.5, 0.25]).mean())
    assert float(metrics["probs_ratio"][0]) == pytest.approx(expected)
    # The mismatch stays that of the policy before the step, whatever the ratio is to.
    assert float(metrics["sampling_logp_difference"][0]) == pytest.approx(8.0)
