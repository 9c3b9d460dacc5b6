# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An environment of two turns: a question whose first answer is wrong is asked once more.

In the configuration:

    env:
      rollout: examples.second_try:second_try
"""

from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory


async def second_try(session: Session) -> Trajectory:
    """Ask, and ask again where the answer is wrong; the last answer is scored."""
    await session.generate()
    score = await session.score()
    if not score.is_correct:
        session.append_text(session.prompt.text)
        if session.has_room:
            await session.generate()
            score = await session.score()
    return session.finish(score)
