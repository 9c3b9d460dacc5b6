# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Callback of transformers' and TRL's trainers: load balance, agreement of generation and training, findings.

    callback = RoutingCallback()
    trainer = SFTTrainer(model, args=..., train_dataset=...)
    callback.attach(trainer)
    trainer.train()

Metrics go into the trainer's logs. Findings are warnings of Python's `logging`. This module imports transformers.
"""

import logging
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from transformers import TrainerCallback

from nemo_rl_moe.routing.findings.tracker import Finding, FindingTracker, Thresholds
from nemo_rl_moe.routing.hooks.pass_recorder import PassKind, RoutedPass, RouteRecorder
from nemo_rl_moe.routing.hooks.router_loss_gradient import RouterLossGradient
from nemo_rl_moe.routing.hooks.routes import anomalies_of, audit_sequences
from nemo_rl_moe.routing.hooks.sequences import RoutedSequence, capture_description, paired_sequences, sequences_of
from nemo_rl_moe.routing.metrics.load_balance_metrics import (
    collect_expert_loads,
    compute_brief_metrics,
    disable_load_balance_tracking,
    enable_load_balance_tracking,
)
from nemo_rl_moe.routing.metrics.load_statistics import LayerLoad
from nemo_rl_moe.routing.metrics.metric_keys import OUTLIER_PREFIX, indices_of_layers, with_moe_prefix
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence

THRESHOLDS = Thresholds(dead_expert_steps=20, excess_cv=1.0, overload_factor=None, sustained_steps=20, sudden_steps=2)
"""Limits of findings, in successive logged steps."""
_log = logging.getLogger(__name__)


class RoutingCallback(TrainerCallback):
    """Callback that observes the routes of the trained model.

    Each logged step has these metrics, over all of its microbatches and processes: load balance of the training pass
    under `moe/`, and, if the model generates its training data as in GRPO without a server, agreement of generation
    with training under `moe/routing/`, and load balance of the generation under `rollout_moe/`. Exchanged layers,
    tokens and sequences are found in a sample from all processes.

    If the model trains with its load balancing loss (`output_router_logits=True`) and the weights of a token's experts
    add up to 1, `moe/router_gradient/coefficient_aux` is the coefficient with which the loss trains, and
    `moe/router_gradient/scale_aux` is its ratio to the wanted coefficient, ideally 1.

    Args:
        thresholds: Limits of findings.
        max_sequences: Largest number of sequences, per process and logged step, whose generation and training are
            compared.
        router_loss_coefficient: Wanted coefficient of the load balancing loss. None means the model's
            `router_aux_loss_coef`.
    """

    def __init__(
        self,
        thresholds: Thresholds = THRESHOLDS,
        max_sequences: int = 64,
        router_loss_coefficient: float | None = None,
    ):
        self._wanted_coefficient = router_loss_coefficient
        self._thresholds, self._max_sequences = thresholds, max_sequences
        self._model: nn.Module | None = None
        self._recorder: RouteRecorder | None = None
        self._losses: RouterLossGradient | None = None
        self._num_updates = 0
        self._tracker: FindingTracker | None = None
        self._has_generated = False
        self._rollout: list[RoutedSequence] = []
        self._compared: list[CapturedSequence] = []

    @property
    def findings(self) -> list[Finding]:
        return [] if self._tracker is None else self._tracker.findings

    def attach(self, trainer: Any) -> None:
        """Add the callback to a trainer, before the callbacks that report metrics, so that they get its metrics."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **more: Any) -> None:
        recorder = RouteRecorder(model, self._wants)  # raises for some models, so before other hooks
        enable_load_balance_tracking(model)
        # A scaler of float16 multiplies every gradient by a factor that it changes during training.
        is_scaled = bool(getattr(args, "fp16", False))
        self._losses = RouterLossGradient(model) if _balancing_coefficient(model) and not is_scaled else None
        self._model, self._recorder = model, recorder
        self._tracker = FindingTracker(self._thresholds, self._recorder.topk)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._recorder is not None:
            self._recorder.take()
            self._has_generated = bool(self._rollout)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._recorder is not None:
            self._num_updates += 1
            self._compare_passes(self._recorder.take())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **more: Any) -> None:
        """Add the metrics to the logs of a training step, and report new findings."""
        if self._model is None or self._recorder is None or "loss" not in logs:
            return
        metrics = self._end_of_step(self._model, self._recorder, state)
        logs.update(metrics)
        state.log_history[-1].update(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._model is not None and self._recorder is not None:
            self._recorder.remove_hooks()
            disable_load_balance_tracking(self._model)
        if self._losses is not None:
            self._losses.remove_hooks()
        self._model = self._recorder = self._losses = None
        self._rollout, self._compared = [], []

    def _wants(self, kind: PassKind) -> bool:
        """Return True if a pass must be recorded for comparison: a generation, or training after a generation."""
        if kind.is_training:
            return self._has_generated and len(self._compared) < self._max_sequences
        self._has_generated |= kind.has_cache
        return kind.has_cache

    def _compare_passes(self, passes: list[RoutedPass]) -> None:
        sampled = sequences_of([routed for routed in passes if not routed.kind.is_training])
        # A rollout serves the steps until the next rollout.
        self._rollout = sampled or self._rollout
        trained = sequences_of([routed for routed in passes if routed.kind.is_training])
        pairs = paired_sequences(self._rollout, trained, first=len(self._compared))
        self._compared += pairs[: self._max_sequences - len(self._compared)]

    def _router_losses(self, model: nn.Module) -> dict[str, float]:
        """Return metrics of how the gradient of the load balancing loss since the last log agrees with its equation."""
        found = None if self._losses is None else self._losses.take()
        updates, self._num_updates = max(self._num_updates, 1), 0
        if found is None:
            return {}
        coefficient = found.coefficient / updates
        scale = coefficient / (self._wanted_coefficient or _balancing_coefficient(model))
        metrics = {"router_gradient/coefficient_aux": coefficient, "router_gradient/scale_aux": scale}
        return metrics | ({"router_gradient/error_aux": max(abs(scale - 1), found.error)} if found.is_exact else {})

    def _end_of_step(self, model: nn.Module, recorder: RouteRecorder, state: Any) -> dict[str, float]:
        assert self._tracker is not None
        step = int(state.global_step)
        loads = collect_expert_loads(model, dist.group.WORLD if dist.is_initialized() else None)
        metrics = with_moe_prefix(compute_brief_metrics(loads, top_k=0) | self._router_losses(model))
        anomalies = None
        compared, self._compared = self._compared, []
        if self._has_generated and _adds_up_on_the_host():
            audited = audit_sequences(capture_description(recorder.layers, "trainer"), step, compared)
            anomalies = anomalies_of(audited)
            metrics |= {
                key: value
                for key, value in audited.metrics.items()
                if key.startswith(("moe/routing", "rollout_moe/")) and OUTLIER_PREFIX not in key and value == value
            }
        begun = self._tracker.observe(step, {f"train/{key}": value for key, value in metrics.items()}, *_matrix(loads))
        if anomalies is not None:
            begun += self._tracker.observe_anomalies(step, anomalies)
        if state.is_world_process_zero:
            for finding in begun:
                where = "" if finding.layer is None else f", layer {finding.layer}"
                _log.warning("routing, step %d%s: %s", step, where, finding.text)
        return metrics


def _balancing_coefficient(model: nn.Module) -> float:
    """Return the coefficient of the balancing loss that transformers adds to the model's loss, or 0."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(config, "output_router_logits", False):
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)


def _matrix(loads: dict[int, LayerLoad] | dict[str, LayerLoad]) -> tuple[tuple[int, ...], Any]:
    """Return the layers, and their counts as one matrix. It is None if numbers of experts differ between layers."""
    indices = indices_of_layers(loads)
    counts = [loads[key]["expert_load"] for key in indices]  # type: ignore[index]
    alike = len({len(row) for row in counts}) == 1
    return tuple(indices.values()), np.stack([row.numpy() for row in counts]) if alike else None


def _adds_up_on_the_host() -> bool:
    """Return True if there is one process, or its group can reduce tensors on the host, as gloo does."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    return "gloo" in dist.get_backend_config()
