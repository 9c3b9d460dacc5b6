# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""One rank's model for forward passes, with generation, refits and saved weights. The module does not depend on Ray."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from torch.utils._pytree import tree_map_only

from nemo_rl_moe.config.schema_grpo import generating
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.distributed.batch import GlobalBatchShard, TokenBatch
from nemo_rl_moe.distributed.stored_rows import IN_PLACE, RowStore, StoredRows
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationBatch, store_captured, store_kept_tokens
from nemo_rl_moe.metrics import MetricSeries
from nemo_rl_moe.models.flops import forward_flops
from nemo_rl_moe.models.interfaces import Head, LossFunction
from nemo_rl_moe.models.kept_tensors import find_kept
from nemo_rl_moe.models.kept_tokens import check_kept_tokens
from nemo_rl_moe.models.megatron.generation import MegatronGenerator
from nemo_rl_moe.models.megatron.layers.router_losses import RouterLosses
from nemo_rl_moe.models.megatron.lora.attach import add_adapters
from nemo_rl_moe.models.megatron.lora.changes import changed_by_adapters
from nemo_rl_moe.models.megatron.lora.peft_folder import factors_on_first_rank, load_adapter, write_adapter
from nemo_rl_moe.models.megatron.lora.probe import AdapterProbe
from nemo_rl_moe.models.megatron.lora.transfer import factors_of_this_rank, factors_with_scale, load_factors
from nemo_rl_moe.models.megatron.model import parallel_state as project_parallel_state
from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
from nemo_rl_moe.models.megatron.model.router_settings import setting_sources
from nemo_rl_moe.models.megatron.model.sparse_attention import indexer_flops
from nemo_rl_moe.models.megatron.model.transformer_config import (
    attention_windows,
    build_transformer_config,
    effective_moe_configuration,
    num_trained_mtp_layers,
)
from nemo_rl_moe.models.megatron.model.vision_model import pixels_per_token_of_positions
from nemo_rl_moe.models.megatron.training.captured_routes import Capturing, StagesOfLayers, routes_of_microbatch
from nemo_rl_moe.models.megatron.training.forward_backward import ForwardBackward, metrics_to_host
from nemo_rl_moe.models.megatron.training.indexer_hooks import attach_indexer_hooks
from nemo_rl_moe.models.megatron.training.measurements import Measurement, Result, token_logprobs
from nemo_rl_moe.models.megatron.training.optimizer import half_precision_modules
from nemo_rl_moe.models.megatron.training.router_hooks import attach_hooks
from nemo_rl_moe.models.megatron.weights.hf_broadcast import tensors_on_every_rank
from nemo_rl_moe.models.megatron.weights.hf_export import save_weights, tensors_of_this_rank
from nemo_rl_moe.models.megatron.weights.hf_receive import load_tensors
from nemo_rl_moe.models.megatron.weights.hf_sources import is_of_main_model
from nemo_rl_moe.models.megatron.weights.starting_weights import set_starting_weights
from nemo_rl_moe.models.model_files import write_model_files
from nemo_rl_moe.models.peft_files import ADAPTER_FOLDER
from nemo_rl_moe.models.rank_results import RankDescription
from nemo_rl_moe.routing.agreement.statistics import AgreementTotals
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from nemo_rl_moe.weight_sync.transport import TransportSpec


