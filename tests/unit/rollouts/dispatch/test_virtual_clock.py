# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The virtual clock of these tests."""

import asyncio

import pytest

from tests.support.clocks_and_disks import NothingLeftError, run_virtually


def test_hours_pass_in_order() -> None:
    async def body() -> list[tuple[str, float]]:
        now, order = asyncio.get_running_loop().time, list[tuple[str, float]]()

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append((name, now()))

        await asyncio.gather(wait("late", 7200.0), wait("early", 0.5), wait("never waits", 0.0))
        return order

    assert run_virtually(body()) == [("never waits", 0.0), ("early", 0.5), ("late", 7200.0)]


def test_a_deadlock_is_an_error_at_once() -> None:
    async def body() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(NothingLeftError, match="everybody waits"):
        run_virtually(body())


@pytest.mark.parametrize("seconds", [100.0, 0.0])
def test_what_never_ends_is_an_error(seconds: float) -> None:
    async def body() -> None:
        while True:
            await asyncio.sleep(seconds)

    with pytest.raises(NothingLeftError, match="goes on after"):
        run_virtually(body())


def test_errors_of_callbacks_are_not_lost() -> None:
    async def body() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1.0)

    with pytest.raises(ZeroDivisionError):
        run_virtually(body())
