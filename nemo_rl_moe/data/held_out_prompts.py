# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Keeps training prompts out of validation."""

from collections.abc import Iterable
from dataclasses import replace

from nemo_rl_moe.data.bad_lines import counted
from nemo_rl_moe.data.prompts import Prompt, PromptDataset
from nemo_rl_moe.errors import DataError


def without_training_prompts(held_out: PromptDataset, training: Iterable[Prompt]) -> PromptDataset:
    """The held-out prompts that are no training prompts, token for token; the report counts the others.

    Raises:
        DataError: None is left.
    """
    shared = {prompt.token_ids for prompt in held_out}.intersection(prompt.token_ids for prompt in training)
    if not shared:
        return held_out
    kept = [prompt for prompt in held_out if prompt.token_ids not in shared]
    if not kept:
        raise DataError(
            f"data.validation: each of the {counted(len(held_out), 'prompt')} of {held_out.report.name} is a training "
            "prompt too; name held-out data, or null"
        )
    report = replace(
        held_out.report,
        num_prompts=len(kept),
        num_tokens=sum(len(prompt.token_ids) for prompt in kept),
        num_training_prompts=len(held_out) - len(kept),
    )
    return PromptDataset(kept, report)