class MegatronModel:
    """One rank's part of a model without gradients and optimizer state.

    Args:
        weights_folder: Folder to read weights from, or None for random weights.
        tokenizer: Only needed for stop strings.
        store: Store for large arrays, such as routed experts and pixels. Batches and results contain only handles.

    Attributes:
        adapters: Switch of the model's adapters, or None without adapters.
        num_updates: Number of optimizer steps that changed the weights: the weights' version.
    """

    is_trainer = False

    def __init__(
        self,
        policy: PolicyConfig,
        hf_config: Any,
        weights_folder: Path | None,
        *,
        tokenizer: Any = None,
        heads: Collection[Head] = (Head.LOGPROBS,),
        store: RowStore = IN_PLACE,
    ):
        self.policy, self.hf_config, self._store = policy, hf_config, store
        self.device = project_parallel_state.device()
        self.coordinates = project_parallel_state.parallel_coordinates()
        self.config = build_transformer_config(policy, hf_config)
        self.chunks = build_model_chunks(policy, self.config, hf_config, heads)
        self.notices = set_starting_weights(
            self.chunks,
            self.config,
            hf_config,
            weights_folder,
            policy.init_seed,
            skips_mtp=not (self.is_trainer and Head.LOGPROBS in heads),
        )
        self._trains_mtp = any(chunk.trains_mtp for chunk in self.chunks)
        self._kept = None if self._trains_mtp else find_kept(weights_folder, hf_config)
        self.adapters = None
        if policy.lora is not None:
            self.adapters = add_adapters(self.chunks, self.config, hf_config, policy.lora, policy.init_seed)
            if policy.lora.path is not None:
                load_adapter(self.chunks, Path(policy.lora.path), policy.lora.rank, hf_config)
        generates = generating(policy)
        temperature = generates.generation.temperature if generates else 1.0
        for chunk in self.chunks:
            chunk.temperature = temperature
        self.modules: Sequence[MegatronModule] = half_precision_modules(self.config, self.chunks)
        self._hooks = attach_hooks(self.chunks, self.config, policy, self.device)
        indexers = attach_indexer_hooks(self.chunks, policy, hf_config, self.device)
        self._router_losses = RouterLosses(self.chunks, self.config)
        self._forward_backward = ForwardBackward(
            config=self.config,
            router_losses=self._router_losses,
            packed=policy.sequence_packing.enabled,
            explicit_mask=policy.megatron_cfg.layer_spec == "local",
            device=self.device,
            temperature=temperature,
            hooks=self._hooks,
            indexer_hooks=indexers,
            pixels_per_token=pixels_per_token_of_positions(hf_config),
            mtp_loss_weight=policy.megatron_cfg.mtp_loss_scaling_factor,
        )
        self._stages = None if self._hooks is None else StagesOfLayers(self._hooks, self.device)
        topk = int(self.config.moe_router_topk)
        self._generator = MegatronGenerator(
            self.chunks,
            self.config,
            tokenizer,
            self.device,
            routers=None
            if self._hooks is None or self._stages is None
            else Capturing(self._hooks, self._stages, topk, torch.int16),
            indexers=None
            if indexers is None
            else Capturing(indexers, StagesOfLayers(indexers, self.device), indexers.topk, torch.int32),
        )
        self._probe = AdapterProbe(self.chunks)
        self.num_updates = 0

    @property
    def has_tower(self) -> bool:
        """Whether this rank has a vision tower. Only ranks with a tower read pixels."""
        return any(hasattr(chunk, "vision") for chunk in self.chunks)

    def describe(self, config_json: Mapping[str, Any]) -> RankDescription:
        """Return this rank's coordinates, router settings, notices, FLOPs and GPU, for the log at the start.

        Args:
            config_json: The model's Hugging Face configuration, as in the file.
        """
        return RankDescription(
            coordinates=self.coordinates,
            moe_configuration=effective_moe_configuration(self.config),
            moe_configuration_sources=setting_sources(self.policy, self.hf_config, config_json, self.config),
            notices=self.notices,
            forward_flops=forward_flops(
                self.config,
                self.hf_config.vocab_size,
                attention_windows(self.config),
                indexer_flops(self.policy, self.hf_config),
                mtp_layers=num_trained_mtp_layers(self.policy, self.hf_config) if self._trains_mtp else 0,
                detaches_mtp=self.policy.megatron_cfg.mtp_detach_heads,
            ),
            gpu=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None,
        )

    def evaluate(self, shard: GlobalBatchShard, loss_function: LossFunction) -> dict[str, MetricSeries]:
        """Return the loss function's metrics of this rank's microbatches, from forward passes only."""
        shard = replace(shard, microbatches=self._fetched(shard.microbatches))
        self._evaluation_mode()
        with torch.no_grad():
            results = self._forward_backward.evaluate(self.modules, shard, loss_function)
        return self._series(results)

    def measure(self, microbatches: Sequence[TokenBatch], measurement: Measurement[Result]) -> list[Result]:
        """Return the measurement of each microbatch, in host memory.

        Ranks without the loss (`coordinates.reports_loss`) return an empty list.
        """
        self._evaluation_mode()
        with torch.no_grad():
            found = self._forward_backward.measure(self.modules, self._fetched(microbatches), measurement)
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, found) if self.coordinates.reports_loss else []

    def logprobs(self, microbatches: Sequence[TokenBatch]) -> list[torch.Tensor]:
        """Return `token_logprobs` of each microbatch, `[sequences, longest]`, as `measure` does."""
        return self.measure(microbatches, token_logprobs)

    def logprobs_and_routes(self, microbatches: Sequence[TokenBatch]) -> tuple[list[torch.Tensor], list[StoredRows]]:
        """Return `logprobs`, and each sequence's routed experts in the store, in the order of the microbatches."""
        assert self._hooks is not None  # the configuration asks for a capture
        assert self._stages is not None
        with self._hooks.capturing() as captured:
            found = self.logprobs(microbatches)
        routes = [
            rows
            for microbatch, chosen in captured
            for rows in routes_of_microbatch(microbatch, chosen, self._stages, self._hooks.cut)
        ]
        return found, self._store.keep(routes) if self.coordinates.reports_loss else []

    def compare_routes(self, microbatches: Sequence[TokenBatch]) -> tuple[list[torch.Tensor], AgreementTotals]:
        """Return `logprobs` with freely choosing routers, and how far their experts agree with the captured experts.

        Every rank calls it.
        """
        assert self._hooks is not None
        with self._hooks.comparing() as totals:
            return self.logprobs(microbatches), totals()

    def generate(self, request: GenerationBatch, max_batch_size: int | None) -> list[GeneratedSequence]:
        """Return the responses to this data-parallel rank's prompts, with their routed experts in the store.

        Every rank calls it. Ranks that do not report a loss get an empty list.
        """
        if self.has_tower:
            request = request.fetched(self._store.fetch)
        self._evaluation_mode()
        found = self._generator.generate(request, weight_version=self.num_updates, max_batch_size=max_batch_size)
        return store_kept_tokens(store_captured(found, self._store), self._store)

    def send_weights(self, transfer: TransportSpec, altered: bool = False) -> int:
        """Send this rank's part of the weights to the workers of a generation engine. Return the number of sent bytes.

        Every rank calls it.

        Args:
            altered: Whether to send other values than the weights, for a test of the engine.

        Raises:
            WeightSyncError: A receiver or another rank failed. The model is unchanged.
            RuntimeError: A rank failed, for example out of memory. The error is the same on every rank.
        """
        tensors = self._sent_tensors(on_device=transfer.backend.on_device, changed_only=transfer.changed_only)
        try:
            if dist.get_rank() >= transfer.num_senders:
                return 0
            # A norm's weights are often all equal, so rolling alone would not change them.
            sent = ((name, 1.5 * tensor.roll(1, -1)) for name, tensor in tensors) if altered else tensors
            return transfer.send(sent, dist.get_rank(), self.num_updates)
        finally:
            # Each tensor is gathered in collectives: a rank that stops early would leave the others waiting.
            deque(tensors, maxlen=0)
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()  # torch keeps a bucket that a receiver still had when this rank dropped it
            torch.cuda.empty_cache()  # frees the gathered tensors before the engine allocates its cache

    def receive_weights(self, transfer: TransportSpec, receiver: int, version: int) -> int:
        """Receive the weights of a trainer's ranks, and return the number of received bytes. Every rank calls it.

        Args:
            receiver: Index of this rank among all receivers of the transfer.
            version: Number of optimizer steps of the received weights.

        Raises:
            WeightSyncError: Not every tensor arrived exactly once. The weights are a mixture of old and new values.
        """
        load = partial(load_tensors, self.chunks, self.config, self.hf_config, keeps_others=transfer.changed_only)
        if self._sends_adapters:
            load = partial(load_factors, self.chunks)
        num_bytes = transfer.receive(receiver, load)
        self.num_updates = version
        return num_bytes

    def weight_fingerprints(self, number_format: str) -> dict[str, str]:
        """Return name -> fingerprint for this rank's part of the merged weights. Every rank calls it.

        If the engine gets the adapters, base and adapters have separate fingerprints. `B` is multiplied by the scale,
        so that a wrong scale shows too.
        """
        of_main = partial(is_of_main_model, hf_config=self.hf_config)
        merged = partial(tensors_of_this_rank, self.chunks, self.config, self.hf_config, of_main)
        if self.adapters is None or not self._sends_adapters:
            return self._fingerprints(merged(), number_format)
        found = self._fingerprints(factors_with_scale(self.chunks, number_format), number_format)
        with self.adapters.off():
            return found | self._fingerprints(merged(), number_format)

    def _fingerprints(self, tensors: Iterator[tuple[str, torch.Tensor]], number_format: str) -> dict[str, str]:
        try:
            return fingerprints_of(tensors, number_format)
        finally:
            deque(tensors, maxlen=0)  # after a failure too, because the other ranks wait in the collectives
            torch.cuda.empty_cache()  # before the engine allocates its cache

    @property
    def _sends_adapters(self) -> bool:
        """Whether the engine has the base and gets only the adapters. Otherwise it gets merged weights."""
        generates = generating(self.policy)
        return self.adapters is not None and generates is not None and generates.generation.lora_refit == "adapter"

    def _sent_tensors(self, *, on_device: bool, changed_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors that this rank sends to an engine."""
        if self._sends_adapters:
            return self._adapters_and_missing_base(changed_only=changed_only)
        gather = tensors_on_every_rank if on_device else tensors_of_this_rank
        of_main = partial(is_of_main_model, hf_config=self.hf_config)
        is_wanted = changed_by_adapters(self.chunks) if changed_only else of_main
        return gather(self.chunks, self.config, self.hf_config, is_wanted)

    def _adapters_and_missing_base(self, *, changed_only: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the adapters' factors, after the base if the engine has not got it yet."""
        generates = generating(self.policy)
        if generates is not None and generates.generation.engine.lacks_base and not changed_only:
            assert self.adapters is not None  # the caller sends them
            with self.adapters.off():
                yield from tensors_of_this_rank(self.chunks, self.config, self.hf_config)
        yield from factors_of_this_rank(self.chunks)

    def begin_probe(self) -> None:
        """Change the adapters' values until `end_probe`, to check that an engine uses the adapters."""
        self._probe.begin()

    def end_probe(self) -> None:
        """Restore the adapters' values bit by bit."""
        self._probe.end()

    def empty_cache(self) -> None:
        """Return the unused memory of torch's allocator to the device."""
        torch.cuda.empty_cache()

    def save_weights(self, folder: Path, model_files: Mapping[str, bytes]) -> list[str]:
        """Write the weights as a Hugging Face folder. Adapters are merged, and also written to a subfolder.

        Tensors that the model does not load (`find_kept`) are copied from the folder of the initial weights.

        Every rank calls it.

        Returns:
            Names of parameters that were not written, because the family's format has no tensor for them.

        Raises:
            CheckpointError: A rank could not write its part. The error is the same on every rank.
        """
        lora = self.policy.lora
        factors = {} if lora is None else factors_on_first_rank(self.chunks)

        def write_other_files(staging: Path) -> None:
            write_model_files(model_files, staging)
            if lora is not None:
                base = self.policy.model_name
                write_adapter(staging / ADAPTER_FOLDER, factors, lora, self.hf_config, base, "fused")

        return save_weights(self.chunks, self.config, self.hf_config, folder, write_other_files, kept=self._kept)

    def _fetched(self, microbatches: Sequence[TokenBatch]) -> tuple[TokenBatch, ...]:
        """Return the microbatches with their stored columns, and with images if the rank reads images."""
        found = tuple(batch.fetched(self._store.fetch, with_shared=self.has_tower) for batch in microbatches)
        for batch in found:
            check_kept_tokens(batch)
        return found

    def _evaluation_mode(self) -> None:
        for chunk in self.modules:
            if chunk.training:  # switching all modules takes milliseconds
                chunk.eval()

    def _series(self, results: Sequence[Any]) -> dict[str, MetricSeries]:
        if not self.coordinates.reports_loss:
            return {}
        return {
            name: MetricSeries(tuple(values), reduction)
            for name, (values, reduction) in metrics_to_host(results).items()
        }
