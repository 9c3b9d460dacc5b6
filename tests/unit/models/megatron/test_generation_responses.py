# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The record of responses while they grow."""

import numpy as np
import pytest

from nemo_rl_moe.generation.interface import SamplingParameters
from nemo_rl_moe.models.megatron.generation.sampling import Responses, StopCondition

END = 9


def grown(*columns: tuple[list[int], list[float]]) -> Responses:
    """Two responses of at most two tokens."""
    stop = StopCondition(SamplingParameters(max_new_tokens=2, stop_token_ids=(END,)), None)
    responses = Responses(2, 2, stop)
    for token_ids, logprobs in columns:
        responses.append(np.arange(2), np.array(token_ids), np.array(logprobs), np.array([True, True]))
    return responses


def test_one_ends_and_one_is_cut() -> None:
    first, second = grown(([END, 5], [-0.5, -1.0]), ([7, 6], [-9.0, -2.0])).sequences(weight_version=3)
    assert (first.token_ids.tolist(), first.logprobs.tolist(), first.is_truncated) == ([END], [-0.5], False)
    assert (second.token_ids.tolist(), second.logprobs.tolist(), second.is_truncated) == ([5, 6], [-1.0, -2.0], True)
    assert first.weight_version == second.weight_version == 3


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_not_trained_on(broken: float) -> None:
    responses = grown(([5, 5], [-1.0, broken]))
    with pytest.raises(RuntimeError, match=r"1 of 2 responses .* after 3 optimizer steps"):
        responses.sequences(weight_version=3)


@pytest.mark.parametrize(("top_p", "expected"), [(0.9, [[0.5], [0.75, 1.0]]), (1.0, [None, None])])
def test_kept_mass_is_reported_each_token_where_something_is_cut(
    top_p: float, expected: list[list[float] | None]
) -> None:
    sampling = SamplingParameters(max_new_tokens=2, top_p=top_p, stop_token_ids=(END,))
    responses = Responses(2, 2, StopCondition(sampling, None), reports_kept_mass=sampling.draws_from_a_part)
    for token_ids, kept_mass in (([END, 5], [0.5, 0.75]), ([7, 6], [0.25, 1.0])):
        every = np.array([True, True])
        responses.append(np.arange(2), np.array(token_ids), np.array([-1.0, -1.0]), every, np.array(kept_mass))
    found = [sequence.kept_mass for sequence in responses.sequences(weight_version=0)]
    assert [None if mass is None else mass.tolist() for mass in found] == expected
