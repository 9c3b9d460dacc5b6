# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Layout-independent names and shapes of parameters, and the slice of each parameter that a rank holds."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.layers.recurrent_sizes import recurrent_sizes
from nemo_rl_moe.models.megatron.lora.adapter import Adapter, adapters_in


@dataclass(frozen=True)
class ParameterPiece:
    """A parameter, a router's expert bias or an indexer's weight, or this rank's slice of it.

    Attributes:
        name: Canonical name (see `families/rules.py`), with global layer and expert numbers, without wrapper prefixes.
        shard_dimension: Dimension that tensor parallelism splits, or None.
        sections: Relative sizes of the sections of `shard_dimension` that are split separately, such as gate and up.
        adapter: Adapter of the weight, with the index of the rank's expert.
        narrower_type: Type in which a float32 tensor is written to files if the type represents every number exactly,
            or None.
    """

    name: str
    local: Tensor
    shard_dimension: int | None
    num_shards: int
    shard_rank: int
    sections: tuple[int, ...]
    is_expert: bool
    adapter: tuple[Adapter, int] | None = None
    narrower_type: torch.dtype | None = None

    def merged(self) -> Tensor:
        """Return the local tensor, plus its adapter's term if the adapter is on, added in float32 and rounded once."""
        if self.adapter is None or not self.adapter[0].switch.is_on:
            return self.local
        adapter, expert = self.adapter
        return (self.local.float() + adapter.delta(expert)).to(self.local.dtype)

    @property
    def is_vocabulary(self) -> bool:
        """Whether rows are vocabulary entries, with padding rows at the end."""
        return self.name in ("embedding.word_embeddings.weight", "output_layer.weight")

    @property
    def is_expert_bias(self) -> bool:
        """Whether the tensor is a router's selection bias, which has no gradient."""
        return self.name.endswith(_EXPERT_BIAS)

    def pad_vocabulary(self, rows: Tensor) -> Tensor:
        missing = self.full_shape()[0] - rows.shape[0]
        return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if self.is_vocabulary and missing else rows

    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the full tensor, including the padding of a vocabulary."""
        shape = list(self.local.shape)
        if self.shard_dimension is not None:
            shape[self.shard_dimension] *= self.num_shards
        return tuple(shape)

    def slice_of(self, full: Tensor) -> Tensor:
        """Return this rank's piece of the full tensor."""
        if self.shard_dimension is None or self.num_shards == 1:
            return full
        parts = self._in_sections(full)
        mine = [part.chunk(self.num_shards, self.shard_dimension)[self.shard_rank] for part in parts]
        return torch.cat(mine, self.shard_dimension)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from the pieces of all ranks in order."""
        if self.shard_dimension is None or self.num_shards == 1:
            return shards[0]
        parts = zip(*map(self._in_sections, shards), strict=True)
        return torch.cat([of_rank for part in parts for of_rank in part], self.shard_dimension)

    def _in_sections(self, values: Tensor) -> Sequence[Tensor]:
        dimension = self.shard_dimension or 0
        unit = values.shape[dimension] // sum(self.sections)
        return values.split([size * unit for size in self.sections], dimension)


_LOCAL_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_SEQUENTIAL_EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_GROUPED_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
_STACKED_EXPERTS = re.compile(r"\.experts\.(linear_fc[12])_(weights|biases)$")
# Transformer Engine keeps a norm's weight in the linear layer after it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_ONE_SECTION, _GATE_AND_UP = (1,), (1, 1)
_EXPERT_BIAS = ".router.expert_bias"
_INDEXER = ".self_attention.indexer."


def parameter_pieces(chunks: Sequence[GPTModel], config: TransformerConfig) -> Iterator[ParameterPiece]:
    """Yield all parameters of this rank's unwrapped model chunks except adapters' factors. Each expert is one piece.

    A chunk's expert biases and weights of indexers follow its parameters. They are buffers, as they have no gradient.
    """
    adapters = adapters_in(chunks)
    factors = {id(parameter) for adapter in adapters for parameter in adapter.parameters()}
    adapter_of = {
        id(weight): (adapter, index) for adapter in adapters for index, weight in enumerate(adapter.base.weights)
    }
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            if id(parameter) not in factors:
                adapter = adapter_of.get(id(parameter))
                yield from _pieces_of(_canonical_layer(chunk, local_name), parameter, config, adapter)
        for local_name, buffer in chunk.named_buffers():
            if local_name.endswith(_EXPERT_BIAS) or _INDEXER in f".{local_name}":
                yield from _pieces_of(_canonical_layer(chunk, local_name), buffer, config)


def _canonical_layer(chunk: GPTModel, local_name: str) -> str:
    """Return the name with the layer's number in the full model."""
    return _LOCAL_LAYER.sub(
        lambda match: f"decoder.layers.{chunk.decoder.layers[int(match.group(1))].layer_number - 1}.", local_name
    )


