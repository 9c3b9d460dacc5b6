# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A trajectory that asks a sub-agent between two turns of its own: credit goes by time, not by sequence.

Its main conversation has the turns 0 and 2, and the answer is the last one; the sub-agent's sequence stands behind it.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nemo_rl_moe.algorithms.grpo_batch import advantages_of_groups, shaped_rewards
from nemo_rl_moe.rollouts.agents.task import AgentTask
from nemo_rl_moe.rollouts.trajectory import TokenSequence, Trajectory
from tests.support.conversations import ALL, MODEL, client_of, ended, play
from tests.support.grpo_fakes import small_config, trajectory
from tests.support.grpo_inputs import tokens_of, with_tokens
from tests.unit.algorithms.test_critic import PLAIN, columns_of, ppo_config, values_of
from tests.unit.algorithms.test_reward_model import scored
from tests.unit.algorithms.test_turn_credit import config_of, groups_of

QWEN = ALL["Qwen3, Qwen3-MoE"]


def joined(*parts: TokenSequence) -> TokenSequence:
    ids, mask, logprobs, versions = (
        np.concatenate([vars(part)[name] for part in parts])
        for name in ("token_ids", "loss_mask", "logprobs", "weight_versions")
    )
    return TokenSequence(ids, mask, logprobs, versions)


def with_sub_agent(turn_rewards: tuple[float, ...] = (), reward: float = 1.0) -> Trajectory:
    """The tokens 5 and 6 of the main conversation, and 7 and 8 of a sub-agent between them."""
    main, sub_agent = joined(tokens_of([9], [5]), tokens_of([9], [6])), tokens_of([9], [7, 8])
    made = with_tokens(trajectory(reward=reward + sum(turn_rewards)), main, sub_agent)
    return replace(made, num_turns=3, turn_lengths=(1, 1, 2), turn_order=(0, 2, 1), turn_rewards=turn_rewards)


def test_the_rest_of_the_reward_belongs_to_the_last_turn_in_time() -> None:
    """Values are a tenth of the column: of 5, 7, 8 and 6 they are 0.1, 0.1, 0.2 and 0.3. Differences are 0.0, 0.1, 0.1
    and 1 - 0.3, and each counts half of those behind it."""
    batch, _ = columns_of(ppo_config(*PLAIN), [with_sub_agent()])
    assert values_of(batch, "advantages", 0) == pytest.approx([0, 0.1625, 0, 0.7])
    assert values_of(batch, "advantages", 1) == pytest.approx([0, 0.325, 0.45, 0])
    assert values_of(batch, "previous_values", 0) == pytest.approx([0, 0.1, 0, 0.3])
    assert values_of(batch, "returns", 1) == pytest.approx([0, 0.425, 0.65, 0])


def test_the_reward_of_a_turn_stands_at_its_own_tokens() -> None:
    """2 for the sub-agent, at 8: differences of 5, 7, 8 and 6 are 0.0, 0.1, 2.1 and 0.7."""
    batch, _ = columns_of(ppo_config(*PLAIN), [with_sub_agent((0.0, 2.0, 0.0))])
    assert values_of(batch, "advantages", 1) == pytest.approx([0, 0.1 + 0.5 * 2.45, 2.45, 0])
    assert values_of(batch, "advantages", 0) == pytest.approx([0, 0.5 * 1.325, 0, 0.7])


def test_the_return_of_a_turn_has_the_rewards_of_later_turns() -> None:
    """2 for the sub-agent is a return of the turns 0 and 1, and not of the answer, which came later."""
    found = [with_sub_agent((0.0, 2.0, 0.0)), with_sub_agent(), with_sub_agent()]
    advantages = advantages_of_groups(config_of(), groups_of(found))[0]
    high, none = 2 * 2 / 3, 0.0
    # Main conversation: given, 5, given, 6; the sub-agent: given, 7, 8.
    assert advantages[0].tolist() == pytest.approx([0, high, 0, none, 0, high, high])


def test_a_reward_model_scores_the_sequence_with_the_last_response() -> None:
    (found,) = scored(with_sub_agent())
    assert dict(found.rewards) == {"reward_model": 6.0}
    assert with_sub_agent().last_sequence is not with_sub_agent().sequences[-1]
    (found,) = scored(replace(with_sub_agent(), turn_order=()))
    assert dict(found.rewards) == {"reward_model": 8.0}


def test_an_agent_s_turns_have_their_order_in_time() -> None:
    def agent(task: AgentTask) -> float:
        client = client_of(task)

        def ask(messages: list[Any]) -> dict[str, object]:
            reply = client.chat.completions.create(model=MODEL, messages=messages)
            return dict(reply.choices[0].message.to_dict())

        messages: list[Any] = [*task.messages]
        messages.append(ask(messages))
        note = ask([{"role": "user", "content": "sub task"}])
        messages.append({"role": "user", "content": note["content"]})
        ask(messages)
        return 1.0

    responses = [ended(QWEN, text) for text in ("plan", "note", "answer!")]
    _, found = play(agent, responses, QWEN)
    assert found.turn_lengths == tuple(len(responses[turn]) for turn in (0, 2, 1))
    assert found.turn_order == (0, 2, 1)
    assert "answer!" in QWEN.tokenizer.decode(found.last_sequence.token_ids)


def test_the_punishment_of_long_responses_is_of_one_response() -> None:
    """20 of the 100 tokens that a response may have cost more and more; three of 40 tokens are not one of 120."""
    config = small_config(
        "policy.generation.max_new_tokens=100",
        "policy.max_total_sequence_length=1000",
        "grpo.reward_shaping.enabled=true",
        "grpo.reward_shaping.overlong_buffer_length=20",
        "grpo.reward_shaping.overlong_buffer_penalty=1.0",
    )

    def of(*turns: int) -> Trajectory:
        whole = joined(*(tokens_of([9], [5] * size) for size in turns))
        return replace(with_tokens(trajectory(reward=1.0), whole), num_turns=len(turns), turn_lengths=turns)

    found = [of(40), of(40, 40, 40), of(40, 90, 10)]
    assert shaped_rewards(config, groups_of(found)).tolist() == [[1.0, 1.0, 0.5]]
