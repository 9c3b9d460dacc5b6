# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A quiz of several additions as an OpenEnv environment, for grpo_tiny_moe_openenv.yaml. `app` is the server."""

from typing import Any

from openenv.core import create_app
from openenv.core.env_server import Action, Environment, Observation, State

SESSIONS = 16
"""Largest number of concurrent episodes of a server."""


class Answer(Action):
    """An answer of the player."""

    text: str


class Question(Observation):
    """A question to the player."""

    text: str


class AdditionQuiz(Environment):
    """Asks one addition after the other. Each right answer is an equal part of the reward of 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._questions = State(), [""]

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Question:
        """Take the questions, such as "12+30=". The player has the first one in its prompt."""
        self._state, self._questions = State(), list(options["questions"])
        return Question(text="")

    def step(self, action: Answer, timeout_s: float | None = None, **options: Any) -> Question:
        """Score an answer, and ask the next question."""
        terms = self._questions[self._state.step_count].rstrip("=").split("+")
        reward = float(action.text == str(sum(map(int, terms)))) / len(self._questions)
        self._state.step_count += 1
        if self._state.step_count == len(self._questions):
            return Question(text="", done=True, reward=reward)
        return Question(text=self._questions[self._state.step_count], reward=reward)

    @property
    def state(self) -> State:
        """State with the number of answered questions."""
        return self._state


app = create_app(AdditionQuiz, Answer, Question, max_concurrent_envs=SESSIONS)
