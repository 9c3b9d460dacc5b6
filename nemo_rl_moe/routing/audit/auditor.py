# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Audit of one step of a capture: statistics, agreement, identity, load balance and mismatch, as far as it has data.

Rows are read a few sequences at a time, so a step may be larger than memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_rl_moe.metrics import with_prefix
from nemo_rl_moe.routing.agreement.rank_rows import SLOTS, rows_by_rank
from nemo_rl_moe.routing.agreement.repeated_rows import RepeatedRows
from nemo_rl_moe.routing.agreement.report import CheckTotals, routing_report
from nemo_rl_moe.routing.agreement.route_identity import RouteSample, RoutingAnomaly, layer_overlap
from nemo_rl_moe.routing.agreement.statistics import AgreementStatistics, RoutingReport, Row, row_anomalies
from nemo_rl_moe.routing.audit.exactness import ExactCounts
from nemo_rl_moe.routing.audit.history import RunHistory
from nemo_rl_moe.routing.audit.indexer import IndexerCounts
from nemo_rl_moe.routing.audit.prefixes import PrefixCollector
from nemo_rl_moe.routing.audit.sampling_mask import subset_metrics
from nemo_rl_moe.routing.audit.turns import TurnCounts
from nemo_rl_moe.routing.audit.versions import VersionRows
from nemo_rl_moe.routing.metrics.expert_load_recorder import sum_over_ranks
from nemo_rl_moe.routing.metrics.load_balance_metrics import load_balance_metrics
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.routing.metrics.mismatch_split import gap_metrics, split_gap, split_metrics
from nemo_rl_moe.routing.replay import ReplayRoutes, RoutedTokens
from nemo_rl_moe.runs.folder.captured_sequences import LOGPROBS, UNKNOWN, CaptureDescription, CapturedRows
from nemo_rl_moe.shapes import Float, Int

_TOKENS_AT_A_TIME = 4096
_SAMPLED_SEQUENCES, _SAMPLED_TOKENS = 16, 48
_OF_TOKENS = (*LOGPROBS, "advantages", "weight_versions", "kept_mass")


@dataclass(frozen=True)
class AuditedStep:
    step: int
    num_sequences: int
    num_tokens: int
    metrics: Mapping[str, float]
    report: RoutingReport | None
    rollout_load: Int[np.ndarray, "layers experts"] | None
    training_load: Int[np.ndarray, "layers experts"] | None
    layer_overlap: Float[np.ndarray, "layers layers"] | None = None
    columns: frozenset[str] = field(default_factory=frozenset)

    @property
    def anomalies(self) -> tuple[RoutingAnomaly, ...]:
        return () if self.report is None else self.report.anomalies

    def load(self, is_rollout: bool) -> Int[np.ndarray, "layers experts"] | None:
        return self.rollout_load if is_rollout else self.training_load


def audit_step(
    description: CaptureDescription,
    step: int,
    parts: Iterable[CapturedRows],
    writers: Sequence[str] = (),
    history: RunHistory | None = None,
) -> AuditedStep:
    """Return the audit of one step. Each of the `parts` has a few sequences of the step.

    Args:
        writers: Names of the processes that wrote the capture. If given, a process with wrong routes is named.
        history: Earlier steps, to compare this step with. This step is added to it.
    """
    audit = _StepAudit(description, writers, history)
    for part in parts:
        audit.add(part)
    return audit.finished(step)


def names_of_slots(writers: Sequence[str]) -> list[str]:
    """Return the names of the writers of each slot for messages. A slot has the counts of one writer, or of several if
    there are more writers than slots.
    """
    return [f"the writer {' or '.join(writers[slot::SLOTS])}" for slot in range(min(len(writers), SLOTS))]


