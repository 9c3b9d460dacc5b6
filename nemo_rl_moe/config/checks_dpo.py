# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Rules between settings that only DPO has; see `checks.py`."""

from collections.abc import Iterator

from nemo_rl_moe.config.schema import DPOMasterConfig


def some_loss_has_weight(config: DPOMasterConfig) -> Iterator[str]:
    """Without any, nothing is trained."""
    if config.dpo.preference_loss_weight == 0 and config.dpo.sft_loss_weight == 0:
        yield "dpo.preference_loss_weight and dpo.sft_loss_weight: both are 0, so that nothing would be trained"


def smoothing_has_labels(config: DPOMasterConfig) -> Iterator[str]:
    """IPO's loss is not that of a label."""
    if config.dpo.preference_loss_type == "ipo" and config.dpo.label_smoothing > 0:
        yield (
            f"dpo.label_smoothing: got {config.dpo.label_smoothing}, expected 0 with dpo.preference_loss_type ipo,"
            " which does not read it; sigmoid does"
        )


DPO_RULES = (some_loss_has_weight, smoothing_has_labels)
