# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies of staleness: which finished groups make the next training step, and which are too old.

A policy only orders groups. The rules hold for all policies, custom ones included: a group that is too old is never
trained on, and with `on_stale: wait` no group is overtaken so often that it gets too old. One number decides on both:
the age of a group since its admission.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_moe.config.schema_rollouts import OnStale
from nemo_rl_moe.config.user_code import described, import_function, is_custom
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rollouts.asynchronous.admission import Bounds


@dataclass(frozen=True)
class LiveGroup:
    """A group that runs or waits in the queue.

    Attributes:
        position: Number of its prompt.
        version: Optimizer steps of the weights at its dispatch.
        admitted_version: Optimizer steps of the weights at its admission; its age begins there.
        finish_number: Its number in the order of finishing; None: it still runs.
    """

    position: int
    version: int
    admitted_version: int
    finish_number: int | None

    @property
    def is_ready(self) -> bool:
        """Return whether it is finished."""
        return self.finish_number is not None


@dataclass(frozen=True)
class QueueView:
    """Groups among which a policy chooses.

    Attributes:
        groups: Groups that run or wait, in the order of their prompts.
        num_needed: Groups to choose.
        version: Optimizer steps of the weights that are trained.
    """

    groups: tuple[LiveGroup, ...]
    num_needed: int
    version: int

    @property
    def ready(self) -> list[LiveGroup]:
        """Return the finished groups, in the order of their prompts."""
        return [group for group in self.groups if group.is_ready]


Choose = Callable[[QueueView], Sequence[int]]
"""Returns the positions of `num_needed` finished groups; fewer: training waits."""


def in_order(view: QueueView) -> Sequence[int]:
    """Choose groups in the order of their prompts: what is trained on does not depend on time."""
    return [group.position for group in _until_one_runs(view.groups)[: view.num_needed]]


def windowed(view: QueueView) -> Sequence[int]:
    """Choose finished groups, the oldest version first; groups that run are overtaken."""
    oldest_first = sorted(view.ready, key=lambda group: (group.version, group.position))
    return [group.position for group in oldest_first[: view.num_needed]]


def ready_first(view: QueueView) -> Sequence[int]:
    """Choose finished groups in the order in which they finished."""
    numbered = sorted((group.finish_number, group.position) for group in view.groups if group.finish_number is not None)
    return [position for _, position in numbered[: view.num_needed]]


def _until_one_runs(groups: Sequence[LiveGroup]) -> Sequence[LiveGroup]:
    first = next((index for index, group in enumerate(groups) if not group.is_ready), len(groups))
    return groups[:first]


POLICIES: Mapping[str, Choose] = {"in_order": in_order, "windowed": windowed, "ready_first": ready_first}
"""By name."""


@dataclass(frozen=True)
class StalenessPolicy:
    """All that decides on the age of what is trained on.

    Attributes:
        choose: Orders finished groups.
        bounds: Limits.
        on_stale: Treatment of groups that get too old.
        name: Name in the configuration.
    """

    choose: Choose
    bounds: Bounds
    on_stale: OnStale = "wait"
    name: str = ""

    def stale(self, groups: Sequence[LiveGroup], version: int) -> list[int]:
        """Return the positions of groups that are too old to be trained on at a version.

        With `wait` there are none, unless a run goes on with a smaller bound.
        """
        return [group.position for group in groups if self.bounds.is_stale(group.admitted_version, version)]

    def select(self, groups: Sequence[LiveGroup], version: int) -> list[int]:
        """Return the positions of the groups of the next training step, in order; empty: training waits.

        Args:
            groups: Groups that run or wait, in the order of their prompts; none is too old.
            version: Optimizer steps of the weights that are trained.

        Raises:
            ConfigurationError: A custom policy chose what it cannot.
        """
        due = [group for group in groups if self._is_due(group, version)][: self.bounds.groups_per_step]
        if not all(group.is_ready for group in due):
            return []
        others = tuple(group for group in groups if group not in due)
        view = QueueView(others, self.bounds.groups_per_step - len(due), version)
        chosen = list(self.choose(view)) if view.num_needed else []
        self._check(chosen, view)
        if len(chosen) < view.num_needed:
            return []
        return sorted([*(group.position for group in due), *chosen])

    def _is_due(self, group: LiveGroup, version: int) -> bool:
        return self.on_stale == "wait" and self.bounds.is_due(group.admitted_version, version)

    def _check(self, chosen: Sequence[int], view: QueueView) -> None:
        ready = {group.position for group in view.ready}
        if len(chosen) > view.num_needed or len(set(chosen)) < len(chosen) or not ready.issuperset(chosen):
            raise ConfigurationError(
                f"{self.name} chose {described(chosen)}, expected at most {view.num_needed} different positions of"
                f" finished groups, {sorted(ready)}"
            )


def make_policy(key: str, name: str, bounds: Bounds, on_stale: OnStale) -> StalenessPolicy:
    """Return the policy that a configuration names: one of `POLICIES`, or a custom function of a `QueueView`.

    Args:
        key: Key of the configuration, for error messages.
        name: Name in `POLICIES`, or `package.module:function`.
        bounds: Limits.
        on_stale: Treatment of groups that get too old.

    Raises:
        ConfigurationError: There is no such policy.
    """
    if is_custom(name):
        choose: Choose = import_function(key, name, "a QueueView")
    elif name in POLICIES:
        choose = POLICIES[name]
    else:
        raise ConfigurationError(f"{key}: got {name!r}, expected {', '.join(POLICIES)} or package.module:function")
    return StalenessPolicy(choose, bounds, on_stale, f"{key}: {name}")
