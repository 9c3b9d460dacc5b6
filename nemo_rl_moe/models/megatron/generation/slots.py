# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a batch lie in the key-value cache, whose slots are the same for all rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.generation.interface import TokenIds
from nemo_rl_moe.models.megatron.generation.sampling import uniform_numbers


@dataclass(frozen=True)
class SlotPlan:
    """A batch of prompts in slots.

    Prompts either end at the same slot, with padding before the shorter ones, or begin at the first slot without any;
    in the second case the rest of the longer prompts goes in token by token while the others are being answered.

    Attributes:
        prompt_tokens: Tokens of the prompts; 0 elsewhere.
        uniforms: The number that draws the token of a slot; 0 on prompts.
        first_sampled: Slot of each row's first sampled token.
        num_pads: Padding before each row; None where there is none in any.
        prefill: Slots that the first forward pass fills.
    """

    prompt_tokens: Int[Tensor, "slots rows"]
    uniforms: Float[Tensor, "slots rows"]
    first_sampled: Int[Tensor, " rows"]
    num_pads: Int[Tensor, " rows"] | None
    prefill: int

    def keep(self, rows: Int[Tensor, " kept"]) -> "SlotPlan":
        """The plan of some of the rows."""
        return SlotPlan(
            prompt_tokens=self.prompt_tokens.index_select(1, rows),
            uniforms=self.uniforms.index_select(1, rows),
            first_sampled=self.first_sampled.index_select(0, rows),
            num_pads=None if self.num_pads is None else self.num_pads.index_select(0, rows),
            prefill=self.prefill,
        )


def plan_slots(
    prompts: Sequence[TokenIds], seeds: Sequence[int], max_new_tokens: int, *, padded: bool, device: torch.device
) -> SlotPlan:
    """Puts prompts into slots.

    Args:
        prompts: At least one, none empty.
        seeds: One for each.
        max_new_tokens: Slots after each prompt.
        padded: True to let prompts end together, False to let them begin together.
        device: Where the tensors go.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    num_pads = longest - lengths if padded else np.zeros_like(lengths)
    first_sampled = num_pads + lengths
    tokens = np.zeros((longest + max_new_tokens, len(prompts)), dtype=np.int64)
    uniforms = np.zeros(tokens.shape)
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        first = first_sampled[row]
        tokens[num_pads[row] : first, row] = prompt
        uniforms[first : first + max_new_tokens, row] = uniform_numbers(seed, max_new_tokens)
    return SlotPlan(
        prompt_tokens=torch.from_numpy(tokens).to(device),
        uniforms=torch.from_numpy(uniforms).to(device),
        first_sampled=torch.from_numpy(first_sampled).to(device),
        num_pads=torch.from_numpy(num_pads).to(device) if num_pads.any() else None,
        prefill=int(first_sampled.min()),
    )
