# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Hooks on the routers of a rank's chunks. They replay a microbatch's capture in any layout, and show the live choice.

A chunk's routers get the routes of a microbatch before its forward pass, and again when its backward pass begins. Under
activation checkpointing the backward pass runs the routers again, after the forward passes of other microbatches.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Int
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from nemo_rl_moe.config.schema_grpo import RolloutMegatronConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.megatron.layers.router_losses import SequencesOfTokens
from nemo_rl_moe.models.megatron.training.microbatch import (
    ModelMicrobatch,
    SequenceCut,
    first_tokens,
    in_router_order,
)
from nemo_rl_moe.models.megatron.training.route_checks import RouteChecks, RouteProbe, computes_in_float32
from nemo_rl_moe.routing.agreement.replayed_passes import MOST_ENTRIES, ReplayedPass, join_passes
from nemo_rl_moe.routing.agreement.report import routing_report
from nemo_rl_moe.routing.agreement.statistics import AgreementStatistics, AgreementTotals, RoutingReport, Row
from nemo_rl_moe.routing.replay import (
    ROUTED_EXPERTS,
    UNKNOWN,
    LayerRoutes,
    ReplayRoutes,
    RoutedTokens,
    RouterHook,
    experts_as_map,
)
from nemo_rl_moe.routing.routers import moe_layer_indices, routers_of
from nemo_rl_moe.token_lag import NO_LAG, TOKEN_LAG

CountedLoad = Literal["live", "replayed"]


def cut_of_rank(config: TransformerConfig) -> SequenceCut:
    if not config.sequence_parallel:
        return SequenceCut(0, 1)
    return SequenceCut(
        parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    )


@dataclass(frozen=True)
class ChunkRoutes:
    """Captured experts of one microbatch's tokens, for the routers of a model chunk.

    Attributes:
        rows: Experts of the tokens of all sequences.
        fed: Experts of the routers' tokens. They differ from `rows` only if sequences share tokens.
    """

    rows: ReplayRoutes
    fed: ReplayRoutes

    @cached_property
    def by_layer(self) -> list[LayerRoutes]:
        """The captured experts of each router. Computed at the first use, because not every pass needs them."""
        return self.fed.by_layer()


