# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Policies of staleness, which select the finished groups of the next training step and reject stale ones.

A policy function only orders groups. Two rules hold for all of them, custom ones included. A stale group is never
trained on. With `on_stale: wait`, no group is overtaken so often that it becomes stale: groups of one age become stale
at the same time, and the steps before must have room for all of them. Both rules use the age since admission.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile

from nemo_rl_moe.config.schema_rollouts import OnStale
from nemo_rl_moe.config.user_code import described, import_function, is_custom, named_in_errors
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rollouts.dispatch.admission import Bounds


@dataclass(frozen=True)
class LiveGroup:
    """A group that runs or waits in the queue.

    Attributes:
        position: Index of its prompt.
        version: Version (number of optimizer steps) of the weights at the dispatch of the group.
        admitted_version: Version (number of optimizer steps) of the weights at the admission of the group. Its age
            counts from there.
        finish_number: Index of the group in the order of finishing. None while it runs.
    """

    position: int
    version: int
    admitted_version: int
    finish_number: int | None

    @property
    def is_ready(self) -> bool:
        return self.finish_number is not None


@dataclass(frozen=True)
class QueueView:
    """Groups among which a policy chooses.

    Attributes:
        groups: Groups that run or wait, in the order of their prompts.
        num_needed: Number of groups to choose.
        version: Version (number of optimizer steps) of the weights that are trained.
    """

    groups: tuple[LiveGroup, ...]
    num_needed: int
    version: int

    @property
    def ready(self) -> list[LiveGroup]:
        """Finished groups, in the order of their prompts."""
        return [group for group in self.groups if group.is_ready]


Choose = Callable[[QueueView], Sequence[int]]
"""Returns the positions of `num_needed` finished groups. If it returns fewer, training waits."""


def in_order(view: QueueView) -> Sequence[int]:
    """Choose groups in the order of their prompts, so that batches do not depend on timing."""
    finished = takewhile(lambda group: group.is_ready, view.groups)
    return [group.position for group in islice(finished, view.num_needed)]


def windowed(view: QueueView) -> Sequence[int]:
    """Choose finished groups, the oldest version first. Groups that still run may be overtaken."""
    oldest_first = sorted(view.ready, key=lambda group: (group.version, group.position))
    return [group.position for group in oldest_first[: view.num_needed]]


def ready_first(view: QueueView) -> Sequence[int]:
    """Choose finished groups in the order in which they finished."""
    numbered = sorted((group.finish_number, group.position) for group in view.groups if group.finish_number is not None)
    return [position for _, position in numbered[: view.num_needed]]


POLICIES: Mapping[str, Choose] = {"in_order": in_order, "windowed": windowed, "ready_first": ready_first}


@dataclass(frozen=True)
class StalenessPolicy:
    """A policy function (`choose`), together with two rules that hold for every policy.

    Stale groups are never trained on. With `on_stale: wait`, groups are trained on before they become stale.

    Attributes:
        name: Name of the policy in messages.
    """

    choose: Choose
    bounds: Bounds
    on_stale: OnStale = "wait"
    name: str = ""

    def stale(self, groups: Sequence[LiveGroup], version: int) -> list[int]:
        """Return the positions of groups that are too old to be trained on at a version.

        With `on_stale: wait` no group is too old, unless a run was resumed with a smaller bound.
        """
        return [group.position for group in groups if self.bounds.is_stale(group.admitted_version, version)]

    def select(self, groups: Sequence[LiveGroup], version: int) -> list[int]:
        """Return the sorted positions of the groups of the next training step. Empty if training has to wait.

        Args:
            groups: Groups that run or wait, in the order of their prompts, without stale ones.
            version: Version (number of optimizer steps) of the weights that are trained.
        """
        chosen: list[int] = []
        for candidates, num_needed in self._claims(groups, version):
            left = tuple(group for group in candidates if group.position not in chosen)
            view = QueueView(left, num_needed - len(chosen), version)
            found = self._chosen(view)
            if len(found) < view.num_needed:
                return []
            chosen += found
        return sorted(chosen)

    def _claims(self, groups: Sequence[LiveGroup], version: int) -> Iterator[tuple[Sequence[LiveGroup], int]]:
        """Yield sets of groups, each with the smallest number of its groups on which this step must train.

        The first set has the most urgent groups. Each further set also contains the groups of the set before.
        """
        # Of the groups that become stale after `n` further steps, these steps train on at most `n * groups_per_step`,
        # and this step must train on the rest.
        size = self.bounds.groups_per_step
        if self.on_stale == "wait":
            steps_left = {group.position: self.bounds.steps_left(group.admitted_version, version) for group in groups}
            for num_steps in sorted(set(steps_left.values())):
                urgent = [group for group in groups if steps_left[group.position] <= num_steps]
                yield urgent, min(size, len(urgent) - num_steps * size)
        yield groups, size

    def _chosen(self, view: QueueView) -> Sequence[int]:
        if view.num_needed <= 0:
            return []
        if self.on_stale == "wait" and view.num_needed == len(view.groups):  # nothing to choose
            return [group.position for group in view.ready]
        found = list(self.choose(view))
        self._check(found, view)
        return found

    def _check(self, chosen: Sequence[int], view: QueueView) -> None:
        ready = {group.position for group in view.ready}
        if len(chosen) > view.num_needed or len(set(chosen)) < len(chosen) or not ready.issuperset(chosen):
            raise ConfigurationError(
                f"{self.name} chose {described(chosen)}, expected at most {view.num_needed} different positions of"
                f" finished groups, {sorted(ready)}"
            )


def make_policy(key: str, name: str, bounds: Bounds, on_stale: OnStale) -> StalenessPolicy:
    """Return the policy with a name in `POLICIES`, or with a custom function (`package.module:function`).

    Args:
        key: Key of the configuration, for error messages.
    """
    if is_custom(name):
        choose: Choose = partial(_chosen_in_run, key, name, import_function(key, name, "a QueueView"))
    elif name in POLICIES:
        choose = POLICIES[name]
    else:
        raise ConfigurationError(f"{key}: got {name!r}, expected {', '.join(POLICIES)} or package.module:function")
    return StalenessPolicy(choose, bounds, on_stale, f"{key}: {name}")


def _chosen_in_run(key: str, name: str, choose: Choose, view: QueueView) -> Sequence[int]:
    with named_in_errors(key, name):
        return choose(view)
