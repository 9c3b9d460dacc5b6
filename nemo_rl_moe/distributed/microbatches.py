# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Plans of microbatches: the sequences of each data-parallel rank, in fixed numbers, by tokens or packed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from nemo_rl_moe.distributed.bin_packing import (
    deal_by_work,
    first_fit_decreasing,
    round_up,
    rounded_number,
    split_evenly,
    split_until,
)
from nemo_rl_moe.distributed.length_partition import cheapest_partition
from nemo_rl_moe.distributed.patch_limit import Images, most_neighbours, of_groups
from nemo_rl_moe.errors import ConfigurationError


def padded_group_lengths(lengths: Sequence[int], group_size: int) -> list[int]:
    """Return the number of tokens of each group if all its sequences are padded to the longest of them.

    In a microbatch, all groups are padded to the largest of these numbers, so the number of tokens of a microbatch is
    its number of groups times this maximum.
    """
    return [group_size * max(group) for group in _groups(lengths, group_size)]


def packed_group_lengths(lengths: Sequence[int], group_size: int, sequence_multiple: int) -> list[int]:
    """Return the tokens of each group if sequences are packed, each padded to a multiple of `sequence_multiple`."""
    return [sum(round_up(length, sequence_multiple) for length in group) for group in _groups(lengths, group_size)]


def sequences_of(groups: Sequence[int], group_size: int) -> tuple[int, ...]:
    """Return the indices of the sequences of groups. A group consists of `group_size` consecutive sequences."""
    return tuple(group * group_size + member for group in groups for member in range(group_size))


def _groups(lengths: Sequence[int], group_size: int) -> list[Sequence[int]]:
    if len(lengths) % group_size:
        raise ValueError(f"{len(lengths)} sequences are not a multiple of the group size {group_size}")
    return [lengths[start : start + group_size] for start in range(0, len(lengths), group_size)]


Microbatch = tuple[int, ...]
"""Indices of the sequences that run together."""
RankMicrobatches = tuple[tuple[Microbatch, ...], ...]
"""Microbatches of one global batch, by data-parallel rank and in execution order."""


@dataclass(frozen=True)
class PlainBatching:
    """A fixed number of sequences (or groups) per microbatch, in the order of the batch."""

    micro_batch_size: int


@dataclass(frozen=True)
class DynamicBatching:
    """Sequences of similar length together. Their number times the longest length is at most `max_tokens`.

    Attributes:
        overhead_tokens: Cost of a microbatch in tokens, besides its padded tokens.
        max_patches: Maximum number of image patches in a microbatch. Equal images count once. It does not apply to a
            microbatch whose sequences (or groups) all have the same images. None for no limit.
    """

    max_tokens: int
    overhead_tokens: int = 0
    max_patches: int | None = None


@dataclass(frozen=True)
class PackedBatching:
    """Sequences packed into one row of at most `max_tokens`, each padded to a multiple of `sequence_multiple`.

    Attributes:
        max_patches: Maximum number of image patches in a microbatch, as in `DynamicBatching`. None for no limit.
    """

    max_tokens: int
    sequence_multiple: int = 1
    max_patches: int | None = None


Batching = PlainBatching | DynamicBatching | PackedBatching


