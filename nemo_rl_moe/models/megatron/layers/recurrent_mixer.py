# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A layer with a recurrent state in place of attention: what gated delta nets and Mamba-2 have in common.

Both project their inputs, convolve a part of the channels, let a state decay from token to token, normalise what they
read from it, and project the result. Their parameters have Megatron-Core's names.
"""

import dataclasses
import functools
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from nemo_rl_moe.models.megatron.layers.recurrence import causal_convolution
from nemo_rl_moe.models.megatron.layers.recurrent_sizes import RecurrentSizes


@dataclass
class RecurrentState:
    """State of a layer for a batch of rows, after the tokens so far.

    Attributes:
        inputs: The last inputs of the convolution. None before the first token.
        memory: The state of each head, a matrix. None before the first token.
    """

    inputs: Float[Tensor, "rows taps_minus_1 channels"] | None = None
    memory: Float[Tensor, "rows heads dim_1 dim_2"] | None = None

    def select_rows(self, rows: Int[Tensor, " selected"]) -> None:
        """Select sequences by row index. An index may occur several times."""
        if self.inputs is not None and self.memory is not None:
            self.inputs, self.memory = self.inputs.index_select(0, rows), self.memory.index_select(0, rows)


class ShardedVectors(nn.Module):
    """Parameters `weight` and optionally `bias`, sharded by rows over the tensor-parallel ranks."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self.weight = cut_parameter(weight)
        self.bias = None if bias is None else cut_parameter(bias)


def cut_parameter(values: Tensor) -> nn.Parameter:
    """Return a parameter whose rows are split over the tensor-parallel ranks."""
    parameter = nn.Parameter(values)
    set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    return parameter


def in_float32(parameter: nn.Parameter) -> nn.Parameter:
    """Mark a parameter that stays in float32 when the model's weights are converted."""
    parameter.stays_in_float32 = True  # type: ignore[attr-defined]
    return parameter


@dataclass
class RecurrentMixerSubmodules:
    """Linear layers before and after the recurrence. The first may contain the norm of its inputs."""

    in_proj: ModuleSpec | type = IdentityOp
    out_proj: ModuleSpec | type = IdentityOp


class RecurrentMixer(MegatronModule):
    """A causal layer with a recurrent state that replaces self-attention.

    Attributes:
        sizes: Sizes on this tensor-parallel rank.
        options: Type and device of parameters.
        sharded_vectors: Names of further parameters that are split over the tensor-parallel ranks.
        whole_vectors: Names of parameters that every rank holds in full.
    """

    sizes: RecurrentSizes
    sharded_vectors: ClassVar[tuple[str, ...]] = ()
    whole_vectors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        config: TransformerConfig,
        submodules: RecurrentMixerSubmodules,
        layer_number: int,
        sizes: tuple[RecurrentSizes, RecurrentSizes],
        pg_collection: Any = None,
        *,
        has_conv_bias: bool = False,
    ):
        """Build the layer, with the parameters of `add_vectors` before the output projection.

        Args:
            sizes: Sizes on this rank, and without tensor parallelism.
            has_conv_bias: Whether the convolution adds a bias.
        """
        super().__init__(config)
        self.layer_number = layer_number
        self.sizes, full = sizes
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
        self.options: dict[str, Any] = {
            "dtype": config.params_dtype,
            "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        }
        channels = sum(self.sizes.convolved)
        bias = torch.zeros(channels, **self.options) if has_conv_bias else None
        self.conv1d = ShardedVectors(torch.zeros(channels, 1, self.sizes.taps, **self.options), bias)
        self.dt_bias = cut_parameter(torch.zeros(self.sizes.heads, **self.options))
        # Published checkpoints have `A_log` in float32, although the matrices are in bfloat16.
        self.A_log = in_float32(cut_parameter(torch.zeros(self.sizes.heads, **self.precise)))
        self.add_vectors()
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

    @abstractmethod
    def add_vectors(self) -> None:
        """Add the parameters that only this kind of layer has."""

    @property
    def precise(self) -> dict[str, Any]:
        """Options of parameters in float32."""
        return {**self.options, "dtype": torch.float32}

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
            inference_context: Stores the `RecurrentState` of this layer.
        """
        mixed, _ = self.in_proj(hidden_states)
        boundaries = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        state = None
        if inference_context is not None:
            state = inference_context.key_value_memory_dict.setdefault(self.layer_number, RecurrentState())
        return self.out_proj(self.mix(mixed, boundaries=boundaries, state=state))[0], None

    @abstractmethod
    def mix(
        self,
        mixed: Float[Tensor, "tokens rows projected"],
        *,
        boundaries: Int[Tensor, " sequences_plus_1"] | None = None,
        state: RecurrentState | None = None,
        padding: Bool[Tensor, "tokens rows 1"] | None = None,
    ) -> Float[Tensor, "tokens rows values"]:
        """Compute the part of the layer between its two projections.

        Args:
            boundaries: Boundaries of packed sequences.
            state: State after the previous tokens, which is updated in place.
            padding: Tokens before the first token of a row. They leave an empty state empty.
        """

    def convolve(
        self,
        inputs: Float[Tensor, "rows tokens channels"],
        segments: Tensor | None,
        state: RecurrentState | None,
        padding: Bool[Tensor, "tokens rows 1"] | None,
    ) -> Float[Tensor, "rows tokens channels"]:
        """Return the SiLU of the causal convolution, with zeros for padding, and keep its last inputs in the state."""
        hidden = None if padding is None else padding.transpose(0, 1)
        if hidden is not None:
            inputs = inputs.masked_fill(hidden, 0)
        before, bias = None if state is None else state.inputs, self.conv1d.bias
        outputs = causal_convolution(inputs, self.conv1d.weight.squeeze(1), segments=segments, before=before)
        if state is not None:
            kept = self.sizes.taps - 1
            padded = F.pad(inputs, (0, 0, kept, 0)) if before is None else torch.cat([before, inputs], dim=1)
            state.inputs = padded[:, padded.shape[1] - kept :].clone()
        outputs = F.silu(outputs if bias is None else outputs + bias)
        return outputs if hidden is None else outputs.masked_fill(hidden, 0)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        of_convolution = [f"conv1d.{name}" for name, _ in self.conv1d.named_parameters()]
        cut = ["A_log", "dt_bias", *of_convolution, *self.sharded_vectors]
        own = {name: self.get_parameter(name) for name in (*cut, *self.whole_vectors)}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, dict.fromkeys(cut, 0), sharded_offsets)
        for name, linear in (("in_proj", self.in_proj), ("out_proj", self.out_proj)):
            found |= linear.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        in_parts = {"in_proj.weight": self.sizes.projected, **dict.fromkeys(of_convolution, self.sizes.convolved)}
        for name, sizes in in_parts.items():
            found[f"{prefix}{name}"] = in_sections(found[f"{prefix}{name}"], sizes)
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
