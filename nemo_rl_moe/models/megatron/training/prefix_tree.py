# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefix trees of a microbatch: tokens that several sequences share are computed once.

The responses to a prompt repeat the prompt, and branches of an agent's trajectory repeat their common turns. Here the
sequences of a microbatch form a forest. A node is a run of tokens that the same sequences share, and its children
continue it. Each token attends to its node's ancestors and to the earlier tokens of its node, so its hidden state is
that of the separate sequences.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_rl_moe.distributed.batch import to_device

Columns = Sequence[Int[np.ndarray, "tokens ..."]]


@dataclass
class _Node:
    """Node of the tree while it is built. `start` is the flat position of its first token."""

    start: int
    length: int
    children: list["_Node"] = field(default_factory=list)

    def cut(self, length: int) -> None:
        """Move all tokens after the first `length` to a new child."""
        rest = _Node(self.start + length, self.length - length, self.children)
        self.length, self.children = length, [rest]


@dataclass(frozen=True)
class PrefixTree:
    """The distinct tokens of packed sequences, node after node. Parents come before their children, and siblings follow
    each other.

    Attributes:
        lengths: Number of tokens of each node.
        parents: Index of each node's parent, -1 for a root.
        owner: Flat position of each token of the tree in the first packed sequence that has it.
        copies: Flat positions of all tokens of the packed sequences, in ascending order.
        source: Token of the tree for each of the `copies`.
    """

    lengths: list[int]
    parents: list[int]
    owner: Int[np.ndarray, " tree"]
    copies: Int[np.ndarray, " copies"]
    source: Int[np.ndarray, " copies"]

    @classmethod
    def of(cls, columns: Columns, starts: Sequence[int], lengths: Sequence[int]) -> "PrefixTree":
        """Build the tree of packed sequences.

        Args:
            columns: Values of each token of the packed sequences, such as token ids. Two sequences share a token if all
                values of this token and of all tokens before it are equal.
            starts: Flat position of each sequence's first token.
            lengths: Number of tokens of each sequence. A sequence may be empty.
        """
        root = _Node(0, 0)
        owner_of = np.zeros(max((s + n for s, n in zip(starts, lengths, strict=True)), default=0), dtype=np.int64)
        for start, length in zip(starts, lengths, strict=True):
            _insert(root, columns, start, length, owner_of)
        nodes, parents = _in_order(root)
        owner = np.concatenate([np.arange(node.start, node.start + node.length) for node in nodes] or [owner_of[:0]])
        position = np.zeros_like(owner_of)
        position[owner] = np.arange(len(owner))
        copies = np.concatenate(
            [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)] or [owner_of[:0]]
        )
        return cls([node.length for node in nodes], parents, owner, copies, position[owner_of[copies]])

    @property
    def num_tokens(self) -> int:
        return len(self.owner)

    @cached_property
    def starts(self) -> list[int]:
        """Token of the tree with which each node begins."""
        return [0, *np.cumsum(self.lengths).tolist()][:-1]

    @cached_property
    def depths(self) -> list[int]:
        """Number of tokens before each node on the path from its root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.lengths[parent])
        return depths

    def predecessors(self) -> Int[np.ndarray, " tree"]:
        """Return the token before each token on the path from its root. A root's first token has itself."""
        found = np.arange(self.num_tokens) - 1
        for start, parent in zip(self.starts, self.parents, strict=True):
            found[start] = start if parent < 0 else self.starts[parent] + self.lengths[parent] - 1
        return found

    def positions(self) -> Int[np.ndarray, " tree"]:
        """Return the position of each token in its sequence."""
        offsets = np.subtract(self.depths, self.starts)
        return np.arange(self.num_tokens) + np.repeat(offsets, self.lengths)

    def copies_of_block(self, rank: int, size: int) -> tuple[Int[np.ndarray, " some"], Int[np.ndarray, " some"]]:
        """Return the `copies` whose token is in block `rank` of `size` tokens of the tree, and their index in it."""
        local = self.source - rank * size
        held = (local >= 0) & (local < size)
        return self.copies[held], local[held]

    def families(self) -> Iterator[tuple[list[slice], range]]:
        """Yield for each parent the tokens of its path, root first, and its children. The roots come first."""
        first = 0
        while first < len(self.parents):
            parent, last = self.parents[first], first
            while last < len(self.parents) and self.parents[last] == parent:
                last += 1
            path: list[slice] = []
            while parent >= 0:
                path.insert(0, slice(self.starts[parent], self.starts[parent] + self.lengths[parent]))
                parent = self.parents[parent]
            yield path, range(first, last)
            first = last


