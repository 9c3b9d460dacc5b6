# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of OpenEnv servers as drivers of trajectories: each response is an action."""

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from nemo_rl_moe.config.environments.openenv import OpenEnvConfig
from nemo_rl_moe.errors import one_line
from nemo_rl_moe.rewards.interface import Fault, Score
from nemo_rl_moe.rewards.registry import answer_in
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.libraries.openenv_servers import OpenEnvServer
from nemo_rl_moe.rollouts.trajectory import Trajectory
from nemo_rl_moe.runs.folder.conversations import FAILED_OUTCOMES, Outcome, ToolUse, as_arguments

RESET = "reset"
"""Key of a record with arguments of the environment's `reset`."""
STEPS, FAILED_STEPS = "openenv/steps", "openenv/failed_steps"
STEP = "step"
"""Name of the call that a conversation shows for an action."""
_AGAIN_S = 0.1


@dataclass
class _Episode:
    """Summed reward of an episode, and its state after the last step."""

    reward: float = 0.0
    is_done: bool = False
    observation: str = ""


class OpenEnvRollout:
    """Rollouts in the environments of servers. Rewards of all steps add up.

    Args:
        servers: Servers that the run has started. If empty, `config.server` is the URL of a running server.
        score_truncated: Whether truncated trajectories keep their rewards. If not, the rewards are 0.
    """

    def __init__(self, servers: Sequence[OpenEnvServer], config: OpenEnvConfig, *, score_truncated: bool):
        # These imports take seconds, which would block all trajectories later.
        from openenv.core import GenericEnvClient
        from websockets.exceptions import ConnectionClosed

        self._client, self._lost = GenericEnvClient, (ConnectionClosed, ConnectionError)
        self._servers, self._config, self._score_truncated = servers, config, score_truncated
        number = len(servers) or 1
        self._free = asyncio.Queue[int]()
        for session in range(config.sessions_per_server * number):
            self._free.put_nowait(session % number)

    async def __call__(self, session: Session) -> Trajectory:
        async with session.place(self._free.get, self._free.put_nowait) as server:
            return await self._in_place(session, self._servers[server] if self._servers else None)

    async def _in_place(self, session: Session, server: OpenEnvServer | None) -> Trajectory:
        limit_s = self._config.step_timeout_s
        url = self._config.server if server is None else server.url
        client = self._client(base_url=url, connect_timeout_s=limit_s, message_timeout_s=limit_s)
        try:
            return await self._play(session, client)
        except TimeoutError:
            failed = session.failed(
                Fault.TIMEOUT, f"the server gave no answer within {limit_s:g} s (env.driver.step_timeout_s)"
            )
        except Exception as error:  # of the connection, or an error that the server reports
            failed = session.failed(Fault.ERROR, one_line(error))
        finally:
            await client.disconnect()
        if server is not None:
            await asyncio.to_thread(server.replace_if_lost)
        return failed

    async def _play(self, session: Session, client: Any) -> Trajectory:
        episode = _Episode()
        session.metrics.update(dict.fromkeys((STEPS, FAILED_STEPS), 0.0))
        self._note(episode, await self._reset(session, client))
        if episode.observation:
            *earlier, last = session.prompt.messages
            content = f"{last['content']}\n\n{episode.observation}"
            session.begin_conversation([*earlier, {**last, "content": content}])
        while session.has_room and not episode.is_done:
            turn = await session.generate()
            if turn.is_truncated and not self._score_truncated:
                break
            self._note(episode, await self._step(session, client, turn.text))
            if episode.is_done or len(session.turns) == self._config.max_turns:
                break
            session.append_message({"role": "user", "content": episode.observation})
        found = session.finish(Score(episode.reward, is_correct=episode.reward > 0))
        if found.is_truncated and not self._score_truncated:
            return replace(found, reward=0.0, is_correct=False)
        return found

    async def _step(self, session: Session, client: Any, text: str) -> Any:
        """Take a step, and return its result. The transcript shows the step as a tool call of the response."""
        action = {self._config.action_key: answer_in(text, self._config.answer_after).strip()}
        name, began_s = f"step{len(session.turns)}", time.monotonic()

        def note(outcome: Outcome) -> None:
            use = ToolUse(name, STEP, as_arguments(action), outcome)
            session.note_call(use, time.monotonic() - began_s)
            session.metrics[STEPS] += outcome == "ok"
            session.metrics[FAILED_STEPS] += outcome in FAILED_OUTCOMES

        try:
            result = await client.step(action)
        except TimeoutError:
            note("timeout")
            raise
        except self._lost:
            note("died")
            raise
        except Exception:
            note("error")
            raise
        note("ok")
        return result

    async def _reset(self, session: Session, client: Any) -> Any:
        """Return the result of a reset, equal for all responses to a prompt. Retry while the server has no capacity."""
        own = session.prompt.record.get(RESET)
        arguments = {"seed": _seed_of(session.prompt.sample_id)} | (dict(own) if isinstance(own, Mapping) else {})
        deadline = asyncio.get_running_loop().time() + self._config.step_timeout_s
        while True:
            try:
                return await client.reset(**arguments)
            except RuntimeError as error:
                if "CAPACITY" not in str(error).upper() or asyncio.get_running_loop().time() > deadline:
                    raise
                await client.disconnect()
                await asyncio.sleep(_AGAIN_S)

    def _note(self, episode: _Episode, result: Any) -> None:
        """Add the result of a step to an episode."""
        reward = 0.0 if result.reward is None else float(result.reward)
        if not math.isfinite(reward):
            raise ValueError(f"the server gave the reward {result.reward!r}, expected a finite number")
        episode.reward += reward
        episode.is_done = bool(result.done)
        observation = dict(result.observation)
        key = self._config.observation_key
        if key not in observation:
            known = ", ".join(observation) or "nothing"
            raise ValueError(f"env.driver.observation_key: got {key!r}, but an observation has {known}")
        found = observation[key]
        episode.observation = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _seed_of(sample_id: str) -> int:
    return int.from_bytes(blake2b(sample_id.encode(), digest_size=4).digest()) >> 1