class _StepAudit:
    def __init__(self, description: CaptureDescription, writers: Sequence[str], history: RunHistory | None):
        self._description, self._writers, self._history = description, writers, history
        self._prefixes, self._turns, self._versions = PrefixCollector(), TurnCounts(), VersionRows()
        self._exact, self._indexer = ExactCounts(description.layers), IndexerCounts()
        self._bias: Float[np.ndarray, "layers experts"] | None = None
        self._bias_before: Float[np.ndarray, "layers experts"] | None = None
        device = torch.device("cpu")
        shape = (len(description.layers), description.num_experts)
        self._layers = torch.arange(len(description.layers))
        # The second has the sequences without routes of training. In the first, they would differ from training.
        self._statistics, self._alone = AgreementStatistics(*shape, device), AgreementStatistics(*shape, device)
        self._repeated = AgreementStatistics(*shape, device)
        self._repeats = RepeatedRows(device)
        self._by_slot, self._alone_by_slot = (rows_by_rank(self._statistics.rows, 0) for _ in range(2))
        self._without_routes = torch.zeros(SLOTS, dtype=torch.long)
        self._loads = {name: np.zeros(shape, dtype=np.int64) for name in ("rollout_experts", "training_experts")}
        self._values: dict[str, list[Float[np.ndarray, " tokens"]]] = {name: [] for name in _OF_TOKENS}
        self._noise_gaps: list[Float[np.ndarray, " tokens"]] = []
        self._sampled: list[tuple[str, np.ndarray, np.ndarray]] = []
        self._rewards: list[np.ndarray] = []
        self._columns: set[str] | None = None
        self._num_sequences = self._num_tokens = self._num_passes = 0

    def add(self, rows: CapturedRows) -> None:
        self._num_sequences += len(rows.lengths)
        self._num_tokens += int(rows.lengths.sum())
        self._columns = set(rows.columns) if self._columns is None else self._columns & set(rows.columns)
        if rows.rewards is not None:
            self._rewards.append(rows.rewards)
        ends = rows.lengths.cumsum()
        fed = np.ones(int(ends[-1]), dtype=bool)
        fed[ends - 1] = False
        capture, live = rows.columns.get("rollout_experts"), rows.columns.get("training_experts")
        if capture is not None:
            self._count_load("rollout_experts", capture[fed])  # some engines write zeros for the last token
        if live is not None:
            self._count_load("training_experts", live)
        slot = (self._writers.index(rows.writer) if rows.writer in self._writers else 0) % SLOTS
        if capture is None:
            self._without_routes[slot] += int(fed.sum())
        else:
            statistics, by_slot = (
                (self._statistics, self._by_slot) if live is not None else (self._alone, self._alone_by_slot)
            )
            before = statistics.rows.clone()
            self._compare(statistics, capture, live, rows.columns.get("margins"), fed)
            by_slot += rows_by_rank(statistics.rows - before, slot)
            if live is not None:
                self._count_repeats(capture, live, fed, ends - rows.lengths)
                self._sample(rows, capture, live)
        if live is not None and (again := rows.columns.get("repeated_experts")) is not None:
            self._compare(self._repeated, again, live, None, fed)
        trained = rows.columns.get("loss_mask", np.ones(len(fed), dtype=bool)).copy()
        self._turns.add(capture, live, trained, rows.lengths)
        if self._history is not None:
            self._prefixes.add(rows)
        if capture is not None and live is not None and "weight_versions" in rows.columns:
            self._versions.add(capture, live, rows.columns["weight_versions"], trained, rows.lengths)
        trained[ends - rows.lengths] = False  # a first token has no log-probability
        self._indexer.add(rows)
        if self._bias is None:
            self._bias, self._bias_before = rows.expert_bias, rows.expert_bias_before
        if self._description.is_exact or self._description.is_bitwise:
            self._exact.add(rows, trained)
        for name in _OF_TOKENS:
            if name in rows.columns:
                self._values[name].append(rows.columns[name][trained])
        if (again := rows.columns.get("repeated_logprobs")) is not None and "training_logprobs" in rows.columns:
            # A noise floor needs only some of the sequences.
            gap = again.astype(np.float64) - rows.columns["training_logprobs"]
            self._noise_gaps.append(gap[trained])

    def finished(self, step: int) -> AuditedStep:
        """Return the audit of the sequences that all processes have added. A collective."""
        self._add_up_processes()
        layers = self._description.layers
        totals, alone = self._statistics.reduced(), self._alone.reduced()
        by_slot, more = self._by_slot, row_anomalies(alone, layers)
        is_compared = bool(totals.rows.any())
        if not is_compared:
            totals, by_slot, more = alone, self._alone_by_slot, []
        self._add_lost_rows(totals.rows, by_slot)
        more = [*more, *self._turns.anomalies(), *self._indexer.anomalies(), *self._impossible_logprobs()]
        more += self._exact.anomalies() if self._description.is_bitwise else ()
        metrics: dict[str, float] = {}
        report = overlap = None
        if totals.rows[:, Row.EXPECTED].any():
            num_experts = self._description.num_experts
            sample = self._capture_sample() if self._sampled else None
            names = [name for name, _, _ in self._sampled]
            checked = CheckTotals(
                self._repeats.counts,
                by_slot,
                num_ranks=len(self._writers),
                is_exact=self._description.is_exact and is_compared,
                rank_names=names_of_slots(self._writers),
            )
            report = routing_report(
                layers, totals, checked, sample, names, num_experts=num_experts, per_layer=True, more_anomalies=more
            )
            overlap = None if sample is None else layer_overlap(sample, num_experts)
            metrics |= with_prefix("moe", report.metrics)
        metrics |= with_prefix("moe", self._noise()) | with_prefix("moe", self._split())
        if self._rewards:
            metrics["reward"] = float(np.concatenate(self._rewards).mean())
        metrics |= self._of_engine() | self._versions.metrics() | with_prefix("moe/indexer", self._indexer.metrics())
        if self._history is not None:
            metrics |= self._history.prefixes.compared(step, self._prefixes.finished())
            metrics |= self._history.biases.metrics(self._bias, self._bias_before)
        if (advantages := self._of_all("advantages")) is not None:
            metrics |= {"advantages/min": float(advantages.min()), "advantages/max": float(advantages.max())}
        loads = {name: counts if counts.any() else None for name, counts in self._loads.items()}
        for name, prefix in (("training_experts", "moe"), ("rollout_experts", "rollout_moe")):
            if (counts := loads[name]) is not None:
                load = ExpertLoad(layers, torch.from_numpy(counts))
                metrics |= with_prefix(prefix, load_balance_metrics(load, router_topk=self._description.topk))
        return AuditedStep(
            step,
            self._num_sequences,
            self._num_tokens,
            metrics,
            report,
            loads["rollout_experts"],
            loads["training_experts"],
            overlap,
            frozenset(self._columns or ()),
        )

    def _add_up_processes(self) -> None:
        """Add up the counts of all processes, and share the sequences that each has sampled first."""
        if not dist.is_initialized() or (size := dist.get_world_size()) == 1:
            return
        names = list(self._loads)
        parts = [torch.tensor([self._num_sequences, self._num_tokens]), self._repeats.counts]
        parts += [self._by_slot, self._alone_by_slot, self._without_routes]
        parts += map(torch.from_numpy, [self._turns.places, self._turns.sequences, *self._loads.values()])
        sums = [part.long() for part in sum_over_ranks(parts, torch.device("cpu"))]
        numbers, self._repeats.counts, self._by_slot, self._alone_by_slot, self._without_routes, *more = sums
        self._turns.places, self._turns.sequences, *loads = (part.numpy() for part in more)
        self._num_sequences, self._num_tokens = numbers.tolist()
        self._loads = dict(zip(names, loads, strict=True))
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, self._sampled[: max(_SAMPLED_SEQUENCES // size, 1)])
        self._sampled = [window for of_process in everyone for window in of_process][:_SAMPLED_SEQUENCES]

    def _add_lost_rows(
        self, rows: Int[torch.Tensor, "layers kinds"], by_slot: Int[torch.Tensor, "slots kinds"]
    ) -> None:
        """Count sequences without routes as missing rows, if other sequences have routes."""
        if rows[:, Row.EXPECTED].any():
            for kind in (Row.EXPECTED, Row.MISSING):
                rows[:, kind] += self._without_routes.sum()
                by_slot[:, kind] += self._without_routes * len(rows)

    def _count_load(self, name: str, experts: Int[np.ndarray, "tokens layers topk"]) -> None:
        num_layers, num_experts = self._loads[name].shape
        for layer in range(num_layers):
            numbers = experts[:, layer].reshape(-1)
            known = numbers[(numbers >= 0) & (numbers < num_experts)]
            self._loads[name][layer] += np.bincount(known, minlength=num_experts)

    def _compare(
        self,
        statistics: AgreementStatistics,
        capture: Int[np.ndarray, "tokens layers topk"],
        live: Int[np.ndarray, "tokens layers topk"] | None,
        margins: Float[np.ndarray, "tokens layers"] | None,
        fed: np.ndarray,
    ) -> None:
        for first in range(0, len(capture), _TOKENS_AT_A_TIME):
            chosen = slice(first, first + _TOKENS_AT_A_TIME)
            of_tokens, routes = torch.from_numpy(fed[chosen]), capture[chosen].copy()
            seen: list[RoutedTokens] = []
            if live is not None:
                # A token without routes of training is not compared, and its routes do not count as unexpected.
                unknown = (live[chosen] == UNKNOWN).any((1, 2))
                routes[unknown & fed[chosen]] = UNKNOWN
                of_tokens = of_tokens & torch.from_numpy(~unknown)
                margin = None if margins is None else torch.from_numpy(margins[chosen].copy())
                # Ids that are no expert must not agree with any captured id.
                is_expert = (live[chosen] >= 0) & (live[chosen] < self._description.num_experts)
                named = torch.from_numpy(np.where(is_expert, live[chosen], UNKNOWN))
                seen = [
                    RoutedTokens(experts, experts, None if margin is None else margin[:, layer])
                    for layer, experts in enumerate(named.unbind(1))
                ]
            statistics.add(self._num_passes, self._layers, self._rows(routes), of_tokens, seen)
            self._num_passes += 1

    def _count_repeats(
        self,
        capture: Int[np.ndarray, "tokens layers topk"],
        live: Int[np.ndarray, "tokens layers topk"],
        fed: np.ndarray,
        starts: Int[np.ndarray, " sequences"],
    ) -> None:
        known = (live != UNKNOWN).all((1, 2))
        follows = known.copy()
        follows[1:] &= known[:-1]
        follows[starts] = False
        for first in range(0, len(capture), _TOKENS_AT_A_TIME):
            chosen = slice(first, first + _TOKENS_AT_A_TIME)
            self._repeats.add(
                self._rows(capture[chosen].copy()),
                self._rows(live[chosen].copy()).planes,
                torch.from_numpy(fed[chosen] & known[chosen]),
                1,
                torch.from_numpy(follows[chosen]),
            )

    def _rows(self, routes: Int[np.ndarray, "tokens layers topk"]) -> ReplayRoutes:
        return ReplayRoutes.of(torch.from_numpy(routes), self._description.num_experts)

    def _sample(self, rows: CapturedRows, capture: np.ndarray, live: np.ndarray) -> None:
        ends = rows.lengths.cumsum()
        for name, length, end in zip(rows.names, rows.lengths.tolist(), ends.tolist(), strict=True):
            if len(self._sampled) == _SAMPLED_SEQUENCES:
                return
            window = slice(max(end - length, end - 1 - _SAMPLED_TOKENS), end - 1)
            self._sampled.append((name, capture[window], live[window]))

    def _capture_sample(self) -> RouteSample:
        shape = (len(self._sampled), _SAMPLED_TOKENS, len(self._description.layers), self._description.topk)
        both = np.full((2, *shape), UNKNOWN, dtype=np.int16)
        for number, (_, *windows) in enumerate(self._sampled):
            for kind, window in enumerate(windows):
                both[kind, number, : len(window)] = window
        return RouteSample(capture=both[0], live=both[1])

    def _noise(self) -> dict[str, float]:
        totals = self._repeated.reduced()
        found = {}
        if totals.tokens[0]:
            found["rows_differing_trainer"] = totals.rows_differing
            found["tokens_differing_trainer"] = totals.tokens_differing
        gaps = np.concatenate(self._noise_gaps) if self._noise_gaps else np.zeros(0)
        if len(gaps):
            gap = gap_metrics(gaps)
            found |= {f"{name}_trainer": gap[name] for name in ("mean_abs", "max_abs", "kl")}
        return with_prefix("routing_noise", found)

    def _of_engine(self) -> dict[str, float]:
        """Return metrics that show, over several steps, whether the engine computes with the newest weights."""
        found = {}
        rollout, training = self._of_rollout(), self._of_all("training_logprobs")
        if rollout is not None and training is not None:
            known = np.isfinite(training) & np.isfinite(rollout)
            gap = training[known].astype(np.float64) - rollout[known]
            found = subset_metrics(gap) | ({"gap": float(np.abs(gap).mean())} if len(gap) else {})
        if (versions := self._of_all("weight_versions")) is not None:
            found["weight_version"] = float(versions.max())
        return with_prefix("moe/engine", found | self._exact.metrics())

    def _split(self) -> dict[str, float]:
        generation, training = self._of_rollout(), self._of_all("training_logprobs")
        if generation is None or training is None:
            return {}
        replayed = self._of_all("replayed_logprobs")
        possible = np.isfinite(generation) & np.isfinite(training)
        possible &= True if replayed is None else np.isfinite(replayed)
        if not possible.any():
            return {}
        generation, training = generation[possible], training[possible]
        if replayed is None:
            parts = {"total": training.astype(np.float64) - generation}
        else:
            parts = split_gap(generation, replayed[possible], training)
        return with_prefix("routing_split", split_metrics(parts) | {"tokens": float(len(training))})

    def _impossible_logprobs(self) -> Iterator[RoutingAnomaly]:
        """Report log-probabilities of trained tokens that are NaN or infinite."""
        # Only with a mask: a prompt's log-probabilities are unknown, so NaN.
        if "loss_mask" not in (self._columns or ()):
            return
        for name in ("rollout_logprobs", "training_logprobs"):
            if (values := self._of_all(name)) is not None and (wrong := int((~np.isfinite(values)).sum())):
                text = f"{wrong:,} of {len(values):,} {name} of trained tokens are NaN or infinite"
                yield RoutingAnomaly("logprobs", text)

    def _of_rollout(self) -> Float[np.ndarray, " tokens"] | None:
        """Return the rollout's log-probabilities, over the full vocabulary if the sampled subset's mass is known."""
        values, kept = self._of_all("rollout_logprobs"), self._of_all("kept_mass")
        if values is None or kept is None:
            return values
        return values + np.log(np.maximum(kept, np.finfo(np.float32).tiny))

    def _of_all(self, name: str) -> Float[np.ndarray, " tokens"] | None:
        """Return a column of the trained tokens, if all sequences have it."""
        found = self._values[name]
        joined = np.concatenate(found) if found and name in (self._columns or ()) else None
        return joined if joined is not None and len(joined) else None