class PathKeys(NamedTuple):
    """Keys of a prefix tree for kernels that take packed sequences.

    Each node is a sequence of queries. Its keys are the keys of its path from the root, followed by its own.

    Attributes:
        tokens: `[keys]`, token of each packed key. The tokens of an inner node occur once for each of its descendants.
        packed: Bounds of the nodes' queries and keys. The last query of a node belongs to its last key.
    """

    tokens: Int[Tensor, " keys"]
    packed: PackedSeqParams

    @classmethod
    def of(cls, tree: PrefixTree, num_tokens: int, device: torch.device) -> "PathKeys":
        """Return the keys of a tree. The `num_tokens` of the row may include padding, whose tokens form a node."""
        parts, lengths, widths = [], list(tree.lengths), []
        for path, children in tree.families():
            for child in children:
                own = slice(tree.starts[child], tree.starts[child] + tree.lengths[child])
                keys = [np.arange(part.start, part.stop) for part in (*path, own)]
                parts += keys
                widths.append(sum(map(len, keys)))
        if padding := num_tokens - tree.num_tokens:
            parts.append(np.arange(tree.num_tokens, num_tokens))
            lengths.append(padding)
            widths.append(padding)
        bounds = [np.cumsum([0, *each], dtype=np.int32) for each in (lengths, widths)]
        tokens, ends, ends_of_keys = (
            to_device(torch.from_numpy(each), device) for each in (np.concatenate(parts), *bounds)
        )
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends_of_keys,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(widths),
        )
        return cls(tokens, packed)


@dataclass
class TreeSeqParams(PackedSeqParams):
    """`PackedSeqParams` of a prefix tree: one packed row, whose tokens attend along the tree.

    `max_seqlen_q` is the length of the longest path, for the table of rotary angles.

    Attributes:
        position_ids: `[tokens]`, position of each token in its sequence.
        predecessors: `[tokens]`, the token of the tree whose hidden state predicts each token.
    """

    tree: PrefixTree | None = None
    position_ids: Tensor | None = None
    predecessors: Tensor | None = None

    @cached_property
    def path_keys(self) -> PathKeys:
        """Keys for the kernels of all layers. Computed at the first use."""
        assert self.tree is not None
        assert self.position_ids is not None
        return PathKeys.of(self.tree, len(self.position_ids), self.position_ids.device)


def tree_of(packed: PackedSeqParams | None) -> PrefixTree | None:
    """Return the prefix tree of a microbatch, or None if its sequences are separate."""
    return packed.tree if isinstance(packed, TreeSeqParams) else None


def predecessors_of(packed: PackedSeqParams | None) -> Int[Tensor, " tokens"] | None:
    """Return the token whose hidden state predicts each token of a prefix tree, or None for separate sequences."""
    return packed.predecessors if isinstance(packed, TreeSeqParams) else None


def _insert(root: _Node, columns: Columns, start: int, length: int, owner_of: Int[np.ndarray, " tokens"]) -> None:
    """Add a sequence to the tree, and set the owner of each of its tokens."""
    node, end = root, start + length
    while start < end:
        child = next((child for child in node.children if _num_equal(columns, child.start, start, 1)), None)
        if child is None:
            node.children.append(_Node(start, end - start))
            owner_of[start:end] = np.arange(start, end)
            return
        shared = _num_equal(columns, child.start, start, min(child.length, end - start))
        owner_of[start : start + shared] = np.arange(child.start, child.start + shared)
        if shared < child.length:
            child.cut(shared)
        node, start = child, start + shared


def _num_equal(columns: Columns, first: int, second: int, most: int) -> int:
    """Return how many of the `most` tokens from two positions on have equal values."""
    for column in columns:
        differs = column[first : first + most] != column[second : second + most]
        rows = differs.reshape(most, -1).any(1).nonzero()[0]
        most = int(rows[0]) if len(rows) else most
        if not most:
            return 0
    return most


def _in_order(root: _Node) -> tuple[list[_Node], list[int]]:
    """Return the nodes without the root, parents first and siblings consecutive, and the index of each one's parent."""
    nodes, parents = list(root.children), [-1] * len(root.children)
    for number, node in enumerate(nodes):  # grows during the loop
        nodes += node.children
        parents += [number] * len(node.children)
    return nodes, parents