@dataclass(frozen=True)
class MicrobatchPlan:
    """Assignment of sequences to data-parallel ranks and microbatches.

    Attributes:
        global_batches: Sequence indices in the full batch, by global batch, data-parallel rank and microbatch. Every
            rank of a global batch has the same number of microbatches.
        num_fillers: Number of filler rows (padding without a sequence), each alone in a microbatch. Their indices
            follow those of the sequences. `batch.with_empty_rows` appends them to a batch.
    """

    global_batches: tuple[RankMicrobatches, ...]
    num_fillers: int = 0

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Number of microbatches of each rank, by global batch."""
        return tuple(len(by_rank[0]) for by_rank in self.global_batches)


@dataclass(frozen=True)
class EvaluationPlan:
    """Assignment of sequences to ranks and microbatches, for a batch of any size.

    Attributes:
        by_rank: Microbatches by data-parallel rank, the same number for each.
        fillers: Sequences that are repeated so that all ranks have the same number of microbatches. The repetition
            `fillers[i]` has the index `number of sequences + i` in `by_rank`, and must not count in results.
            `batch.append_fillers` appends the repetitions to a batch.
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
    sample_sizes: Sequence[int] = (),
    images: Sequence[Images] = (),
    shared: Sequence[int] = (),
) -> MicrobatchPlan:
    """Return the split of a batch into global batches, and of each of these into microbatches for every rank.

    Args:
        lengths: Length of each sequence in tokens, at least 1.
        global_batch_size: Number of consecutive groups that one optimizer step uses. If `sample_sizes` is set, it is a
            number of samples.
        batching: With `PlainBatching` and samples of one sequence, the microbatches do not depend on the number of
            ranks, and rank `r` runs the `r`-th block of them.
        microbatch_multiple: Number of which each rank's number of microbatches is a multiple. For an interleaved
            pipeline schedule, it must be the number of stages.
        group_size: Number of consecutive sequences that form a group, which always runs in one microbatch. All sizes
            above count groups.
        sample_sizes: Number of consecutive sequences of each sample, which run in one optimizer step. A global batch
            with too few sequences for the microbatches of all ranks gets filler rows. If empty, each group is a sample.
        images: Images of each sequence. Empty without images, or without a limit on patches.
        shared: For each sequence, the number of its first tokens that it shares with the sequence before it. A
            microbatch of both has these tokens once. Empty if sequences share no tokens.
    """
    sizes, group_shared = _group_lengths(lengths, group_size, batching, shared)
    num_samples = len(sample_sizes) or len(sizes)
    if not sizes or num_samples % global_batch_size:
        raise ConfigurationError(
            f"policy.train_global_batch_size: got {global_batch_size}, expected a divisor of the {num_samples}"
            f" {'samples' if sample_sizes else _noun(group_size)} in the batch"
        )
    ends = [0, *accumulate(sample_sizes or [1] * num_samples)]
    unit = num_data_parallel_ranks * microbatch_multiple
    groups_images = of_groups(images, group_size)
    global_batches: list[RankMicrobatches] = []
    num_fillers = 0
    for start in range(0, num_samples, global_batch_size):
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
                f" ({_unit_text(num_data_parallel_ranks, microbatch_multiple)}): every rank runs the same"
                " number of microbatches"
            )
        indices = [*range(ends[start], ends[start + global_batch_size])]
        if sample_sizes:
            new = _num_fillers([sizes[index] for index in indices], _of(groups_images, indices), unit, batching)
            indices += range(len(lengths) + num_fillers, len(lengths) + num_fillers + new)
            num_fillers += new
            sizes += [1] * new  # a filler fits, since it is alone in its microbatch
            group_shared += [0] * (new if group_shared else 0)
            groups_images += [{}] * (new if groups_images else 0)
        by_rank = _plan_one(sizes, groups_images, indices, num_data_parallel_ranks, unit, batching, group_shared)
        global_batches.append(_with_sequences(by_rank, group_size))
    return MicrobatchPlan(tuple(global_batches), num_fillers)


