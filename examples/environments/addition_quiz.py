# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A quiz of several additions as an OpenEnv environment, for grpo_tiny_moe_openenv.yaml; `app` is its server."""

from typing import Any

from openenv.core import create_app
from openenv.core.env_server import Action, Environment, Observation, State

SESSIONS = 16
"""Episodes that a server takes at a time."""


class Answer(Action):
    """What the player says."""

    text: str


class Question(Observation):
    """What the player reads."""

    text: str


class AdditionQuiz(Environment):
    """Asks one addition after the other; each right answer is an equal part of the reward of 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._questions = State(), [""]

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Question:
        """Take the questions, such as "12+30="; the player has the first one in its prompt."""
        self._state, self._questions = State(), list(options["questions"])
        return Question(text="")

    def step(self, action: Answer, timeout_s: float | None = None, **options: Any) -> Question:
        """Mark an answer, and ask the next question."""
        terms = self._questions[self._state.step_count].rstrip("=").split("+")
        reward = float(action.text == str(sum(map(int, terms)))) / len(self._questions)
        self._state.step_count += 1
        if self._state.step_count == len(self._questions):
            return Question(text="", done=True, reward=reward)
        return Question(text=self._questions[self._state.step_count], reward=reward)

    @property
    def state(self) -> State:
        """Return the number of questions that have been answered."""
        return self._state


app = create_app(AdditionQuiz, Answer, Question, max_concurrent_envs=SESSIONS)
