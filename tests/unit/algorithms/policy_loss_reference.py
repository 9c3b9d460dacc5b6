# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Random microbatches for the policy losses, and the same loss written a second time: token by token, as papers do."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.algorithms.losses.policy_gradient import PolicyGradientLoss
from nemo_rl_moe.config.schema_grpo import PolicyGradientLossConfig
from nemo_rl_moe.distributed.batch import Column, per_sequence, per_token
from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.interfaces import LossInputs, TrainResult

PLAIN = {
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.3,
    "ratio_clip_c": None,
    "objective": "clipped",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "cov_ratio": 0.25,
    "clip_cov_min": 0.1,
    "clip_cov_max": 5.0,
    "kl_cov_coef": 1.0,
    "sequence_level_importance_ratios": False,
    "token_level_loss": True,
    "length_normalizer": None,
    "force_on_policy_ratio": "auto",
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "reference_policy_kl_gradient": "estimate",
    "use_kl_in_reward": False,
    "kl_output_clamp_value": 10.0,
    "entropy_bonus": 0.0,
    "importance_sampling_correction": "none",
    "importance_sampling_level": "token",
    "importance_sampling_ratio_min": None,
    "importance_sampling_ratio_max": 2.0,
    "sampling_mask": "none",
}


def config_of(**changes: Any) -> PolicyGradientLossConfig:
    return PolicyGradientLossConfig.model_validate(PLAIN | changes)


def inputs_of(logprobs: Tensor, mask: Tensor, totals: tuple[int, int] | None = None, **extras: Tensor) -> LossInputs:
    """Totals are the global batch's valid tokens and sequences; left out, those of this microbatch."""
    tokens, sequences = totals or (int(mask.sum()), int(mask.any(dim=1).sum()))
    return LossInputs(
        logprobs=logprobs,
        token_mask=mask,
        global_valid_tokens=tokens,
        global_sequences=sequences,
        greedy_matches=None,
        columns=columns_of(extras),
    )


def columns_of(values: Mapping[str, Tensor]) -> dict[str, Column]:
    """Columns of tensors: one value for each sequence, or one for each target."""
    return {name: per_sequence(v) if v.ndim == 1 else per_token(v) for name, v in values.items()}


def values_of(inputs: LossInputs) -> dict[str, Tensor]:
    """The tensors of the columns."""
    return {name: column.values for name, column in inputs.columns.items()}


def cut_at(inputs: LossInputs, row: int) -> list[LossInputs]:
    """The sequences before a row, and those from it on, as two microbatches."""
    return [
        replace(
            inputs,
            logprobs=inputs.logprobs[rows],
            token_mask=inputs.token_mask[rows],
            columns={name: replace(column, values=column.values[rows]) for name, column in inputs.columns.items()},
        )
        for rows in (slice(row), slice(row, None))
    ]


def series_of(*parts: LossInputs, **changes: Any) -> dict[str, MetricSeries]:
    """The metrics that ranks report of microbatches."""
    loss = PolicyGradientLoss(config_of(**changes), prev_is_current=False)
    of_parts = [loss(part).metrics for part in parts]
    return {
        name: MetricSeries(tuple(float(of[name][0]) for of in of_parts), reduction)
        for name, (_, reduction) in of_parts[0].items()
    }


def result_of(series: dict[str, MetricSeries], moe: dict[str, float] | None = None) -> TrainResult:
    return TrainResult(0.0, 0.0, 0.0, 1, 1, series, moe or {})


