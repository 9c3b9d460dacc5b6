# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Every layout generates what one rank generates, whatever share of the prompts a rank has."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.gloo_ranks import run_ranks
from tests.support.quick_list import listed
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import PROMPT_LENGTHS, GenerationRun, Response, generate_run

# Largest seen: 2e-6.
TOLERANCE = 1e-5

ALL = tuple(range(len(PROMPT_LENGTHS)))
ONE_SHARE = (ALL,)
UNEVEN_SHARES = ((0, 2, 3, 4, 5), (1,))
EMPTY_SHARE = ((), ALL)

LAYOUTS: dict[str, tuple[int, dict[str, Any], Any]] = {
    "dp2": (2, {}, UNEVEN_SHARES),
    "dp2_empty": (2, {}, EMPTY_SHARE),
    "ep2": (2, layout(ep=2), UNEVEN_SHARES),
    "ep2_empty": (2, layout(ep=2), EMPTY_SHARE),
    "pp2": (2, layout(pp=2), ONE_SHARE),
    "pp2_vpp2": (2, layout(pp=2, vpp=2), ONE_SHARE),
    "pp2_uneven": (2, layout(pp=2, first=3), ONE_SHARE),
    "tp2": (2, layout(tp=2), ONE_SHARE),
    "tp2_ep2": (2, layout(tp=2, ep=2), ONE_SHARE),
    "tp2_etp2": (2, layout(tp=2, etp=2), ONE_SHARE),
    "tp2_pp2": (4, layout(tp=2, pp=2), ONE_SHARE),
    "pp2_ep2": (4, layout(pp=2, ep=2), UNEVEN_SHARES),
}
ON_ONE_SPEC = {"dp2", "dp2_empty", "tp2_etp2", "tp2_pp2", "pp2_vpp2", "pp2_uneven"}
CASES = [(name, spec) for name in LAYOUTS for spec in ("local", "auto") if spec == "auto" or name not in ON_ONE_SPEC]
# With this project's modules each dimension runs beside another one, or where ranks have no share; with
# Megatron-Core's own the one that cuts most of them.
COMBINING = ("dp2_empty", "ep2_empty", "pp2_vpp2", "tp2_ep2", "tp2_etp2", "tp2_pp2")
ON_EACH_CHANGE = [("tp2", "local"), *((name, "auto") for name in COMBINING)]


@cache
def one_rank(layer_spec: str) -> dict[int, Response]:
    """The responses that the others are compared with; made once."""
    return run_ranks(generate_run, 1, GenerationRun(tiny_policy(1, layer_spec=layer_spec)))[0]


def assert_same_responses(found: dict[int, Response], expected: dict[int, Response]) -> None:
    assert found.keys() == expected.keys()
    for index, response in expected.items():
        assert found[index].token_ids == response.token_ids
        assert found[index].is_truncated == response.is_truncated
        np.testing.assert_allclose(found[index].logprobs, response.logprobs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "layer_spec"), listed(CASES, [("pp2_ep2", "auto")], ON_EACH_CHANGE))
def test_layout_generates_as_one_rank_does(name: str, layer_spec: str) -> None:
    world_size, changes, shares = LAYOUTS[name]
    run = GenerationRun(tiny_policy(world_size, layer_spec=layer_spec, **changes), shares=shares, max_batch_size=4)
    found: dict[int, Response] = {}
    for responses in run_ranks(generate_run, world_size, run):
        assert not found.keys() & responses.keys(), "two ranks reported one response"
        found |= responses
    assert_same_responses(found, one_rank(layer_spec))


def test_layer_specs_generate_the_same() -> None:
    assert_same_responses(one_rank("local"), one_rank("auto"))


def test_responses_end_in_both_ways() -> None:
    responses = one_rank("auto").values()
    assert {response.is_truncated for response in responses} == {True, False}
