# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One rank's model, optimizer and schedule, and the steps that they take. Knows nothing of Ray."""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int

from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch
from nemo_rl_moe.metrics import MetricSeries, Reduction, concatenate
from nemo_rl_moe.models.images import IS_IMAGE
from nemo_rl_moe.models.interfaces import Head, LossFunction
from nemo_rl_moe.models.megatron.checkpoint import CheckpointWrite, load_checkpoint, start_write
from nemo_rl_moe.models.megatron.checkpoint.contents import TrainerCounters, TrainingObjects, sharded_contents
from nemo_rl_moe.models.megatron.common import get_moe_metrics
from nemo_rl_moe.models.megatron.generation import MegatronGenerator
from nemo_rl_moe.models.megatron.layers.routers import ExpertBias, force_routing
from nemo_rl_moe.models.megatron.model import parallel_state as project_parallel_state
from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.model.vision_model import pixels_per_token_of_positions
from nemo_rl_moe.models.megatron.training.advantage_recorder import attach_advantage_recorder
from nemo_rl_moe.models.megatron.training.captured_routes import StagesOfLayers, routes_of_microbatch
from nemo_rl_moe.models.megatron.training.forward_backward import ForwardBackward, metrics_to_host
from nemo_rl_moe.models.megatron.training.gradients_at_logits import attach_gradients_at_logits
from nemo_rl_moe.models.megatron.training.host_state import HostState
from nemo_rl_moe.models.megatron.training.optimizer import (
    build_optimizer,
    build_scheduler,
    half_precision_modules,
    step_if_finite,
    wrap_data_parallel,
)
from nemo_rl_moe.models.megatron.training.router_gradients import attach_router_gradients
from nemo_rl_moe.models.megatron.training.router_taps import attach_taps
from nemo_rl_moe.models.megatron.training.routing_recorder import attach_recorder
from nemo_rl_moe.models.megatron.weights.hf_export import save_weights, tensors_of_this_rank
from nemo_rl_moe.models.megatron.weights.starting_weights import ReferenceWeights, set_starting_weights
from nemo_rl_moe.models.model_files import write_model_files
from nemo_rl_moe.moe.load_statistics import ExpertLoad
from nemo_rl_moe.moe.routing_advantage import AdvantageScores
from nemo_rl_moe.moe.tape_ledger import LedgerTotals, TapeReport
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from nemo_rl_moe.weight_sync.transport import TransportSpec

# isort: split
from megatron.core.transformer.module import MegatronModule


@dataclass(frozen=True)
class RankTrainResult:
    """Result of one `train` call on one rank.

    Attributes:
        global_loss: Loss of the global batch over all ranks; of several, the mean. The same on every rank.
        grad_norm: Norm before clipping; of several steps, the mean. The same on every rank.
        lr: Learning rate of the last optimizer step.
        num_microbatches: Microbatches of this data-parallel rank.
        microbatch_metrics: The loss function's metrics of this rank's microbatches; empty where no loss is computed.
        moe_metrics: The same on every rank, but for those of a tape and of the routers' gradients, which rank 0 alone
            has.
        expert_load: The load matrix of the call, on rank 0 alone; None when tracking is off.
        num_skipped_updates: Optimizer steps left out for a loss or gradient that was not finite. The same on every
            rank.
        skipped_in_a_row: How many of the last steps of the call those are. The same on every rank.
        weight_version: Optimizer steps that the weights have seen since the start of the run. The same on every rank.
        tape_report: Of the rollouts' tape, on rank 0 alone; None without one.
        advantage_scores: Of experts by advantage, on rank 0 alone; None where nobody asks, or there are no advantages.
        memory: Metrics of this rank's memory, of `peak_memory_metrics`.
    """

    global_loss: float
    grad_norm: float
    lr: float
    num_microbatches: int
    microbatch_metrics: dict[str, MetricSeries]
    moe_metrics: dict[str, float]
    expert_load: ExpertLoad | None
    num_skipped_updates: int
    skipped_in_a_row: int
    weight_version: int
    tape_report: TapeReport | None = None
    advantage_scores: AdvantageScores | None = None
    memory: dict[str, MetricSeries] = field(default_factory=dict)


