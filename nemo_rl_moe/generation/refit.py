# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A refit: the policy sends its weights to an engine that keeps a copy, again if a receiver was lost."""

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
    """Send the policy's weights to an engine, again in a new transfer if a copy is lost. Return the number of bytes.

    Args:
        altered: Whether to send weights that differ from the policy's in every tensor, for the refit check.
        whole: Whether to send frozen weights too, even if the engine has them.
        then: Called in each transfer after the policy's ranks have been asked to send. If it calls the ranks, they
            execute these calls after sending, while the engine still loads.

    Raises:
        WeightSyncError: Some tensors did not arrive. The engine must not be used again.
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
    """Ray actors that receive weights, with methods to find dead and frozen ones (`weight_sync.watch.Receivers`).

    Args:
        calls: Receiving call -> name of its actor. A call returns its problem or None.
        ask: Calls the named actor, which answers even while it receives, unless it is frozen.
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
        """Wait for the receiving calls, one after another, each for at most `patience_s` seconds."""
        for call, name in self._calls.items():
            try:
                problem = ray.get(call, timeout=self._patience_s)
            except RayError as error:
                raise WeightSyncError(_lost(name, error)) from error
            if problem is not None:
                raise WeightSyncError(problem)


def reason_of(error: RayError) -> str:
    """Return why an actor's call failed, in words that follow the actor's name."""
    if isinstance(error, GetTimeoutError):
        return "does not answer"
    return "died" if isinstance(error, RayActorError) else f"failed: {str(error).strip().splitlines()[-1]}"


def _lost(name: str, error: RayError) -> str:
    return f"{name} {reason_of(error)} while it received weights"


def _ready(calls: list[Any]) -> list[Any]:
    return list(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) if calls else []
