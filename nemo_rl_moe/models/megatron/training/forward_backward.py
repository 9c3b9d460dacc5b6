# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes of microbatches through Megatron-Core's schedule, for training, evaluation and log-probabilities."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import Tensor

from nemo_rl_moe.distributed.batch import Destination, GlobalBatchShard, TokenBatch
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.candidates import CANDIDATE_IDS
from nemo_rl_moe.models.checked_loss import outputs_of
from nemo_rl_moe.models.interfaces import Head, LossFunction, LossInputs, needs_of
from nemo_rl_moe.models.kept_tokens import KEPT_TOKENS
from nemo_rl_moe.models.megatron.layers.router_losses import RouterLosses
from nemo_rl_moe.models.megatron.model.releases import padding_mask_for_stage
from nemo_rl_moe.models.megatron.training.chunked_head import (
    chunked_token_statistics,
    chunked_top_candidates,
    hidden_states_only,
    statistics_of_heads,
)
from nemo_rl_moe.models.megatron.training.context_parallel import place_of_rank
from nemo_rl_moe.models.megatron.training.microbatch import (
    MicrobatchShape,
    ModelMicrobatch,
    common_shape,
    pack_microbatch,
    pad_microbatch,
)
from nemo_rl_moe.models.megatron.training.prefix_tree import predecessors_of
from nemo_rl_moe.models.megatron.training.router_hooks import RouterHooks, cut_of_rank, sequences_of_tokens
from nemo_rl_moe.models.megatron.training.step_observer import StepObserver, TrainingForward
from nemo_rl_moe.models.megatron.training.token_statistics import TokenStatistics, score_norms

MicrobatchMetrics = dict[str, tuple[Tensor, Reduction]]
Result = TypeVar("Result")


