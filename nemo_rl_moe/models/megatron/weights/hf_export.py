# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Export of the weights as Hugging Face tensors, one at a time, to a folder or to engines."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.atomic_writes import delete, put_in_place
from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.errors import CheckpointError
from nemo_rl_moe.models.kept_tensors import kept_bands, kept_headers
from nemo_rl_moe.models.megatron.model.agreement import SharedFailure
from nemo_rl_moe.models.megatron.weights.hf_gather import Delivery, gather_tensors, plan_deliveries
from nemo_rl_moe.models.safetensors_files import (
    MAX_SHARD_BYTES,
    SafetensorsWriter,
    TensorHeader,
    file_names,
    index_of,
    split_into_files,
)
from nemo_rl_moe.models.safetensors_folder import INDEX_FILE, SafetensorsFolder, one_line


def save_weights(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    folder: Path,
    write_beside: Callable[[Path], None],
    *,
    kept: SafetensorsFolder | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[float], None] = lambda share: None,
) -> list[str]:
    """Write a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads, or, of a classifier,
    `AutoModelForSequenceClassification.from_pretrained`. Every rank calls it.

    All ranks must share the file system. They write to `FOLDER.incomplete`, which replaces an older folder once it is
    complete.

    Args:
        write_beside: Function that writes all files except the weights into the folder, on rank 0.
        kept: Tensors of the model's folder that are copied unchanged. The ranks share the work.

    Returns:
        The names of parameters for which the family has no tensor.

    Raises:
        CheckpointError: A rank could not write its part. Raised on every rank. Nothing remains of the folder.
    """
    staging = folder.with_name(folder.name + ".incomplete")
    deliveries, without_rule = plan_deliveries(chunks, config, hf_config)
    own_kept = kept_headers(kept)[dist.get_rank() :: dist.get_world_size()]
    own_files = split_into_files((delivery.header for delivery in deliveries if delivery.is_mine), max_shard_bytes)
    own_files += split_into_files(own_kept, max_shard_bytes)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (own_files, without_rule))
    files = [(rank, tensors) for rank, (of_rank, _) in enumerate(of_ranks) for tensors in of_rank]
    named = dict(zip(file_names(len(files)), files, strict=True))
    _agree(folder, staging, _on_rank_0(lambda: _begin(staging, named, write_beside)))
    mine = {name: tensors for name, (rank, tensors) in named.items() if rank == dist.get_rank()}
    writer = SafetensorsWriter(staging, mine)
    bands = iter(()) if kept is None else kept_bands(kept, own_kept)
    _agree(folder, staging, _write(deliveries, hf_config, staging, writer, bands, progress=progress))
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, writer.parts)

    def finish() -> None:
        write_inventory(staging, {name: checked for of_rank in parts for name, checked in of_rank.items()})
        put_in_place(staging, folder, folder.with_name(f"{folder.name}.replaced"))

    _agree(folder, staging, _on_rank_0(finish))
    return sorted({name for _, names in of_ranks for name in names})


def tensors_of_this_rank(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield Hugging Face names and full tensors on the host, each on one rank only.

    Every rank must exhaust the iterator.

    Args:
        is_wanted: Function of a name: whether to yield the tensor.

    Raises:
        RuntimeError: A rank failed, for example because its memory is full. Raised at the end on every rank.
    """
    deliveries, _ = plan_deliveries(chunks, config, hf_config, is_wanted)
    failure = SharedFailure()
    for delivery in deliveries:
        full = whole_tensor(delivery, hf_config, failure, move=_host_copy)
        if full is not None:
            yield delivery.header.name, full
    raise_problems(failure)


def whole_tensor(
    delivery: Delivery, hf_config: Any, failure: SharedFailure, move: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return a tensor on the rank that gathers it, and None on other ranks. Every rank calls it.

    Args:
        move: Function that moves the tensor, or each expert of a stacked tensor, to the device of the result.
    """
    entries: list[Tensor] = []
    for entry in gather_tensors(delivery, hf_config, failure):
        with failure.caught():
            entries.append(move(entry))
    with failure.caught():
        if delivery.is_mine and not failure.has_failed:
            return torch.stack(entries) if delivery.is_stacked else entries[0]
    return None


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the host, even if the tensor is already there, because training continues."""
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def raise_problems(failure: SharedFailure) -> None:
    """Raise a RuntimeError on all ranks if any rank has failed."""
    if problems := _problems_of_all(failure.text):
        raise RuntimeError(f"the weights cannot be exported: {problems}")


def _begin(
    staging: Path, files: dict[str, tuple[int, list[TensorHeader]]], write_beside: Callable[[Path], None]
) -> None:
    """Write all files but the weights first, so that problems show before hours of writing."""
    delete(staging)
    staging.mkdir(parents=True)
    write_beside(staging)
    if len(files) > 1:
        index = index_of({name: tensors for name, (_, tensors) in files.items()})
        (staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(
    deliveries: Sequence[Delivery],
    hf_config: Any,
    staging: Path,
    writer: SafetensorsWriter,
    kept: Iterator[Tensor],
    *,
    progress: Callable[[float], None],
) -> str | None:
    """Write this rank's files, and return the problem or None. After a failure, the rank only joins in collectives.

    `kept` has the entries of tensors that are written after the model's.
    """
    failure = SharedFailure()
    with failure.caught():
        if not writer.is_complete and not staging.is_dir():
            raise FileNotFoundError(f"there is no folder {staging}; all ranks must share it")
    for number, delivery in enumerate(deliveries, start=1):
        for entry in gather_tensors(delivery, hf_config, failure):
            with failure.caught():
                writer.write(entry.cpu())
        progress(number / len(deliveries))
    with failure.caught():
        for band in () if failure.has_failed else kept:
            writer.write(band)
    with failure.caught():
        writer.close()
    # If another rank has failed, that rank reports the failure.
    return failure.text or (None if writer.is_complete or failure.has_failed else "its files are not complete")


def _on_rank_0(function: Callable[[], None]) -> str | None:
    """Run a function on rank 0. Return its error on one line instead of raising it, because the other ranks wait."""
    if dist.get_rank() == 0:
        try:
            function()
        except Exception as error:
            return one_line(error)
    return None


def _agree(folder: Path, staging: Path, problem: str | None) -> None:
    """Raise the problems of all ranks on every rank, after rank 0 has removed the incomplete folder."""
    problems = _problems_of_all(problem)
    if not problems:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)
    dist.barrier()
    raise CheckpointError(f"{folder}: cannot be written: {problems}")


def _problems_of_all(problem: str | None) -> str:
    """Return the problems of all ranks on one line, the same on every rank, or an empty text without a problem."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text is not None)
