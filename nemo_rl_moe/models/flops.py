# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a model's passes, by arithmetic. The module imports nothing of Megatron-Core.

Only matrix products count, with two operations per multiply-add. Norms, activations, softmax, embedding look-ups,
padding and recomputation do not count.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.models.layer_kinds import Mixer, layers_with_mlp, mixers_of
from nemo_rl_moe.routing.routers import moe_layer_indices


@dataclass(frozen=True)
class IndexerFlops:
    """Numbers of operations of a model's indexers, summed over layers. They have no backward pass.

    Attributes:
        topk: Number of tokens that a query sees. Indexers have no effect in sequences of up to this length, which do
            not count, although indexers run in all sequences of a microbatch with a longer one.
        per_pair: Operations for each pair of a query and an earlier key or its own.
    """

    topk: int
    per_token: int
    per_pair: int

    def forward(self, lengths: Iterable[int]) -> int:
        return sum(
            self.per_token * length + self.per_pair * causal_pairs(length) for length in lengths if length > self.topk
        )


@dataclass(frozen=True)
class ForwardFlops:
    """Numbers of operations of a forward pass of the full model, summed over all ranks.

    Attributes:
        per_token: Operations for each token: projections, MLPs or routers and experts, and the output layer.
        per_pair: Attention window -> operations for each pair of a query and a visible key. A window is the number of
            keys that a query sees, including its own. None means all keys up to its own.
        indexers: Operations of sparse attention's indexers, if the model has them.
        frozen_per_token: Part of `per_token` by frozen weights, which have no gradient.
        mtp: Operations of trained layers of multi-token prediction and of the output layer after them, which only
            training has.
    """

    per_token: int
    per_pair: Mapping[int | None, int]
    indexers: IndexerFlops | None = None
    frozen_per_token: int = 0
    mtp: "ForwardFlops | None" = None

    def forward(self, lengths: Iterable[int]) -> int:
        lengths = list(lengths)
        return self._of_decoder(lengths) + (0 if self.indexers is None else self.indexers.forward(lengths))

    def _of_decoder(self, lengths: Iterable[int]) -> int:
        return sum(
            self.per_token * length + sum(each * causal_pairs(length, window) for window, each in self.per_pair.items())
            for length in lengths
        )

    def training(self, lengths: Iterable[int], *, is_frozen: bool = False) -> int:
        """Return the number of operations of a forward and a backward pass, without adapters.

        Args:
            is_frozen: Whether the weights are frozen, so that no gradients of weights are computed.
        """
        lengths = list(lengths)
        of_weights = (self.per_token if is_frozen else self.frozen_per_token) * sum(lengths)
        of_mtp = 0 if self.mtp is None else self.mtp.training(lengths)
        # A backward pass has two products for each product of the forward pass.
        return self.forward(lengths) + 2 * self._of_decoder(lengths) - of_weights + of_mtp


def causal_pairs(length: int, window: int | None = None) -> int:
    """Return the number of pairs of a query and a visible key in a sequence.

    A query sees `window` keys including its own, or all keys up to its own if `window` is None.
    """
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(
    config: Any,
    vocabulary_size: int,
    windows: Iterable[int | None],
    indexers: IndexerFlops | None = None,
    *,
    mtp_layers: int = 0,
    detaches_mtp: bool = False,
) -> ForwardFlops:
    """Return the numbers of operations of a model's forward pass, per token and per pair of query and key.

    A token uses its routed experts and all shared experts.

    Args:
        windows: Attention window of each layer with attention, see `ForwardFlops`.
        indexers: Operations of indexers, if these choose the keys of each layer.
        mtp_layers: Number of trained layers of multi-token prediction.
        detaches_mtp: Whether their loss does not train the output layer.
    """
    if indexers is not None:
        # A query sees as many keys as in a window.
        windows = [indexers.topk for _ in windows]
    head = config.hidden_size * vocabulary_size
    products = head + sum(_MIXERS[mixer](config) for mixer in mixers_of(config) if mixer is not None)
    products += sum(_mlp_or_moe(config, index) for index in layers_with_mlp(config))
    of_a_layer = 2 * config.num_attention_heads * sum(_head_dims(config))
    mtp = None
    if mtp_layers:
        joined = 2 * config.hidden_size**2  # projection of hidden state and embedding
        of_mtp = joined + _projections(config) + _mlp_or_moe(config, config.num_layers - 1) + head
        mtp = ForwardFlops(
            2 * mtp_layers * of_mtp,
            {None: mtp_layers * of_a_layer},
            frozen_per_token=2 * mtp_layers * head if detaches_mtp else 0,
        )
    return ForwardFlops(
        2 * products, {window: of_a_layer * count for window, count in Counter(windows).items()}, indexers, mtp=mtp
    )