def plain_norm_name(name: str) -> str:
    """Return the name that a norm's weight has in a separate norm module. Other names are returned unchanged."""
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    return name


def _sections(name: str, config: TransformerConfig) -> tuple[int, ...]:
    if ".self_attention.in_proj." in name:
        return recurrent_sizes(config).projected
    if ".self_attention.conv1d." in name:
        return recurrent_sizes(config).convolved
    return _first_product(config) if ".linear_fc1." in name else _ONE_SECTION


def _first_product(config: TransformerConfig) -> tuple[int, ...]:
    """Return the sections of the first matrix of an MLP or expert."""
    return _GATE_AND_UP if config.gated_linear_unit else _ONE_SECTION


def _pieces_of(
    name: str, parameter: Tensor, config: TransformerConfig, adapter: tuple[Adapter, int] | None = None
) -> Iterator[ParameterPiece]:
    name = plain_norm_name(name)
    if ".experts." in name:
        yield from _expert_pieces(name, parameter, config, adapter)
        return
    sharded = bool(getattr(parameter, "tensor_model_parallel", False))
    is_precise = _INDEXER in name or getattr(parameter, "stays_in_float32", False)
    yield ParameterPiece(
        name=name,
        local=parameter.data,
        shard_dimension=parameter.partition_dim if sharded else None,  # type: ignore[attr-defined]
        num_shards=parallel_state.get_tensor_model_parallel_world_size() if sharded else 1,
        shard_rank=parallel_state.get_tensor_model_parallel_rank() if sharded else 0,
        sections=_sections(name, config),
        is_expert=False,
        adapter=adapter,
        narrower_type=config.params_dtype if is_precise and parameter.dtype is torch.float32 else None,
    )


def _expert_pieces(
    name: str, parameter: Tensor, config: TransformerConfig, adapter: tuple[Adapter, int] | None
) -> Iterator[ParameterPiece]:
    num_local = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * num_local
    if match := _SEQUENTIAL_EXPERT.search(name):
        index, linear, kind = match.groups()
        experts = [(first + int(index), parameter.data)]
    elif match := _GROUPED_EXPERT.search(name):
        linear, kind, index = match.groups()
        experts = [(first + int(index), parameter.data)]
    elif match := _STACKED_EXPERTS.search(name):
        linear, kind = match.group(1), {"weights": "weight", "biases": "bias"}[match.group(2)]
        experts = [(first + index, tensor) for index, tensor in enumerate(parameter.data)]
    else:
        raise ValueError(f"no rule for the expert parameter {name}")
    prefix = name[: match.start()]
    num_shards = parallel_state.get_expert_tensor_parallel_world_size()
    # The first product is split along its outputs. The second is split along its inputs, so its bias is not split.
    cut = {"linear_fc1": 0, "linear_fc2": 1 if kind == "weight" else None}[linear]
    if num_shards == 1 or cut is None:
        cut, num_shards = None, 1
    for expert, tensor in experts:
        yield ParameterPiece(
            name=f"{prefix}.experts.{expert}.{linear}.{kind}",
            local=tensor,
            shard_dimension=cut,
            num_shards=num_shards,
            shard_rank=parallel_state.get_expert_tensor_parallel_rank(),
            sections=_first_product(config) if linear == "linear_fc1" else _ONE_SECTION,
            is_expert=True,
            adapter=None if adapter is None else (adapter[0], expert - first),
        )
