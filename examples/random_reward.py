# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random reward, as the control of an experiment with GRPO.

If a model improves with the reward of its task but not with this one, it has learned from the reward. Correctness is
reported truthfully, so that `accuracy` means the same in both runs. In the configuration:

    env:
      reward:
        kind: callable
        function: examples.random_reward:score
      score_truncated: true    # or truncated responses would always get 0, from which a model can learn
"""

import hashlib

from nemo_rl_moe.rewards.interface import ScoringItem

END_OF_THINKING = "</think>"


def score(item: ScoringItem) -> tuple[float, bool]:
    """Return 0 or 1 by chance, and whether the text after the thinking is the record's answer.

    The same response to the same prompt gets the same reward in any process.
    """
    digest = hashlib.sha256(f"{item.sample_id}\0{item.response}".encode()).digest()
    answer = item.response.rpartition(END_OF_THINKING)[2]
    return float(digest[0] % 2), not item.is_truncated and answer == item.record["answer"]
