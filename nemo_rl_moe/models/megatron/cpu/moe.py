# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The MoE layer on a CPU: router, dispatcher and grouped experts."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.routing.replay import experts_as_map


class IndexTopKRouter(TopKRouter):
    """`TopKRouter` for one rank and softmax scores. Its probabilities and gradients equal the stock router's.

    Attributes:
        last_topk_indices: Experts of the last forward pass, best first, `[tokens, k]`.
        is_plain: Whether the logits are the product of input and weight, without other terms.
    """

    last_topk_indices: Tensor | None = None
    is_plain = True

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities and expert indices, both `[sequence * batch, k]`, for padding too."""
        logits = self.apply_z_loss(self.gating(input).view(-1, self.num_experts), padding_mask)
        probs, indices = self._choose(logits)
        # A recomputed segment first runs without gradients. Only its second pass adds the loss.
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            scores = logits.softmax(-1, dtype=torch.float32)
            probs = self._apply_aux_loss(probs, scores, experts_as_map(indices, self.num_experts))
        self.last_topk_indices = indices
        return probs, indices

    def evaluate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Route `[tokens, hidden]` like `forward`, without side effects."""
        weight = self.weight
        as_it_is = self.is_plain and (
            self.config.moe_router_dtype is None
            or (self.config.moe_router_dtype == "fp32" and tokens.dtype == weight.dtype == torch.float32)
        )
        return self._choose(F.linear(tokens, weight) if as_it_is and self.bias is None else self.gating(tokens))

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.moe_router_pre_softmax:
            scores = logits.softmax(-1, dtype=torch.float32).type_as(logits)
            probs, indices = self._top_experts(scores)
        else:
            chosen, indices = self._top_experts(logits)
            probs = chosen.softmax(-1, dtype=torch.float32).type_as(logits)
        if self.config.moe_router_topk_scaling_factor:
            probs = probs * self.config.moe_router_topk_scaling_factor
        return probs, indices

    def _top_experts(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.router_replay is None:
            return scores.topk(self.topk, dim=-1)
        # Same call as in the stock router. Without it, replay would silently have no effect.
        return self.router_replay.get_replay_topk(scores, self.topk, None, None, _plain_topk)


def _plain_topk(scores: Tensor, topk: int, *_groups: Any, **_named_groups: Any) -> tuple[Tensor, Tensor]:
    return scores.topk(topk, dim=-1)


class DispatchFunction(torch.autograd.Function):
    """Copies tokens `[tokens, hidden]` into rows `[tokens * k, hidden]`, which are sorted by expert."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source: Tensor, rows_of_tokens: Tensor) -> Tensor:
        """Return the token of each row, `[tokens * k, hidden]`.

        Args:
            source: `[tokens * k]`, token of each row.
            rows_of_tokens: `[tokens, k]`, rows of each token.
        """
        ctx.save_for_backward(rows_of_tokens)
        return tokens.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Add up the gradients of each token's k rows. Gathering is faster than scattering."""
        (rows_of_tokens,) = ctx.saved_tensors
        return gather_sum(grad, rows_of_tokens), None, None


class CombineFunction(torch.autograd.Function):
    """Sums each token's k rows of `[tokens * k, hidden]`, which are sorted by expert.

    It takes the same index tensors as `DispatchFunction`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, rows_of_tokens: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        return gather_sum(rows, rows_of_tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (source,) = ctx.saved_tensors
        return grad.index_select(0, source), None, None


def gather_sum(rows: Tensor, rows_of_tokens: Tensor) -> Tensor:
    """Return the sum of each token's rows, which have the indices `rows_of_tokens`, `[tokens, k]`."""
    return rows.index_select(0, rows_of_tokens.reshape(-1)).view(*rows_of_tokens.shape, rows.size(-1)).sum(1)


class LocalTokenDispatcher(MoETokenDispatcher):
    """Token dispatcher for one expert-parallel and one expert-tensor-parallel rank.

    It takes the indices `[tokens, k]` of `IndexTopKRouter`. Stock dispatchers take a map over experts.
    """

    def __init__(self, config: TransformerConfig, pg_collection: Any):
        super().__init__(config=config, pg_collection=pg_collection)
        self._num_experts = config.num_moe_experts

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the tokens sorted by expert, `[tokens * k, hidden]`, and probabilities `[tokens * k]`."""
        self._hidden_shape = hidden_states.shape
        experts = routing_map.reshape(-1)
        # Stable, so that each expert sees its tokens in order, as with the stock dispatcher.
        order = experts.argsort(stable=True)
        self._source = order // routing_map.size(1)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(order.numel(), device=order.device)
        self._rows = rows.view_as(routing_map)
        self._tokens_per_expert = experts.bincount(minlength=self._num_experts)
        tokens = hidden_states.reshape(-1, hidden_states.size(-1))
        return DispatchFunction.apply(tokens, self._source, self._rows), probs.reshape(-1).index_select(0, order)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows, the number of rows of each expert `[experts]`, and the probabilities."""
        return hidden_states, self._tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of the experts' outputs (rows) for each token, `[sequence, batch, hidden]`."""
        return CombineFunction.apply(hidden_states, self._source, self._rows).view(self._hidden_shape)


class LocalMoELayer(MoELayer):
    """`MoELayer` with an `IndexTopKRouter` and a `LocalTokenDispatcher`."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **others: Any,
    ):
        # TransformerLayer of 0.16.1 passes process groups only to known classes.
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(config, submodules, layer_number, groups, **others)
        self.token_dispatcher = LocalTokenDispatcher(config, groups)


_GROUPED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class ExpertProducts:
    """Products of each expert's contiguous rows, which end at `ends`."""

    def __init__(self, ends: Tensor, rows: Tensor, widths: tuple[int, ...]):
        # torch's grouped product needs at least one row, and in every matrix rows of a multiple of 16 bytes.
        aligned = all(width * rows.element_size() % 16 == 0 for width in widths)
        self._offsets = None
        if rows.size(0) and aligned and rows.dtype in _GROUPED_TYPES:
            self._offsets = ends
        else:
            self._counts = ends.diff(prepend=ends.new_zeros(1)).tolist()

    def with_weights(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Multiply each row of `[rows, inner]` by its expert's matrix of `[experts, inner, outer]`."""
        if self._offsets is not None:
            return F.grouped_mm(rows, weights, offs=self._offsets)
        parts = zip(rows.split(self._counts), weights, strict=True)
        return torch.cat([part @ weight for part, weight in parts])

    def of_rows(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute `left.T @ right` of each expert's rows, `[experts, left width, right width]`."""
        if self._offsets is not None:
            return F.grouped_mm(left.t(), right, offs=self._offsets)
        parts = zip(left.split(self._counts), right.split(self._counts), strict=True)
        return torch.stack([left_part.t() @ right_part for left_part, right_part in parts])


class SwigluExpertsFunction(torch.autograd.Function):
    """All experts as one autograd node.

    Under plain autograd, torch's grouped product refuses expanded or empty gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, weights_1: Tensor, weights_2: Tensor, tokens_per_expert: Tensor
    ) -> Tensor:
        """Return `(probs * silu(gate) * up) @ weights_2.T`, `[tokens, hidden]`."""
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None]:
        """Return the gradients of tokens, probabilities and weights: None for frozen weights, 0 for unused experts."""
        tokens, probs, weights_1, weights_2, gate_up, activated, product, scaled = ctx.saved_tensors
        products: ExpertProducts = ctx.products
        grad = grad.contiguous()
        grad_product = products.with_weights(grad, weights_2)
        grad_weights_2 = products.of_rows(grad, scaled) if ctx.needs_input_grad[3] else None
        grad_probs = (grad_product * product).sum(-1).to(probs.dtype)
        grad_product.mul_(probs.unsqueeze(-1))
        grad_gate_up = torch.empty_like(gate_up)
        (gate, up), (grad_gate, grad_up) = gate_up.chunk(2, -1), grad_gate_up.chunk(2, -1)
        torch.mul(grad_product, activated, out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad_product.mul_(up), gate))
        grad_tokens = products.with_weights(grad_gate_up, weights_1)
        grad_weights_1 = products.of_rows(grad_gate_up, tokens) if ctx.needs_input_grad[2] else None
        return grad_tokens, grad_probs, grad_weights_1, grad_weights_2, None


class GroupedExperts(MegatronModule):
    """The routed experts of one rank, instead of Megatron's `SequentialMLP`, without expert-tensor parallelism.

    Attributes:
        linear_fc1_weights: `[local experts, 2 * expert_ffn, hidden]`, first gate rows, then up rows.
        linear_fc2_weights: `[local experts, hidden, expert_ffn]`.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any = None, **_others: Any):
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1_weights = self._parameter(num_local_experts, 2 * ffn, hidden)
        self.linear_fc2_weights = self._parameter(num_local_experts, hidden, ffn)
        if not config.perform_initialization:
            return
        # One call per expert, like Megatron, with the random state that differs between expert-parallel ranks.
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for expert in range(num_local_experts):
                config.init_method(self.linear_fc1_weights.data[expert])
                config.output_layer_init_method(self.linear_fc2_weights.data[expert])

    def _parameter(self, *shape: int) -> torch.nn.Parameter:
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))
        # The gradient is reduced over the expert data-parallel group in every layout. Otherwise replicas of experts
        # would drift apart under tensor parallelism without expert parallelism.
        parameter.allreduce = False  # type: ignore[attr-defined]
        # Megatron's mark of expert weights: each tensor-parallel rank counts its own weights in the gradient norm.
        set_tensor_model_parallel_attributes(parameter, True, 1, 1)
        return parameter

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Apply each expert to its rows of `[rows, hidden]`, which are sorted by local expert."""
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
        """Return the weights as pieces of all experts' weights, under `SequentialMLP`'s names and shapes.

        Checkpoints are interchangeable with Megatron-Core's experts, including Transformer Engine's.
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
        """Do nothing, because weight gradients are never delayed here."""
