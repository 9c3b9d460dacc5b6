# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plan of microbatches: the sequences that each data-parallel rank runs, padded, by tokens or packed."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_rl_moe.distributed.length_partition import cheapest_partition
from nemo_rl_moe.errors import ConfigurationError


def padded_group_lengths(lengths: Sequence[int], group_size: int) -> list[int]:
    """Tokens of each group where every sequence is padded to the longest of its microbatch.

    A microbatch of groups takes as many times the largest of these numbers as it holds groups.

    Args:
        lengths: Tokens of each sequence; their number is a multiple of `group_size`.
        group_size: Neighbours in a group.
    """
    return [group_size * max(group) for group in _groups(lengths, group_size)]


def packed_group_lengths(lengths: Sequence[int], group_size: int, sequence_multiple: int) -> list[int]:
    """Tokens of each group where sequences stand end to end.

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


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items into few bins: the largest item first, each into the first bin that has room.

    Args:
        sizes: Size of each item, at least 1 and at most `capacity`.
        capacity: Most that the items of one bin may add up to.

    Returns:
        The items of each bin, largest first.
    """
    bins: list[list[int]] = []
    # A heap-shaped tree of maxima over the room left in each bin (an unopened bin has all its room), so that the first
    # bin with enough room is found in logarithmic time.
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    room = [capacity] * (2 * leaves)
    for item in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= sizes[item] else 2 * node + 1
        position = node - leaves
        if position == len(bins):
            bins.append([])
        bins[position].append(item)
        room[node] -= sizes[item]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def split_evenly(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Cuts positions in two parts that are both non-empty and add up to about the same.

    Args:
        sizes: Size of each item, largest first; at least two.
    """
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for position, size in enumerate(sizes):
        lighter = 0 if totals[0] <= totals[1] else 1
        halves[lighter].append(position)
        totals[lighter] += size
    return halves


def deal_by_work(work: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Deals items to ranks so that every rank gets as many, and about the same work at each turn and in total.

    Ranks that share experts wait for each other in every microbatch, so the items of one turn are neighbours in size;
    within a turn the largest goes to the rank that has least so far.

    Args:
        work: Work of each item; their number is a multiple of `num_ranks`.
        num_ranks: Number of ranks.

    Returns:
        The items of each rank, most work first.
    """
    order = sorted(range(len(work)), key=lambda index: (-work[index], index))
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        least_first = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, item in zip(least_first, order[start : start + num_ranks], strict=True):
            dealt[rank].append(item)
            totals[rank] += work[item]
    return dealt


Microbatch = tuple[int, ...]
"""Indices of the sequences that run together."""
RankMicrobatches = tuple[tuple[Microbatch, ...], ...]
"""The microbatches of one global batch by data-parallel rank, then in the order in which they run."""


@dataclass(frozen=True)
class PlainBatching:
    """A fixed number of sequences (or groups of them) a microbatch, in the order in which they came."""

    micro_batch_size: int


@dataclass(frozen=True)
class DynamicBatching:
    """Sequences of similar length together; number of sequences x longest of them stays within `max_tokens`.

    Attributes:
        max_tokens: Most tokens of a microbatch, padding included.
        overhead_tokens: Tokens that one more microbatch has to save in padding.
    """

    max_tokens: int
    overhead_tokens: int = 0


@dataclass(frozen=True)
class PackedBatching:
    """Sequences end to end in one row of at most `max_tokens`, each padded to a multiple of `sequence_multiple`."""

    max_tokens: int
    sequence_multiple: int = 1


Batching = PlainBatching | DynamicBatching | PackedBatching


@dataclass(frozen=True)
class MicrobatchPlan:
    """Assignment of sequences to data-parallel ranks and microbatches.

    Attributes:
        global_batches: For each global batch, by data-parallel rank, its microbatches of sequence indices. The indices
            count from the start of the whole batch; every rank of a global batch has as many microbatches.
    """

    global_batches: tuple[RankMicrobatches, ...]

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Number of microbatches that each rank runs in each global batch."""
        return tuple(len(by_rank[0]) for by_rank in self.global_batches)


@dataclass(frozen=True)
class EvaluationPlan:
    """Assignment of sequences to ranks and microbatches, for a batch of any size.

    Attributes:
        by_rank: Microbatches by data-parallel rank; every rank has as many.
        fillers: Sequences that are run once more so that every rank gets as many. Filler `i` has the index
            `number of sequences + i` in `by_rank` and must not count: see `fillers.append_fillers`.
    """

    by_rank: RankMicrobatches
    fillers: tuple[int, ...]


def plan_microbatches(
    lengths: Sequence[int],
    *,
    num_data_parallel_ranks: int,
    global_batch_size: int,
    batching: Batching,
    microbatch_multiple: int = 1,
    group_size: int = 1,
) -> MicrobatchPlan:
    """Cuts a batch into global batches, and each of these into microbatches for every rank.

    Args:
        lengths: Tokens of each sequence, at least 1.
        num_data_parallel_ranks: Ranks that share each global batch.
        global_batch_size: Groups in one optimizer step, neighbours in the batch.
        batching: How microbatches are filled. With `PlainBatching` the microbatches are the same for every number of
            ranks, and rank `r` runs the `r`-th block of them.
        microbatch_multiple: Each rank's number of microbatches is a multiple of this (an interleaved pipeline needs
            its number of stages).
        group_size: So many neighbours always run in the same microbatch; every size above counts such groups.

    Raises:
        ConfigurationError: The sizes do not divide, a global batch has too few sequences for the ranks, or a sequence
            (or group) is longer than a microbatch may be.
    """
    sizes = _group_lengths(lengths, group_size, batching)
    if not sizes or len(sizes) % global_batch_size:
        raise ConfigurationError(
            f"policy.train_global_batch_size: got {global_batch_size}, expected a divisor of the {len(sizes)}"
            f" {_noun(group_size)} in the batch"
        )
    unit = num_data_parallel_ranks * microbatch_multiple
    global_batches = []
    for start in range(0, len(sizes), global_batch_size):
        indices = range(start, start + global_batch_size)
        if isinstance(batching, PlainBatching):
            multiple = unit * batching.micro_batch_size
            if global_batch_size % multiple:
                raise ConfigurationError(
                    f"policy.train_global_batch_size: got {global_batch_size}, expected a multiple of {multiple}"
                    f" ({_unit_text(num_data_parallel_ranks, microbatch_multiple)} x policy.train_micro_batch_size"
                    f" {batching.micro_batch_size})"
                )
        elif global_batch_size < unit:
            raise ConfigurationError(
                f"policy.train_global_batch_size: got {global_batch_size}, expected at least {unit}"
                f" ({_unit_text(num_data_parallel_ranks, microbatch_multiple)}): every rank runs as many microbatches"
            )
        by_rank = _plan_one(sizes, indices, num_data_parallel_ranks, unit, batching)
        global_batches.append(_with_sequences(by_rank, group_size))
    return MicrobatchPlan(tuple(global_batches))


def plan_evaluation(
    lengths: Sequence[int],
    *,
    num_data_parallel_ranks: int,
    batching: Batching,
    microbatch_multiple: int = 1,
    group_size: int = 1,
) -> EvaluationPlan:
    """Shares a batch of any size over the ranks; where it does not divide, the shortest group is run again.

    Args:
        lengths: Tokens of each sequence, at least 1.
        num_data_parallel_ranks: Ranks that share the batch.
        batching: How microbatches are filled.
        microbatch_multiple: Each rank's number of microbatches is a multiple of this.
        group_size: So many neighbours always run in the same microbatch.

    Raises:
        ConfigurationError: A sequence (or group) is longer than a microbatch may be.
        ValueError: There is no sequence at all.
    """
    if not lengths:
        raise ValueError("nothing to evaluate: the batch holds no sequence")
    sizes = _group_lengths(lengths, group_size, batching)
    unit = num_data_parallel_ranks * microbatch_multiple
    # With a multiple of the unit there is always a group left to split off for a rank that lacks a microbatch.
    num_fillers = -len(sizes) % (unit * (batching.micro_batch_size if isinstance(batching, PlainBatching) else 1))
    shortest = min(range(len(sizes)), key=lambda index: sizes[index])
    filled = [*sizes, *[sizes[shortest]] * num_fillers]
    by_rank = _plan_one(filled, range(len(filled)), num_data_parallel_ranks, unit, batching)
    return EvaluationPlan(
        by_rank=_with_sequences(by_rank, group_size), fillers=sequences_of((shortest,) * num_fillers, group_size)
    )


def _plan_one(
    lengths: Sequence[int], indices: range, num_ranks: int, unit: int, batching: Batching
) -> RankMicrobatches:
    """The microbatches of the groups at `indices`, in a number that is a multiple of `unit`."""
    if isinstance(batching, PlainBatching):
        size = batching.micro_batch_size
        microbatches = [tuple(indices[start : start + size]) for start in range(0, len(indices), size)]
        block = len(microbatches) // num_ranks
        return tuple(tuple(microbatches[rank * block : (rank + 1) * block]) for rank in range(num_ranks))

    if isinstance(batching, DynamicBatching):
        sizes = [lengths[index] for index in indices]
        bins = _cheapest_by_length(sizes, batching, unit)
        work = [sizes[items[0]] * len(items) for items in bins]
    else:
        sizes = [lengths[index] for index in indices]
        bins = first_fit_decreasing(sizes, batching.max_tokens)
        bins = _split_until(
            bins,
            unit,
            lambda items: sum(sizes[item] for item in items),
            lambda items: split_evenly([sizes[item] for item in items]),
        )
        work = [sum(sizes[item] for item in items) for items in bins]
    return tuple(
        tuple(tuple(sorted(indices[item] for item in bins[number])) for number in numbers)
        for numbers in deal_by_work(work, num_ranks)
    )


def _cheapest_by_length(sizes: Sequence[int], batching: DynamicBatching, unit: int) -> list[list[int]]:
    """Sorts by length, longest first, and cuts where it costs least."""
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    fewest = start = 0
    while start < len(order):
        start += batching.max_tokens // sizes[order[start]]
        fewest += 1
    _rounded_number(fewest, unit, len(order))
    lengths = [sizes[item] for item in order]
    ends = cheapest_partition(lengths, batching.max_tokens, batching.overhead_tokens, unit)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _rounded_number(num_microbatches: int, unit: int, num_items: int) -> int:
    """The next multiple of `unit`, of which each microbatch can have an item of its own.

    Raises:
        ConfigurationError: There are fewer items.
    """
    target = round_up(num_microbatches, unit)
    if target > num_items:
        raise ConfigurationError(
            f"{num_items} sequences fill {num_microbatches} microbatches, which cannot become {target}, the next"
            f" multiple of {unit} that the ranks need; use a policy.train_global_batch_size that is a multiple of"
            f" {unit}"
        )
    return target


def _split_until(
    bins: list[list[int]],
    unit: int,
    work: Callable[[list[int]], int],
    cut: Callable[[list[int]], tuple[Sequence[int], Sequence[int]]],
) -> list[list[int]]:
    """Splits the fullest bin again and again until their number is a multiple of `unit`.

    Args:
        bins: Items of each bin, largest first.
        unit: At most the number of all items, so that there is always a bin to split.
        work: How full a bin is.
        cut: The positions of the two parts of a bin's items.
    """
    target = _rounded_number(len(bins), unit, sum(map(len, bins)))
    # Entries are unique by their first item, so that ties never compare further and the order is deterministic.
    heap = [(-work(items), items[0], items) for items in bins if len(items) > 1]
    heapq.heapify(heap)
    done = [items for items in bins if len(items) == 1]
    while len(heap) + len(done) < target:
        _, _, fullest = heapq.heappop(heap)
        for positions in cut(fullest):
            part = [fullest[position] for position in positions]
            if len(part) == 1:
                done.append(part)
            else:
                heapq.heappush(heap, (-work(part), part[0], part))
    return sorted([items for _, _, items in heap] + done)


def _with_sequences(by_rank: RankMicrobatches, group_size: int) -> RankMicrobatches:
    """The sequences instead of their groups."""
    return tuple(tuple(sequences_of(groups, group_size) for groups in microbatches) for microbatches in by_rank)


def _unit_text(num_ranks: int, microbatch_multiple: int) -> str:
    pipeline = f" x {microbatch_multiple} pipeline stages" if microbatch_multiple > 1 else ""
    return f"{num_ranks} data-parallel ranks{pipeline}"


def _noun(group_size: int) -> str:
    return "sequences" if group_size == 1 else f"groups of {group_size} sequences"


def _group_lengths(lengths: Sequence[int], group_size: int, batching: Batching) -> list[int]:
    """Tokens of each group in a microbatch, padding included; every group fits one."""
    if lengths and min(lengths) < 1:
        raise ValueError(f"sequence {list(lengths).index(min(lengths))} holds no token")
    if isinstance(batching, PackedBatching):
        sizes = packed_group_lengths(lengths, group_size, batching.sequence_multiple)
        name, how = "sequence_packing", f"when padded to a multiple of {batching.sequence_multiple}"
    else:
        sizes = padded_group_lengths(lengths, group_size)
        name, how = "dynamic_batching", "with padding"
    if isinstance(batching, PlainBatching) or not sizes or max(sizes) <= batching.max_tokens:
        return sizes
    longest = sizes.index(max(sizes))
    members = [lengths[index] for index in sequences_of((longest,), group_size)]
    what = (
        f"sequence {longest} of the batch has {members[0]} tokens"
        if group_size == 1
        else f"sequences {longest * group_size} to {(longest + 1) * group_size - 1} of the batch, which run together,"
        f" have {' and '.join(map(str, members))} tokens"
    )
    padded = f" ({sizes[longest]} {how})" if sizes[longest] != sum(members) else ""
    raise ConfigurationError(
        f"policy.{name}.train_mb_tokens: got {batching.max_tokens}, expected at least {sizes[longest]}: {what}{padded}"
    )
