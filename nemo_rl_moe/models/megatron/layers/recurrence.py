# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What gated delta nets and Mamba-2 have in common: the causal convolution, and decays of a state in chunks of tokens.

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


@dataclass(frozen=True)
class ChunkDecays:
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
    ) -> "ChunkDecays":
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


def in_chunks(
    values: Shaped[Tensor, "rows tokens heads *dim"], size: int, kind: torch.dtype
) -> Shaped[Tensor, "rows heads chunks size *dim"]:
    """Return values as `kind` in chunks of `size` tokens, the last one filled with zeros."""
    padded = F.pad(values.to(kind), (0, 0) * (values.ndim - 2) + (0, -values.shape[1] % size))
    return padded.transpose(1, 2).unflatten(2, (-1, size))


def segments_in_chunks(segments: Int[Tensor, " tokens"] | None, size: int) -> Int[Tensor, "chunks size"] | None:
    """Return the sequence number of each token in chunks, the last one filled with the last sequence."""
    if segments is None:
        return None
    return torch.cat([segments, segments[-1:].expand(-len(segments) % size)]).view(-1, size)
