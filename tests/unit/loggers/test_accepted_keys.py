# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One bad key does not cost the others."""

import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.loggers.accepted_keys import write_what_is_accepted

FAILURE = ValueError("the whole step")


class Picky:
    """Takes a part only if it holds no bad key."""

    def __init__(self, bad: set[str]):
        self.bad = bad
        self.taken: list[str] = []
        self.calls = 0

    def __call__(self, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        if self.bad & metrics.keys():
            raise ValueError(sorted(self.bad & metrics.keys()))
        self.taken += metrics


@given(st.integers(1, 60), st.sets(st.integers(0, 59)))
def test_every_good_key_is_written_once_and_every_bad_one_named(count: int, bad: set[int]) -> None:
    keys = [f"k{number}" for number in range(count)]
    picky = Picky({f"k{number}" for number in bad} & set(keys))
    metrics = dict.fromkeys(keys, 1.0)
    if all(probe in picky.bad for probe in (keys[0], keys[count // 2], keys[-1])):
        with pytest.raises(ValueError, match="the whole step"):
            write_what_is_accepted(picky, metrics, FAILURE)
        return
    assert write_what_is_accepted(picky, metrics, FAILURE).keys() == picky.bad
    assert sorted(picky.taken) == sorted(set(keys) - picky.bad)


def test_one_bad_key_among_many_takes_few_writes() -> None:
    picky = Picky({"k100"})
    write_what_is_accepted(picky, {f"k{number}": 1.0 for number in range(300)}, FAILURE)
    assert picky.calls <= 3 + 1 + 2 * math.ceil(math.log2(300))


def test_a_backend_that_is_out_of_order_is_not_asked_for_every_key() -> None:
    keys = {f"k{number}": 1.0 for number in range(300)}
    picky = Picky(set(keys))
    with pytest.raises(ValueError, match="the whole step"):
        write_what_is_accepted(picky, keys, FAILURE)
    assert picky.calls == 3


def test_an_empty_step_that_fails_is_the_backends_fault() -> None:
    with pytest.raises(ValueError, match="the whole step"):
        write_what_is_accepted(Picky(set()), {}, FAILURE)
