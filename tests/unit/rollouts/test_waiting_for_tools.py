# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Waiting for tools in simulated time, and what lockstep gives in exchange: the same batches whatever tools take."""

from dataclasses import replace

import numpy as np

from benchmarks.waiting_for_tools import SCENARIO, result_of
from nemo_rl_moe.config.loading import load_grpo_config
from nemo_rl_moe.generation.lockstep import make_trainer_engine
from tests.support.simulated_rollouts import run_in_lockstep


def test_the_engine_waits_for_at_most_a_fifth_of_an_asynchronous_rollout() -> None:
    """8 turns, tools of a median of 0.2 s: in lockstep nearly all of a rollout is waiting."""
    found = result_of(SCENARIO, num_steps=5, warm_up=2, num_rollouts=2)
    assert float(found["in_lockstep"]) > 0.8
    assert float(found["asynchronous"]) <= 0.2
    assert float(found["asynchronous"]) < float(found["as_they_come"]) < float(found["in_lockstep"])


def test_what_is_generated_together_does_not_depend_on_how_long_tools_take() -> None:
    """So that a run can repeat to the bit: other batches, or another order in one, round otherwise."""
    slow = replace(SCENARIO, tool_s=lambda random: random.lognormal(np.log(3.0), 2.0))
    no_tools = replace(SCENARIO, tool_s=lambda random: 0.0)
    runs = [run_in_lockstep(scenario, seed=1, groups=2)[0] for scenario in (SCENARIO, slow, no_tools)]
    assert runs[0].batches == runs[1].batches == runs[2].batches
    assert [len(batch) for batch in runs[0].batches] == [16] * SCENARIO.num_turns


def test_rollouts_in_lockstep_are_the_default() -> None:
    config = load_grpo_config("grpo_math_1B.yaml", [], check_paths=False)
    assert config.grpo.rollouts.mode == "synchronous"
    assert config.policy.generation.engine.factory() is make_trainer_engine
