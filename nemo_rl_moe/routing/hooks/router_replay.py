# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Audit of Megatron-Core's RouterReplay in any training loop: target experts, experts that were taken, live choices.

    audit = RouterReplayAudit(model_chunks)
    ...                                        # set_replay_data, forward, backward: as the loop does it
    found = audit.end_step(step)               # every rank calls it
    for anomaly in found.report.anomalies: ...

Every forward pass under REPLAY_FORWARD is audited. The live choice is the choice that the router would make without
replay, and costs one more top-k. A pass that activation checkpointing repeats is compared with the original pass. The
model's computation is unchanged.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_rl_moe.metrics import with_prefix
from nemo_rl_moe.routing.agreement.expected_agreement import unexplained_disagreement
from nemo_rl_moe.routing.agreement.route_identity import RouteSample, RoutingAnomaly, find_anomalies
from nemo_rl_moe.routing.agreement.statistics import (
    AgreementStatistics,
    AgreementTotals,
    RoutingReport,
    Row,
    agreement_metrics,
    row_anomalies,
)
from nemo_rl_moe.routing.audit.auditor import AuditedStep
from nemo_rl_moe.routing.hooks.pass_recorder import as_numbers
from nemo_rl_moe.routing.metrics.expert_load_recorder import sum_over_ranks
from nemo_rl_moe.routing.metrics.load_balance_metrics import load_balance_metrics
from nemo_rl_moe.routing.metrics.load_balance_tracking import ForwardWatcher, watch_model
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.routing.replay import UNKNOWN, ReplayRoutes, RoutedTokens, in_order, margins, or_tied
from nemo_rl_moe.routing.routers import RouterKind, RouterLayer, moe_layer_indices, routed_experts, router_kind
from nemo_rl_moe.shapes import Bool, Int

_SAMPLED_SEQUENCES, _SAMPLED_TOKENS = 16, 48
_RECOMPUTED, _RECOMPUTED_WRONG = 0, 1

Unfed = Callable[[Mapping[str, Any]], Bool[Tensor, "batch tokens"]]


class _Place(NamedTuple):
    stages: dist.ProcessGroup | None
    tensor_rank: int
    tensor_size: int


