# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of the verifiers library as drivers of trajectories."""

import math
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from nemo_rl_moe.data.prompt_records import ROW
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.tools.formats.interface import ToolFormat

METRIC_PREFIX = "verifiers/"
_MODEL = "policy"
_FAILURES: ContextVar[set[str] | None] = ContextVar("texts of failed calls of a trajectory", default=None)


class VerifiersRollout:
    """Rollouts in one environment of the library, scored by its rubric.

    Args:
        tool_format: Format in which the model writes calls. None if the environment has no tools.
        score_truncated: Whether truncated trajectories keep their rewards. If not, the rewards are 0.
    """

    def __init__(self, environment: Any, tool_format: ToolFormat | None, *, score_truncated: bool):
        _note_failures(environment)
        self._environment, self._format, self._score_truncated = environment, tool_format, score_truncated

    async def __call__(self, session: Session) -> Trajectory:
        from nemo_rl_moe.rollouts.libraries.verifiers_client import SessionClient

        failures = set[str]()
        _FAILURES.set(failures)  # in this task, whose context the library's tasks inherit
        client = SessionClient(session, self._format, failures)
        output = await self._environment.run_rollout(dict(session.prompt.record[ROW]), client, _MODEL, {})
        client.note_end(output.get("completion") or ())
        if (error := output.get("error")) is not None:
            return session.failed(Fault.ERROR, " ".join(str(error["error_chain_repr"]).split()))
        reward = output["reward"]
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            return session.failed(Fault.ERROR, f"ValueError: the rubric gave {reward!r}, expected a finite number")
        score = Score(float(reward), is_correct=reward >= self._environment.pass_threshold)
        metrics = {
            f"{METRIC_PREFIX}{name}": float(value)
            for name, value in (output.get("metrics") or {}).items()
            if isinstance(value, int | float)
        }
        found = session.finish(score, metrics)
        if found.is_truncated and not self._score_truncated:
            return replace(found, reward=0.0, is_correct=False)
        return found


def _note_failures(environment: Any) -> None:
    """Record the texts by which an environment with tools tells the model that a tool has raised."""
    from verifiers import ToolEnv

    if not isinstance(environment, ToolEnv):
        return
    formatted = environment.error_formatter

    def noted(error: Exception) -> str:
        text = formatted(error)
        if (failures := _FAILURES.get()) is not None:
            failures.add(text)
        return text

    environment.error_formatter = noted
