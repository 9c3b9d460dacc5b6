# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Start of vLLM's engines, with Ray and engines replaced."""

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.generation.vllm import actors as module
from nemo_rl_moe.generation.vllm.actors import EngineActors

NO_ROOM = "ValueError: Free memory on device cuda:0 (20.1/79.2 GiB) on startup is less than desired"


class Method:
    """A remote method, whose result is known when it is called."""

    def __init__(self, result: Any):
        self._result = result

    def remote(self) -> Any:
        return (self._result,)


class Machine:
    """Engines that start with the next of some problems, or without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *problems: str | None):
        self.problems = list(problems)
        self.started: list[int] = []
        self.killed: list[Any] = []
        ray = SimpleNamespace(
            remote=lambda **_: lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._make)),
            wait=lambda calls, **_: (calls, []),
            get=lambda call, **_: call[0],
            is_initialized=lambda: False,
        )
        monkeypatch.setattr(module, "ray", ray)
        monkeypatch.setattr(module, "kill", self.killed.append)
        placement: Any = SimpleNamespace(gpus=lambda number: (), options=lambda number: {})
        settings: Any = SimpleNamespace(seed=5)
        monkeypatch.setattr(module, "replace", lambda settings, **changes: SimpleNamespace(**changes))
        self.engines = EngineActors(
            settings, 2, start_timeout_s=1.0, stall_timeout_s=1.0, placement=placement, warn=lambda text: None
        )

    def _make(self, settings: Any, path: list[str]) -> Any:
        self.started.append(settings.seed)
        return SimpleNamespace(start=Method(self.problems.pop(0)), window=Method(None))


def test_an_engine_that_replaces_a_dead_one_is_started_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, None, None, NO_ROOM, None)
    machine.engines.start_missing()
    survivor, dead = machine.engines.present
    machine.engines.give_up(dead, "died")
    machine.engines.start_missing()
    assert [actor.number for actor in machine.engines.present] == [0, 1]
    assert machine.engines.present[0] is survivor
    assert len(machine.killed) == 2, "the dead engine and the one that did not start"
    assert len(set(machine.started)) == 4, "engines have seeds of their own"


@pytest.mark.parametrize("problems", [(None, NO_ROOM), (None, None, NO_ROOM, NO_ROOM)])
def test_engines_that_never_start_end_all(problems: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, *problems)
    if len(problems) > 2:
        machine.engines.start_missing()
        machine.engines.give_up(machine.engines.present[1], "died")
    with pytest.raises(GenerationError, match="vLLM engine 1 of 2 cannot start: ValueError: Free memory"):
        machine.engines.start_missing()
    assert not machine.engines.present
    assert not machine.problems
