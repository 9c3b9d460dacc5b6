# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Trajectories of a step for the logs. A trajectory that is not trained on has the reason."""

from dataclasses import replace

from nemo_rl_moe.algorithms.grpo_batch import failure_rule, trained_responses
from nemo_rl_moe.config.schema import GRPOMasterConfig
from nemo_rl_moe.rollouts.failed_responses import scored_responses
from nemo_rl_moe.rollouts.source import RolloutGroups
from nemo_rl_moe.rollouts.trajectory import Trajectory

NOT_IN_BATCH = "its group was replaced by another one (grpo.use_dynamic_sampling)"
TRUNCATED = "truncated (grpo.overlong_filtering)"
ZERO_VARIANCE = "all rewards of its group are equal (grpo.zero_variance_filtering)"


def logged_samples(config: GRPOMasterConfig, groups: RolloutGroups) -> list[Trajectory]:
    """Return the trajectories of the batch, followed by failed trajectories of groups that are not in the batch."""
    samples = [
        replace(found, left_out=cause) if cause else found
        for found, cause in zip(groups.trained, _causes(config, groups), strict=True)
    ]
    if groups.generated is groups.trained:
        return samples
    in_batch = set(map(id, groups.trained))
    failed = [found for found in groups.generated if found.fault is not None and id(found) not in in_batch]
    return samples + [replace(found, left_out=NOT_IN_BATCH) for found in failed]


def _causes(config: GRPOMasterConfig, groups: RolloutGroups) -> list[str]:
    """Return the reason why each trajectory is not trained on. The text is empty for a trained trajectory."""
    rule, trajectories, num_generations = failure_rule(config), groups.trained, groups.num_generations
    is_scored = scored_responses(trajectories, num_generations)
    takes_part = rule.taking_part(trajectories, num_generations).reshape(-1).tolist()
    is_trained = trained_responses(config, groups).reshape(-1).tolist()
    num_scored = is_scored.sum(dim=1).tolist()
    causes = []
    for index, (found, takes) in enumerate(zip(trajectories, takes_part, strict=True)):
        of_group, treatment = num_scored[index // num_generations], f"(env.on_failure: {rule.of(found)})"
        if takes and not is_trained[index]:
            causes.append(ZERO_VARIANCE)
        elif takes:
            causes.append(TRUNCATED if config.grpo.overlong_filtering and found.is_truncated else "")
        elif found.fault is not None:
            causes.append(f"{found.fault.value}: {found.fault_message} {treatment}")
        elif of_group < rule.fewest_of_group:
            causes.append(f"only {of_group} of {num_generations} responses of its group could be scored {treatment}")
        else:
            causes.append(f"too few responses of the step could be scored {treatment}")
    return causes