class RouterHooks:
    """Hooks on all routers of this rank. They replay the capture (the recorded experts of tokens) or compare with it.

    Args:
        replays: Whether training passes replay the capture.
        counted_load: Experts that auxiliary losses and the expert bias count during replay. "live" are the experts that
            the router would choose, and that the losses and the bias should balance. "replayed" are the capture's.
        in_float32: Whether captures and training passes certainly compute the same.
    """

    def __init__(
        self,
        chunks: Sequence[GPTModel],
        config: TransformerConfig,
        device: torch.device,
        *,
        replays: bool = False,
        counted_load: CountedLoad = "live",
        in_float32: bool = False,
    ):
        self.layers = tuple(moe_layer_indices(config))
        self.statistics = AgreementStatistics(len(self.layers), config.num_moe_experts, device)
        self._config = config
        self._replays = replays
        self._counts_statistics = config.sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0
        of_layer = {layer: position for position, layer in enumerate(self.layers)}
        self.probe = RouteProbe(len(self.layers), int(config.moe_router_topk), device)
        self.checks = RouteChecks(device, in_float32=in_float32)
        self._probed: set[int] = set()
        self._captured: dict[int, tuple[ModelMicrobatch, Tensor]] | None = None
        self._compared: AgreementStatistics | None = None
        self._waiting: list[ReplayedPass] = []
        self._waiting_of: tuple[int, ModelMicrobatch]  # the waiting passes' chunk, and the first pass's microbatch
        self._last_routes: tuple[ModelMicrobatch, int, ChunkRoutes] | None = None
        self._pipeline = parallel_state.get_pipeline_model_parallel_group()
        self._hooks: list[dict[int, RouterHook]] = []
        for chunk in chunks:
            hooks = {}
            # The decoder's routers only: a capture has no routes of multi-token prediction.
            for layer, router in routers_of(chunk.decoder):
                assert isinstance(layer.key, int)  # Megatron-Core numbers its layers
                slot: Any = getattr(router, "router_replay", None)
                hook = RouterHook(slot, counts_replayed=counted_load == "replayed")
                router.router_replay = hook  # type: ignore[assignment]
                if replays:
                    _count_for_bias(router, hook)
                hooks[of_layer[layer.key]] = hook
            self._hooks.append(hooks)
        self._layers = [torch.tensor(list(hooks), dtype=torch.long, device=device) for hooks in self._hooks]

    @property
    def positions(self) -> list[list[int]]:
        """For each chunk, the indices of its MoE layers among all MoE layers of the model."""
        return [sorted(hooks) for hooks in self._hooks]

    @contextmanager
    def forward(
        self, chunk: int, microbatch: ModelMicrobatch, number: int, *, trains: bool, counts: bool
    ) -> Iterator[None]:
        """Set up the hooks for the forward pass of a chunk over one microbatch.

        A training pass replays the captured experts if the configuration asks for it. Any other pass replays them,
        except under `comparing`.

        Args:
            number: Number of the microbatch within the `train` call.
            trains: Whether it is a training pass.
            counts: Whether the pass counts in the step's statistics.
        """
        routes = self._routes(chunk, microbatch)
        statistics = self.statistics if counts else self._compared
        counts = statistics is not None and routes is not None and self._counts_statistics
        self._give(chunk, routes if (self._replays if trains else self._compared is None) else None)
        captured = routes.by_layer if counts and routes is not None else [None] * len(self._hooks[chunk])
        for hook, of_layer in zip(self._hooks[chunk].values(), captured, strict=True):
            # Comparisons of other passes do not use the margins.
            hook.shows, hook.shows_margin, hook.compared = (
                counts or self._captured is not None,
                counts and statistics is self.statistics,
                of_layer,
            )
        try:
            yield
            if self._captured is not None:
                self._capture(chunk, microbatch, self._captured)
            elif counts:
                assert routes is not None
                assert statistics is not None
                # A router runs once in a forward pass.
                seen = [of_copies(hook.take()[0], microbatch, self.cut) for hook in self._hooks[chunk].values()]
                fed = fed_tokens(microbatch, self.cut)
                if statistics is self.statistics:
                    rows, follows = microbatch.input_ids.shape[0], following_tokens(microbatch, self.cut)
                    lags = row_lags(microbatch, self.cut)
                    self._wait(
                        chunk, microbatch, ReplayedPass({number: len(fed)}, routes.rows, fed, seen, rows, follows, lags)
                    )
                else:
                    statistics.add(number, self._layers[chunk], routes.rows, fed, seen)
        finally:
            _hide(self._hooks[chunk].values())
            self._give(chunk, None)

    def _wait(self, chunk: int, microbatch: ModelMicrobatch, found: ReplayedPass) -> None:
        """Queue a pass, so that its experts are compared and counted together with those of other small passes."""
        if self._waiting:
            first = self._waiting[0]
            entries = found.num_entries + sum(each.num_entries for each in self._waiting)
            if chunk != self._waiting_of[0] or found.distance != first.distance or entries > MOST_ENTRIES:
                self._count_waiting()
        if not self._waiting:
            self._waiting_of = (chunk, microbatch)
        self._waiting.append(found)
        if found.num_entries > MOST_ENTRIES:
            self._count_waiting()

    def _count_waiting(self) -> None:
        """Add the queued forward passes to statistics, checks and probe."""
        if not self._waiting:
            return
        first_tokens = len(self._waiting[0].fed)
        found, (chunk, microbatch) = join_passes(self._waiting), self._waiting_of
        self._waiting.clear()
        layers = self._layers[chunk]
        live = self.statistics.add(found.tokens, layers, found.routes, found.fed, found.seen)
        if live is None:  # a stage without MoE layers
            return
        self.checks.repeats.add(found.routes, live, found.fed, found.distance, found.follows)
        if found.lags is not None:
            self.checks.by_lag.add(found.routes, live, found.fed, found.lags)
        if chunk not in self._probed:
            first = slice(first_tokens)
            planes = found.routes.planes[..., first]
            self.probe.add(layers, planes, live[..., first], microbatch, self.cut)
        self._probed.add(chunk)

    def watch_backward(self, heads: Sequence[Tensor], chunk: int, microbatch: ModelMicrobatch) -> None:
        """Set the replayed experts again when the backward pass begins, for the routers that recomputation runs."""
        routes = self._routes(chunk, microbatch) if self._replays else None
        if routes is not None:
            register_multi_grad_hook(heads, lambda _: self._give(chunk, routes), mode="any")

    def start_step(self, num_updates: int = 1) -> None:
        self._waiting.clear()
        self.statistics.clear()
        self.checks.start(num_updates)
        self.probe.clear()
        self._probed.clear()

    def report(self, *, per_layer: bool) -> RoutingReport | None:
        """Return the report on the step's capture and its anomalies on rank 0, otherwise None. Every rank calls it."""
        self._count_waiting()
        totals, sample = self.statistics.reduced(self._pipeline), self.probe.reduced()
        checked = self.checks.reduced(self.statistics.rows)
        if dist.get_rank() > 0 or not totals.rows[:, Row.EXPECTED].any():  # once is enough
            return None
        return routing_report(
            self.layers,
            totals,
            checked,
            sample,
            self.probe.names,
            num_experts=self._config.num_moe_experts,
            per_layer=per_layer,
        )

    def clear(self) -> None:
        """Remove all routes. Called after the last backward pass, so that routers choose freely in later passes."""
        self._last_routes = None
        for chunk in range(len(self._hooks)):
            self._give(chunk, None)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Keep the routers' choices for `take` while the context is open."""
        hooks = [hook for of_chunk in self._hooks for hook in of_chunk.values()]
        for hook in hooks:
            hook.shows = True
        try:
            yield
        finally:
            _hide(hooks)

    def take(self) -> dict[int, list[RoutedTokens]]:
        """Return index of an MoE layer -> its router's choices under `shown` since the last call."""
        return {position: hook.take() for hooks in self._hooks for position, hook in hooks.items()}

    @contextmanager
    def capturing(self) -> Iterator[list[tuple[ModelMicrobatch, Int[Tensor, "tokens moe_layers topk"]]]]:
        """Collect each microbatch with its routed experts, in the order of forward passes, while the context is open.

        Yields a list that is filled at exit.
        """
        pairs: list[tuple[ModelMicrobatch, Tensor]] = []
        self._captured = {}
        try:
            yield pairs
            pairs += self._captured.values()
        finally:
            self._captured = None

    @contextmanager
    def comparing(self) -> Iterator[Callable[[], AgreementTotals]]:
        """Let routers choose freely and compare their experts with the capture, while the context is open.

        Yields a function that returns the counts of equal and different experts, summed over all ranks.
        """
        statistics = AgreementStatistics(len(self.layers), self._config.num_moe_experts, self.statistics.rows.device)
        self._compared = statistics
        try:
            yield lambda: statistics.reduced(self._pipeline)
        finally:
            self._compared = None

    def _capture(
        self, chunk: int, microbatch: ModelMicrobatch, captured: dict[int, tuple[ModelMicrobatch, Tensor]]
    ) -> None:
        if id(microbatch) not in captured:  # also on a stage without MoE layers, for the later collectives
            shape = (
                microbatch.inputs.input_ids.numel() // self.cut.size,
                len(self.layers),
                int(self._config.moe_router_topk),
            )
            routes = torch.full(shape, UNKNOWN, dtype=torch.int16, device=microbatch.input_ids.device)
            captured[id(microbatch)] = (microbatch, routes)
        for position, hook in self._hooks[chunk].items():
            (seen,) = hook.take()
            captured[id(microbatch)][1][:, position] = seen.taken.to(torch.int16)

    def _routes(self, chunk: int, microbatch: ModelMicrobatch) -> ChunkRoutes | None:
        """Return the capture for the routers of a chunk. The last result is cached."""
        if ROUTED_EXPERTS not in microbatch.model_columns:
            return None
        if self._last_routes is None or self._last_routes[0] is not microbatch or self._last_routes[1] != chunk:

            def of_chunk(values: Tensor) -> ReplayRoutes:
                return ReplayRoutes.of(values.index_select(1, self._layers[chunk]), int(self._config.num_moe_experts))

            rows = of_chunk(microbatch.in_router_order(microbatch.model_columns[ROUTED_EXPERTS], self.cut))
            shared = microbatch.shared
            fed = rows if shared is None else of_chunk(in_router_order(shared.model_columns[ROUTED_EXPERTS], self.cut))
            self._last_routes = (microbatch, chunk, ChunkRoutes(rows, fed))
        return self._last_routes[2]

    @property
    def cut(self) -> SequenceCut:
        return cut_of_rank(self._config)

    def _give(self, chunk: int, routes: ChunkRoutes | None) -> None:
        hooks = self._hooks[chunk].values()
        for hook, of_layer in zip(hooks, [None] * len(hooks) if routes is None else routes.by_layer, strict=True):
            hook.routes = of_layer


