# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Routed SwiGLU experts with stacked weights: the elementwise work of all experts at once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend  # noqa: F401  (before megatron.core)

# isort: split
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

_GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class ExpertProducts:
    """Products of the rows of each expert, which lie one after another.

    Args:
        ends: Where each expert's rows end, `[experts]`, int32.
        rows: A tensor of the type and the number of the rows.
        widths: Sizes of the last dimensions of all operands.
    """

    def __init__(self, ends: Tensor, rows: Tensor, widths: tuple[int, ...]):
        # torch's grouped product wants every line of a matrix to be a multiple of 16 bytes, and some rows.
        aligned = all(width * rows.element_size() % 16 == 0 for width in widths)
        self._offsets = None
        if rows.size(0) and aligned and rows.dtype in _GROUPED_TYPES:
            self._offsets = ends
        else:
            self._counts = ends.diff(prepend=ends.new_zeros(1)).tolist()

    def with_weights(self, rows: Tensor, weights: Tensor) -> Tensor:
        """`[rows, inner]` times its expert's matrix of `[experts, inner, outer]`."""
        if self._offsets is not None:
            return F.grouped_mm(rows, weights, offs=self._offsets)
        parts = zip(rows.split(self._counts), weights, strict=True)
        return torch.cat([part @ weight for part, weight in parts])

    def of_rows(self, left: Tensor, right: Tensor) -> Tensor:
        """`left.T @ right` of the rows of each expert: `[experts, left width, right width]`, zero without rows."""
        if self._offsets is not None:
            return F.grouped_mm(left.t(), right, offs=self._offsets)
        parts = zip(left.split(self._counts), right.split(self._counts), strict=True)
        return torch.stack([left_part.t() @ right_part for left_part, right_part in parts])


class SwigluExpertsFunction(torch.autograd.Function):
    """All experts as one node of the graph.

    Left to autograd, torch's grouped product refuses gradients that are expanded or empty.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, weights_1: Tensor, weights_2: Tensor, tokens_per_expert: Tensor
    ) -> Tensor:
        """Returns `probs * silu(gate) * up` through the second weight, `[tokens, hidden]`."""
        widths = (tokens.size(1), weights_1.size(1), weights_2.size(2))
        products = ExpertProducts(tokens_per_expert.cumsum(0).to(torch.int32), tokens, widths)
        gate_up = products.with_weights(tokens, weights_1.transpose(1, 2))
        gate, up = gate_up.chunk(2, -1)
        activated = F.silu(gate)
        product = activated * up
        scaled = (product * probs.unsqueeze(-1)).to(tokens.dtype)
        ctx.save_for_backward(tokens, probs, weights_1, weights_2, gate_up, activated, product, scaled)
        ctx.products = products
        return products.with_weights(scaled, weights_2.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        """Gradients of tokens, probabilities and both weights; those of unused experts are zero."""
        tokens, probs, weights_1, weights_2, gate_up, activated, product, scaled = ctx.saved_tensors
        products: ExpertProducts = ctx.products
        grad = grad.contiguous()
        grad_product = products.with_weights(grad, weights_2)
        grad_weights_2 = products.of_rows(grad, scaled)
        grad_probs = (grad_product * product).sum(-1).to(probs.dtype)
        grad_product.mul_(probs.unsqueeze(-1))
        grad_gate_up = torch.empty_like(gate_up)
        (gate, up), (grad_gate, grad_up) = gate_up.chunk(2, -1), grad_gate_up.chunk(2, -1)
        torch.mul(grad_product, activated, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad_product.mul_(up), gate))
        grad_tokens = products.with_weights(grad_gate_up, weights_1)
        return grad_tokens, grad_probs, products.of_rows(grad_gate_up, tokens), grad_weights_2, None


class GroupedExperts(MegatronModule):
    """The routed experts of one rank, in place of Megatron's `SequentialMLP`; no expert-tensor parallelism.

    Attributes:
        linear_fc1_weights: `[local experts, 2 * expert_ffn, hidden]`, gate rows before up rows.
        linear_fc2_weights: `[local experts, hidden, expert_ffn]`.

    Args:
        num_local_experts: Experts on this rank.
        config: The model's configuration.
        pg_collection: Not used: the dispatcher in front does the communication.
        **_others: What some versions of Megatron-Core pass to every module (`name`).
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **_others: Any):
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1_weights = self._parameter(num_local_experts, 2 * ffn, hidden)
        self.linear_fc2_weights = self._parameter(num_local_experts, hidden, ffn)
        if config.perform_initialization:
            self._initialize()

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))
        # Reduced over the expert data-parallel group in every layout; otherwise replicas of experts would drift
        # apart under tensor parallelism without expert parallelism.
        parameter.allreduce = False  # type: ignore[attr-defined]
        # As Megatron marks every expert weight: each tensor-parallel rank counts its own in the gradient norm.
        set_tensor_model_parallel_attributes(parameter, True, 1, 1)
        return parameter

    def _initialize(self) -> None:
        # One draw an expert, as in Megatron, from the random state that differs between expert-parallel ranks.
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for expert in range(self.num_local_experts):
                self.config.init_method(self.linear_fc1_weights.data[expert])
                self.config.output_layer_init_method(self.linear_fc2_weights.data[expert])

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Applies each expert to its rows.

        Args:
            permuted_local_hidden_states: `[tokens, hidden]`, sorted by local expert.
            tokens_per_expert: `[local experts]`, adding up to `tokens`.
            permuted_probs: `[tokens]`, each row's routing probability.

        Returns:
            `[tokens, hidden]`, and no bias.
        """
        output = SwigluExpertsFunction.apply(
            permuted_local_hidden_states,
            permuted_probs,
            self.linear_fc1_weights,
            self.linear_fc2_weights,
            tokens_per_expert,
        )
        return output, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensor]:
        """The weights as pieces of all experts' weights, under the names and shapes that `SequentialMLP` gives them.

        So checkpoints can be exchanged with Megatron-Core's own experts, Transformer Engine's included.
        """
        offset = (len(sharded_offsets), parallel_state.get_expert_model_parallel_rank())
        size = parallel_state.get_expert_model_parallel_world_size()
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name.removesuffix('_weights')}.weight",
                weights,
                *sharded_offsets,
                (*offset, size),
                replica_id=(0, 0, parallel_state.get_expert_data_parallel_rank()),
                prepend_axis_num=len(sharded_offsets),
            )
            for name, weights in self.named_parameters(recurse=False)
        }

    def backward_dw(self) -> None:
        """Does nothing: weight gradients are never delayed here."""
