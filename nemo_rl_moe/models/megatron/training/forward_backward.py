# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes of microbatches through Megatron-Core's schedule, for training, evaluation and log-probabilities."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from nemo_rl_moe.distributed.batch import Destination, GlobalBatchShard, TokenBatch
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.checked_loss import outputs_of
from nemo_rl_moe.models.interfaces import Head, LossFunction, LossInputs, needs_of
from nemo_rl_moe.models.kept_tokens import KEPT_TOKENS
from nemo_rl_moe.models.megatron.layers.router_losses import RouterLosses
from nemo_rl_moe.models.megatron.model.releases import padding_mask_for_stage
from nemo_rl_moe.models.megatron.training.chunked_head import hidden_states_only
from nemo_rl_moe.models.megatron.training.context_parallel import place_of_rank
from nemo_rl_moe.models.megatron.training.indexer_hooks import IndexerHooks
from nemo_rl_moe.models.megatron.training.measurements import (
    ForwardResult,
    Measurement,
    Result,
    column_of_candidates,
    in_layout_of,
)
from nemo_rl_moe.models.megatron.training.microbatch import (
    MicrobatchShape,
    ModelMicrobatch,
    common_shape,
    pack_microbatch,
    pad_microbatch,
)
from nemo_rl_moe.models.megatron.training.router_hooks import RouterHooks, cut_of_rank, sequences_of_tokens
from nemo_rl_moe.models.megatron.training.step_observer import StepObserver, TrainingForward
from nemo_rl_moe.models.megatron.training.token_statistics import TokenStatistics

MicrobatchMetrics = dict[str, tuple[Tensor, Reduction]]


@dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward passes of this rank over microbatches.

    Attributes:
        packed: Whether sequences are packed, not padded.
        explicit_mask: Whether the core attention needs its causal mask as a tensor, as Megatron-Core's does.
        counts: Whether training passes count in the statistics of the routers' agreement with captured experts. False
            for passes outside of the step.
        mtp_loss_weight: Factor of the mean loss of the layers of multi-token prediction.
    """

    config: TransformerConfig
    packed: bool
    explicit_mask: bool
    device: torch.device
    router_losses: RouterLosses
    temperature: float = 1.0
    hooks: RouterHooks | None = None
    indexer_hooks: IndexerHooks | None = None
    observers: Sequence[StepObserver] = ()
    counts: bool = True
    pixels_per_token: int | None = None
    mtp_loss_weight: float = 0.0

    def train(
        self,
        chunks: Sequence[MegatronModule],
        shard: GlobalBatchShard,
        loss_function: LossFunction,
        first_microbatch: int = 0,
        num_microbatches: int | None = None,
    ) -> list[MicrobatchMetrics]:
        """Run one forward and backward pass over the first `num_microbatches` microbatches, by default all.

        If only some of them run, their gradients are scaled up to the size of a full global batch.

        Returns:
            For each microbatch, the loss function's metrics and `loss`. Empty on stages before the last.
        """
        self.router_losses.start_update(shard)
        step = partial(self._training_step, shard, loss_function)
        chosen = shard.microbatches[:num_microbatches]
        results = self._run(chunks, chosen, step, first_microbatch=first_microbatch, forward_only=False)
        for hooks in (self.hooks, self.indexer_hooks):
            if hooks is not None:
                hooks.clear()
        return results

    def evaluate(
        self, chunks: Sequence[MegatronModule], shard: GlobalBatchShard, loss_function: LossFunction
    ) -> list[MicrobatchMetrics]:
        """Return the same results as `train`, from forward passes only. The loss function also gets greedy matches."""
        return self.measure(chunks, shard.microbatches, partial(_loss_metrics, shard, loss_function))

    def measure(
        self, chunks: Sequence[MegatronModule], microbatches: Sequence[TokenBatch], measurement: Measurement[Result]
    ) -> list[Result]:
        """Return the measurement of each microbatch. Empty on stages before the last."""
        with hidden_states_only([unwrap_model(chunk) for chunk in chunks]):
            step = partial(self._forward_step, measurement)
            return self._run(chunks, microbatches, step, first_microbatch=0, forward_only=True)

    def _run(
        self,
        chunks: Sequence[MegatronModule],
        token_batches: Sequence[TokenBatch],
        step: Callable[..., Any],
        *,
        first_microbatch: int,
        forward_only: bool,
    ) -> list[Any]:
        microbatches = self.prepare(token_batches)
        first = microbatches[0]
        iterators = [enumerate(microbatches, start=first_microbatch) for _ in chunks]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=first.num_columns if first.shared is None else first.shared.input_ids.shape[1],
            micro_batch_size=first.input_ids.shape[0],
            forward_only=forward_only,
        )
        return results

    def prepare(self, token_batches: Sequence[TokenBatch]) -> list[ModelMicrobatch]:
        """Return the microbatches as inputs of the model, padded or packed, on the device."""
        place = place_of_rank()
        multiple = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        multiple *= place.sequence_multiple
        shape = MicrobatchShape(multiple, place=place, pixels_per_token=self.pixels_per_token)
        packed = self.packed or token_batches[0].shares_prefixes
        if self.config.pipeline_model_parallel_size > 1:
            shape = common_shape(token_batches, shape, packed=packed)
        make = pack_microbatch if packed else pad_microbatch
        return [make(batch, shape, self.device) for batch in token_batches]

    def _training_step(
        self,
        shard: GlobalBatchShard,
        loss_function: LossFunction,
        data_iterator: Iterator[tuple[int, ModelMicrobatch]],
        model: MegatronModule,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, MicrobatchMetrics]]]:
        number, microbatch = next(data_iterator)
        chunk = get_attr_wrapped_model(model, "vp_stage") or 0
        bare = unwrap_model(model)
        needs = needs_of(loss_function)
        bare.needs_entropy, bare.candidate_column = Head.ENTROPY in needs, column_of_candidates(microbatch, needs)
        forward = TrainingForward(chunk, number, microbatch)
        give_tokens = self._give_tokens(chunk, bare, microbatch)
        give_tokens()
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.training_forward(forward))
            output = self._run_model(model, microbatch, number, labels=microbatch.inputs.labels)
        mtp_logprobs, bare.mtp_logprobs = bare.mtp_logprobs, ()
        entropy, bare.entropy = bare.entropy, None
        values, bare.values = bare.values, None
        candidates, bare.candidates = bare.candidates, None
        # A loss may use any of them alone, and recomputation runs the routers again.
        heads = [
            head
            for head in (output, *mtp_logprobs, entropy, values, candidates)
            if head is not None and head.requires_grad
        ]
        register_multi_grad_hook(heads, lambda _: give_tokens(), mode="any")
        for hooks in (self.hooks, self.indexer_hooks):
            if hooks is not None:
                hooks.watch_backward(heads, chunk, microbatch)
        for observer in self.observers:
            observer.after_forward(forward, heads)
        if not bare.predicts_tokens:  # the output is then the values
            return output, partial(_value_loss, shard, loss_function, microbatch)
        loss = partial(_training_loss, shard, loss_function, microbatch, entropy, values, candidates)
        if not mtp_logprobs:
            return output, loss
        return output, partial(_with_mtp, shard, microbatch, mtp_logprobs, self.mtp_loss_weight, loss)

    def _give_tokens(self, chunk: int, model: Any, microbatch: ModelMicrobatch) -> Callable[[], None]:
        """Return a function that gives the tokens of a microbatch to the routers of a chunk and to their losses."""
        tokens = sequences_of_tokens(microbatch, cut_of_rank(self.config)) if self.router_losses.is_on else None

        def give() -> None:
            model.share_tokens(self._copies(microbatch))
            if tokens is not None:
                self.router_losses.set_tokens(chunk, tokens)

        return give

    def _copies(self, microbatch: ModelMicrobatch) -> Tensor | None:
        return None if microbatch.shared is None else microbatch.shared.copies_of(cut_of_rank(self.config)).source

    def _forward_step(
        self,
        measurement: Measurement[Result],
        data_iterator: Iterator[tuple[int, ModelMicrobatch]],
        model: MegatronModule,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Result]]]:
        number, microbatch = next(data_iterator)

        def finish(hidden_states: Tensor) -> tuple[Tensor, Result]:
            found = ForwardResult(unwrap_model(model), microbatch, hidden_states, self.temperature)
            # The schedule only divides this loss in place.
            return hidden_states.new_zeros(()), measurement(found)

        return self._run_model(model, microbatch, number, labels=None), finish

    def _run_model(
        self, model: MegatronModule, microbatch: ModelMicrobatch, number: int, labels: Tensor | None
    ) -> Tensor:
        chunk, trains = get_attr_wrapped_model(model, "vp_stage") or 0, labels is not None
        counts = trains and self.counts
        hooked: AbstractContextManager[None] = nullcontext()
        indexed: AbstractContextManager[None] = nullcontext()
        if self.hooks is not None:
            hooked = self.hooks.forward(chunk, microbatch, number, trains=trains, counts=counts)
        if self.indexer_hooks is not None:
            indexed = self.indexer_hooks.forward(chunk, microbatch, counts=counts)
        unwrap_model(model).share_tokens(self._copies(microbatch))
        inputs = microbatch.inputs
        with hooked, indexed:
            output: Tensor = model(
                inputs.input_ids,
                inputs.position_ids,
                self._attention_mask(microbatch),
                labels=labels,
                model_columns=inputs.model_columns,
                packed_seq_params=inputs.packed_seq_params,
                padding_mask=padding_mask_for_stage(
                    inputs.padding_mask,
                    is_first_stage=get_attr_wrapped_model(model, "pre_process"),
                    tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
                    tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
                ),
            )
        return output

    def _attention_mask(self, microbatch: ModelMicrobatch) -> Tensor | None:
        if not self.explicit_mask:
            return None
        length = microbatch.input_ids.shape[1]
        return torch.ones(length, length, dtype=torch.bool, device=self.device).triu_(1)[None, None]


def _loss_metrics(shard: GlobalBatchShard, loss_function: LossFunction, found: ForwardResult) -> MicrobatchMetrics:
    statistics = found.statistics(needs_of(loss_function))
    outputs = outputs_of(loss_function, _loss_inputs(shard, loss_function, found.microbatch, statistics))
    return outputs.metrics | {"loss": (outputs.loss, Reduction.SHARE)}


def _training_loss(
    shard: GlobalBatchShard,
    loss_function: LossFunction,
    microbatch: ModelMicrobatch,
    entropy: Tensor | None,
    values: Tensor | None,
    candidates: Tensor | None,
    output: Tensor,
) -> tuple[Tensor, MicrobatchMetrics]:
    statistics = in_layout_of(microbatch, TokenStatistics(-output, None, entropy, values, candidates))
    if KEPT_TOKENS in microbatch.model_columns:
        statistics = statistics.over_kept(microbatch.model_columns[KEPT_TOKENS])
    return _scaled_loss(shard, loss_function, microbatch, statistics)


def _with_mtp(
    shard: GlobalBatchShard,
    microbatch: ModelMicrobatch,
    mtp_logprobs: Sequence[Tensor],
    weight: float,
    training_loss: Callable[[Tensor], tuple[Tensor, MicrobatchMetrics]],
    output: Tensor,
) -> tuple[Tensor, MicrobatchMetrics]:
    """Return the training loss plus `weight` times the mean loss of the layers of multi-token prediction.

    A layer's loss is the negative log-probability of the trained tokens that it predicts, divided by the number of
    trained tokens of the global batch. `mtp_logprobs` has the layers' log-probabilities.
    """
    loss, metrics = training_loss(output)
    mask = microbatch.batch.token_mask
    for number, logprobs in enumerate(mtp_logprobs, start=1):
        of_targets = microbatch.per_sequence(logprobs)[:, :-number].where(mask[:, 1 + number :], 0.0)
        share = -of_targets.sum() / max(shard.global_valid_tokens, 1)
        loss = loss + share * (weight / len(mtp_logprobs) * _scale_of_shares(shard))
        metrics[f"mtp_{number}_loss"] = (share.detach(), Reduction.SHARE)
    return loss, metrics


def _value_loss(
    shard: GlobalBatchShard, loss_function: LossFunction, microbatch: ModelMicrobatch, output: Tensor
) -> tuple[Tensor, MicrobatchMetrics]:
    statistics = in_layout_of(microbatch, TokenStatistics.of_values(output))
    return _scaled_loss(shard, loss_function, microbatch, statistics)


def _scaled_loss(
    shard: GlobalBatchShard, loss_function: LossFunction, microbatch: ModelMicrobatch, statistics: TokenStatistics
) -> tuple[Tensor, MicrobatchMetrics]:
    outputs = outputs_of(loss_function, _loss_inputs(shard, loss_function, microbatch, statistics))
    return outputs.loss * _scale_of_shares(shard), outputs.metrics | {"loss": (outputs.loss.detach(), Reduction.SHARE)}


def _scale_of_shares(shard: GlobalBatchShard) -> int:
    # The schedule divides by the number of microbatches, and the gradient reduction by the data-parallel size. The loss
    # is already a share of the global sum, so it is multiplied by both numbers. Auxiliary losses keep the mean. Context
    # parallelism cancels: the schedule multiplies by its size and the reduction divides by it, and each rank has the
    # loss of full rows, with the gradient at its own columns.
    return len(shard.microbatches) * parallel_state.get_data_parallel_world_size()


def _loss_inputs(
    shard: GlobalBatchShard, loss_function: LossFunction, microbatch: ModelMicrobatch, statistics: TokenStatistics
) -> LossInputs:
    needs, values = needs_of(loss_function), statistics.values

    def by_sequence(values: Tensor | None) -> Tensor | None:
        return None if values is None else microbatch.per_sequence(values)

    columns = microbatch.batch.columns_for(Destination.LOSS)
    return LossInputs(
        logprobs=microbatch.per_sequence(statistics.logprobs),
        token_mask=microbatch.batch.token_mask[:, 1:],
        global_valid_tokens=shard.global_valid_tokens,
        global_sequences=shard.global_sequences,
        greedy_matches=by_sequence(statistics.greedy_matches),
        columns={name: column.of_targets() for name, column in columns.items()},
        entropy=by_sequence(statistics.entropy),
        values=by_sequence(values) if Head.VALUE in needs else None,
        candidates=by_sequence(statistics.candidates),
        scores=None if values is None or Head.SCORE not in needs else microbatch.at_last_tokens(values),
    )


def metrics_to_host(results: Sequence[MicrobatchMetrics]) -> dict[str, tuple[list[float], Reduction]]:
    """Return name -> values of the microbatches and reduction of each metric. All are copied to the host at once."""
    if not results:
        return {}
    names = list(results[0])
    stacked = torch.stack([torch.stack([result[name][0].double() for name in names]) for result in results])
    columns: list[list[Any]] = stacked.T.tolist()
    return {name: (column, results[0][name][1]) for name, column in zip(names, columns, strict=True)}