def _hide(hooks: Iterable[RouterHook]) -> None:
    for hook in hooks:
        hook.shows, hook.shows_margin, hook.compared = False, False, None
        hook.take()


def attach_hooks(
    chunks: Sequence[GPTModel], config: TransformerConfig, policy: PolicyConfig, device: torch.device
) -> RouterHooks | None:
    """Attach and return the hooks that a configuration asks for. Return None without a capture or without MoE layers.

    A fused router does not call its `router_replay`, so it gets no hooks.
    """
    chosen = policy.megatron_cfg
    if not isinstance(chosen, RolloutMegatronConfig) or not moe_layer_indices(config) or config.moe_router_fusion:
        return None
    if not chosen.capture_routing and chosen.routing_replay == "none":
        return None
    return RouterHooks(
        chunks,
        config,
        device,
        replays=chosen.routing_replay != "none",
        counted_load=chosen.routing_replay_load,
        in_float32=computes_in_float32(policy, config),
    )


def of_copies(seen: RoutedTokens, microbatch: ModelMicrobatch, cut: SequenceCut) -> RoutedTokens:
    """Return a router's choices for the tokens of all sequences, if sequences share tokens."""
    if microbatch.shared is None:
        return seen
    copies = microbatch.shared.copies_of(cut).source
    live = seen.live[copies]
    taken = live if seen.taken is seen.live else seen.taken[copies]
    return RoutedTokens(live, taken, None if seen.margin is None else seen.margin[copies])


