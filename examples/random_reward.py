# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A reward by the toss of a coin: the control of an experiment with GRPO.

A model that gets better with the reward of its task, and not with this one, has learned from the reward. Whether a
response is right is reported honestly, so that `accuracy` means the same in both runs. In the configuration:

    env:
      reward:
        kind: callable
        function: examples.random_reward:score
      score_truncated: true    # or a response that is cut off would get 0 for certain, which is something to learn
"""

import hashlib

from nemo_rl_moe.rewards.interface import ScoringItem

END_OF_THINKING = "</think>"


def score(item: ScoringItem) -> tuple[float, bool]:
    """Toss a coin for each response, and says whether it is right.

    The same response to the same prompt always gets the same side, in whichever process it is scored.

    Returns:
        0 or 1 by chance, and whether the text after the thinking is the record's answer.
    """
    digest = hashlib.sha256(f"{item.sample_id}\0{item.response}".encode()).digest()
    answer = item.response.rpartition(END_OF_THINKING)[2]
    return float(digest[0] % 2), not item.is_truncated and answer == item.record["answer"]
