# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A refit: the policy's weights sent to an engine that keeps a copy of them, once more where a receiver was lost."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from nemo_rl_moe.errors import ReceiverLostError, WeightSyncError
from nemo_rl_moe.generation.interface import GenerationEngine
from nemo_rl_moe.weight_sync.transport import WeightTransport


class WeightSource(Protocol):
    @property
    def weight_version(self) -> int: ...

    def weight_transport(
        self, *, altered: bool = False, whole: bool = False, then: Callable[[], object] = ...
    ) -> AbstractContextManager[WeightTransport]: ...


def refit(
    engine: GenerationEngine,
    policy: WeightSource,
    *,
    altered: bool = False,
    whole: bool = False,
    then: Callable[[], object] = lambda: None,
) -> int:
    """Send the policy's weights to an engine; once more, through a new transfer, where a copy is lost meanwhile.

    Args:
        altered: Send others in their place, of which every tensor differs.
        whole: Send frozen weights too where the engine has had them.
        then: Called when the policy's ranks have been asked to send, in each transfer: what it asks of them, they do
            when they have sent, while the engine still loads.

    Raises:
        WeightSyncError: Some did not arrive; the engine must not be used further.
    """

    def send() -> int:
        with policy.weight_transport(altered=altered, whole=whole, then=then) as transport:
            engine.update_weights(transport, policy.weight_version)
        return transport.num_bytes

    try:
        return send()
    except ReceiverLostError:
        return send()


class ActorReceivers:
    """Ray actors that receive weights, a `Receivers` of the watch.

    Args:
        calls: Calls that receive and return what went wrong or None, each with the name of its actor.
        ask: Asks the actor of a name anything that it answers while it receives; a frozen one does not.
        patience_s: Seconds without an answer after which an actor counts as frozen.
    """

    def __init__(
        self, calls: Mapping[Any, str], *, ask: Callable[[str], Any], end: Callable[[str], None], patience_s: float
    ):
        self._calls, self._ask, self._end, self._patience_s = dict(calls), ask, end, patience_s
        self._pending = dict(calls)
        self._questions: dict[str, tuple[Any, float]] = {}

    def find_lost(self, patience_s: float | None = None) -> str | None:
        patience = self._patience_s if patience_s is None else patience_s
        for call in _ready(list(self._pending)):
            name = self._pending.pop(call)
            try:
                ray.get(call)
            except RayError as error:
                return _lost(name, error)
        for name in self._pending.values():
            question, since = self._questions.get(name, (None, 0.0))
            if question is None or _ready([question]):
                self._questions[name] = self._ask(name), time.monotonic()
            elif (silent_s := time.monotonic() - since) > patience:
                self._end(name)
                return f"{name} did not answer for {silent_s:.0f} s while it received weights"
        return None

    def have_ended(self) -> bool:
        return not self._pending

    def wait(self) -> None:
        """Wait until all of them have received.

        Raises:
            WeightSyncError: One has not, also not within the patience after all before it.
        """
        for call, name in self._calls.items():
            try:
                problem = ray.get(call, timeout=self._patience_s)
            except RayError as error:
                raise WeightSyncError(_lost(name, error)) from error
            if problem is not None:
                raise WeightSyncError(problem)


def reason_of(error: RayError) -> str:
    """Return the end of an actor whose call has failed, in words that follow its name."""
    if isinstance(error, GetTimeoutError):
        return "does not answer"
    return "died" if isinstance(error, RayActorError) else f"failed: {str(error).strip().splitlines()[-1]}"


def _lost(name: str, error: RayError) -> str:
    return f"{name} {reason_of(error)} while it received weights"


def _ready(calls: list[Any]) -> list[Any]:
    return list(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) if calls else []
