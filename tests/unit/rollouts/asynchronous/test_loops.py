# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Event loops of rollouts: what ends one is heard by who waits for it."""

import asyncio
import sys

import pytest

from nemo_rl_moe.rollouts.asynchronous.loops import CallersLoop, LoopThread, RolloutLoop


@pytest.mark.parametrize("make_loop", [LoopThread, CallersLoop])
def test_code_that_exits_ends_who_waits(make_loop: type[RolloutLoop]) -> None:
    """A trajectory's code runs `exit()`, as code that a model has written does: the run ends."""

    async def exits() -> None:
        sys.exit(3)

    async def waits() -> None:
        asyncio.get_running_loop().create_task(exits())
        await asyncio.get_running_loop().create_future()

    loop = make_loop()
    with pytest.raises(SystemExit, match="3"):
        loop.run(waits())
