# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Context manager that records the routes of a model of transformers or Megatron-Core.

with record_routes(model) as routes:
    model(**batch).loss.backward()
print(routes.load_balance_metrics())
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from nemo_rl_moe.routing.agreement.route_identity import RoutingAnomaly, foreign_capture
from nemo_rl_moe.routing.audit.auditor import AuditedStep, audit_step
from nemo_rl_moe.routing.hooks.pass_recorder import RoutedPass, RouteRecorder
from nemo_rl_moe.routing.hooks.sequences import (
    RoutedSequence,
    capture_description,
    paired_sequences,
    sequences_of,
    training_sequences,
)
from nemo_rl_moe.routing.metrics.expert_load_recorder import add_assignments
from nemo_rl_moe.routing.metrics.load_balance_metrics import load_balance_metrics
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.routing.replay import UNKNOWN
from nemo_rl_moe.runs.folder.captured_sequences import CaptureDescription, CapturedSequence, rows_of

_ALONE = f"process-{uuid.uuid4().hex[:12]}"
"""Name, in a capture, of a process that is not in a job of several processes."""


class Routes:
    """Routes of the forward passes that one process has made inside `record_routes`."""

    def __init__(self, recorder: RouteRecorder):
        self.passes: list[RoutedPass] = []
        self.description: CaptureDescription = capture_description(recorder.layers, "record_routes")

    def expert_load(self) -> ExpertLoad:
        """Return the number of tokens of each expert in each layer, without padding."""
        counts = torch.zeros(len(self.description.layers), self.description.num_experts, dtype=torch.long)
        for routed in self.passes:
            for layer, experts in enumerate(routed.experts.unbind(1)):
                add_assignments(counts[layer], experts.clamp(min=0), routed.real & (experts != UNKNOWN).all(-1))
        return ExpertLoad(self.description.layers, counts)

    def load_balance_metrics(self, *, detailed: bool = False) -> dict[str, float]:
        return load_balance_metrics(self.expert_load(), router_topk=self.description.topk, detailed=detailed)

    def sequences(self) -> list[RoutedSequence]:
        """Return the sequences of the passes. The passes of one generation are joined to sequences."""
        return sequences_of(self.passes)

    def capture(self, rollout: "Routes | None" = None) -> list[CapturedSequence]:
        """Return the sequences in the form of a capture, with these routes as the routes of training.

        The routes of `rollout`, if given, become the routes of the rollout.
        """
        if rollout is None:
            return training_sequences(self.sequences())
        return paired_sequences(rollout.sequences(), self.sequences())

    def audit(self, rollout: "Routes", step: int = 0) -> AuditedStep:
        """Return the audit against a rollout of the same tokens: agreement, load balance of both, findings."""
        return audit_sequences(self.description, step, self.capture(rollout))

    def write_capture(self, folder: Path, step: int, rollout: "Routes | None" = None) -> Path | None:
        """Write the sequences into a capture folder. Return the file, or None without sequences.

        The capture has the rank of the process in its job as the writer's name, so that findings can name the rank.
        """
        sequences = self.capture(rollout)
        from nemo_rl_moe.runs.folder.capture_folder import CaptureFolderWriter  # files need pyarrow, metrics do not

        writer = f"rank-{dist.get_rank()}" if dist.is_initialized() else _ALONE
        return CaptureFolderWriter(folder, self.description, writer).write(step, sequences) if sequences else None


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Routes]:
    """Record the passes of a model inside the context. The returned routes are complete when it ends.

    Raises:
        ValueError: No router is known, or layers have different numbers of experts.
    """
    recorder = RouteRecorder(model)
    routes = Routes(recorder)
    try:
        yield routes
    finally:
        recorder.remove_hooks()
        routes.passes += recorder.take()


def audit_sequences(description: CaptureDescription, step: int, sequences: Sequence[CapturedSequence]) -> AuditedStep:
    """Return the audit of sequences in memory.

    In a job of several processes, each process calls it with its sequences, and gets the audit of all. Counts and loads
    are sums over the processes. Layers, tokens and sequences are compared in a sample from up to 16 processes. If only
    one process has lost or wrong routes, it is named. Metrics of log-probabilities and rewards are only those of
    the calling process.
    """
    ranks = [f"rank-{rank}" for rank in range(dist.get_world_size())] if dist.is_initialized() else []
    if len(ranks) < 2:
        return audit_step(description, step, [rows_of(description, step, sequences)] if sequences else [])
    own = ranks[dist.get_rank()]
    named = [replace(sequence, name=f"{sequence.name} of {own}") for sequence in sequences]
    return audit_step(
        description, step, [replace(rows_of(description, step, named), writer=own)] if named else [], ranks
    )


def anomalies_of(audited: AuditedStep) -> tuple[RoutingAnomaly, ...]:
    """Return the anomalies of a step's routes. If there are none, report a rollout of different tokens or weights."""
    found = () if audited.report is None else audited.report.anomalies
    return found or tuple(foreign_capture(audited.metrics.get("moe/routing/slot_kappa")))
