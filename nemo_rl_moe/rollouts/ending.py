# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of an exception that a trajectory raises into the fault of that trajectory."""

from asyncio import CancelledError
from collections.abc import Awaitable

from nemo_rl_moe.config.user_code import error_in_user_code
from nemo_rl_moe.errors import GenerationError, UserError, WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory

ENDS_THE_RUN = (UserError, WorkerDiedError, GenerationError, CancelledError)
"""Exceptions that are no fault of one trajectory: the user has to act, or the engine or a worker has failed."""


async def ended(
    rollout: Awaitable[Trajectory], session: Session, ends_the_run: tuple[type[BaseException], ...] = ENDS_THE_RUN
) -> Trajectory:
    """Return the trajectory of a rollout. If it raises, return the trajectory so far, with the error as its fault.

    Models, agents, tools and servers can send malformed data of any kind. That costs the trajectory, never the run.

    Args:
        ends_the_run: Exceptions that are raised again. Empty for a user's code, whose errors are all faults.
    """
    try:
        return await rollout
    except (KeyboardInterrupt, GeneratorExit):  # of the terminal, and of a coroutine that is closed
        raise
    except BaseException as error:  # errors of libraries in other languages are no `Exception`
        if isinstance(error, ends_the_run):
            raise
        return session.failed(Fault.ERROR, error_in_user_code(error))