def random_inputs(seed: int, sequences: int = 5, targets: int = 4, spread: float = 0.5) -> LossInputs:
    """Ratios on both sides of all bounds, advantages of both signs and 0, and a sequence without a valid token."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(sequences, targets, dtype=torch.float64, generator=generator) * spread

    mask = torch.rand(sequences, targets, generator=generator) < 0.6
    mask[0] = False
    mask[1:, 0] = True
    logprobs = -torch.rand(sequences, targets, dtype=torch.float64, generator=generator) * 3
    # Probabilities of the engine are below 1, which divergences of probabilities need.
    prev, generation, reference = logprobs + noise(), (logprobs + noise()).clamp(max=-0.01), logprobs + noise()
    advantages = torch.randn(sequences, dtype=torch.float64, generator=generator)
    advantages[-1] = 0.0
    return inputs_of(
        logprobs.requires_grad_(),
        mask,
        totals=(int(mask.sum()) + 3, sequences + 1),
        advantages=advantages,
        prev_logprobs=prev,
        generation_logprobs=generation,
        reference_logprobs=reference,
        selected_tokens=torch.rand(sequences, targets, generator=generator) < 0.4,
    )


def reference_loss(inputs: LossInputs, config: PolicyGradientLossConfig, on_policy: bool = False) -> Tensor:
    """The loss in float64, one token at a time, with the formulas as the papers print them."""
    low, high, c = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max, config.ratio_clip_c
    total = torch.zeros((), dtype=torch.float64)
    selected = inputs.columns["selected_tokens"].values
    for row in range(len(inputs.logprobs)):
        places = [t for t in range(inputs.logprobs.shape[1]) if inputs.token_mask[row, t]]
        if not places:
            continue
        new = {t: inputs.logprobs[row, t] for t in places}
        old = {t: new[t].detach() if on_policy else inputs.columns["prev_logprobs"].values[row, t] for t in places}
        advantage = float(inputs.columns["advantages"].values[row])
        of_sequence = torch.stack([new[t] - old[t] for t in places]).mean().exp()
        generation = inputs.columns["generation_logprobs"].values[row]
        in_log = [_clipped_log_ratio(new[t] - old[t], advantage, config) for t in places]
        gaps = {t: float(old[t]) - float(generation[t]) for t in places}
        losses = []
        for t in places:
            ratio = of_sequence if config.sequence_level_importance_ratios else torch.exp(new[t] - old[t])
            clipped = torch.clip(ratio, low, high)
            if config.objective == "reinforce":
                loss = -advantage * new[t]
            elif config.objective == "cispo":
                loss = -clipped.detach() * advantage * new[t]
            elif config.objective == "sapo":
                tau = config.sapo_temperature_pos if advantage > 0 else config.sapo_temperature_neg
                loss = -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage
            elif config.objective == "gmpo":
                loss = -torch.exp(sum(in_log) / len(in_log)) * advantage
            elif config.objective in ("dppo_tv", "dppo_kl"):
                mu, pi = math.exp(float(generation[t])), math.exp(float(new[t]))
                distance = abs(pi - mu)
                if config.objective == "dppo_kl":
                    distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
                bound = config.ratio_clip_max if advantage > 0 else config.ratio_clip_min
                is_far = (pi - mu) * advantage > 0 and distance > bound
                weight_of_token = min(pi / mu, math.inf if c is None else c)
                loss = -(0.0 if is_far else weight_of_token) * advantage * new[t]
            elif config.objective == "kl_cov":
                loss = -ratio * advantage
                if selected[row, t]:
                    loss = loss + config.kl_cov_coef * torch.abs(new[t] - old[t])
            elif config.objective == "clip_cov" and selected[row, t]:
                loss = 0.0 * new[t]
            else:
                objective = torch.minimum(ratio * advantage, clipped * advantage)
                if c is not None and advantage < 0:
                    objective = torch.maximum(objective, torch.tensor(c * advantage, dtype=torch.float64))
                loss = -objective
            if config.reference_policy_kl_penalty > 0:
                d = inputs.columns["reference_logprobs"].values[row, t] - new[t]
                kl = {"k1": -d, "k2": 0.5 * d**2, "k3": torch.exp(d) - 1 - d}[config.reference_policy_kl_type]
                if config.reference_policy_kl_gradient == "divergence":
                    of_token = torch.exp(new[t] - old[t])
                    kl = kl * (of_token.detach() if config.reference_policy_kl_type == "k2" else of_token)
                loss = loss + config.reference_policy_kl_penalty * kl
            weight = math.exp(sum(gaps.values()) if config.importance_sampling_level == "sequence" else gaps[t])
            geometric = math.exp(sum(gaps.values()) / len(gaps))
            minimum, maximum = config.importance_sampling_ratio_min, config.importance_sampling_ratio_max
            if minimum is None:
                minimum = 0.5 if config.importance_sampling_correction == "icepop" else 0.0
            losses.append(
                loss
                * {
                    "none": 1.0,
                    "truncated": max(min(weight, maximum), minimum),
                    "icepop": weight if minimum <= weight <= maximum else 0.0,
                    "sequence_mask": weight if minimum <= geometric <= maximum else 0.0,
                }[config.importance_sampling_correction]
            )
        if config.token_level_loss:
            total = total + torch.stack(losses).sum() / inputs.global_valid_tokens
        elif config.length_normalizer is not None:
            total = total + torch.stack(losses).sum() / config.length_normalizer / inputs.global_sequences
        else:
            total = total + torch.stack(losses).mean() / inputs.global_sequences
    return total


def _clipped_log_ratio(log_ratio: Tensor, advantage: float, config: PolicyGradientLossConfig) -> Tensor:
    """GMPO clips the logarithm of a ratio that moves in the direction of the advantage."""
    clipped = torch.clip(log_ratio, -config.ratio_clip_min, config.ratio_clip_max)
    return torch.minimum(log_ratio, clipped) if advantage > 0 else torch.maximum(log_ratio, clipped)