def plan_evaluation(
    lengths: Sequence[int],
    *,
    num_data_parallel_ranks: int,
    batching: Batching,
    microbatch_multiple: int = 1,
    group_size: int = 1,
    images: Sequence[Images] = (),
    shared: Sequence[int] = (),
) -> EvaluationPlan:
    """Return a plan for a batch of any size.

    The shortest group is repeated until all ranks can get the same number of microbatches.

    The arguments are described in `plan_microbatches`.
    """
    if not lengths:
        raise ValueError("nothing to evaluate: the batch holds no sequence")
    sizes, group_shared = _group_lengths(lengths, group_size, batching, shared)
    unit = num_data_parallel_ranks * microbatch_multiple
    # With a multiple of the unit, there is always a group to split off for a rank that lacks a microbatch.
    num_fillers = -len(sizes) % (unit * (batching.micro_batch_size if isinstance(batching, PlainBatching) else 1))
    shortest = min(range(len(sizes)), key=lambda index: sizes[index])
    filled = [*sizes, *[sizes[shortest]] * num_fillers]
    groups_images = of_groups(images, group_size)
    if groups_images:
        groups_images += [groups_images[shortest]] * num_fillers
    group_shared += [0] * (num_fillers if group_shared else 0)
    by_rank = _plan_one(
        filled, groups_images, range(len(filled)), num_data_parallel_ranks, unit, batching, group_shared
    )
    return EvaluationPlan(
        by_rank=_with_sequences(by_rank, group_size), fillers=sequences_of((shortest,) * num_fillers, group_size)
    )


