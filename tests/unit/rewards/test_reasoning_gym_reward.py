# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Tasks of reasoning-gym: verified, sampled, and refused with a hint."""

import pytest

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Score
from nemo_rl_moe.rewards.reasoning_gym import ReasoningGymReward, draw_items
from tests.support.grpo_inputs import reward_section

SUMS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}


def task(name="basic_arithmetic", partial_credit=False, **parameters):
    keys = {"task": name, "parameters": parameters, "partial_credit": partial_credit}
    return reward_section("reasoning_gym", **keys)


def test_only_a_full_score_is_right(item_of):
    strict, lenient = ReasoningGymReward(task()), ReasoningGymReward(task(partial_credit=True))
    record = {"question": "228+378=", "answer": "606", "metadata": {}}
    for response in ("606", " 606\n"):
        assert strict.score(item_of(response, **record)) == Score(1.0, True)
        assert lenient.score(item_of(response, **record)) == Score(1.0, True)
    # The library's own scores: the share of the text that is the answer.
    assert strict.score(item_of("is 606", **record)) == Score(0.0, False)
    assert lenient.score(item_of("is 606", **record)) == Score(0.5, False)
    assert strict.score(item_of("607", **record)) == Score(0.0, False)
    assert strict.score(item_of("", **record)) == Score(0.0, False)


def test_verifier_reads_the_metadata(item_of):
    """A task with many right answers: any of them counts, not only the record's."""
    environment = ReasoningGymReward(task("countdown"))
    record = {"question": "", "answer": "1 + 2 * 3", "metadata": {"numbers": [1, 2, 3], "target": 7}}
    assert environment.score(item_of("3 * 2 + 1", **record)).is_correct
    assert not environment.score(item_of("3 + 2 + 1", **record)).is_correct
    with pytest.raises(KeyError):
        environment.score(item_of("3 * 2 + 1", question="", answer="7"))


def test_sampled_items_score_full_with_their_own_answers(item_of):
    config = task(**SUMS)
    environment = ReasoningGymReward(config)
    for _, item in draw_items(config, 20, 0).items:
        assert environment.score(item_of(item["answer"], **item)) == Score(1.0, True)


def test_same_seed_same_items_and_other_seeds_share_none():
    def questions(seed):
        return [item["question"] for _, item in draw_items(task(min_digits=4), 50, seed).items]

    assert questions(1) == questions(1)
    assert not set(questions(1)) & set(questions(2)), "the library itself would share 49 of 50"


def test_questions_are_sampled_once():
    sampled = draw_items(task(**SUMS), 60, 0)
    questions = [item["question"] for _, item in sampled.items]
    assert len(questions) == len(set(questions)) == 60
    assert sampled.num_repeated > 0
    assert [index for index, _ in sampled.items] == sorted(index for index, _ in sampled.items)
    assert sampled.items[-1][0] + 1 == 60 + sampled.num_repeated


def test_a_task_with_fewer_questions_than_asked_for_ends():
    sampled = draw_items(task(**SUMS), 400, 0)
    assert 0 < len(sampled.items) < 400
    assert len(sampled.items) + sampled.num_repeated == 4 * 400 + 100


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            task("basic_arithmetik"),
            "env.reward.task: reasoning-gym has no task 'basic_arithmetik'; did you mean basic_arithmetic?",
        ),
        (task(min_digit=3), "env.reward.parameters.min_digit: basic_arithmetic has no such parameter; its "),
        (task(seed=3), "env.reward.parameters.seed: is set by data.*.seed; leave it out here"),
        (
            task(min_terms=0),
            "env.reward.parameters: basic_arithmetic refuses these values: AssertionError: min_terms must be positive",
        ),
        (task(min_terms="two"), "env.reward.parameters: basic_arithmetic refuses these values: TypeError: "),
    ],
)
def test_what_is_refused(config, problem):
    with pytest.raises(ConfigurationError) as error:
        ReasoningGymReward(config)
    (message,) = error.value.problems
    assert message.startswith(problem)


def test_nearest_parameter_and_every_task_if_none_is_near():
    with pytest.raises(ConfigurationError, match=r"; did you mean min_digits\?$"):
        ReasoningGymReward(task(min_digit=3))
    with pytest.raises(ConfigurationError, match=r"; they are: .*, basic_arithmetic, "):
        ReasoningGymReward(task("qqqq"))
