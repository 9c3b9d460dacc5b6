# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in torch, token by token and in chunks, and the causal convolution before it.

Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks (arXiv:2412.06464), eq. 10. The state of a head is a matrix
`[key_dim, value_dim]`, zero at first. A token lets it decay, corrects its value for the token's key, and reads it:

    S <- exp(log_decay) S
    S <- S + key (beta (value - S^T key))^T
    output = S^T query / sqrt(key_dim)

`segments` is the sequence number of each token, in ascending order. It separates packed sequences, and the device does
not have to wait for the host.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

CHUNK_SIZE = 64


def segments_of(boundaries: Int[Tensor, " sequences_plus_1"], num_tokens: int) -> Int[Tensor, " tokens"]:
    """Return the sequence number of each packed token."""
    tokens = torch.arange(num_tokens, dtype=boundaries.dtype, device=boundaries.device)
    return torch.searchsorted(boundaries[1:].contiguous(), tokens, right=True)


def causal_convolution(
    inputs: Float[Tensor, "rows tokens channels"],
    weight: Float[Tensor, "channels taps"],
    *,
    segments: Int[Tensor, " tokens"] | None = None,
    before: Float[Tensor, "rows taps_minus_1 channels"] | None = None,
) -> Float[Tensor, "rows tokens channels"]:
    """Return the weighted sum of each channel's last inputs. The last tap weighs the current token.

    Args:
        segments: Sequence number of each packed token. A sum includes only inputs of the token's sequence.
        before: Inputs before the first token, by default zeros.
    """
    tokens, taps = inputs.shape[1], weight.shape[1]
    padded = F.pad(inputs, (0, 0, taps - 1, 0)) if before is None else torch.cat([before, inputs], dim=1)
    outputs = padded[:, taps - 1 :] * weight[:, -1]
    for distance in range(1, taps):
        first = taps - 1 - distance
        seen = padded[:, first : first + tokens]
        if segments is not None:
            same = segments == F.pad(segments, (distance, 0), value=-1)[:tokens]
            seen = seen * same[:, None]
        outputs = outputs + seen * weight[:, first]
    return outputs


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


@dataclass(frozen=True)
class _Decays:
    """Decay factors in chunks of `size` tokens. A decay to an earlier token or to another sequence is 0.

    Attributes:
        between: Decay from a token to a later token of its chunk.
        from_state: Decay from the state before the chunk to a token.
        to_state: Decay from a token to the state after its chunk.
        of_chunk: Decay from the state before the chunk to the state after the chunk.
    """

    between: Float[Tensor, "rows heads chunks size size"]
    from_state: Float[Tensor, "rows heads chunks size 1"]
    to_state: Float[Tensor, "rows heads chunks size 1"]
    of_chunk: Float[Tensor, "rows heads chunks 1 1"]

    @classmethod
    def of(
        cls, log_decay: Float[Tensor, "rows heads chunks size"], segments: Int[Tensor, "chunks size"] | None
    ) -> "_Decays":
        kind, size = log_decay.dtype, log_decay.shape[-1]
        # float64, because the differences below cancel sums over other sequences. float32 would leave rounding errors.
        sums = log_decay.double().cumsum(-1)
        reaches: Bool[Tensor, "*chunks size size"] = torch.ones(
            size, size, dtype=torch.bool, device=log_decay.device
        ).tril()
        if segments is not None:
            reaches = reaches & (segments[:, :, None] == segments[:, None, :])
        between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(kind).masked_fill(~reaches, float("-inf")).exp()
        from_state, to_state, of_chunk = sums.exp(), (sums[..., -1:] - sums).exp(), sums[..., -1:].exp()
        if segments is not None:
            before = torch.cat([segments[:1, :1], segments[:-1, -1:]])
            last = segments[:, -1:]
            from_state, to_state = from_state * (segments == before), to_state * (segments == last)
            of_chunk = of_chunk * (last == before)
        return cls(between, *(each.to(kind).unsqueeze(-1) for each in (from_state, to_state, of_chunk)))


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
    missing = -tokens % size

    def in_chunks(each: Shaped[Tensor, "rows tokens heads *dim"]) -> Shaped[Tensor, "rows heads chunks size *dim"]:
        padded = F.pad(each.to(kind), (0, 0) * (each.ndim - 2) + (0, missing))
        return padded.transpose(1, 2).unflatten(2, (-1, size))

    if segments is not None:
        segments = torch.cat([segments, segments[-1:].expand(missing)]).view(-1, size)
    # Padding tokens have no correction and no decay.
    query, key, values, rate = in_chunks(query * key_dim**-0.5), in_chunks(key), in_chunks(value), in_chunks(beta)
    decays = _Decays.of(in_chunks(log_decay), segments)
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
