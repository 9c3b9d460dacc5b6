# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_rl_moe.routing.metrics.load_statistics import positions_at_ranks
from tests.support.quick_list import examples

# Few distinct values make ties; wide ranges make buckets that hold nearly everything.
VALUES = st.one_of(
    st.lists(st.sampled_from([0.0, 1.0, 1.5, 7.0]), min_size=1, max_size=60),
    st.lists(st.floats(0, 1e9), min_size=1, max_size=60),
)


@given(values=VALUES, random=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=examples(80))
@example(values=[0.0] * 20 + [1e9] + [1e-9] * 5, random=Random(0))
@example(values=[3.0], random=Random(0))
def test_ranks_give_the_order_of_value_and_position(values: list[float], random: Random) -> None:
    """All of them, and some in any order."""
    order = sorted(range(len(values)), key=lambda position: (values[position], position))
    for ranks in (list(range(len(values))), [random.randrange(len(values)) for _ in range(4)]):
        measured = positions_at_ranks(torch.tensor(values, dtype=torch.float64), ranks)
        assert measured.tolist() == [order[rank] for rank in ranks]


@pytest.mark.parametrize("exponent", [0.2, 1, 30])
def test_more_values_than_buckets(exponent: float) -> None:
    values = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** exponent
    ranks = [0, 4_999, 10_000, 19_999]
    assert positions_at_ranks(values, ranks).tolist() == values.argsort(stable=True)[ranks].tolist()
