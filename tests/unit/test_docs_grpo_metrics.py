# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The tables of metrics in `docs/grpo-reference.md` and `docs/gpu.md` against what the code can produce."""

import re
from dataclasses import replace
from itertools import product

import torch

from nemo_rl_moe.algorithms.grpo_batch import SELECTED_FRACTION
from nemo_rl_moe.algorithms.grpo_metrics import advantage_metrics, group_metrics
from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.algorithms.position_metrics import PositionMetrics
from nemo_rl_moe.algorithms.step_metrics import performance_metrics, training_metrics
from nemo_rl_moe.metrics import MetricSeries, PhaseClock, Reduction
from nemo_rl_moe.models.interfaces import GpuUse, TrainResult
from nemo_rl_moe.rollouts.agents.requests import CALL_METRICS, OTHER_SAMPLING, REFUSED
from nemo_rl_moe.rollouts.environment import CACHED_TOKENS
from nemo_rl_moe.rollouts.libraries.openenv_environment import FAILED_STEPS, STEPS
from nemo_rl_moe.rollouts.libraries.verifiers_environment import METRIC_PREFIX
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.tool_environment import METRICS, UNKNOWN_CALLS
from nemo_rl_moe.rollouts.training_batch import training_batch
from nemo_rl_moe.rollouts.trajectory import KEPT_MASS
from tests.support.grpo_fakes import LEAVE_OUT, PAD_TOKEN, trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens
from tests.unit.algorithms.policy_loss_reference import config_of, random_inputs
from tests.unit.test_docs_examples import DOCS, documented_keys

METRICS_OF_GRPO = DOCS / "grpo-reference.md"


def unfolded(key: str) -> set[str]:
    """`a/{b,c}` is `a/b` and `a/c`; a placeholder such as `{k}` stays."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", key)
    return {key[: match.start()] + part + key[match.end() :] for part in match[1].split(",")} if match else {key}


def training_keys() -> set[str]:
    """Keys of a step, over all settings that decide which there are."""
    keys: set[str] = set()
    for correction, penalty in product(("none", "truncated", "icepop"), (0.0, 0.1)):
        config = config_of(
            importance_sampling_correction=correction, reference_policy_kl_penalty=penalty, entropy_bonus=penalty
        )
        inputs = random_inputs(seed=0, targets=9)
        inputs = replace(inputs, entropy=torch.ones_like(inputs.logprobs))
        of_loss = PolicyGradientLoss(config, prev_is_current=False)(inputs).metrics
        series = {name: MetricSeries((float(value),), reduction) for name, (value, reduction) in of_loss.items()}
        result = TrainResult(0.0, 0.0, 0.0, 1, 1, series, {})
        of_selection = {SELECTED_FRACTION: 1.0}
        keys |= training_metrics(
            result, step_metrics() | of_selection | PositionMetrics().after_update(result, PhaseClock())
        ).keys()
    return keys


def step_metrics(environment: str = "") -> dict[str, float]:
    """Return metrics of the responses of a step with dynamic sampling."""
    of_environments = (
        STEPS,
        FAILED_STEPS,
        f"{METRIC_PREFIX}...",
        *METRICS,
        UNKNOWN_CALLS,
        *CALL_METRICS,
        REFUSED,
        OTHER_SAMPLING,
    )
    of_session = dict.fromkeys((KEPT_MASS, CACHED_TOKENS, *of_environments), 1.0)
    rollouts = [
        with_tokens(trajectory(reward=1.0, rewards={"NAME": 1.0}), tokens_of([10], [5, 1]), tokens_of([10, 5], [1])),
        replace(
            trajectory(),
            num_turns=2,
            num_retries=1,
            metrics=of_session,
            overlong="9 tokens do not fit",
            turn_rewards=(0.0, 1.0),
        ),
    ]
    rollouts = [replace(each, environment=environment) for each in rollouts]
    groups = RolloutGroups(trained=rollouts, generated=rollouts, num_generations=2, num_filled=1)
    batch = training_batch(rollouts, torch.zeros(1, 2, dtype=torch.float64), PAD_TOKEN, leave_out_truncated=False)
    rule = replace(LEAVE_OUT, leave_truncated=frozenset({environment}))
    return group_metrics(groups, rule) | advantage_metrics(batch, torch.ones(1, 2, dtype=torch.bool))


def test_table_has_every_training_metric_and_no_other() -> None:
    table = {key for cell in documented_keys(METRICS_OF_GRPO) for key in unfolded(cell)}
    elsewhere = {"train/moe/...", "train/by_lag/...", "train/env/NAME/..."}
    assert {key for key in table if key.startswith("train/")} - elsewhere == training_keys()


def test_metrics_of_an_environment_are_those_of_the_table_and_its_share() -> None:
    own = {key for key in step_metrics(environment="NAME") if key.startswith("env/NAME/")}
    known = {key.removeprefix("env/") for key in step_metrics()} | {"share"}
    assert {key.removeprefix("env/NAME/") for key in own} <= known
    assert {"share", "reward", "accuracy", "mean_turns_per_sample", "tools/calls", "num_errors"} <= {
        key.removeprefix("env/NAME/") for key in own
    }


def test_table_of_gpus_has_every_performance_metric_and_no_other() -> None:
    memory = {f"max_memory_{kind}_gb": MetricSeries((1.0,), Reduction.MAX) for kind in ("allocated", "reserved")}
    result = TrainResult(0.0, 0.0, 0.0, 1, 1, {}, {}, gpu_use=GpuUse(1, 1, 1, 1.0, memory))
    clock = PhaseClock()
    with clock.phase("step"), clock.phase("train"):
        pass
    table = {key for key in documented_keys(DOCS / "gpu.md") if key.startswith("performance/")}
    assert table == performance_metrics(result, clock).keys()