class MegatronModel:
    """One rank's part of a model, for forward passes alone: it generates, measures and sends its weights.

    No gradients, no optimizer state.

    Args:
        policy: The section of the configuration that describes it.
        hf_config: The model's Hugging Face configuration.
        weights_folder: Folder to read weights from; None for random ones.
        tokenizer: Needed where responses end with stop strings.
        heads: Heads that the model has.

    Attributes:
        notices: What a user should know of the weights that it starts with, a line each.
        num_updates: Optimizer steps that changed the weights: their version.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        hf_config: Any,
        weights_folder: Path | None,
        *,
        tokenizer: Any = None,
        heads: Collection[Head] = (Head.LOGPROBS,),
    ):
        self.policy, self.hf_config = policy, hf_config
        self.device = project_parallel_state.device()
        self.coordinates = project_parallel_state.parallel_coordinates()
        self.config = build_transformer_config(policy, hf_config)
        self.chunks = build_model_chunks(policy, self.config, hf_config, heads)
        self.notices = set_starting_weights(self.chunks, self.config, hf_config, weights_folder, policy.init_seed)
        generates = generating(policy)
        temperature = generates.generation.temperature if generates else 1.0
        for chunk in self.chunks:
            chunk.temperature = temperature
        self.modules: Sequence[MegatronModule] = half_precision_modules(self.config, self.chunks)
        self._taps = attach_taps(self.chunks, self.config, policy, self.device)
        self._forward_backward = ForwardBackward(
            config=self.config,
            packed=policy.sequence_packing.enabled,
            explicit_mask=policy.megatron_cfg.layer_spec == "local",
            device=self.device,
            temperature=temperature,
            taps=self._taps,
            pixels_per_token=pixels_per_token_of_positions(hf_config),
        )
        self._stages = None if self._taps is None else StagesOfLayers(self._taps, self.device)
        self._generator = MegatronGenerator(
            self.chunks, self.config, tokenizer, self.device, taps=self._taps, stages=self._stages
        )
        self.num_updates = 0

    @property
    def has_tower(self) -> bool:
        """True where this rank runs a vision tower: others read no pixels."""
        return any(hasattr(chunk, "vision") for chunk in self.chunks)

    def evaluate(self, shard: GlobalBatchShard, loss_function: LossFunction) -> dict[str, MetricSeries]:
        """Forward passes only. Returns the loss function's metrics of this rank's microbatches."""
        self._evaluation_mode()
        with torch.no_grad():
            results = self._forward_backward.evaluate(self.modules, shard, loss_function)
        return self._series(results)

    def logprobs(self, microbatches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """Forward passes only.

        Returns:
            For each microbatch, the log-probability of every token given those before it, `[sequences, longest]`, on
            the host; empty where no loss is computed.
        """
        self._evaluation_mode()
        with torch.no_grad():
            found = self._forward_backward.logprobs(self.modules, microbatches)
        return [logprobs.cpu() for logprobs in found] if self.coordinates.reports_loss else []

    def values(self, microbatches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """Run forward passes only, of a model with a value head.

        Returns:
            For each microbatch, the value of the state in which every token is chosen, `[sequences, longest]`, on the
            host; empty where no loss is computed.
        """
        self._evaluation_mode()
        with torch.no_grad():
            found = self._forward_backward.values(self.modules, microbatches)
        return [values.cpu() for values in found] if self.coordinates.reports_loss else []

    def logprobs_and_routes(
        self, microbatches: Sequence[TokenBatch]
    ) -> tuple[list[torch.Tensor], list[Int[np.ndarray, "tokens moe_layers topk"]]]:
        """`logprobs`, and the routed experts of each sequence, microbatch after microbatch; of the ranks that report.

        The model has MoE layers, and the configuration asks for a tape.
        """
        assert self._taps is not None
        assert self._stages is not None
        with self._taps.capturing() as captured:
            found = self.logprobs(microbatches)
        routes = [
            rows
            for microbatch, chosen in captured
            for rows in routes_of_microbatch(microbatch, chosen, self._stages, self._taps.cut)
        ]
        return found, routes if self.coordinates.reports_loss else []

    def compare_routes(self, microbatches: Sequence[TokenBatch]) -> tuple[list[torch.Tensor], LedgerTotals]:
        """`logprobs` with the routers' own experts, and how far these are those of the tape; every rank calls it.

        The model has MoE layers, and the configuration asks for a tape.
        """
        assert self._taps is not None
        with self._taps.comparing() as totals:
            return self.logprobs(microbatches), totals()

    def generate(self, request: GenerationBatch, max_batch_size: int | None) -> list[GeneratedSequence]:
        """Responses to this data-parallel rank's prompts; empty where no loss is computed. Every rank calls it."""
        self._evaluation_mode()
        return self._generator.generate(request, weight_version=self.num_updates, max_batch_size=max_batch_size)

    def send_weights(self, transfer: TransportSpec, *, altered: bool = False) -> int:
        """Sends this rank's part of the weights to the workers of a generation engine. Every rank calls it.

        Args:
            transfer: The transfer.
            altered: Send others in their place, of which every tensor differs.

        Returns:
            Bytes sent.

        Raises:
            WeightSyncError: A receiver or another rank could not go on; the model is as it was.
            RuntimeError: A rank ran out of memory, say. The same on every rank.
        """
        tensors = tensors_of_this_rank(self.chunks, self.config, self.hf_config)
        try:
            # A norm's weights are often all alike, so that moving them is not enough.
            sent = ((name, 1.5 * tensor.roll(1, -1)) for name, tensor in tensors) if altered else tensors
            return transfer.send(sent, dist.get_rank(), self.num_updates)
        finally:
            # The ranks bring each tensor together: one that stopped early would keep the others waiting.
            deque(tensors, maxlen=0)
            torch.cuda.empty_cache()  # of the tensors that were brought together: the engine's cache comes next

    def weight_fingerprints(self, number_format: str) -> dict[str, str]:
        """Return the fingerprints of this rank's part of the weights. Every rank calls it.

        Args:
            number_format: Of `weight_sync.fingerprints.fingerprint`.
        """
        tensors = tensors_of_this_rank(self.chunks, self.config, self.hf_config)
        try:
            return fingerprints_of(tensors, number_format)
        finally:
            deque(tensors, maxlen=0)  # the others wait in its collectives
            torch.cuda.empty_cache()  # the engine's cache comes next

    def save_weights(self, folder: Path, model_files: Mapping[str, bytes]) -> list[str]:
        """Writes the weights as a Hugging Face folder. Every rank calls it.

        Args:
            folder: Where to.
            model_files: What lies beside the weights, file name to content.

        Returns:
            Names of parameters that the family has no tensor for, which are left out.

        Raises:
            CheckpointError: A rank could not write its part. The same on every rank.
        """

        def write_beside(staging: Path) -> None:
            write_model_files(model_files, staging)

        return save_weights(self.chunks, self.config, self.hf_config, folder, write_beside)

    def _evaluation_mode(self) -> None:
        for chunk in self.modules:
            if chunk.training:  # it takes milliseconds to tell all modules
                chunk.eval()

    def _series(self, results: Sequence[Any]) -> dict[str, MetricSeries]:
        if not self.coordinates.reports_loss:
            return {}
        return {
            name: MetricSeries(tuple(values), reduction)
            for name, (values, reduction) in metrics_to_host(results).items()
        }