@dataclass(frozen=True)
class ForwardBackward:
    """Forward and backward passes of this rank over microbatches.

    Attributes:
        packed: Whether sequences are packed, not padded.
        explicit_mask: Whether the core attention needs its causal mask as a tensor, as Megatron-Core's does.
        counts: Whether training passes count in the statistics of the routers' agreement with captured experts. False
            for passes outside of the step.
    """

    config: TransformerConfig
    packed: bool
    explicit_mask: bool
    device: torch.device
    router_losses: RouterLosses
    temperature: float = 1.0
    hooks: RouterHooks | None = None
    observers: Sequence[StepObserver] = ()
    counts: bool = True
    pixels_per_token: int | None = None

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
        if self.hooks is not None:
            self.hooks.clear()
        return results

    def evaluate(
        self, chunks: Sequence[MegatronModule], shard: GlobalBatchShard, loss_function: LossFunction
    ) -> list[MicrobatchMetrics]:
        """Return the same results as `train`, from forward passes only. The loss function also gets greedy matches."""

        def measure(microbatch: ModelMicrobatch, statistics: TokenStatistics) -> MicrobatchMetrics:
            outputs = outputs_of(loss_function, _loss_inputs(shard, microbatch, statistics))
            return outputs.metrics | {"loss": (outputs.loss, Reduction.SHARE)}

        return self._run_forward(chunks, shard.microbatches, measure, needs_of(loss_function))

    def logprobs(self, chunks: Sequence[MegatronModule], microbatches: Sequence[TokenBatch]) -> list[Tensor]:
        """Return for each microbatch the log-probability of every token given its prefix, `[sequences, longest]`.

        The first token of a sequence has 0, and padding any number. Empty on stages before the last.
        """

        def collect(microbatch: ModelMicrobatch, statistics: TokenStatistics) -> Tensor:
            return torch.nn.functional.pad(microbatch.per_sequence(statistics.logprobs), (1, 0))

        return self._run_forward(chunks, microbatches, collect, {Head.LOGPROBS})

    def score_norms(self, chunks: Sequence[MegatronModule], microbatches: Sequence[TokenBatch]) -> list[Tensor]:
        """Return for each microbatch the `score_norms` of every token given its prefix, `[sequences, longest]`.

        The first token of a sequence has 0, and padding any number. Empty on stages before the last.
        """

        def step(
            data_iterator: Iterator[tuple[int, ModelMicrobatch]], model: MegatronModule
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
            number, microbatch = next(data_iterator)

            def finish(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
                of_tokens = partial(
                    chunked_token_statistics,
                    unwrap_model(model),
                    hidden_states,
                    microbatch.inputs.labels,
                    predecessors=predecessors_of(microbatch.inputs.packed_seq_params),
                )
                logprobs, sharpened = (of_tokens(self.temperature / divisor).logprobs for divisor in (1, 2))
                found = _in_layout_of(microbatch, TokenStatistics(score_norms(logprobs, sharpened), None))
                norms = torch.nn.functional.pad(microbatch.per_sequence(found.logprobs), (1, 0))
                return hidden_states.new_zeros(()), norms

            return self._run_model(model, microbatch, number, labels=None), finish

        return self._run_without_head(chunks, microbatches, step)

    def values(self, chunks: Sequence[MegatronModule], microbatches: Sequence[TokenBatch]) -> list[Tensor]:
        """Return for each microbatch the values of the value head, `[sequences, longest]`.

        The entry of a token is the value of the tokens before it. The first token of a sequence has 0, and padding any
        number. Empty on stages before the last.
        """

        def collect(microbatch: ModelMicrobatch, statistics: TokenStatistics) -> Tensor:
            assert statistics.values is not None
            return torch.nn.functional.pad(microbatch.per_sequence(statistics.values), (1, 0))

        return self._run_forward(chunks, microbatches, collect, {Head.VALUE})

    def scores(self, chunks: Sequence[MegatronModule], microbatches: Sequence[TokenBatch]) -> list[Tensor]:
        """Return for each microbatch the value head's output at each sequence's last token, `[sequences, 1]`."""

        def collect(microbatch: ModelMicrobatch, statistics: TokenStatistics) -> Tensor:
            assert statistics.values is not None
            return microbatch.at_last_tokens(statistics.values)[:, None]

        return self._run_forward(chunks, microbatches, collect, {Head.VALUE})

    def candidate_logprobs(self, chunks: Sequence[MegatronModule], microbatches: Sequence[TokenBatch]) -> list[Tensor]:
        """Return for each microbatch the log-probabilities of each token's candidates, `[sequences, longest, k]`."""

        def collect(microbatch: ModelMicrobatch, statistics: TokenStatistics) -> Tensor:
            assert statistics.candidates is not None
            return _of_tokens(microbatch.per_sequence(statistics.candidates))

        return self._run_forward(chunks, microbatches, collect, {Head.LOGPROBS, Head.CANDIDATES})

    def top_candidates(
        self, chunks: Sequence[MegatronModule], microbatches: Sequence[TokenBatch], k: int, vocabulary_size: int
    ) -> list[tuple[Tensor, Tensor]]:
        """Return for each microbatch the likeliest tokens at the position of each token, and their log-probabilities.

        Both have the shape `[sequences, longest, k]`.
        """

        def step(
            data_iterator: Iterator[tuple[int, ModelMicrobatch]], model: MegatronModule
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor]]]]:
            number, microbatch = next(data_iterator)

            def finish(hidden_states: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
                bare = unwrap_model(model)
                ids, logprobs = chunked_top_candidates(bare, hidden_states, self.temperature, k, vocabulary_size)
                ids, logprobs = (
                    _of_tokens(microbatch.per_sequence(microbatch.of_inputs(each)))
                    for each in (ids.to(torch.int32), logprobs)
                )
                return hidden_states.new_zeros(()), (ids, logprobs)

            return self._run_model(model, microbatch, number, labels=None), finish

        return self._run_without_head(chunks, microbatches, step)

    def _run_forward(
        self,
        chunks: Sequence[MegatronModule],
        microbatches: Sequence[TokenBatch],
        measure: Callable[[ModelMicrobatch, TokenStatistics], Result],
        heads: Collection[Head],
    ) -> list[Result]:
        return self._run_without_head(chunks, microbatches, partial(self._forward_step, measure, heads))

    def _run_without_head(
        self, chunks: Sequence[MegatronModule], microbatches: Sequence[TokenBatch], step: Callable[..., Any]
    ) -> list[Any]:
        with hidden_states_only([unwrap_model(chunk) for chunk in chunks]):
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
        bare.needs_entropy, bare.candidate_column = Head.ENTROPY in needs, _candidate_column(microbatch, needs)
        forward = TrainingForward(chunk, number, microbatch)
        give_tokens = self._give_tokens(chunk, bare, microbatch)
        give_tokens()
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.training_forward(forward))
            output = self._run_model(model, microbatch, number, labels=microbatch.inputs.labels)
        for observer in self.observers:
            observer.after_forward(forward, output)
        if output.requires_grad:  # recomputation runs the routers again
            output.register_hook(lambda _: give_tokens())
        if self.hooks is not None:
            self.hooks.watch_backward(output, chunk, microbatch)
        entropy, bare.entropy = bare.entropy, None
        values, bare.values = bare.values, None
        candidates, bare.candidates = bare.candidates, None
        if not bare.predicts_tokens:  # the output is then the values
            return output, partial(_value_loss, shard, loss_function, microbatch)
        return output, partial(_training_loss, shard, loss_function, microbatch, entropy, values, candidates)

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
        measure: Callable[[ModelMicrobatch, TokenStatistics], Result],
        heads: Collection[Head],
        data_iterator: Iterator[tuple[int, ModelMicrobatch]],
        model: MegatronModule,
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Result]]]:
        number, microbatch = next(data_iterator)

        def finish(hidden_states: Tensor) -> tuple[Tensor, Result]:
            column, inputs = _candidate_column(microbatch, heads), microbatch.inputs
            found = statistics_of_heads(
                unwrap_model(model),
                hidden_states,
                inputs.labels,
                self.temperature,
                heads,
                None if column is None else inputs.model_columns[column],
                predecessors_of(inputs.packed_seq_params),
            )
            statistics = _in_layout_of(microbatch, found)
            if column == KEPT_TOKENS:
                statistics = statistics.over_kept(microbatch.model_columns[KEPT_TOKENS])
            # The schedule only divides this loss in place.
            return hidden_states.new_zeros(()), measure(microbatch, statistics)

        return self._run_model(model, microbatch, number, labels=None), finish

    def _run_model(
        self, model: MegatronModule, microbatch: ModelMicrobatch, number: int, labels: Tensor | None
    ) -> Tensor:
        hooked: AbstractContextManager[None] = nullcontext()
        if self.hooks is not None:
            chunk, trains = get_attr_wrapped_model(model, "vp_stage") or 0, labels is not None
            hooked = self.hooks.forward(chunk, microbatch, number, trains=trains, counts=trains and self.counts)
        unwrap_model(model).share_tokens(self._copies(microbatch))
        inputs = microbatch.inputs
        with hooked:
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


