# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The combinations that the product refuses, each with the words of its error: reviewed, and kept out of the array.

A case with a refused combination would end before it trains, and hide all its other pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.functional.pairs.settings import Setting


@dataclass(frozen=True)
class Refusal:
    """A combination that no run has.

    Attributes:
        values: A value for some parameters: with all others at their simplest, the only problem is this one.
        error: All that the product says.
    """

    values: Setting
    error: str


_LAG = "grpo.rollouts.max_staleness"
_OF_ONE_VERSION = (
    "policy.megatron_cfg.routing_replay: got old_policy, expected none or rollout with grpo.rollouts.max_staleness {}:"
    " old_policy replays routes of the weights before the update, but older weights sampled the tokens"
)
_SHARED_WEIGHTS = (
    _LAG + ": got {}, expected 0 with policy.generation.backend megatron, which generates with the weights that are"
    " trained; megatron_separate and vllm have copies and can run ahead"
)
_FEWER_THAN_A_STEP = (
    f"{_LAG}: got 1, expected 0 or at least 2: a step is 2 optimizer steps, and with a smaller lag no group could be"
    " generated ahead of its step"
)
_STALENESS = {"staleness_1": 1, "staleness_2": 2, "drop": 1}

REFUSALS: tuple[Refusal, ...] = (
    # An engine without weights of its own generates only while training waits.
    *(
        Refusal({"engine": "trainer", "rollouts": rollouts}, _SHARED_WEIGHTS.format(staleness))
        for rollouts, staleness in _STALENESS.items()
    ),
    # Ages are optimizer steps: a whole step ahead has the age of its updates.
    *(Refusal({"rollouts": rollouts, "updates": "two"}, _FEWER_THAN_A_STEP) for rollouts in ("staleness_1", "drop")),
    # Routes of old_policy come from a pass of the trained weights, and are replayed in later updates.
    *(
        Refusal({"rollouts": rollouts, "replay": "old_policy"}, _OF_ONE_VERSION.format(staleness))
        for rollouts, staleness in _STALENESS.items()
    ),
    Refusal(
        {"replay": "old_policy", "updates": "one"},
        "policy.megatron_cfg.routing_replay: got old_policy, expected none or rollout if a step is one update: only"
        " later updates could replay the routes of the first one (a smaller policy.train_global_batch_size gives"
        " several)",
    ),
    # A teacher's log-probabilities are over all tokens.
    Refusal(
        {"algorithm": "distillation", "sampling_mask": "replay"},
        "policy.generation.top_k: got 64, expected null with teachers: they score with unchanged logits, so the policy"
        " must sample from unchanged logits too",
    ),
)


def refused(values: Mapping[str, str]) -> Refusal | None:
    """Return a refused combination among the values of some parameters; None: they can be combined."""
    return next((each for each in REFUSALS if each.values.items() <= values.items()), None)