class MegatronTrainer(MegatronModel):
    """One rank's part of a model that Megatron-Core trains.

    Args:
        policy: The `policy` section of the configuration.
        hf_config: The model's Hugging Face configuration.
        weights_folder: Folder to read weights from; None for random ones.
        num_steps: Optimizer steps of the whole run, for the learning-rate schedule.
        tokenizer: Needed where responses end with stop strings.
        keep_reference: Keep the first weights as the reference model.
        heads: Heads that the model has.

    Attributes:
        host_state: Moves the optimizer's state between the device and the host.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        hf_config: Any,
        weights_folder: Path | None,
        num_steps: int,
        *,
        tokenizer: Any = None,
        keep_reference: bool = False,
        heads: Collection[Head] = (Head.LOGPROBS,),
    ):
        super().__init__(policy, hf_config, weights_folder, tokenizer=tokenizer, heads=heads)
        self.modules = self.ddp_chunks = wrap_data_parallel(policy, self.config, self.modules)
        self.optimizer = build_optimizer(policy, self.config, self.ddp_chunks)
        self.scheduler = build_scheduler(policy, self.optimizer, num_steps)
        force_routing(self.chunks, self.config)
        self._expert_bias = ExpertBias(self.chunks, self.config)
        tracked = policy.megatron_cfg.track_moe_metrics
        self._recorder = attach_recorder(self.chunks, self.config, self.device) if tracked else None
        self._advantages = attach_advantage_recorder(self.chunks, self.config, policy, self.device)
        self._forward_backward = replace(self._forward_backward, recorder=self._recorder, advantages=self._advantages)
        self._router_gradients = attach_router_gradients(self.ddp_chunks, self.config, policy, self.device)
        self._at_logits = attach_gradients_at_logits(self.ddp_chunks, self.config, policy, self.device)
        self._reference = ReferenceWeights(self.chunks) if keep_reference else None
        self.host_state = HostState(self.optimizer, self.ddp_chunks, self.device)
        self._calls = 0

    def train(self, shards: Sequence[GlobalBatchShard], loss_function: LossFunction) -> RankTrainResult:
        """One optimizer step for each global batch. Every rank calls it with as many shards and microbatches."""
        self.host_state.come_back()
        losses, grad_norms, lr = [], [], 0.0
        series: list[dict[str, MetricSeries]] = []
        num_skipped = skipped_in_a_row = 0
        num_microbatches = sum(len(shard.microbatches) for shard in shards)
        done = 0
        if self._recorder is not None:
            # A batch has its columns on every rank.
            counts_images = IS_IMAGE in shards[0].microbatches[0].columns
            self._recorder.start(num_microbatches, counts_images=counts_images)
        if self._taps is not None:
            self._taps.start_step(len(shards))
        if self._advantages is not None:
            self._advantages.start(shards)
        self._expert_bias.start_step()
        for chunk in self.ddp_chunks:
            chunk.train()
        gradient_metrics = self._measure_router_gradients(shards[0], loss_function)
        every = self.policy.megatron_cfg.router_gradients.at_logits_every_n_steps
        at_logits = self._at_logits if self._is_due(every) else None
        for shard in shards:
            for chunk in self.ddp_chunks:
                chunk.zero_grad_buffer()
            self._expert_bias.snapshot()
            # Of the first global batch alone, as the exact form.
            with nullcontext() if at_logits is None or done else at_logits.recording():
                results = self._forward_backward.train(self.ddp_chunks, shard, loss_function, first_microbatch=done)
            if self._taps is not None:
                self._taps.clear()
            done += len(shard.microbatches)
            series.append(self._series(results))
            losses.append(self._sum_over_ranks(series[-1]))
            # Without any target the gradient is that of auxiliary losses alone, and Adam would move on by its momentum.
            has_targets = shard.global_valid_tokens > 0
            is_finite = math.isfinite(losses[-1])
            grad_norm, is_updated = step_if_finite(self.optimizer, may_update=has_targets and is_finite)
            # Its float32 copies of gradients would be held while responses are generated.
            self.optimizer.zero_grad()
            grad_norms.append(grad_norm)
            lr = float(self.optimizer.param_groups[0]["lr"])
            if is_updated:
                self.scheduler.step(1)
                self.num_updates += 1
                self._expert_bias.count_frozen()
            else:
                self._expert_bias.restore()
            is_skipped = has_targets and not is_updated
            skipped_in_a_row = skipped_in_a_row + 1 if is_skipped else 0
            num_skipped += is_skipped
        if at_logits is not None:
            gradient_metrics |= at_logits.report()
        self._calls += 1
        taps, advantages, per_layer = self._taps, self._advantages, self.policy.megatron_cfg.moe_per_layer_logging
        tape_report = None if taps is None else taps.report(per_layer=per_layer)
        moe_metrics = self._moe_metrics(num_microbatches) | ({} if tape_report is None else tape_report.metrics)
        moe_metrics |= self._further_moe_metrics() | gradient_metrics
        return RankTrainResult(
            global_loss=sum(losses) / len(losses),
            grad_norm=sum(grad_norms) / len(grad_norms),
            lr=lr,
            num_microbatches=num_microbatches,
            microbatch_metrics=_mean_over_global_batches(series),
            moe_metrics=moe_metrics,
            # Once is enough: the driver reads the first rank's.
            expert_load=self._recorder.expert_load if self._recorder is not None and dist.get_rank() == 0 else None,
            num_skipped_updates=num_skipped,
            skipped_in_a_row=skipped_in_a_row,
            weight_version=self.num_updates,
            tape_report=tape_report,
            advantage_scores=advantages.scores if advantages is not None and dist.get_rank() == 0 else None,
            memory=peak_memory_metrics(self.device),
        )

    def reference_logprobs(self, microbatches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """`logprobs` of the weights that the run began with."""
        assert self._reference is not None  # the run keeps one wherever its loss needs it
        with self._reference.in_place():
            return self.logprobs(microbatches)

    def compare_reference_routes(self, microbatches: Sequence[TokenBatch]) -> tuple[list[torch.Tensor], LedgerTotals]:
        """`compare_routes` of the weights that the run began with."""
        assert self._reference is not None  # asked for where the run keeps one
        with self._reference.in_place():
            return self.compare_routes(microbatches)

    def start_checkpoint(self, directory: Path, *, with_optimizer: bool) -> CheckpointWrite:
        """Take a snapshot and begin to write it; what is written must have ended before. Every rank calls it."""
        counters = TrainerCounters(self.num_updates, self._calls, self.scheduler.num_steps) if with_optimizer else None
        contents = sharded_contents(self._training_objects, counters)
        return start_write(contents, directory)

    def load_checkpoint(self, directory: Path, *, with_optimizer: bool) -> None:
        """Goes back to a checkpoint. Every rank calls it.

        Raises:
            CheckpointError: It is damaged, holds anything but tensors, or belongs to another model.
        """
        self.host_state.come_back()
        counters = load_checkpoint(self._training_objects, directory, with_optimizer=with_optimizer)
        if counters is not None:
            self.num_updates, self._calls = counters.num_updates, counters.num_calls

    @property
    def _training_objects(self) -> TrainingObjects:
        return TrainingObjects(self.chunks, self.optimizer, self.scheduler)

    def _moe_metrics(self, num_microbatches: int) -> dict[str, float]:
        megatron = self.policy.megatron_cfg
        if not megatron.track_moe_metrics:
            return {}
        chosen = megatron.moe_metrics
        every = chosen.detailed_every_steps
        return get_moe_metrics(
            loss_scale=1 / num_microbatches,
            per_layer_logging=megatron.moe_per_layer_logging,
            config=self.config,
            device=self.device,
            recorder=self._recorder,
            detailed=chosen.mode == "detailed" or (every is not None and self._calls % every == 0),
            top_k_experts=chosen.top_k_experts,
            overload=megatron.log_moe_overload_factor,
            what_if_expert_parallel_sizes=chosen.what_if_expert_parallel_sizes,
        )

    def _further_moe_metrics(self) -> dict[str, float]:
        """Of the expert bias, and of experts by advantage."""
        if not self.policy.megatron_cfg.track_moe_metrics:
            return {}
        return self._expert_bias.metrics() | ({} if self._advantages is None else self._advantages.report())

    def _measure_router_gradients(self, shard: GlobalBatchShard, loss_function: LossFunction) -> dict[str, float]:
        """Metrics of the step's first global batch, before it is trained on; empty on steps without."""
        every = self.policy.megatron_cfg.router_gradients.every_n_steps
        if self._router_gradients is None or not self._is_due(every):
            return {}
        return self._router_gradients.measure(self._forward_backward, shard, loss_function)

    def _is_due(self, every: int | None) -> bool:
        """True in a `train` call that is the `every`th, counted over the whole run."""
        return every is not None and (self._calls + 1) % every == 0

    def _sum_over_ranks(self, series: dict[str, MetricSeries]) -> float:
        own = series["loss"].reduce() if "loss" in series else 0.0
        total = torch.tensor([own], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)


def peak_memory_metrics(device: torch.device) -> dict[str, MetricSeries]:
    """Most memory of a GPU that torch had allocated and reserved since the last call, in GB; empty on CPUs.

    The allocator's own counts: nothing waits for the GPU. Called at the end of a step's training, so that a step's
    peak is that of all that its process did, log-probability passes and generation too.
    """
    if device.type != "cuda":
        return {}
    peaks = {
        "max_memory_allocated_gb": torch.cuda.max_memory_allocated(device),
        "max_memory_reserved_gb": torch.cuda.max_memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return {name: MetricSeries((num_bytes / 1e9,), Reduction.MAX) for name, num_bytes in peaks.items()}


def _mean_over_global_batches(series: Sequence[dict[str, MetricSeries]]) -> dict[str, MetricSeries]:
    """One series for each metric; every global batch has its own mean to share in, and all of them count the same."""
    joined = {name: concatenate(part[name] for part in series) for name in series[0]}
    return {
        name: MetricSeries(tuple(value / len(series) for value in whole.values), whole.reduction)
        if whole.reduction is Reduction.SHARE
        else whole
        for name, whole in joined.items()
    }
