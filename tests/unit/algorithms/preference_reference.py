# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Preference losses written a second time, one pair at a time, as TRL's DPOTrainer and the papers print them."""

import math
from typing import Any

import torch
from torch import Tensor

from nemo_rl_moe.config.schema import PreferenceLossConfig
from nemo_rl_moe.data.preferences import REFERENCE_SUMS
from nemo_rl_moe.distributed.batch import per_sequence
from nemo_rl_moe.models.interfaces import LossInputs

DEFAULTS: dict[str, Any] = {
    "preference_loss_type": "sigmoid",
    "reference_policy_kl_penalty": 0.1,
    "label_smoothing": 0.0,
    "preference_average_log_probs": False,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.0,
    "sft_average_log_probs": False,
}


def config_of(**changes: Any) -> PreferenceLossConfig:
    """Plain DPO but for the changes."""
    return PreferenceLossConfig.model_validate(DEFAULTS | changes)


def inputs_of(logprobs: Tensor, mask: Tensor, reference: Tensor, num_sequences: int | None = None) -> LossInputs:
    """A microbatch of pairs, by default the whole global batch.

    Args:
        logprobs: Of the policy, `[sequences, targets]`.
        mask: True on responses.
        reference: The reference's sums, `[sequences]`.
        num_sequences: Of the global batch.
    """
    total = int(mask.any(dim=1).sum()) if num_sequences is None else num_sequences
    return LossInputs(logprobs, mask, int(mask.sum()), total, None, {REFERENCE_SUMS: per_sequence(reference)})


def random_pairs(seed: int, pairs: int, targets: int) -> LossInputs:
    """A global batch whose policy has moved away from its reference; NaN stands wherever nothing may be read."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * pairs
    logprobs = -torch.rand(rows, targets, generator=generator, dtype=torch.float64) * 3
    lengths = torch.randint(1, targets + 1, (rows,), generator=generator)
    starts = (lengths * torch.rand(rows, generator=generator)).long()
    columns = torch.arange(targets)
    mask = (columns >= starts[:, None]) & (columns < lengths[:, None])
    logprobs = logprobs.where(columns < lengths[:, None], float("nan"))
    noise = torch.randn(rows, generator=generator, dtype=torch.float64)
    return inputs_of(logprobs.requires_grad_(), mask, logprobs.detach().where(mask, 0.0).sum(dim=1) + noise)


def reference_losses(inputs: LossInputs, config: PreferenceLossConfig) -> dict[str, Any]:
    """The loss and what is reported with it, plain means over pairs; only the loss carries a graph."""
    beta, smoothing = config.reference_policy_kl_penalty, config.label_smoothing
    found: dict[str, list[Any]] = {}
    for row in range(0, len(inputs.logprobs), 2):
        logps, ref_logps, lengths = [], [], []
        for sequence in (row, row + 1):
            places = [t for t in range(inputs.logprobs.shape[1]) if inputs.token_mask[sequence, t]]
            logps.append(torch.stack([inputs.logprobs[sequence, t] for t in places]).sum())
            ref_logps.append(float(inputs.columns[REFERENCE_SUMS].values[sequence]))
            lengths.append(len(places))
        scale = lengths if config.preference_average_log_probs else [1, 1]
        # TRL: chosen_logratios = chosen_logps - ref_chosen_logps; logits = chosen_logratios - rejected_logratios
        ratios = [(logps[i] - ref_logps[i]) / scale[i] for i in (0, 1)]
        logits = ratios[0] - ratios[1]
        if config.preference_loss_type == "ipo":
            loss = (logits - 1 / (2 * beta)) ** 2
        elif config.preference_loss_type == "hinge":
            loss = torch.clamp(1 - beta * logits, min=0)
        elif config.preference_loss_type == "apo_zero":
            loss = (1 - _sigmoid(beta * ratios[0])) + _sigmoid(beta * ratios[1])
        elif config.preference_loss_type == "apo_down":
            loss = _sigmoid(beta * ratios[0]) + (1 - _sigmoid(beta * logits))
        else:
            clean = -torch.log(_sigmoid(beta * logits))
            flipped = -torch.log(1 - _sigmoid(beta * logits))
            loss = (1 - smoothing) * clean + smoothing * flipped
            if config.preference_loss_type == "robust":
                loss = ((1 - smoothing) * clean - smoothing * flipped) / (1 - 2 * smoothing)
        nll = -logps[0] / (lengths[0] if config.sft_average_log_probs else 1)
        values = {
            "loss": config.preference_loss_weight * loss + config.sft_loss_weight * nll,
            "preference_loss": loss.item(),
            "sft_loss": nll.item(),
            "accuracy": float(ratios[0] > ratios[1]),
            "rewards_chosen_mean": beta * ratios[0].item(),
            "rewards_rejected_mean": beta * ratios[1].item(),
            "reward_margin": beta * logits.item(),
            "logprobs_chosen_mean": logps[0].item(),
            "logprobs_rejected_mean": logps[1].item(),
        }
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    loss = torch.stack(found.pop("loss")).mean()
    return {name: math.fsum(values) / len(values) for name, values in found.items()} | {"loss": loss}


def _sigmoid(value: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-value))
