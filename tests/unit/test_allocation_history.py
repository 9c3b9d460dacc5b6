# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Allocations at the fullest moment of a phase, and the terms of `plan` that they belong to."""

from typing import Any

import pytest

from tests.fake_card.full_size.history import Block, at_peak
from tests.fake_card.full_size.terms import OTHER, sums_by_term, term_of_lines


def _event(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "frames": []}


def test_the_fullest_moment_has_what_was_held_before_and_not_what_was_freed() -> None:
    events = [
        _event("alloc", 2, 30),
        _event("free_requested", 1, 10),
        _event("free_completed", 1, 10),
        _event("alloc", 1, 40),  # 70 with the address of what was freed
        _event("alloc", 3, 5),
        _event("free_requested", 2, 30),
        _event("alloc", 4, 29),
    ]
    held = {1: _event("alloc", 1, 10)}
    assert sorted((event["addr"], event["size"]) for event in at_peak(held, events)) == [(1, 40), (2, 30), (3, 5)]
    assert at_peak(held, []) == [held[1]]


def test_the_moment_at_which_some_allocations_are_the_most() -> None:
    events = [_event("alloc", 1, 1), _event("alloc", 2, 50), _event("free_requested", 2, 50), _event("alloc", 3, 2)]
    found = at_peak({}, events, lambda event: event["size"] if event["addr"] in (1, 3) else 0)
    assert sorted(event["addr"] for event in found) == [1, 3]


@pytest.mark.parametrize(
    ("lines", "size", "term"),
    [
        (("rmsnorm.py:op_forward", "transformer_layer.py:_forward_mlp"), 33 << 20, "norms"),
        (("rmsnorm.py:op_forward", "transformer_layer.py:_forward_mlp"), 1 << 20, "statistics"),
        (("fused_bias_dropout.py:_add", "transformer_layer.py:_forward_attention"), 33 << 20, "residual"),
        (("fused_bias_dropout.py:_add", "transformer_layer.py:_forward_post_mlp"), 33 << 20, "input"),
        (("functional.py:linear", "chunked_head.py:logits"), 300 << 20, "head"),
        (("_common.py:apply_normalization", "multi_latent_attention.py:forward"), 6 << 20, "latents"),
        (("gemm.py:general_gemm", "mlp.py:forward"), 160 << 20, "matrices"),
        (("mine.py:anything",), 1, OTHER),
        ((), 1, OTHER),
    ],
)
def test_lines_have_terms(lines: tuple[str, ...], size: int, term: str) -> None:
    assert term_of_lines(Block(1, size, lines)) == term


def test_what_is_held_is_known_by_its_address() -> None:
    blocks = [Block(1, 100, ("rmsnorm.py:op_forward",)), Block(2, 10, ("mine.py:anything",)), Block(3, 1, ())]
    assert sums_by_term(blocks, {"weights": {1}, "gradients": {3}}) == {"weights": 100, OTHER: 10, "gradients": 1}
