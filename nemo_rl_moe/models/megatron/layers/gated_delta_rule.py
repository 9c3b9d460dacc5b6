# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in torch, token by token and in chunks.

Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks (arXiv:2412.06464), eq. 10. The state of a head is a matrix
`[key_dim, value_dim]`, zero at first. A token lets it decay, corrects its value for the token's key, and reads it:

    S <- exp(log_decay) S
    S <- S + key (beta (value - S^T key))^T
    output = S^T query / sqrt(key_dim)
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from nemo_rl_moe.models.megatron.layers.recurrence import CHUNK_SIZE, ChunkDecays, in_chunks, segments_in_chunks


def l2_normalize(vectors: Float[Tensor, "*batch dim"], eps: float = 1e-6) -> Float[Tensor, "*batch dim"]:
    return vectors * torch.rsqrt(vectors.pow(2).sum(-1, keepdim=True) + eps)


def recurrent_gated_delta_rule(
    query: Float[Tensor, "rows tokens heads key_dim"],
    key: Float[Tensor, "rows tokens heads key_dim"],
    value: Float[Tensor, "rows tokens heads value_dim"],
    log_decay: Float[Tensor, "rows tokens heads"],
    beta: Float[Tensor, "rows tokens heads"],
    *,
    state: Float[Tensor, "rows heads key_dim value_dim"] | None = None,
) -> tuple[Float[Tensor, "rows tokens heads value_dim"], Float[Tensor, "rows heads key_dim value_dim"]]:
    """Compute the gated delta rule (arXiv:2412.06464, eq. 10) token by token, in float32 or wider.

    Returns:
        Outputs, and the state after the last token.
    """
    kind = torch.promote_types(query.dtype, torch.float32)
    queries, keys, values = (each.to(kind).unbind(1) for each in (query * query.shape[-1] ** -0.5, key, value))
    decays, betas = log_decay.to(kind).exp().unbind(1), beta.to(kind).unbind(1)
    if state is None:
        state = keys[0].new_zeros(*keys[0].shape, value.shape[-1])
    outputs = []
    for q, k, v, decay, rate in zip(queries, keys, values, decays, betas, strict=True):
        state = state * decay[..., None, None]
        correction = (v - torch.einsum("rhkv,rhk->rhv", state, k)) * rate[..., None]
        state = state + k.unsqueeze(-1) * correction.unsqueeze(-2)
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, q))
    return torch.stack(outputs, dim=1).to(query.dtype), state


def chunked_gated_delta_rule(
    query: Float[Tensor, "rows tokens heads key_dim"],
    key: Float[Tensor, "rows tokens heads key_dim"],
    value: Float[Tensor, "rows tokens heads value_dim"],
    log_decay: Float[Tensor, "rows tokens heads"],
    beta: Float[Tensor, "rows tokens heads"],
    *,
    segments: Int[Tensor, " tokens"] | None = None,
    state: Float[Tensor, "rows heads key_dim value_dim"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Tensor, "rows tokens heads value_dim"], Float[Tensor, "rows heads key_dim value_dim"]]:
    """Compute the gated delta rule with matrix products for each chunk of tokens, in float32 or wider.

    A chunk's corrections solve a unit lower triangular system (arXiv:2412.06464, section 3.3).

    Args:
        segments: Sequence number of each packed token, in ascending order.
        state: State before the first token, by default zeros.

    Returns:
        Outputs, and the state after the last token (of the last sequence, if packed).
    """
    tokens, key_dim = query.shape[1], query.shape[3]
    kind, size = torch.promote_types(query.dtype, torch.float32), min(chunk_size, tokens)
    # Padding tokens have no correction and no decay.
    query, key, values, rate, log_decay = (
        in_chunks(each, size, kind) for each in (query * key_dim**-0.5, key, value, beta, log_decay)
    )
    decays = ChunkDecays.of(log_decay, segments_in_chunks(segments, size))
    rated_key = key * rate.unsqueeze(-1)
    system = rated_key @ key.transpose(-1, -2) * decays.between
    known = torch.cat([values * rate.unsqueeze(-1), rated_key * decays.from_state], dim=-1)
    corrections, of_state = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True).split(
        [value.shape[-1], key_dim], dim=-1
    )
    within = query @ key.transpose(-1, -2) * decays.between
    reading, writing = query * decays.from_state, (key * decays.to_state).transpose(-1, -2)
    if state is None:
        state = corrections.new_zeros(*corrections.shape[:2], key_dim, value.shape[-1])
    state = state.to(kind)
    outputs = []
    for chunk in range(corrections.shape[2]):
        corrected = corrections[:, :, chunk] - of_state[:, :, chunk] @ state
        outputs.append(reading[:, :, chunk] @ state + within[:, :, chunk] @ corrected)
        state = state * decays.of_chunk[:, :, chunk] + writing[:, :, chunk] @ corrected
    joined = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :tokens]
    return joined.transpose(1, 2).to(value.dtype), state
