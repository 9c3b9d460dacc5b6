# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An OpenEnv server for tests: guess a number below 8; some guesses make it fail, hang or end."""

import os
import time
from typing import Any

from openenv.core import create_app
from openenv.core.env_server import Action, Environment, Observation, State


class Guess(Action):
    text: str


class Answer(Observation):
    said: str


class Numbers(Environment):
    """Tells whether the number is larger or smaller; reward 1 for it, -0.25 for others."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._number = State(), 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Answer:
        self._number = options.get("number", (seed or 0) % 8)
        return Answer(said="Guess a number below 8.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Answer:
        self._state.step_count += 1
        if action.text == "hang":
            time.sleep(3600)
        if action.text == "end":
            os._exit(3)
        if not action.text.isdigit():
            raise ValueError("no number")
        guess = int(action.text)
        if guess == self._number:
            return Answer(said="Right.", done=True, reward=1.0)
        return Answer(said="larger" if guess < self._number else "smaller", reward=-0.25)

    @property
    def state(self) -> State:
        return self._state


app = create_app(Numbers, Guess, Answer, max_concurrent_envs=2)
