# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Neighbouring sequences that must run in the same microbatch, planned as if each group were one sequence."""

from collections.abc import Sequence


def padded_group_lengths(lengths: Sequence[int], group_size: int) -> list[int]:
    """What each group takes where every sequence is padded to the longest of its microbatch.

    A microbatch of groups takes as many times the largest of these numbers as it holds groups.

    Args:
        lengths: Tokens of each sequence; their number is a multiple of `group_size`.
        group_size: Neighbours in a group.
    """
    return [group_size * max(group) for group in _groups(lengths, group_size)]


def packed_group_lengths(lengths: Sequence[int], group_size: int, sequence_multiple: int) -> list[int]:
    """What each group takes where sequences stand end to end.

    Args:
        lengths: Tokens of each sequence; their number is a multiple of `group_size`.
        group_size: Neighbours in a group.
        sequence_multiple: Each sequence is padded to a multiple of it.
    """
    return [sum(round_up(length, sequence_multiple) for length in group) for group in _groups(lengths, group_size)]


def sequences_of(groups: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Indices of the sequences of these groups; a group's sequences stay neighbours and in their order."""
    return tuple(group * group_size + member for group in groups for member in range(group_size))


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not less."""
    return -(-length // multiple) * multiple


def _groups(lengths: Sequence[int], group_size: int) -> list[Sequence[int]]:
    if len(lengths) % group_size:
        raise ValueError(f"{len(lengths)} sequences are no whole number of groups of {group_size}")
    return [lengths[start : start + group_size] for start in range(0, len(lengths), group_size)]
