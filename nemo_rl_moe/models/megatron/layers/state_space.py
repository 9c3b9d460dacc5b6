# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The selective state space of Mamba-2 in torch, token by token and in chunks.

Dao and Gu 2024, Transformers are SSMs (arXiv:2405.21060), section 3. The state of a head is a matrix
`[head_dim, state_dim]`, zero at first. A token lets it decay, adds its value along `into`, and reads it along `out_of`
(in the paper dt x, B and C):

    S <- exp(log_decay) S + value into^T
    output = S out_of

The heads of a group share `into` and `out_of`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron.layers.recurrence import CHUNK_SIZE, ChunkDecays, in_chunks, segments_in_chunks


def recurrent_state_space(
    value: Float[Tensor, "rows tokens heads head_dim"],
    log_decay: Float[Tensor, "rows tokens heads"],
    into: Float[Tensor, "rows tokens groups state_dim"],
    out_of: Float[Tensor, "rows tokens groups state_dim"],
    *,
    state: Float[Tensor, "rows heads head_dim state_dim"] | None = None,
) -> tuple[Float[Tensor, "rows tokens heads head_dim"], Float[Tensor, "rows heads head_dim state_dim"]]:
    """Compute the state space token by token, in float32 or wider.

    Returns:
        Outputs, and the state after the last token.
    """
    kind = torch.promote_types(value.dtype, torch.float32)
    heads_per_group = value.shape[2] // into.shape[2]
    values, decays = value.to(kind).unbind(1), log_decay.to(kind).exp().unbind(1)
    writing, reading = (each.to(kind).repeat_interleave(heads_per_group, 2).unbind(1) for each in (into, out_of))
    if state is None:
        state = values[0].new_zeros(*values[0].shape, into.shape[-1])
    outputs = []
    for v, decay, b, c in zip(values, decays, writing, reading, strict=True):
        state = state * decay[..., None, None] + v.unsqueeze(-1) * b.unsqueeze(-2)
        outputs.append(torch.einsum("rhps,rhs->rhp", state, c))
    return torch.stack(outputs, dim=1).to(value.dtype), state


def chunked_state_space(
    value: Float[Tensor, "rows tokens heads head_dim"],
    log_decay: Float[Tensor, "rows tokens heads"],
    into: Float[Tensor, "rows tokens groups state_dim"],
    out_of: Float[Tensor, "rows tokens groups state_dim"],
    *,
    segments: Int[Tensor, " tokens"] | None = None,
    state: Float[Tensor, "rows heads head_dim state_dim"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Tensor, "rows tokens heads head_dim"], Float[Tensor, "rows heads head_dim state_dim"]]:
    """Compute the state space with matrix products for each chunk of tokens, in float32 or wider.

    Tokens read earlier tokens of their chunk by a masked product, and earlier chunks by the state (arXiv:2405.21060,
    section 6).

    Args:
        segments: Sequence number of each packed token, in ascending order.
        state: State before the first token, by default zeros.

    Returns:
        Outputs, and the state after the last token (of the last sequence, if packed).
    """
    tokens, groups = value.shape[1], into.shape[2]
    kind, size = torch.promote_types(value.dtype, torch.float32), min(chunk_size, tokens)
    # Padding tokens have no value and no decay.
    values, writing, reading, log_decay = (in_chunks(each, size, kind) for each in (value, into, out_of, log_decay))
    decays = ChunkDecays.of(log_decay, segments_in_chunks(segments, size))

    def by_group(each: Tensor) -> Tensor:
        """View heads as `[groups, heads of a group]`."""
        return each.unflatten(1, (groups, -1))

    writing, reading = writing.unsqueeze(2), reading.unsqueeze(2)
    within = (reading @ writing.transpose(-1, -2)) * by_group(decays.between) @ by_group(values)
    added = (by_group(values * decays.to_state)).transpose(-1, -2) @ writing
    from_state, of_chunk = by_group(decays.from_state), by_group(decays.of_chunk)
    if state is None:
        state = values.new_zeros(*values.shape[:2], values.shape[-1], into.shape[-1])
    state = by_group(state.to(kind))
    before = []
    for chunk in range(values.shape[2]):
        before.append(state)
        state = state * of_chunk[:, :, :, chunk] + added[:, :, :, chunk]
    states = torch.stack(before, dim=3)
    outputs = within + from_state * (reading @ states.transpose(-1, -2))
    joined = outputs.flatten(1, 2).flatten(2, 3)[:, :, :tokens]
    return joined.transpose(1, 2).to(value.dtype), state.flatten(1, 2)
