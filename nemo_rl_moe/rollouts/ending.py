# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The end of a trajectory that raises: the one place that makes its fault of an exception."""

from asyncio import CancelledError
from collections.abc import Awaitable

from nemo_rl_moe.config.user_code import error_in_user_code
from nemo_rl_moe.errors import GenerationError, UserError, WorkerDiedError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory

ENDS_THE_RUN = (UserError, WorkerDiedError, GenerationError, CancelledError)
"""Exceptions that are no fault of one trajectory: a user has to do something, or nothing works any more."""


async def ended(
    rollout: Awaitable[Trajectory], session: Session, ends_the_run: tuple[type[BaseException], ...] = ENDS_THE_RUN
) -> Trajectory:
    """Return what a rollout gives; where it raises, the trajectory as it is, with the error as its fault.

    What models, agents, tools and servers send can be wrong in ways that nobody has thought of. It costs the
    trajectory, and never the run.

    Args:
        ends_the_run: What is raised all the same; nothing for a user's own code, whose every error is its own.
    """
    try:
        return await rollout
    except (KeyboardInterrupt, GeneratorExit):  # of the terminal, and of a coroutine that is closed
        raise
    except BaseException as error:  # errors of libraries in other languages are no `Exception`
        if isinstance(error, ends_the_run):
            raise
        return session.failed(Fault.ERROR, error_in_user_code(error))
