# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The fake NCCL under ProcessGroupNCCL: every collective and message gives what it must."""

import pytest

from tests.fake_card.collectives import TYPES, try_all
from tests.fake_card.ranks import run_on_cards


@pytest.mark.parametrize("name", TYPES)
def test_every_collective_is_right_between_two_ranks(name: str) -> None:
    run_on_cards(try_all, 2, name)