def fed_tokens(microbatch: ModelMicrobatch, cut: SequenceCut) -> Bool[Tensor, " tokens"]:
    """Return True for tokens that an engine feeds to its model: all except padding and each sequence's last token."""
    batch = microbatch.batch
    fed = first_tokens(batch.counted_lengths - 1, batch.input_ids.shape[1])
    return microbatch.in_router_order(microbatch.at_tokens(fed, fed, False), cut)


def sequences_of_tokens(microbatch: ModelMicrobatch, cut: SequenceCut) -> SequencesOfTokens:
    """Return the sequence of each token that a rank's routers see."""
    batch = microbatch.batch
    rows, longest = batch.input_ids.shape
    is_token = first_tokens(batch.counted_lengths, longest)
    rows_of_tokens = torch.arange(rows, device=is_token.device)[:, None].expand(rows, longest)
    of_tokens = microbatch.in_router_order(microbatch.at_tokens(rows_of_tokens, is_token, -1), cut)
    copies = None if microbatch.shared is None else microbatch.shared.copies_of(cut).source
    return SequencesOfTokens.of(of_tokens, rows, copies)


def row_lags(microbatch: ModelMicrobatch, cut: SequenceCut) -> Int[Tensor, " tokens"] | None:
    """Return the lag of the token after each of the rank's tokens, or None if the batch has no lags.

    A lag is the number of optimizer steps between the weights that sampled a token and the weights that train on it.
    """
    batch = microbatch.batch
    if TOKEN_LAG not in batch.columns:
        return None
    lags = batch.columns[TOKEN_LAG].of_targets().values
    has_next = first_tokens(batch.counted_lengths - 1, lags.shape[1])
    return microbatch.in_router_order(microbatch.at_tokens(lags, has_next, NO_LAG), cut)


def following_tokens(microbatch: ModelMicrobatch, cut: SequenceCut) -> Bool[Tensor, " tokens"]:
    """Return True for tokens whose predecessor in the sequence is on the same rank, one column (`rows` tokens) before.

    The predecessor of a context-parallel chunk's first token may be on another rank.
    """
    after_another = microbatch.offsets > 0
    if microbatch.context is not None:
        after_another[:, 1:] &= microbatch.context.held.diff() == 1
    follows = microbatch.in_router_order(after_another, cut)
    if microbatch.shared is not None:
        positions = microbatch.shared.copies_of(cut).positions
        follows[1:] &= positions.diff() == 1
    follows[: microbatch.input_ids.shape[0]] = False
    return follows


def _count_for_bias(router: Any, hook: RouterHook) -> None:
    """Let the expert bias count the hook's `counted` experts, not the replayed experts."""
    # Without this change, Megatron-Core counts the replayed experts.
    apply_bias = router._apply_expert_bias

    def count_for_bias(routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        counted = routing_map if hook.counted is None else experts_as_map(hook.counted, routing_map.shape[-1])
        apply_bias(counted, padding_mask=padding_mask)

    router._apply_expert_bias = count_for_bias
