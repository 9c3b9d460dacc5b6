# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What a new estimator touches: its own module and one line of the registry."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import nemo_rl_moe
from nemo_rl_moe.algorithms.grpo_batch import failure_rule, informative_groups
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.rl.estimators import ESTIMATORS
from nemo_rl_moe.rl.estimators.interface import Estimator
from tests.support.grpo_fakes import small_config, trajectory
from tests.unit.algorithms.test_grpo_loop import Loop

MODULE = '''
"""Difference of a response from the best one of its group, spread over its tokens."""

from nemo_rl_moe.rl.estimators.interface import Estimator


def advantages(inputs):
    """Compute an advantage for each token: a response's, divided by its length."""
    behind = inputs.rewards - inputs.rewards.amax(dim=1, keepdim=True)
    return (behind / inputs.num_tokens)[:, :, None] * inputs.token_mask


def somebody_is_right(inputs):
    """Return which groups have a response of reward 1."""
    return inputs.rewards.amax(dim=1) == 1


def is_not_divided(config):
    """Check that no scaling is asked for."""
    if config.grpo.adv_estimator.normalize_rewards:
        yield "grpo.adv_estimator.normalize_rewards: got true, expected false with against_best"


AGAINST_BEST = Estimator("against_best", advantages, is_informative=somebody_is_right, rules=(is_not_divided,))
'''
CHOSEN = ("grpo.adv_estimator.name=against_best", "grpo.adv_estimator.normalize_rewards=false")


@pytest.fixture
def against_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Estimator:
    (tmp_path / "against_best.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    estimator: Estimator = importlib.import_module("against_best").AGAINST_BEST
    monkeypatch.setitem(ESTIMATORS, estimator.name, estimator)
    return estimator


def test_it_is_a_name_of_the_schema_with_its_own_rules(
    against_best: Estimator, grpo_problems_of: Callable[..., list[str]]
) -> None:
    assert len(MODULE.strip().splitlines()) <= 30
    load_grpo_config("grpo_tiny_moe.yaml", CHOSEN, check_paths=False)
    assert grpo_problems_of(CHOSEN[0]) == [
        "grpo.adv_estimator.normalize_rewards: got true, expected false with against_best"
    ]
    assert grpo_problems_of("grpo.adv_estimator.name=against_bst") == [
        "grpo.adv_estimator.name: got 'against_bst' (str), expected one of grpo, turn_grpo, gdpo, maxrl,"
        " optimal_token_baseline, reinforce_plus_plus, reinforce_plus_plus_baseline, reinforce, gae, against_best or"
        " package.module:name; did you mean against_best?"
    ]
    assert grpo_problems_of(*CHOSEN, "grpo.adv_estimator.normalize_over=batch") == [
        "grpo.adv_estimator.normalize_over: got batch, expected group with grpo.adv_estimator.name against_best, which"
        " does not read it; grpo does"
    ]


def test_a_run_trains_with_it(against_best: Estimator) -> None:
    (batch, *_) = Loop(small_config("grpo.max_num_steps=1", *CHOSEN)).policy.batches
    advantages, mask = batch.columns["advantages"].values, batch.token_mask
    assert advantages.shape == mask.shape
    assert (advantages[~mask] == 0).all()
    sums = advantages.sum(dim=1).view(2, 3)
    assert (sums <= 0).all()
    assert (sums.amax(dim=1) == 0).all(), "the best of each group is as good as the best"


def test_dynamic_sampling_and_failures_ask_it(against_best: Estimator) -> None:
    config = small_config(*CHOSEN)
    rewards = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.0]
    found = informative_groups(config, [trajectory(reward=reward) for reward in rewards])
    assert found.tolist() == [True, True, False]
    assert failure_rule(config).fewest_of_group == 2


def test_no_other_file_of_the_package_says_the_name_of_an_estimator_of_named_rewards() -> None:
    """Counted for `gdpo`, whose name the package once said in eight files."""
    package = Path(nemo_rl_moe.__file__).parent
    found = [path for path in package.rglob("*.py") if "gdpo" in path.read_text().lower()]
    assert sorted(str(path.relative_to(package)) for path in found) == [
        "rl/estimators/__init__.py",
        "rl/estimators/gdpo.py",
    ]


def test_registries_are_read_without_torch() -> None:
    code = (
        "import nemo_rl_moe.rl.estimators.rules, nemo_rl_moe.rl.objectives, nemo_rl_moe.rl.corrections, sys\n"
        "print(sorted({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True)
    assert done.stdout.strip() == "[]"


def test_an_advantage_for_each_token_is_held_between_the_bounds(against_best: Estimator) -> None:
    config = small_config("grpo.max_num_steps=1", *CHOSEN, "grpo.advantage_clip_low=-0.01")
    advantages = Loop(config).policy.batches[0].columns["advantages"].values
    assert advantages.min() == torch.tensor(-0.01)
