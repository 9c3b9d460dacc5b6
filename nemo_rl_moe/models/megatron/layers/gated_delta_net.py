# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Linear attention by gated delta nets (Qwen3-Next, Qwen3.5), with Megatron-Core's parameter names.

Megatron-Core's layer needs flash-linear-attention, does not support generation, and up to 0.18 no packed sequences.
The layer of this module uses the kernel of flash-linear-attention on a GPU if it is installed, and torch otherwise.
"""

import dataclasses
import functools
import importlib.util
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from nemo_rl_moe.models.megatron.layers.gated_delta_rule import (
    causal_convolution,
    chunked_gated_delta_rule,
    l2_normalize,
    recurrent_gated_delta_rule,
    segments_of,
)


@dataclass(frozen=True)
class DeltaNetSizes:
    """Sizes of a model's gated delta nets on each tensor-parallel rank.

    Attributes:
        key_heads: Number of heads of queries and keys. `value_heads / key_heads` value heads share each of them.
        taps: Number of tokens that the convolution sees, including the current token.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @classmethod
    def of(cls, config: TransformerConfig, tensor: int | None = None) -> "DeltaNetSizes":
        """Return the sizes on each of `tensor` ranks, by default the configuration's tensor-parallel size."""
        tensor = config.tensor_model_parallel_size if tensor is None else tensor
        return cls(
            config.linear_num_key_heads // tensor,
            config.linear_num_value_heads // tensor,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Numbers of channels of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def projected(self) -> tuple[int, int, int, int, int, int]:
        """Numbers of rows of the input projection: queries, keys, values, output gates, rates and decays."""
        return *self.convolved, self.values, self.value_heads, self.value_heads

    def parameters(self, hidden_size: int) -> int:
        """Return the number of weights of a layer, without the norm of its hidden states."""
        matrices = hidden_size * (sum(self.projected) + self.values)
        return matrices + sum(self.convolved) * self.taps + 2 * self.value_heads + self.value_dim

    def state_bytes(self, itemsize: int) -> int:
        """Return the bytes of a layer's state for one sequence: float32 matrices and the convolution's last inputs."""
        memory = self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return memory + sum(self.convolved) * (self.taps - 1) * itemsize


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor | None]] | None:
    """Return flash-linear-attention's kernel of the gated delta rule, or None if the package is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    found: Callable[..., tuple[Tensor, Tensor | None]] = chunk_gated_delta_rule
    return found


@dataclass
class DeltaNetState:
    """State of a layer for a batch of rows, after the tokens so far.

    Attributes:
        inputs: The last inputs of the convolution. None before the first token.
        memory: State of the gated delta rule. None before the first token.
    """

    inputs: Float[Tensor, "rows taps_minus_1 channels"] | None = None
    memory: Float[Tensor, "rows heads key_dim value_dim"] | None = None

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Select sequences by row index. An index may occur several times."""
        if self.inputs is not None and self.memory is not None:
            self.inputs, self.memory = self.inputs.index_select(0, rows), self.memory.index_select(0, rows)


class _Weight(nn.Module):
    """A parameter `weight`, sharded by rows over the tensor-parallel ranks."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = _cut_parameter(weight)


def _cut_parameter(values: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(values)
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def in_float32(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that stays in float32 when the model's weights are converted."""
    parameter.stays_in_float32 = True  # type: ignore[attr-defined]
    return parameter


class GatedNorm(nn.Module):
    """RMSNorm of each head, with its output scaled by a gate.

    Every tensor-parallel rank has all weights and normalises different heads, so the weights' gradients must be summed
    over the ranks. Megatron-Core would not sum them.
    """

    def __init__(self, weight: Tensor, eps: float, *, is_shared: bool):
        super().__init__()
        self.weight = in_float32(nn.Parameter(weight))
        self.eps, self._is_shared = eps, is_shared

    def forward(self, heads: Float[Tensor, "*batch dim"], gate: Float[Tensor, "*batch dim"]) -> Tensor:
        weight = copy_to_tensor_model_parallel_region(self.weight) if self._is_shared else self.weight
        values = heads.float()
        normalized = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        return ((weight * normalized.to(heads.dtype)) * F.silu(gate.float())).to(heads.dtype)


