# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What runs in vLLM's processes neither waits for the step that runs, nor takes memory that vLLM does not know of."""

from nemo_rl_moe.generation.vllm.releases import _ROWS_AT_A_TIME
from tests.fake_card.engine_parts import NUM_STEPS, memory_of_logprobs, waits_of_recorder
from tests.fake_card.ranks import run_on_cards
from tests.support.vllm_runner import chosen


def test_a_forward_pass_waits_for_the_routes_of_the_step_before_last() -> None:
    ((waits, routes),) = run_on_cards(waits_of_recorder, 1)
    assert waits == [[], [], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert routes == [chosen(100 * step, 2)[0].tolist() for step in range(NUM_STEPS - 1)]


def test_log_probabilities_take_little_memory_beside_their_result() -> None:
    rows, vocabulary = 1024, 2048
    (beside,) = run_on_cards(memory_of_logprobs, 1, rows, vocabulary)
    # Of a part of the rows: float32 logits, the quotient, and log-probabilities.
    assert beside <= 3 * _ROWS_AT_A_TIME * vocabulary * 4 + 4 * rows + 4096
