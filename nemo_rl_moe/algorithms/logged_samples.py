# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories of a step for the logs. A trajectory that is not trained on has the reason."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_rl_moe.algorithms.grpo_batch import failure_rule
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.rollouts.failed_responses import FailureRule, scored_responses
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory

NOT_IN_BATCH = "its group was replaced by another one (grpo.use_dynamic_sampling)"
TRUNCATED = "truncated (grpo.overlong_filtering)"


def logged_samples(config: GRPOMasterConfig, groups: RolloutGroups) -> list[Trajectory]:
    """Return the trajectories of the batch, followed by failed trajectories of groups that are not in the batch."""
    rule = failure_rule(config)
    causes = _causes(rule, groups.trained, groups.num_generations, filters_overlong=config.grpo.overlong_filtering)
    samples = [
        replace(found, left_out=cause) if cause else found for found, cause in zip(groups.trained, causes, strict=True)
    ]
    if groups.generated is groups.trained:
        return samples
    in_batch = set(map(id, groups.trained))
    failed = [found for found in groups.generated if found.fault is not None and id(found) not in in_batch]
    return samples + [replace(found, left_out=NOT_IN_BATCH) for found in failed]


def _causes(
    rule: FailureRule, trajectories: Sequence[Trajectory], num_generations: int, *, filters_overlong: bool
) -> list[str]:
    """Return the reason why each trajectory is not trained on. The text is empty for a trained trajectory."""
    is_scored = scored_responses(trajectories, num_generations)
    takes_part = rule.taking_part(trajectories, num_generations).reshape(-1).tolist()
    num_scored = is_scored.sum(dim=1).tolist()
    causes = []
    for index, (found, takes) in enumerate(zip(trajectories, takes_part, strict=True)):
        of_group, treatment = num_scored[index // num_generations], f"(env.on_failure: {rule.of(found)})"
        if takes:
            causes.append(TRUNCATED if filters_overlong and found.is_truncated else "")
        elif found.fault is not None:
            causes.append(f"{found.fault.value}: {found.fault_message} {treatment}")
        elif of_group < rule.fewest_of_group:
            causes.append(f"only {of_group} of {num_generations} responses of its group could be scored {treatment}")
        else:
            causes.append(f"too few responses of the step could be scored {treatment}")
    return causes
