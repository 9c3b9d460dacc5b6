# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes Hugging Face folders: safetensors shards, index, config and tokenizer."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.megatron.families import family_of
from nemo_rl_moe.models.megatron.families.family import ModelFamily
from nemo_rl_moe.models.megatron.parameter_layout import ParameterPiece, parameter_pieces

# isort: split
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

_INDEX = "model.safetensors.index.json"


class _TensorReader:
    """Reads single tensors from the safetensors files of one folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._file_of: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._file_of.update(dict.fromkeys(file.keys(), path.name))
        if not self._file_of:
            raise ConfigurationError(
                f"policy.init: got 'pretrained', but {folder} holds no *.safetensors file; allowed with it: random"
            )

    def __call__(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ConfigurationError(f"policy.model_name: {self._folder} holds no tensor {name}")
        with safe_open(self._folder / self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def load_weights(chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any, folder: Path) -> None:
    """Fills every parameter from a Hugging Face folder, one tensor at a time.

    Raises:
        ConfigurationError: The folder has no weights, lacks a tensor, or a tensor has another shape.
    """
    read, family = _TensorReader(folder), family_of(hf_config)
    with torch.no_grad():
        for piece in parameter_pieces(chunks, config):
            full = piece.pad_vocabulary(_full_tensor(piece, family, read, hf_config))
            if tuple(full.shape) != piece.full_shape():
                raise ConfigurationError(
                    f"policy.model_name: {folder}: {piece.name} has shape {tuple(full.shape)}, "
                    f"expected {piece.full_shape()}"
                )
            piece.local.copy_(piece.slice_of(full))


def _full_tensor(piece: ParameterPiece, family: ModelFamily, read: Callable[[str], Tensor], hf_config: Any) -> Tensor:
    tied = piece.name == "output_layer.weight" and hf_config.tie_word_embeddings
    found = family.rules.find("embedding.word_embeddings.weight" if tied else piece.name)
    assert found is not None
    parts = []
    for source in found.sources:
        part = read(source.name)
        if source.is_stacked:
            part = part[found.expert]
        if source.is_transposed:
            part = part.t()
        parts.append(part if source.half is None else part.chunk(2)[source.half])
    return found.layout.join(parts, hf_config)


def save_weights(
    chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any, tokenizer: Any, folder: Path
) -> None:
    """Writes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads. Every rank calls it.

    Each rank that holds the first copy of some weights writes them as one shard, so no rank ever holds the whole model.
    The folder appears whole or not at all (ranks must share the file system).
    """
    staging = folder.with_name(folder.name + ".incomplete")
    if dist.get_rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    shard = dict(tensors_of_this_rank(chunks, config, hf_config))
    shards: list[dict[str, int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, {name: tensor.nbytes for name, tensor in shard.items()})
    writers = [rank for rank, tensors in enumerate(shards) if tensors]
    file_names = {
        rank: f"model-{number:05d}-of-{len(writers):05d}.safetensors" for number, rank in enumerate(writers, start=1)
    }
    if shard:
        save_file(shard, staging / file_names[dist.get_rank()], metadata={"format": "pt"})
    if dist.get_rank() == 0:
        sizes = {rank: shards[rank] or {} for rank in writers}
        index = {
            "metadata": {"total_size": sum(sum(tensors.values()) for tensors in sizes.values())},
            "weight_map": {name: file_names[rank] for rank, tensors in sizes.items() for name in sorted(tensors)},
        }
        (staging / _INDEX).write_text(json.dumps(index, indent=1))
        hf_config.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    dist.barrier()
    if dist.get_rank() == 0:
        if folder.exists():
            shutil.rmtree(folder)
        staging.rename(folder)
    dist.barrier()


def tensors_of_this_rank(
    chunks: Sequence[GPTModel], config: TransformerConfig, hf_config: Any
) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names and full tensors on the host; over all ranks, each once. Every rank runs it to its end."""
    family = family_of(hf_config)
    for piece in parameter_pieces(chunks, config):
        full = _gather_shards(piece)
        if full is None or (hf_config.tie_word_embeddings and piece.name == "output_layer.weight"):
            continue
        if piece.is_vocabulary:
            full = full[: hf_config.vocab_size]
        found = family.rules.find(piece.name)
        assert found is not None
        parts = found.layout.split(full, len(found.sources), hf_config)
        for source, part in zip(found.sources, parts, strict=True):
            yield source.name, part.cpu().contiguous().clone()


def _gather_shards(piece: ParameterPiece) -> Tensor | None:
    """The full tensor on the one rank that writes it, else None. All ranks of a tensor-parallel group take part."""
    if piece.is_expert:
        replica, group = (
            parallel_state.get_expert_data_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
        # With experts not cut, their tensor-parallel ranks belong to the data-parallel ones.
        shard_rank = piece.shard_rank
    else:
        replica, group = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_group()
        shard_rank = parallel_state.get_tensor_model_parallel_rank()
    if replica != 0:
        return None
    if piece.num_shards == 1:
        return piece.local if shard_rank == 0 else None
    shards = [torch.empty_like(piece.local, memory_format=torch.contiguous_format) for _ in range(piece.num_shards)]
    dist.all_gather(shards, piece.local.contiguous(), group=group)
    return piece.join(shards) if shard_rank == 0 else None
