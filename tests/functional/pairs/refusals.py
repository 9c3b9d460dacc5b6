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
_TWO_CORRECTIONS = (
    "loss_fn.importance_sampling_correction: got truncated, expected none with loss_fn.objective dppo_tv, whose ratio"
    " is already relative to the engine's probabilities"
)
_CRITIC = "grpo.adv_estimator.name: got {}, expected gae with the algorithm ppo, whose critic makes the advantages"
_ESTIMATORS = (("dppo", "maxrl"), ("clip_cov", "optimal_token_baseline"))
_MAY_BE_NEGATIVE = (
    "{}: got true, expected false with grpo.adv_estimator.name maxrl, which divides by the mean reward: a penalty could"
    " make it negative"
)
_STALENESS = {"staleness_1": 1, "staleness_2": 2, "drop": 1}

REFUSALS: tuple[Refusal, ...] = (
    # An engine without weights of its own generates only while training waits.
    *(
        Refusal({"engine": "trainer", "rollouts": rollouts}, _SHARED_WEIGHTS.format(staleness))
        for rollouts, staleness in _STALENESS.items()
    ),
    Refusal(
        {"engine": "trainer", "lora": "adapter"},
        "policy.generation.lora_refit: got adapter, expected merged with policy.generation.backend megatron; engines"
        " that take an adapter: megatron_separate, vllm",
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
    # DPPO's ratio is relative to the engine, as a correction is, and MaxRL divides by a mean of rewards.
    *(Refusal({"rollouts": rollouts, "objective": "dppo"}, _TWO_CORRECTIONS) for rollouts in _STALENESS),
    Refusal({"objective": "dppo", "reward_shaping": "on"}, _MAY_BE_NEGATIVE.format("grpo.reward_shaping.enabled")),
    Refusal({"objective": "dppo", "kl_penalty": "reward"}, _MAY_BE_NEGATIVE.format("loss_fn.use_kl_in_reward")),
    Refusal(
        {"objective": "clip_cov", "sampling_mask": "replay"},
        "loss_fn.sampling_mask: got replay, expected none with grpo.adv_estimator.name optimal_token_baseline, whose"
        " norms of gradients are over the full vocabulary",
    ),
    *(Refusal({"algorithm": "ppo", "objective": objective}, _CRITIC.format(name)) for objective, name in _ESTIMATORS),
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