def _candidate_column(microbatch: ModelMicrobatch, heads: Collection[Head]) -> str | None:
    """Return the name of the column with the token ids whose log-probabilities are needed, or None.

    They are the tokens that top-k and top-p kept in sampling, or the candidates that the loss asks for.
    """
    if Head.LOGPROBS in heads and KEPT_TOKENS in microbatch.model_columns:
        return KEPT_TOKENS
    return CANDIDATE_IDS if Head.CANDIDATES in heads else None


def _of_tokens(values: Tensor) -> Tensor:
    """Return `[sequences, targets, k]` with zeros in front for the first token, which has no prediction."""
    return torch.nn.functional.pad(values, (0, 0, 1, 0))


def _in_layout_of(microbatch: ModelMicrobatch, found: TokenStatistics) -> TokenStatistics:
    """Return a model's statistics in the layout of the microbatch's separate sequences."""
    if microbatch.shared is None:
        return found
    return TokenStatistics(
        microbatch.of_targets(found.logprobs),
        None if found.greedy_matches is None else microbatch.of_targets(found.greedy_matches),
        None if found.entropy is None else microbatch.of_targets(found.entropy),
        None if found.values is None else microbatch.of_inputs(found.values),
        None if found.candidates is None else microbatch.of_targets(found.candidates),
    )


def _training_loss(
    shard: GlobalBatchShard,
    loss_function: LossFunction,
    microbatch: ModelMicrobatch,
    entropy: Tensor | None,
    values: Tensor | None,
    candidates: Tensor | None,
    output: Tensor,
) -> tuple[Tensor, MicrobatchMetrics]:
    statistics = _in_layout_of(microbatch, TokenStatistics(-output, None, entropy, values, candidates))
    if KEPT_TOKENS in microbatch.model_columns:
        statistics = statistics.over_kept(microbatch.model_columns[KEPT_TOKENS])
    return _scaled_loss(shard, loss_function, microbatch, statistics)


def _value_loss(
    shard: GlobalBatchShard, loss_function: LossFunction, microbatch: ModelMicrobatch, output: Tensor
) -> tuple[Tensor, MicrobatchMetrics]:
    statistics = _in_layout_of(microbatch, TokenStatistics.of_values(output))
    return _scaled_loss(shard, loss_function, microbatch, statistics)


def _scaled_loss(
    shard: GlobalBatchShard, loss_function: LossFunction, microbatch: ModelMicrobatch, statistics: TokenStatistics
) -> tuple[Tensor, MicrobatchMetrics]:
    outputs = outputs_of(loss_function, _loss_inputs(shard, microbatch, statistics))
    # The schedule divides by the number of microbatches, and the gradient reduction by the data-parallel size. The loss
    # is already a share of the global sum, so it is multiplied by both numbers. Auxiliary losses keep the mean. Context
    # parallelism cancels: the schedule multiplies by its size and the reduction divides by it, and each rank has the
    # loss of full rows, with the gradient at its own columns.
    scale = len(shard.microbatches) * parallel_state.get_data_parallel_world_size()
    return outputs.loss * scale, outputs.metrics | {"loss": (outputs.loss.detach(), Reduction.SHARE)}


def _loss_inputs(shard: GlobalBatchShard, microbatch: ModelMicrobatch, statistics: TokenStatistics) -> LossInputs:
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
        values=by_sequence(statistics.values),
        candidates=by_sequence(statistics.candidates),
    )


def metrics_to_host(results: Sequence[MicrobatchMetrics]) -> dict[str, tuple[list[float], Reduction]]:
    """Return name -> values of the microbatches and reduction of each metric. All are copied to the host at once."""
    if not results:
        return {}
    names = list(results[0])
    stacked = torch.stack([torch.stack([result[name][0].double() for name in names]) for result in results])
    columns: list[list[Any]] = stacked.T.tolist()
    return {name: (column, results[0][name][1]) for name, column in zip(names, columns, strict=True)}
