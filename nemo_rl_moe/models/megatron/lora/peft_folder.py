# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Writing and reading of adapters as peft folders, in both forms of the experts."""

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_rl_moe.checksums import write_inventory
from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.hf_files import MEGATRON_WEIGHTS_FOLDER, holds_megatron_weights
from nemo_rl_moe.models.megatron.checkpoint.load import load_model
from nemo_rl_moe.models.megatron.lora.transfer import FactorPart, factor_parts, factors_of_this_rank
from nemo_rl_moe.models.megatron.model.agreement import union_of_ranks
from nemo_rl_moe.models.peft_files import (
    CONFIG_FILE,
    SCORE,
    TEXT_MODEL,
    VISION_MODEL,
    WEIGHTS_FILE,
    ExpertFactor,
    ExpertForm,
    adapter_config,
    expert_factor,
    folder_of_peft,
    fused_module,
    named_in,
    read_adapter_config,
)
from nemo_rl_moe.models.safetensors_folder import listed, one_line

_AT_A_TIME = 64


def factors_on_first_rank(chunks: Sequence[GPTModel]) -> dict[str, Tensor]:
    """Return all full factors on rank 0, on the host, and nothing on other ranks. Every rank calls it.

    The head of a sequence classifier trains with its adapters, and is returned with them.
    """
    own = [*factors_of_this_rank(chunks), *_score_of_this_rank(chunks)]
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, len(own))
    is_first, found = dist.get_rank() == 0, dict[str, Tensor]()
    for start in range(0, max(counts), _AT_A_TIME):
        parts: list[Any] | None = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(own[start : start + _AT_A_TIME], parts)
        found |= {name: tensor for of_rank in parts or () for name, tensor in of_rank}
    return found


def _score_of_this_rank(chunks: Sequence[GPTModel]) -> list[tuple[str, Tensor]]:
    """Return the head of a sequence classifier on the first rank of the last stage, and nothing on other ranks."""
    copies = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    heads = [chunk.value_head for chunk in chunks if chunk.is_classifier and not any(copies)]
    return [(SCORE, head.weight.detach().cpu().clone()) for head in heads]


def write_adapter(
    folder: Path, factors: Mapping[str, Tensor], lora: LoraConfig, hf_config: Any, base: str, form: ExpertForm
) -> None:
    """Write a folder that peft's `PeftModel.from_pretrained` can read, with checksums.

    Args:
        factors: Result of `factors_on_first_rank`.
        base: Name or folder of the base model.
        form: "per_expert" for separate factors of each expert, "fused" for one `A` and one `B` of a layer's experts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    decoder = TEXT_MODEL if family_of(hf_config).vision is None else VISION_MODEL
    factors = {named_in(decoder, name): factor for name, factor in factors.items()}
    content = adapter_config(lora, hf_config, base, factors, form)
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = _of_each_expert(factors, hf_config) if form == "per_expert" else _fused(factors, hf_config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
    write_inventory(folder)


def _num_experts(hf_config: Any) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next(int(getattr(hf_config, name)) for name in names if getattr(hf_config, name, None))


def _of_each_expert(factors: Mapping[str, Tensor], hf_config: Any) -> dict[str, Tensor]:
    """Return the factors with a copy for each expert in place of a factor that a layer's experts share."""
    found = {}
    for name, tensor in factors.items():
        parts = expert_factor(name)
        if parts is None or parts.expert is not None:
            found[name] = tensor
            continue
        for expert in range(_num_experts(hf_config)):
            found[name.replace(".experts.", f".experts.{expert}.")] = tensor.clone()
    return found


def _fused(factors: Mapping[str, Tensor], hf_config: Any) -> dict[str, Tensor]:
    """Return the factors with one `A` and one `B` for each fused parameter in place of factors of single experts."""
    found: dict[str, Tensor] = {}
    of_experts: dict[tuple[str, str], dict[tuple[int, int | None, bool], Tensor]] = {}
    for name, tensor in _of_each_expert(factors, hf_config).items():
        parts = expert_factor(name)
        if parts is None:
            found[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
            continue
        assert parts.expert is not None
        of_experts.setdefault((parts.container, parts.fused), {})[parts.expert, parts.half, parts.is_a] = tensor
    parameters = {fused for _, fused in of_experts}
    for (container, fused), tensors in of_experts.items():
        module = fused_module(container, fused, parameters)
        halves = sorted({half for _, half, _ in tensors}, key=lambda half: half or 0)
        experts = range(_num_experts(hf_config))
        down = torch.stack([torch.cat([tensors[expert, half, True] for half in halves]) for expert in experts])
        up = torch.stack([_blocks([tensors[expert, half, False] for half in halves], halves) for expert in experts])
        found[f"{module}.lora_A.weight"] = down.flatten(0, 1)
        found[f"{module}.lora_B.weight"] = up.permute(1, 2, 0).flatten(1)
    return found


def _blocks(parts: Sequence[Tensor], halves: Sequence[int | None]) -> Tensor:
    """Return the `B` of a fused parameter, such as gate and up: a block per half, zeros for a half without a factor."""
    if halves == [None]:
        return parts[0]
    blocks = torch.block_diag(*parts)
    if len(halves) == 2:
        return blocks
    zeros = torch.zeros_like(blocks)
    return torch.cat([blocks, zeros] if halves == [0] else [zeros, blocks])


def load_adapter(chunks: Sequence[GPTModel], folder: Path, rank: int, hf_config: Any) -> None:
    """Fill this rank's factors from a peft folder or a run's checkpoint. Every rank calls it.

    A value head without a tensor there stays unchanged.

    Args:
        rank: Rank of the adapters' matrices.
    """
    folder = folder_of_peft(folder)
    if holds_megatron_weights(folder):
        load_model(chunks, folder / MEGATRON_WEIGHTS_FOLDER)
        return
    problems: list[str] = []
    names, used = set[str](), set[str]()
    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            parameters = read_adapter_config(folder).get("target_parameters") or ()
            reader = _Reader(file, rank, hf_config, {each.rpartition(".")[2] for each in parameters})
            for part in factor_parts(chunks):
                _load(part, reader, problems)
            for head in (chunk.value_head for chunk in chunks if chunk.has_value_head):
                _load_head(head.weight.data, reader, problems)
            used = reader.used
            names = set(file.keys())
    except (OSError, SafetensorError) as error:
        problems.append(f"cannot be read: {one_line(error)}")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problems[:8])
    all_used = union_of_ranks(dict.fromkeys(used)).keys()
    lines = list(dict.fromkeys(line for of_rank in found for line in of_rank))
    if not lines and (extra := sorted(names - all_used)):
        lines = [f"contains {len(extra)} factors of modules that policy.lora does not adapt: {listed(extra)}"]
    if lines:
        raise ConfigurationError([f"policy.lora.path: {folder}: {line}" for line in lines])


