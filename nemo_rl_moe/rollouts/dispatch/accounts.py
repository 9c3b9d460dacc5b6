# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Metrics of asynchronous rollouts: staleness, waiting and wasted tokens."""

from collections.abc import MutableMapping

import numpy as np

from nemo_rl_moe.rollouts.dispatch.groups import Batch, Reason


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of a step's groups.

    - `staleness/mean`, `staleness/max`: number of optimizer steps since the dispatch of a group. The mean is the sum of
      `staleness/in_flight` (during generation) and `staleness/in_queue`
    - `rollouts/queue_length`: number of finished groups that wait for later steps
    - `rollouts/trainer_wait_s`: seconds that training waited for the groups
    - `rollouts/num_cancelled/REASON`: number of groups cancelled since the previous step, if above 0
    - `rollouts/num_given_up`: number of cancelled groups whose prompts are not generated again
    """
    ages = batch.staleness
    metrics = {
        "staleness/mean": float(np.mean([age.total for age in ages])),
        "staleness/max": float(max(age.total for age in ages)),
        "staleness/in_flight": float(np.mean([age.in_flight for age in ages])),
        "staleness/in_queue": float(np.mean([age.in_queue for age in ages])),
        "rollouts/queue_length": float(batch.num_queued),
        "rollouts/trainer_wait_s": batch.waited_s,
        "rollouts/num_given_up": float(sum(each.is_given_up for each in batch.cancelled)),
    }
    for reason in Reason:
        if number := sum(each.reason is reason for each in batch.cancelled):
            metrics[f"rollouts/num_cancelled/{reason}"] = float(number)
    return metrics


def wasted_tokens(batch: Batch, num_tokens: MutableMapping[tuple[int, int], int]) -> dict[str, float]:
    """Return `rollouts/wasted_tokens`, and `rollouts/wasted_tokens/REASON` by reason.

    Tokens of unfinished responses are counted if the engine has reported them.

    Args:
        num_tokens: Position and attempt of a group -> number of tokens sampled for it. Entries of groups in the batch
            are removed.
    """
    wasted = dict.fromkeys([*map(str, Reason), "restart"], 0)
    for each in batch.cancelled:
        wasted[str(each.reason)] += num_tokens.pop((each.position, each.attempt), 0)
    for found in batch.groups:
        sampled = num_tokens.pop((found.ticket.position, found.ticket.attempt), None)
        if sampled is not None:  # this run has generated the group
            wasted["restart"] += sampled - sum(each.num_sampled_tokens for each in found.group)
    by_reason = {f"rollouts/wasted_tokens/{reason}": float(number) for reason, number in wasted.items() if number}
    return {"rollouts/wasted_tokens": float(sum(wasted.values()))} | by_reason