@dataclass
class GatedDeltaNetSubmodules:
    """Linear layers before and after the gated delta rule. The first may contain the norm of its inputs."""

    in_proj: ModuleSpec | type = IdentityOp
    out_proj: ModuleSpec | type = IdentityOp


class GatedDeltaNet(MegatronModule):
    """Linear attention by the gated delta rule: a causal layer that replaces self-attention."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **_others: Any,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.sizes, full = DeltaNetSizes.of(config), DeltaNetSizes.of(config, tensor=1)
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sum(full.projected),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=pg_collection.tp,
        )
        options: dict[str, Any] = {
            "dtype": config.params_dtype,
            "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        }
        heads = self.sizes.value_heads
        self.conv1d = _Weight(torch.zeros(sum(self.sizes.convolved), 1, self.sizes.taps, **options))
        self.dt_bias = _cut_parameter(torch.zeros(heads, **options))
        # Published checkpoints have `A_log` and the norm in float32, although the matrices are in bfloat16.
        precise = {**options, "dtype": torch.float32}
        self.A_log = in_float32(_cut_parameter(torch.zeros(heads, **precise)))
        is_shared = config.tensor_model_parallel_size > 1
        self.out_norm = GatedNorm(
            torch.ones(self.sizes.value_dim, **precise), config.layernorm_epsilon, is_shared=is_shared
        )
        self.out_proj = build_module(
            submodules.out_proj,
            full.values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=pg_collection.tp,
        )

    def forward(
        self,
        hidden_states: Float[Tensor, "tokens rows hidden"],
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_others: Any,
    ) -> tuple[Float[Tensor, "tokens rows hidden"], None]:
        """Mix the tokens of each row or packed sequence. The returned bias is None.

        Args:
            attention_mask: Unused, because the layer is causal and padding comes last.
            inference_context: Stores the `DeltaNetState` of this layer.
        """
        mixed, _ = self.in_proj(hidden_states)
        boundaries = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        state = None
        if inference_context is not None:
            state = inference_context.key_value_memory_dict.setdefault(self.layer_number, DeltaNetState())
        return self.out_proj(self.mix(mixed, boundaries=boundaries, state=state))[0], None

    def mix(
        self,
        mixed: Float[Tensor, "tokens rows projected"],
        *,
        boundaries: Int[Tensor, " sequences_plus_1"] | None = None,
        state: DeltaNetState | None = None,
    ) -> Float[Tensor, "tokens rows values"]:
        """Compute the part of the layer between its two projections.

        Args:
            boundaries: Boundaries of packed sequences.
            state: State after the previous tokens, which is updated in place. Padding tokens of zeros leave an empty
                state empty.
        """
        sizes = self.sizes
        convolved, gate, rate, decay = mixed.transpose(0, 1).split(
            [sum(sizes.convolved), sizes.values, sizes.value_heads, sizes.value_heads], dim=-1
        )
        segments = None if boundaries is None else segments_of(boundaries, mixed.shape[0])
        query, key, value = self._convolve(convolved, segments, state).split(sizes.convolved, dim=-1)
        repeats = sizes.value_heads // sizes.key_heads
        query, key = (
            l2_normalize(each.unflatten(-1, (sizes.key_heads, sizes.key_dim)).float()).repeat_interleave(repeats, dim=2)
            for each in (query, key)
        )
        value = value.unflatten(-1, (sizes.value_heads, sizes.value_dim))
        log_decay = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias)
        heads = self._rule((query, key, value, log_decay, rate.sigmoid()), boundaries, segments, state)
        outputs = self.out_norm(heads, gate.unflatten(-1, (sizes.value_heads, sizes.value_dim)))
        return outputs.flatten(2).transpose(0, 1).contiguous()

    def _convolve(
        self, inputs: Float[Tensor, "rows tokens channels"], segments: Tensor | None, state: DeltaNetState | None
    ) -> Tensor:
        before = None if state is None else state.inputs
        outputs = causal_convolution(inputs, self.conv1d.weight.squeeze(1), segments=segments, before=before)
        if state is not None:
            kept = self.sizes.taps - 1
            padded = F.pad(inputs, (0, 0, kept, 0)) if before is None else torch.cat([before, inputs], dim=1)
            state.inputs = padded[:, padded.shape[1] - kept :].clone()
        return F.silu(outputs)

    def _rule(
        self,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        boundaries: Tensor | None,
        segments: Tensor | None,
        state: DeltaNetState | None,
    ) -> Float[Tensor, "rows tokens heads value_dim"]:
        query, key, value, log_decay, rate = tensors
        memory = None if state is None else state.memory
        if state is not None and query.shape[1] == 1:
            heads, state.memory = recurrent_gated_delta_rule(*tensors, state=memory)
            return heads.to(value.dtype)
        kernel = _kernel() if value.is_cuda else None
        if kernel is None:
            heads, memory = chunked_gated_delta_rule(*tensors, segments=segments, state=memory)
        else:
            heads, memory = kernel(
                query.to(value.dtype),
                key.to(value.dtype),
                value,
                g=log_decay,
                beta=rate,
                initial_state=memory,
                output_final_state=state is not None,
                cu_seqlens=None if boundaries is None else boundaries.long(),
            )
        if state is not None:
            state.memory = memory
        return heads.to(value.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        own = {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "conv1d.weight": self.conv1d.weight,
            "out_norm.weight": self.out_norm.weight,
        }
        cut = dict.fromkeys(own.keys() - {"out_norm.weight"}, 0)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets)
        for name, linear in (("in_proj", self.in_proj), ("out_proj", self.out_proj)):
            found |= linear.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        for name, sizes in (("in_proj", self.sizes.projected), ("conv1d", self.sizes.convolved)):
            found[f"{prefix}{name}.weight"] = in_sections(found[f"{prefix}{name}.weight"], sizes)
        return found


def in_sections(sharded: ShardedTensor, sizes: Sequence[int], dimension: int = 0) -> ShardedTensorFactory:
    """Return a parameter for a checkpoint, in which each section of rows, such as queries, has the rows of all ranks.

    Args:
        sharded: This rank's rows of the parameter.
        sizes: Number of this rank's rows in each section.
        dimension: Dimension of the rows.
    """
    rows = sharded.local_shape[dimension]
    rank, ranks = sharded.global_offset[dimension] // rows, sharded.global_shape[dimension] // rows
    starts = [0, *itertools.accumulate(size * ranks for size in sizes)]

    def build(key: str, values: Tensor, replica_id: Any, flattened_range: slice | None) -> list[ShardedTensor]:
        assert flattened_range is None
        return [
            dataclasses.replace(
                sharded,
                key=key,
                data=part,
                dtype=part.dtype,
                local_shape=tuple(part.shape),
                global_offset=(
                    *sharded.global_offset[:dimension],
                    start + rank * size,
                    *sharded.global_offset[dimension + 1 :],
                ),
                axis_fragmentations=None,  # blocks differ in size
                replica_id=replica_id,
            )
            for part, start, size in zip(values.split(list(sizes), dimension), starts, sizes, strict=False)
        ]

    join = functools.partial(torch.cat, dim=dimension)
    return ShardedTensorFactory(sharded.key, sharded.data, build, join, sharded.replica_id)


def use_gated_delta_nets(block: TransformerBlockSubmodules, linear: Collection[int]) -> TransformerBlockSubmodules:
    """Return a copy of a block's layer specs with gated delta nets instead of attention in the layers `linear`."""
    layers = [_with_net(layer) if index in linear else layer for index, layer in enumerate(block.layer_specs)]
    return dataclasses.replace(block, layer_specs=layers)


def _with_net(layer_spec: ModuleSpec) -> ModuleSpec:
    """Return a layer spec with a gated delta net, built from attention's linear layers (with Transformer Engine, the
    first of them contains the norm)."""
    layer = layer_spec.submodules
    attention = layer.self_attention.submodules
    net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=attention.linear_qkv, out_proj=attention.linear_proj),
    )
    return dataclasses.replace(layer_spec, submodules=dataclasses.replace(layer, self_attention=net))