def _head_dims(config: Any) -> tuple[int, int]:
    """Return the width of a query or key, and of a value."""
    if config.multi_latent_attention:
        return config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    return config.kv_channels, config.kv_channels


def _projections(config: Any) -> int:
    """Return a token's multiplications in the query, gate, key, value and output projections."""
    if config.multi_latent_attention:
        return _latent_projections(config)
    heads, groups = config.num_attention_heads, config.num_query_groups
    of_queries = 3 if config.attention_output_gate else 2
    return int(config.hidden_size * config.kv_channels * (of_queries * heads + 2 * groups))


def _delta_net(config: Any) -> int:
    """Return a token's multiplications in a gated delta net."""
    # Counted for the plain recurrence: the state is read for the key and for the query, and updated once.
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    keys, value_heads = config.linear_num_key_heads * key_dim, config.linear_num_value_heads
    values = value_heads * value_dim
    projections = config.hidden_size * (2 * keys + 3 * values + 2 * value_heads)
    convolution = (2 * keys + values) * config.linear_conv_kernel_dim
    return int(projections + convolution + 3 * values * key_dim)


def _mamba(config: Any) -> int:
    """Return a token's multiplications in a Mamba-2 layer."""
    # Counted for the plain recurrence: the state is updated once and read once.
    heads, values = config.mamba_num_heads, config.mamba_num_heads * config.mamba_head_dim
    convolved = values + 2 * config.mamba_num_groups * config.mamba_state_dim
    projections = config.hidden_size * (2 * values + convolved + heads)
    return int(projections + convolved * config.linear_conv_kernel_dim + 2 * values * config.mamba_state_dim)


def _latent_projections(config: Any) -> int:
    """Return a token's multiplications in latent attention, with keys and values computed from their latent."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    rank = config.q_lora_rank
    of_queries = hidden * queries if rank is None else hidden * rank + rank * queries
    of_latent = hidden * (latent + config.qk_pos_emb_head_dim)
    of_keys_and_values = latent * heads * (config.qk_head_dim + config.v_head_dim)
    return int(of_queries + of_latent + of_keys_and_values + heads * config.v_head_dim * hidden)


def _mlp_or_moe(config: Any, index: int) -> int:
    """Return a token's multiplications in a layer's MLP or experts."""
    if index in moe_layer_indices(config):
        return _moe(config)
    return _mlp(config, config.hidden_size, config.ffn_hidden_size)


def _moe(config: Any) -> int:
    """Return a token's multiplications in the router, its routed experts and the shared experts."""
    hidden, latent = config.hidden_size, config.moe_latent_size
    router = hidden * config.num_moe_experts
    experts = config.moe_router_topk * _mlp(config, latent or hidden, config.moe_ffn_hidden_size)
    to_and_from_latent = 2 * hidden * (latent or 0)
    shared = _mlp(config, hidden, config.moe_shared_expert_intermediate_size or 0)
    gate = hidden if shared and config.moe_shared_expert_gate else 0
    return int(router + experts + to_and_from_latent + shared + gate)


def _mlp(config: Any, size: int, intermediate_size: int) -> int:
    """Return a token's multiplications in an MLP."""
    return (3 if config.gated_linear_unit else 2) * size * intermediate_size


_MIXERS: Mapping[Mixer, Callable[[Any], int]] = {
    Mixer.ATTENTION: _projections,
    Mixer.DELTA_NET: _delta_net,
    Mixer.MAMBA: _mamba,
}
"""Mixer -> function of the configuration that returns a token's multiplications outside of its pairs with others."""
