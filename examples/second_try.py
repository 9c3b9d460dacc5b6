# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""An environment of two turns: after a wrong answer, the question is asked once more, at a cost.

In the configuration:

    env:
      driver:
        kind: function
        function: examples.second_try:second_try
    grpo:
      adv_estimator:
        name: turn_grpo    # credit by turn; with the others all tokens share one advantage
"""

from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory


async def second_try(session: Session) -> Trajectory:
    """Ask, and ask again if the answer is wrong. The last answer is scored."""
    await session.generate()
    score = await session.score()
    if not score.is_correct:
        session.reward(-0.2)  # for the first answer only, with an estimator such as turn_grpo
        session.append_text(session.prompt.text)
        if session.has_room:
            await session.generate()
            score = await session.score()
    return session.finish(score)