class RouterReplayAudit:
    """Audit of replay on one rank: hooks on its model chunks, and the counts of one step.

    Args:
        unfed: Function that gets the named arguments of a chunk's forward, and returns a mask of tokens without routes
            in the rollout, such as padding and the last token of each sequence. The target experts of these tokens are
            ignored. None: all tokens count.

    Raises:
        ValueError: Routers have no RouterReplay.
    """

    def __init__(self, chunks: Sequence[nn.Module], unfed: Unfed | None = None):
        self._unfed = unfed
        self._config = cast(Any, _entry(chunks[0]).config)
        self._layers = tuple(moe_layer_indices(self._config))
        self._position = {layer: position for position, layer in enumerate(self._layers)}
        self._num_experts, self._topk = int(self._config.num_moe_experts), int(self._config.moe_router_topk)
        device = next((parameter.device for parameter in chunks[0].parameters()), torch.device("cpu"))
        self._statistics = AgreementStatistics(len(self._layers), self._num_experts, device)
        self._recomputed = torch.zeros(len(self._layers), 2, dtype=torch.long, device=device)
        # (pass, sequence) -> target experts and routers' own choices. Each chunk fills its layers.
        self._sampled: dict[tuple[int, int], np.ndarray] = {}
        self._place = _place()
        # Without sequence parallelism all tensor-parallel ranks see the same tokens.
        self._counts = self._place.tensor_rank == 0 or bool(self._config.sequence_parallel)
        self._watchers = [_ChunkWatcher(self, chunk) for chunk in chunks]

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.remove()

    def end_step(self, step: int) -> AuditedStep:
        """Return the audit of the passes since the last step, over all ranks. A collective.

        `metrics` has the keys of `nemo-rl-moe audit`. `rollout_load` counts the target experts, and `training_load`
        the experts that routers would choose without replay for the same tokens. Anomalies of all ranks are reported,
        each kind once per layer.
        """
        totals = self._statistics.reduced(self._place.stages)
        (recomputed,) = sum_over_ranks([self._recomputed], self._recomputed.device)
        anomalies = self._anomalies(totals, recomputed.long())
        found = agreement_metrics(totals, self._layers, per_layer=True)
        metrics: dict[str, float] = {}
        report = None
        if found:
            found["routing/anomalies"] = float(len(anomalies))
            report = RoutingReport(self._layers, totals, found, tuple(anomalies))
            metrics = with_prefix("moe", found)
            for prefix, counts in (("moe", totals.live_experts), ("rollout_moe", totals.captured_experts)):
                load = ExpertLoad(self._layers, counts)
                metrics |= with_prefix(prefix, load_balance_metrics(load, router_topk=self._topk))
        audited = AuditedStep(
            step,
            len(self._sampled),
            int(totals.tokens[0]),
            metrics,
            report,
            totals.captured_experts.numpy() if found else None,
            totals.live_experts.numpy() if found else None,
            columns=frozenset({"rollout_experts", "training_experts", "margins"} if found else ()),
        )
        self._statistics.clear()
        self._recomputed.zero_()
        self._sampled.clear()
        for watcher in self._watchers:
            watcher.start_step()
        return audited

    def fed_tokens(self, arguments: Mapping[str, Any], num_rows: int) -> Bool[Tensor, " tokens"]:
        """Return a mask of the tokens of a pass that count, in the routers' order."""
        if self._unfed is None:
            return torch.ones(num_rows, dtype=torch.bool, device=self._recomputed.device)
        by_column = ~self._unfed(arguments).transpose(0, 1)
        if by_column.numel() != num_rows:  # sequence parallel: each rank has a block of columns
            by_column = by_column.chunk(self._place.tensor_size)[self._place.tensor_rank]
        return by_column.reshape(-1)

    def add(self, number: int, seen: Mapping[int, "_Seen"], fed: Bool[Tensor, " tokens"], num_sequences: int) -> None:
        if not self._counts:
            return
        layers = sorted(seen)
        positions = torch.tensor([self._position[layer] for layer in layers], dtype=torch.long, device=fed.device)
        if not layers:
            nothing = ReplayRoutes.of(fed.new_zeros(len(fed), 0, self._topk, dtype=torch.long), self._num_experts)
            self._statistics.add(number, positions, nothing, fed, [])
            return
        # Targets may have any integer type, such as one that cannot hold UNKNOWN.
        targets = torch.stack([seen[layer].target.to(fed.device, torch.long) for layer in layers], 1)
        # Tokens that no engine was fed have targets too, with arbitrary values.
        targets = targets.masked_fill(~fed[:, None, None], UNKNOWN)
        routed = [seen[layer].routed for layer in layers]
        self._statistics.add(number, positions, ReplayRoutes.of(targets, self._num_experts), fed, routed)
        live = torch.stack([of_layer.live for of_layer in routed], 1)
        self._sample(number, layers, torch.stack([targets, live]), fed, num_sequences)

    def add_recomputed(self, layer: int, wrong: Int[Tensor, ""], num_rows: int) -> None:
        """Count the tokens of a layer in a recomputed pass, and its tokens with other experts than originally."""
        self._recomputed[self._position[layer], _RECOMPUTED] += num_rows
        self._recomputed[self._position[layer], _RECOMPUTED_WRONG] += wrong

    def rows_of_batch(self, token_ids: Tensor) -> int:
        parts = self._place.tensor_size if self._config.sequence_parallel else 1
        return token_ids.numel() // parts

    def _sample(
        self,
        number: int,
        layers: Sequence[int],
        both: Int[Tensor, "2 tokens layers topk"],
        fed: Bool[Tensor, " tokens"],
        num_sequences: int,
    ) -> None:
        """Keep the target experts and the routers' own choices of the last tokens of a few sequences."""
        if len(fed) % num_sequences:
            return
        places = [self._position[layer] for layer in layers]
        for sequence in range(num_sequences):
            key = number, sequence
            if key not in self._sampled:
                if len(self._sampled) == _SAMPLED_SEQUENCES:
                    return
                shape = (2, _SAMPLED_TOKENS, len(self._layers), self._topk)
                self._sampled[key] = np.full(shape, UNKNOWN, dtype=np.int16)
            rows = fed.view(-1, num_sequences)[:, sequence].nonzero()[-_SAMPLED_TOKENS:, 0] * num_sequences + sequence
            self._sampled[key][:, : len(rows), places] = both[:, rows].to(torch.int16).cpu().numpy()

    def _anomalies(self, totals: AgreementTotals, recomputed: Int[Tensor, "layers 2"]) -> list[RoutingAnomaly]:
        """Return the anomalies of a step on all ranks. A collective."""
        found = row_anomalies(totals, self._layers) + _not_taken(totals, self._layers)
        found += _other_recomputed(recomputed, self._layers)
        mine = self._identity(totals)
        everyone: list[list[RoutingAnomaly]] = [mine]
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, mine)
        kinds = {(anomaly.kind, anomaly.layer): anomaly for of_rank in reversed(everyone) for anomaly in of_rank}
        found += kinds.values()
        return found or unexplained_disagreement(totals, self._layers)

    def _identity(self, totals: AgreementTotals) -> list[RoutingAnomaly]:
        """Return the anomalies of this rank's sampled sequences, in the layers of all pipeline stages. A collective."""
        of_stages = [self._sampled]
        if self._place.stages is not None:
            of_stages = [{} for _ in range(dist.get_world_size(self._place.stages))]
            dist.all_gather_object(of_stages, self._sampled, group=self._place.stages)
        # Layers of other stages are UNKNOWN, which is -1 and below every expert id.
        keys = sorted({key for of_stage in of_stages for key in of_stage})
        found = [np.maximum.reduce([of_stage[key] for of_stage in of_stages if key in of_stage]) for key in keys]
        if not found:
            return []
        capture, live = np.stack(found, 1)
        rank = dist.get_rank() if dist.is_initialized() else 0
        names = [f"{sequence} of pass {number} on rank {rank}" for number, sequence in keys]
        return find_anomalies(RouteSample(capture, live), self._num_experts, self._layers, names, totals.of_experts)