def _plan_one(
    lengths: Sequence[int],
    images: Sequence[Images],
    indices: Sequence[int],
    num_ranks: int,
    unit: int,
    batching: Batching,
    shared: Sequence[int],
) -> RankMicrobatches:
    """Return the microbatches of the groups at `indices`, in a number that is a multiple of `unit`."""
    if isinstance(batching, PlainBatching):
        # As evenly as possible, since the number of groups need not be a multiple if samples have several sequences.
        number = round_up(-(-len(indices) // batching.micro_batch_size), unit)
        ends = [len(indices) * (count + 1) // number for count in range(number)]
        microbatches = [tuple(indices[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        block = number // num_ranks
        return tuple(tuple(microbatches[rank * block : (rank + 1) * block]) for rank in range(num_ranks))

    sizes = [lengths[index] for index in indices]
    own = _of(images, indices)
    if isinstance(batching, DynamicBatching):
        bins = _cheapest_by_length(sizes, own, batching, unit)
        work = [sizes[items[0]] * len(items) for items in bins]
    elif shared:
        return _plan_families(sizes, [shared[index] for index in indices], indices, num_ranks, unit, batching)
    else:
        bins = first_fit_decreasing(sizes, batching.max_tokens, own, batching.max_patches)
        bins = split_until(
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


def _plan_families(
    sizes: Sequence[int],
    shared: Sequence[int],
    indices: Sequence[int],
    num_ranks: int,
    unit: int,
    batching: PackedBatching,
) -> RankMicrobatches:
    """Return microbatches in which neighbours that share tokens are together, as far as the limit and balance allow."""
    tokens = sum(sizes) - sum(shared[1:])
    families = _families(sizes, shared, min(batching.max_tokens, max(-(-tokens // unit), *sizes)))
    while True:
        work = [_tokens_of(family, sizes, shared) for family in families]
        bins = first_fit_decreasing(work, batching.max_tokens)
        if round_up(len(bins), unit) <= len(families) or all(len(family) == 1 for family in families):
            break
        largest = max((family for family in families if len(family) > 1), key=len)
        middle = largest.start + len(largest) // 2
        families.remove(largest)
        families += [range(largest.start, middle), range(middle, largest.stop)]
    bins = split_until(
        bins,
        unit,
        lambda items: sum(work[item] for item in items),
        lambda items: split_evenly([work[item] for item in items]),
    )
    members = [tuple(sorted(indices[number] for item in items for number in families[item])) for items in bins]
    dealt = deal_by_work([sum(work[item] for item in items) for items in bins], num_ranks)
    return tuple(tuple(members[number] for number in numbers) for numbers in dealt)


def _families(sizes: Sequence[int], shared: Sequence[int], most_tokens: int) -> list[range]:
    """Return runs of neighbours that share tokens, each with at most `most_tokens` distinct tokens."""
    families: list[range] = []
    for number in range(len(sizes)):
        joined = range(families[-1].start if families else 0, number + 1)
        if number and shared[number] and _tokens_of(joined, sizes, shared) <= most_tokens:
            families[-1] = joined
        else:
            families.append(range(number, number + 1))
    return families


def _tokens_of(family: range, sizes: Sequence[int], shared: Sequence[int]) -> int:
    """Return the number of distinct tokens of neighbours."""
    return sum(sizes[number] for number in family) - sum(shared[number] for number in family[1:])


def _num_fillers(sizes: Sequence[int], images: Sequence[Images], unit: int, batching: Batching) -> int:
    """Return the number of filler rows that a global batch needs so that no microbatch of any rank is empty."""
    if len(sizes) % unit == 0:  # one per microbatch is enough
        return 0
    if isinstance(batching, PlainBatching):
        fewest = -(-len(sizes) // batching.micro_batch_size)
    elif isinstance(batching, DynamicBatching):
        _, lengths, most = _by_length(sizes, images, batching)
        fewest = _fewest_by_length(lengths, most, batching)
    else:
        fewest = len(first_fit_decreasing(sizes, batching.max_tokens, images, batching.max_patches))
    return max(0, round_up(fewest, unit) - len(sizes))


def _of(images: Sequence[Images], indices: Sequence[int]) -> list[Images]:
    """Return the images of some groups. Empty without images."""
    return [images[index] for index in indices] if images else []


def _by_length(
    sizes: Sequence[int], images: Sequence[Images], batching: DynamicBatching
) -> tuple[list[int], list[int], list[int]]:
    """Sort items by length, longest first. Return the items, their lengths, and `most_neighbours` of their images."""
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    own = [images[item] for item in order] if images else [{}] * len(order)
    return order, [sizes[item] for item in order], most_neighbours(own, batching.max_patches)


def _fewest_by_length(lengths: Sequence[int], most: Sequence[int], batching: DynamicBatching) -> int:
    """Return the smallest number of microbatches for sequences that are sorted by length."""
    fewest = start = 0
    while start < len(lengths):
        start += min(batching.max_tokens // lengths[start], most[start])
        fewest += 1
    return fewest


def _cheapest_by_length(
    sizes: Sequence[int], images: Sequence[Images], batching: DynamicBatching, unit: int
) -> list[list[int]]:
    order, lengths, most = _by_length(sizes, images, batching)
    rounded_number(_fewest_by_length(lengths, most, batching), unit, len(order))
    ends = cheapest_partition(lengths, batching.max_tokens, batching.overhead_tokens, unit, most)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _with_sequences(by_rank: RankMicrobatches, group_size: int) -> RankMicrobatches:
    """Return microbatches with the indices of sequences instead of groups."""
    return tuple(tuple(sequences_of(groups, group_size) for groups in microbatches) for microbatches in by_rank)


def _unit_text(num_ranks: int, microbatch_multiple: int) -> str:
    pipeline = f" x {microbatch_multiple} pipeline stages" if microbatch_multiple > 1 else ""
    return f"{num_ranks} data-parallel ranks{pipeline}"


def _noun(group_size: int) -> str:
    return "sequences" if group_size == 1 else f"groups of {group_size} sequences"


def _group_lengths(
    lengths: Sequence[int], group_size: int, batching: Batching, shared: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the tokens of each group in a microbatch, padding included, and the tokens that it shares with the group
    before it. Refuse groups that do not fit into a microbatch."""
    if lengths and min(lengths) < 1:
        raise ValueError(f"sequence {list(lengths).index(min(lengths))} holds no token")
    if isinstance(batching, PackedBatching):
        sizes = packed_group_lengths(lengths, group_size, batching.sequence_multiple)
        if shared:
            within = [sum(group[1:]) for group in _groups(shared, group_size)]
            sizes = [size - number for size, number in zip(sizes, within, strict=True)]
        name, how = "sequence_packing", f"when padded to a multiple of {batching.sequence_multiple}"
    else:
        sizes = padded_group_lengths(lengths, group_size)
        name, how = "dynamic_batching", "with padding"
    if isinstance(batching, PlainBatching) or not sizes or max(sizes) <= batching.max_tokens:
        return sizes, list(shared[::group_size]) if isinstance(batching, PackedBatching) else []
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
