# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans on the driver which sequences each data-parallel rank runs in which microbatch."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_rl_moe.distributed.bin_packing import deal_by_work, first_fit_decreasing, split_evenly
from nemo_rl_moe.errors import ConfigurationError

Microbatch = tuple[int, ...]
"""Indices of the sequences that run together."""
RankMicrobatches = tuple[tuple[Microbatch, ...], ...]
"""The microbatches of one global batch by data-parallel rank, then in the order in which they run."""


@dataclass(frozen=True)
class PlainBatching:
    """A fixed number of sequences a microbatch, in the order in which they came."""

    micro_batch_size: int


@dataclass(frozen=True)
class DynamicBatching:
    """Sequences of similar length together; number of sequences x longest of them stays within `max_tokens`."""

    max_tokens: int


@dataclass(frozen=True)
class PackedBatching:
    """Sequences end to end in one row of at most `max_tokens`, each padded to a multiple of `sequence_multiple`."""

    max_tokens: int
    sequence_multiple: int = 1


Batching = PlainBatching | DynamicBatching | PackedBatching


@dataclass(frozen=True)
class MicrobatchPlan:
    """Who runs what.

    Attributes:
        global_batches: For each global batch, by data-parallel rank, its microbatches of sequence indices. The indices
            count from the start of the whole batch; every rank of a global batch has as many microbatches.
    """

    global_batches: tuple[RankMicrobatches, ...]

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """How many microbatches each rank runs in each global batch."""
        return tuple(len(by_rank[0]) for by_rank in self.global_batches)


@dataclass(frozen=True)
class EvaluationPlan:
    """Who runs what, for a batch of any size.

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
) -> MicrobatchPlan:
    """Cuts a batch into global batches, and each of these into microbatches for every rank.

    Args:
        lengths: Tokens of each sequence, at least 1.
        num_data_parallel_ranks: Ranks that share each global batch.
        global_batch_size: Sequences in one optimizer step, neighbours in the batch.
        batching: How microbatches are filled. With `PlainBatching` the microbatches are the same for every number of
            ranks, and rank `r` runs the `r`-th block of them.
        microbatch_multiple: Each rank's number of microbatches is a multiple of this (an interleaved pipeline needs
            its number of stages).

    Raises:
        ConfigurationError: The sizes do not divide, a global batch has too few sequences for the ranks, or a sequence
            is longer than a microbatch may be.
    """
    _check_lengths(lengths, batching)
    if not lengths or len(lengths) % global_batch_size:
        raise ConfigurationError(
            f"policy.train_global_batch_size: got {global_batch_size}, expected a divisor of the {len(lengths)}"
            " sequences in the batch"
        )
    unit = num_data_parallel_ranks * microbatch_multiple
    global_batches = []
    for start in range(0, len(lengths), global_batch_size):
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
        global_batches.append(_plan_one(lengths, indices, num_data_parallel_ranks, unit, batching))
    return MicrobatchPlan(tuple(global_batches))


def plan_evaluation(
    lengths: Sequence[int], *, num_data_parallel_ranks: int, batching: Batching, microbatch_multiple: int = 1
) -> EvaluationPlan:
    """Shares a batch of any size over the ranks; where it does not divide, the shortest sequence is run again.

    Args:
        lengths: Tokens of each sequence, at least 1.
        num_data_parallel_ranks: Ranks that share the batch.
        batching: How microbatches are filled.
        microbatch_multiple: Each rank's number of microbatches is a multiple of this.

    Raises:
        ConfigurationError: A sequence is longer than a microbatch may be.
        ValueError: There is no sequence at all.
    """
    if not lengths:
        raise ValueError("nothing to evaluate: the batch holds no sequence")
    _check_lengths(lengths, batching)
    unit = num_data_parallel_ranks * microbatch_multiple
    # With a multiple of the unit there is always a sequence left to split off for a rank that lacks a microbatch.
    num_fillers = -len(lengths) % (unit * (batching.micro_batch_size if isinstance(batching, PlainBatching) else 1))
    shortest = min(range(len(lengths)), key=lambda index: lengths[index])
    filled = [*lengths, *[lengths[shortest]] * num_fillers]
    return EvaluationPlan(
        by_rank=_plan_one(filled, range(len(filled)), num_data_parallel_ranks, unit, batching),
        fillers=(shortest,) * num_fillers,
    )


def _plan_one(
    lengths: Sequence[int], indices: range, num_ranks: int, unit: int, batching: Batching
) -> RankMicrobatches:
    """The microbatches of the sequences at `indices`, in a number that is a multiple of `unit`."""
    if isinstance(batching, PlainBatching):
        size = batching.micro_batch_size
        microbatches = [tuple(indices[start : start + size]) for start in range(0, len(indices), size)]
        block = len(microbatches) // num_ranks
        return tuple(tuple(microbatches[rank * block : (rank + 1) * block]) for rank in range(num_ranks))

    if isinstance(batching, DynamicBatching):
        sizes = [lengths[index] for index in indices]
        bins = _fill_by_longest(sizes, batching.max_tokens)
        bins = _split_until(bins, unit, lambda items: sizes[items[0]] * len(items), _cut_in_the_middle)
        work = [sizes[items[0]] * len(items) for items in bins]
    else:
        sizes = [_round_up(lengths[index], batching.sequence_multiple) for index in indices]
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


def _fill_by_longest(sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Sorts by length and fills each microbatch with as many as its longest sequence allows: the fewest possible."""
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    bins: list[list[int]] = []
    start = 0
    while start < len(order):
        end = start + max_tokens // sizes[order[start]]
        bins.append(order[start:end])
        start = end
    return bins


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
    target = -(-len(bins) // unit) * unit
    num_items = sum(map(len, bins))
    if target > num_items:
        raise ConfigurationError(
            f"{num_items} sequences fill {len(bins)} microbatches, which cannot become {target}, the next multiple of"
            f" {unit} that the ranks need; use a policy.train_global_batch_size that is a multiple of {unit}"
        )
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


def _cut_in_the_middle(items: list[int]) -> tuple[range, range]:
    middle = math.ceil(len(items) / 2)
    return range(middle), range(middle, len(items))


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _unit_text(num_ranks: int, microbatch_multiple: int) -> str:
    pipeline = f" x {microbatch_multiple} pipeline stages" if microbatch_multiple > 1 else ""
    return f"{num_ranks} data-parallel ranks{pipeline}"


def _check_lengths(lengths: Sequence[int], batching: Batching) -> None:
    if lengths and min(lengths) < 1:
        raise ValueError(f"sequence {list(lengths).index(min(lengths))} holds no token")
    if isinstance(batching, PlainBatching):
        return
    multiple = batching.sequence_multiple if isinstance(batching, PackedBatching) else 1
    name = "sequence_packing" if isinstance(batching, PackedBatching) else "dynamic_batching"
    longest = max(range(len(lengths)), key=lambda index: lengths[index], default=None)
    if longest is None:
        return
    size = _round_up(lengths[longest], multiple)
    if size > batching.max_tokens:
        padded = f" ({size} when padded to a multiple of {multiple})" if size != lengths[longest] else ""
        raise ConfigurationError(
            f"policy.{name}.train_mb_tokens: got {batching.max_tokens}, expected at least {size}: sequence {longest} of"
            f" the batch has {lengths[longest]} tokens{padded}"
        )