class _Seen(NamedTuple):
    """One router in a pass under replay: target experts, experts of its own choice, and the experts that it took."""

    target: Int[Tensor, "tokens topk"]
    routed: RoutedTokens


class _ChunkWatcher(ForwardWatcher):
    """Hooks on one model chunk and on the RouterReplay of each of its routers."""

    def __init__(self, audit: RouterReplayAudit, chunk: nn.Module):
        routers = _decoder_routers(chunk)
        super().__init__([layer for layer, _ in routers])
        self._audit = audit
        self._arguments: Mapping[str, Any] = {}
        self._seen: dict[int, _Seen] = {}
        self._num_rows = self._num_passes = 0
        self._num_sequences: int | None = None
        self._taken: dict[int, deque[Tensor]] = defaultdict(deque)
        self._replays: list[tuple[Any, Any]] = []
        for layer, router in routers:
            replay: Any = getattr(router, "router_replay", None)
            if not hasattr(replay, "replay_backward_list"):
                raise ValueError(
                    f"layer {layer.key} has no RouterReplay: the model must be built with moe_enable_routing_replay"
                )
            # Set on the object. The loop may rely on its position in the global list of RouterReplay objects.
            self._replays.append((replay, vars(replay).get("get_replay_topk")))
            replay.get_replay_topk = partial(self._replayed, layer, replay, replay.get_replay_topk)
        self._chunk = _entry(chunk)
        watch_model(self._chunk, routers, self)

    def remove(self) -> None:
        self.remove_hooks()
        for replay, own in self._replays:
            if own is None:
                del replay.get_replay_topk
            else:  # the loop itself had replaced the method
                replay.get_replay_topk = own

    def start_step(self) -> None:
        self._num_passes = 0
        self._taken.clear()

    def enter_model(self, arguments: Mapping[str, Any]) -> None:
        super().enter_model(arguments)
        if not self.is_recomputed():
            self._arguments, self._seen, self._num_rows, self._num_sequences = arguments, {}, 0, None

    def add(self, layer: RouterLayer, router: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Record the output of a fused router. Such a router chooses without calling its RouterReplay."""
        replay: Any = router.router_replay
        number = int(layer.key)
        if self._num_sequences is None and args and args[0].ndim == 3:  # [tokens, sequences, hidden]
            self._num_sequences = args[0].shape[1]
        if self.is_recomputed() or number in self._seen or not _is_replaying(replay):
            return
        if self._gradients_at_entry is None or replay.target_topk_idx is None:
            return
        taken = as_numbers(routed_experts(layer, router, outputs), layer.topk)
        self._note(number, replay.target_topk_idx, RoutedTokens(taken, taken, None))

    def leave_model(self) -> None:
        if self._gradients_at_entry is not None and not self.is_recomputed():
            num_rows, num_sequences = self._size_of_pass()
            if num_rows:
                fed = self._audit.fed_tokens(self._arguments, num_rows)
                self._audit.add(self._num_passes, self._seen, fed, num_sequences)
            self._num_passes += 1
            self._arguments, self._seen = {}, {}
        super().leave_model()

    def _size_of_pass(self) -> tuple[int, int]:
        """Return the number of tokens of a router on this rank in a pass, and the number of sequences."""
        # A stage without a router must know it too, because stages exchange which tokens differ.
        tokens = self._arguments.get("input_ids")
        if isinstance(tokens, Tensor):
            return self._num_rows or self._audit.rows_of_batch(tokens), tokens.shape[0]
        if self._num_rows:
            return self._num_rows, self._num_sequences or 1
        hidden = getattr(getattr(self._chunk, "decoder", None), "input_tensor", None)  # from the previous stage
        return (hidden.shape[0] * hidden.shape[1], hidden.shape[1]) if isinstance(hidden, Tensor) else (0, 1)

    def _replayed(
        self,
        layer: RouterLayer,
        replay: Any,
        choose: Callable[..., tuple[Tensor, Tensor]],
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the experts that the RouterReplay chooses, and record them with its targets."""
        is_replaying, target, number = _is_replaying(replay), replay.target_topk_idx, int(layer.key)
        values, taken = choose(scores, topk, num_groups, group_topk, default_compute_topk)
        if self.is_recomputed():
            self._compare_recomputed(number, taken)
            return values, taken
        if self._gradients_at_entry is None:  # the router runs without its model
            return values, taken
        self._num_rows = len(taken)
        if self._gradients_at_entry:
            if len(replay.replay_backward_list) <= 1:  # the loop has cleared the queue
                self._taken[number].clear()
            self._taken[number].append(taken)
        if is_replaying and target is not None and default_compute_topk is not None:
            with torch.no_grad():
                live, margin = default_compute_topk(scores.detach(), topk, num_groups, group_topk)[1], None
                if not group_topk:
                    margin = margins(scores.detach(), topk)
                    if target.shape == live.shape:
                        (captured,) = ReplayRoutes.of(target[:, None], scores.shape[1]).by_layer()
                        live = or_tied(live, scores.detach(), captured)
            self._note(number, target, RoutedTokens(live, taken.to(live.dtype), margin))
        return values, taken

    def _note(self, layer: int, target: Tensor, routed: RoutedTokens) -> None:
        self._num_rows = len(routed.live)
        self._seen[layer] = _Seen(target, routed)

    def _compare_recomputed(self, layer: int, taken: Int[Tensor, "tokens topk"]) -> None:
        if not self._taken[layer]:
            return
        first = self._taken[layer].popleft()
        if first.shape != taken.shape:
            wrong = torch.tensor(len(taken), device=taken.device)
        else:
            wrong = (in_order(first) != in_order(taken.to(first.dtype))).any(-1).sum()
        self._audit.add_recomputed(layer, wrong, len(taken))


def _is_replaying(replay: Any) -> bool:
    # By name, so that the enumeration need not be imported.
    return getattr(getattr(replay, "router_replay_action", None), "value", None) == "replay_forward"


def _decoder_routers(chunk: nn.Module) -> list[tuple[RouterLayer, Any]]:
    """Return (layer, router) for the decoder's layers, without layers for multi-token prediction (MTP)."""
    return [
        (RouterLayer(module.layer_number - 1, RouterKind.MEGATRON, int(module.num_experts), int(module.topk)), module)
        for name, module in chunk.named_modules()
        if router_kind(module) is RouterKind.MEGATRON and "mtp" not in name.split(".")
    ]


def _entry(chunk: nn.Module) -> nn.Module:
    """Return the model inside its wrappers. Unlike theirs, its forward has named parameters."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def _place() -> _Place:
    if not dist.is_initialized():
        return _Place(None, 0, 1)
    from megatron.core import parallel_state

    stages = parallel_state.get_pipeline_model_parallel_group()
    return _Place(
        stages if dist.get_world_size(stages) > 1 else None,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _not_taken(totals: AgreementTotals, layers: Sequence[int]) -> list[RoutingAnomaly]:
    """Report target experts that a router has not taken, because, for example, a fused router reads no targets."""
    missed = totals.rows[:, Row.USABLE] - totals.rows[:, Row.TAKEN_SAME]
    compared = int(totals.tokens[0]) > 0
    return [
        RoutingAnomaly("rows", f"{count:,} rows of targets were set but not taken in layer {layer}", layer)
        for layer, count in zip(layers, missed.tolist(), strict=True)
        if compared and count
    ]


def _other_recomputed(recomputed: Int[Tensor, "layers 2"], layers: Sequence[int]) -> list[RoutingAnomaly]:
    """Report layers that took other experts when recomputed, so that their gradient does not fit the forward pass."""
    return [
        RoutingAnomaly(
            "rows", f"the repeated forward of layer {layer} took other experts in {wrong:,} of {rows:,} rows", layer
        )
        for layer, (rows, wrong) in zip(layers, recomputed.tolist(), strict=True)
        if wrong
    ]