@torch.no_grad()
def _load(part: FactorPart, reader: "_Reader", problems: list[str]) -> None:
    found = reader.find(part.name)
    if found is None:
        problems.append(f"lacks {part.name}")
    elif isinstance(found, str):
        problems.append(found)
    elif tuple(found.shape) != part.shape:
        problems.append(f"{part.name}: got the shape {list(found.shape)}, expected {list(part.shape)}")
    else:
        part.local.copy_(part.slice_of(found))


@torch.no_grad()
def _load_head(weight: Tensor, reader: "_Reader", problems: list[str]) -> None:
    found = reader.find(SCORE)
    if isinstance(found, Tensor) and found.shape != weight.shape:
        problems.append(f"{SCORE}: got the shape {list(found.shape)}, expected {list(weight.shape)}")
    elif isinstance(found, Tensor):
        weight.copy_(found)


class _Reader:
    """Reader that finds full factors in a peft file by this project's names.

    Factors of experts may be separate for each expert, or fused for all experts of a layer.

    Attributes:
        used: Names in the file that have been read.
    """

    def __init__(self, file: Any, rank: int, hf_config: Any, fused: Collection[str]):
        self._rank, self._hf_config, self._fused = rank, hf_config, fused
        self._names = {named_in(TEXT_MODEL, name): name for name in file.keys()}  # noqa: SIM118  (no dict)
        self.used: set[str] = set()
        self._tensor = lru_cache(maxsize=4)(file.get_tensor)

    def _read(self, name: str) -> Tensor:
        self.used.add(self._names[name])
        found: Tensor = self._tensor(self._names[name])
        return found

    def find(self, name: str) -> Tensor | str | None:
        """Return a factor, or a text about its problem, or None if the file lacks it."""
        name = named_in(TEXT_MODEL, name)
        plain = name if name in self._names else name.replace(".block_sparse_moe.", ".mlp.")
        if plain in self._names:
            return self._read(plain)
        parts = expert_factor(name)
        if parts is None:
            return None
        if parts.expert is None:
            return self._shared(name, parts)
        return self._of_fused(parts, parts.expert)

    def _shared(self, name: str, parts: ExpertFactor) -> Tensor | str | None:
        """Return the factor that a layer's experts share, or a text about the problem if their factors differ."""
        numbered = [name.replace(".experts.", f".experts.{e}.") for e in range(_num_experts(self._hf_config))]
        found = [self.find(each) for each in numbered]
        first = found[0]
        if first is None or isinstance(first, str):
            return first
        alike = all(isinstance(other, Tensor) and torch.equal(first, other) for other in found)
        return first if alike else f"{parts.container}: its experts' factors differ, but policy.lora.experts is shared"

    def _of_fused(self, parts: ExpertFactor, expert: int) -> Tensor | str | None:
        module = fused_module(parts.container, parts.fused, self._fused)
        names = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        if parts.fused not in self._fused or not self._names.keys() >= {*names}:
            return None
        down, up = (self._read(each) for each in names)
        count = _num_experts(self._hf_config)
        down = down.view(count, -1, down.shape[-1])[expert]
        up = up.view(up.shape[0], -1, count)[..., expert]
        return _half(parts, down, up, self._rank)


def _half(parts: ExpertFactor, down: Tensor, up: Tensor, rank: int) -> Tensor | str:
    """Return an expert's factor for one half of a fused parameter, such as gate and up, or a text about a problem.

    Fused factors of rank `rank` share `A` between the halves. Those of twice this rank have one block per half.
    """
    if parts.half is None:
        return down if parts.is_a else up
    length = up.shape[0] // 2
    rows = slice(parts.half * length, (parts.half + 1) * length)
    if len(down) == rank:
        # Both halves share `A`, as peft creates them.
        return down if parts.is_a else up[rows]
    ranks = slice(parts.half * rank, (parts.half + 1) * rank)
    others = torch.ones(up.shape[1], dtype=torch.bool)
    others[ranks] = False
    if len(down) != 2 * rank or up[rows][:, others].any():
        return (
            f"{parts.container}: the adapter of {parts.fused}, of rank {len(down)}, does not split into two projections"
            f" of rank {rank}"
        )
    return down[ranks] if parts.is_a else up[rows, ranks]
