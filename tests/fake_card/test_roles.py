# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities, critic, teacher, adapters, replay, offload and checkpoints on cards are those over gloo."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_card.ranks import run_on_cards
from tests.fake_card.roles import ROLES, Numbers, resumed, state_away
from tests.support.gloo_ranks import run_ranks
from tests.support.tiny_model import layout, tiny_grpo_policy

TOLERANCE = 2e-5
"""Of float32 after two steps, absolute and relative. The largest seen is 1.3e-6."""
SHARDED = {"distributed_data_parallel_config__use_distributed_optimizer": True}


def assert_same(found: Sequence[Numbers], expected: Sequence[Numbers]) -> None:
    """Every rank has found the same numbers on a card as over gloo."""
    largest = 0.0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert sum(values.size for values in theirs.values()) > 2
        for name, values in theirs.items():
            assert np.isfinite(values).all(), name
            np.testing.assert_allclose(mine[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
            gaps = np.abs(mine[name] - values) / np.maximum(1, np.abs(values))
            largest = max(largest, float(gaps.max(initial=0)))
    print(f"largest difference {largest:.1e}")


@pytest.mark.parametrize("name", ROLES)
def test_a_role_on_cards_is_that_over_gloo(name: str) -> None:
    role, world_size, changes = ROLES[name]
    policy = tiny_grpo_policy(world_size, **changes)
    assert_same(run_on_cards(role, world_size, policy), run_ranks(role, world_size, policy))


RUNNERS: dict[str, Callable[..., list[Any]]] = {"card": run_on_cards, "gloo": run_ranks}


def test_state_leaves_for_the_host_and_checkpoints_resume_on_either(tmp_path: Path) -> None:
    policy = tiny_grpo_policy(2, **layout(ep=2), **SHARDED)
    for name in RUNNERS:
        (tmp_path / name).mkdir()
    went_on = {name: run(state_away, 2, policy, str(tmp_path / name)) for name, run in RUNNERS.items()}
    assert_same(went_on["card"], went_on["gloo"])
    behind = [{name: found[name][1:] for name in ("losses", "gradient norms")} for found in went_on["gloo"]]
    for writer, reader in (("card", "card"), ("card", "gloo"), ("gloo", "card")):
        after = RUNNERS[reader](resumed, 2, policy, str(tmp_path / writer))
        assert_same([{name: found[name] for name in behind[0]} for found in after], behind)
