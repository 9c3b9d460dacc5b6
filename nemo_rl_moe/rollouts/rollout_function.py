# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The driver that runs a user's coroutine function."""

import inspect
from collections.abc import Awaitable, Callable

from nemo_rl_moe.config.user_code import described, import_attribute
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rollouts.ending import ended
from nemo_rl_moe.rollouts.environment import Session
from nemo_rl_moe.rollouts.trajectory import Trajectory

ROLLOUT_KEY = "env.driver.function"
_EXPECTED = "the Trajectory that session.finish(score) of its own session makes"


class RolloutFunction:
    """An environment made of a user's coroutine function, which takes a session and returns its trajectory.

    Args:
        name: Name of the function in the configuration.
    """

    def __init__(self, function: Callable[[Session], Awaitable[object]], name: str):
        self._function, self._name = function, name

    async def rollout(self, session: Session) -> Trajectory:
        """Make one trajectory. If the function raises an error, return a trajectory with a fault."""
        # A cancellation by the user's code is a fault, too. After a cancellation by the run, the result is unused.
        return await ended(self._checked(session), session, ends_the_run=())

    async def _checked(self, session: Session) -> Trajectory:
        found = await self._function(session)
        if not isinstance(found, Trajectory):
            got = "None" if found is None else f"an object of type {type(found).__name__}"
            raise TypeError(f"{ROLLOUT_KEY}: {self._name} returned {got}, expected {_EXPECTED}")
        if found.group_id != session.group_id:
            raise ValueError(
                f"{ROLLOUT_KEY}: {self._name} returned a trajectory of {found.group_id} for {session.group_id},"
                f" expected {_EXPECTED}"
            )
        return found


def load_rollout_function(reference: str) -> RolloutFunction:
    """Import a user's coroutine function, and return it as an environment."""
    function = import_attribute(ROLLOUT_KEY, reference, form="package.module:function")
    if not inspect.iscoroutinefunction(function):
        raise ConfigurationError(
            f"{ROLLOUT_KEY}: {reference} is {described(function)}, expected a coroutine function (async def) that"
            " takes a Session and returns its Trajectory"
        )
    return RolloutFunction(function, reference)
