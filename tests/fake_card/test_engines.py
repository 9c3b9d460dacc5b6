# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An engine that dies while it receives over NCCL does not end the trainer, which serves another engine then."""

import json
from pathlib import Path

import pytest

from tests.fake_card.engines import lose_an_engine
from tests.fake_card.ranks import run_on_cards
from tests.support.gloo_ranks import RankError


@pytest.mark.parametrize("dies", ["connected", "unconnected"])
@pytest.mark.parametrize("nccl", ["error", "silence"])
def test_an_engine_that_dies_costs_the_trainer_one_transfer(nccl: str, dies: str, tmp_path: Path) -> None:
    with pytest.raises(RankError) as error:  # of rank 1, which has died
        run_on_cards(lose_an_engine, 3, str(tmp_path), dies, grace_s=300.0, FAKE_CARD_LATE=nccl)
    assert "rank 1: died without an answer" in str(error.value)
    assert "rank 0: " not in str(error.value)
    assert "rank 2: " not in str(error.value)
    assert json.loads((tmp_path / "trainer").read_text()) == ["the engine died", str(12 * 4096), 8.0]
    received = json.loads((tmp_path / "engine").read_text())
    assert len(received) == 12
    for number in range(12):
        assert received[f"layer {number}"] == [2.0 * k + number for k in range(1024)]
