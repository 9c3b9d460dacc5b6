# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Failures and findings of one rank that all ranks must know before the next collective."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_moe.checksums import find_damage
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.hf_files import holds_megatron_weights
from nemo_rl_moe.models.safetensors_folder import one_line


def union_of_ranks(mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged entries of all ranks, the same on every rank. Every rank calls it.

    The ranks broadcast in turn, and each sends only new entries. An all-gather would give every rank a copy of each
    rank's names, which are mostly the same.
    """
    union: dict[str, Any] = {}
    for rank in range(dist.get_world_size()):
        new = {name: value for name, value in mine.items() if name not in union} if rank == dist.get_rank() else None
        message = [new]
        dist.broadcast_object_list(message, src=rank)
        assert message[0] is not None  # the sender's entries
        union |= message[0]
    return union


class SharedFailure:
    """A failure of one rank that all ranks of a group learn before their next collective.

    An error on a single rank, such as a full disk, would leave its peers waiting in the next collective. Code that can
    fail therefore runs under `caught`, without collectives, and before each collective the ranks ask each other with
    `none_failed`. After a failure, ranks do no more work. They only keep answering until all ranks have reached the
    end, where the first error is raised.

    Attributes:
        text: First error on this rank, on one line.
        has_failed: Whether this or another rank is known to have failed.
    """

    def __init__(self) -> None:
        self.text: str | None = None
        self.has_failed = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Record an error that ends the block, which must not contain a collective."""
        try:
            yield
        except Exception as error:
            self.text = self.text or one_line(error)
            self.has_failed = True

    def none_failed(self, group: Any, device: torch.device) -> bool:
        """Return whether no rank of a group has failed. Every rank of the group calls it."""
        failed = torch.tensor([self.has_failed], dtype=torch.uint8, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        self.has_failed = bool(failed.item())
        return not self.has_failed


class DamageSearch:
    """Comparison of a folder's files with their checksums, in a thread, while the rank reads the same files.

    The thread and the rank find each other's blocks in the page cache, so the disk is read only once. A rank must call
    `of_all_ranks` before it uses the tensors. Without `files.json`, which has the checksums, no damage is found.
    """

    def __init__(self, folder: Path, *, in_parts: bool | None = None):
        self._found: list[str] = []
        self._thread = threading.Thread(target=self._compare, args=(folder, in_parts), daemon=True)
        self._share, self._num_shares = dist.get_rank(), dist.get_world_size()
        self._thread.start()

    def of_all_ranks(self) -> list[str]:
        """Wait for the comparison, and return a line for each damaged file of any rank. Every rank calls it."""
        self._thread.join()
        found: list[Any] = [None] * self._num_shares
        dist.all_gather_object(found, self._found)
        return list(dict.fromkeys(problem for problems in found for problem in problems))

    def _compare(self, folder: Path, in_parts: bool | None) -> None:
        try:
            self._found = find_damage(folder, share=self._share, num_shares=self._num_shares, in_parts=in_parts)
        except Exception as error:  # a file that was not compared counts as damaged
            self._found = [f"{folder}: cannot be compared with its checksums: {one_line(error)}"]


def agree_on_model(config_json: Mapping[str, Any], folder: Path, *, with_weights: bool) -> None:
    """Raise an error unless all ranks read the same model. Every rank calls it before it uses the model."""
    digest = hashlib.sha256(json.dumps(config_json, sort_keys=True).encode()).hexdigest()
    form = "Megatron-Core's" if with_weights and holds_megatron_weights(folder) else "Hugging Face's"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (digest, form, str(folder)))
    first_digest, first_form, first_folder = found[0]
    for rank, (of_rank, form_of_rank, folder_of_rank) in enumerate(found):
        where = f"policy.model_name: {folder_of_rank}: rank {rank} finds"
        if of_rank != first_digest:
            raise ConfigurationError(
                f"{where} another config.json than rank 0 ({first_folder}); all ranks must read the same model"
            )
        if form_of_rank != first_form:
            raise ConfigurationError(
                f"{where} weights in {form_of_rank} format, but rank 0 ({first_folder}) in {first_form}; all ranks "
                "must read the same model"
            )
