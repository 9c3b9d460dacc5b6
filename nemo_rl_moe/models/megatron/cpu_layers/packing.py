# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: their lengths, and a padded batch of them."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core.packed_seq_params import PackedSeqParams

# Padding packed sequences to the longest saves calls; with more rows than this share a call each is faster.
_LARGEST_PADDED_SHARE = 1.5


def packed_lengths(packed: PackedSeqParams, total: int) -> list[int]:
    """Lengths of the packed sequences, with their own padding where there is some.

    Args:
        packed: Megatron's description of a packed batch, format `thd`.
        total: Number of tokens in the pack.

    Raises:
        ValueError: Another format, or lengths that do not add up to `total`.
    """
    if packed.qkv_format != "thd":
        raise ValueError(f"packed sequences: qkv_format must be 'thd', got {packed.qkv_format!r}")
    padded = packed.cu_seqlens_q_padded
    bounds = (packed.cu_seqlens_q if padded is None else padded).tolist()
    if bounds[0] != 0 or bounds[-1] != total:
        raise ValueError(f"packed sequences: cu_seqlens must run from 0 to {total}, got {bounds[0]} to {bounds[-1]}")
    return [end - start for start, end in itertools.pairwise(bounds) if end > start]


def worth_padding(lengths: list[int]) -> bool:
    """Whether one padded batch of these sequences is faster than one call each."""
    return max(lengths) * len(lengths) <= _LARGEST_PADDED_SHARE * sum(lengths)


@dataclass(frozen=True)
class PaddedBatch:
    """Moves the tokens of a pack into a batch `[longest, sequences]` and back.

    Padding stands behind each sequence, where causal attention of real tokens never looks.

    Attributes:
        longest: Length of the longest sequence.
        sequences: Number of sequences.
        places: `[tokens]`, each token's row in the flattened batch.
    """

    longest: int
    sequences: int
    places: Tensor

    @classmethod
    def of(cls, lengths: list[int]) -> "PaddedBatch":
        """The batch for sequences of these lengths."""
        # The same few tensors for every layer of a microbatch are cheaper to make than to keep.
        places = [torch.arange(length).mul_(len(lengths)).add_(index) for index, length in enumerate(lengths)]
        return cls(max(lengths), len(lengths), torch.cat(places))

    def pad(self, packed: Tensor) -> Tensor:
        """`[tokens, ...]` to `[longest, sequences, ...]`, zero where there is no token."""
        rows = packed.new_zeros(self.longest * self.sequences, *packed.shape[1:])
        return rows.index_copy(0, self.places, packed).view(self.longest, self.sequences, *packed.shape[1:])

    def unpad(self, padded: Tensor) -> Tensor:
        """`[longest, sequences, ...]` to `[tokens, ...]`."""
        return padded.flatten(0, 1).index_select(0, self.places)
