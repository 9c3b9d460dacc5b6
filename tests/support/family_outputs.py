# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What this project computes with a Hugging Face folder, put together from the ranks of any layout."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.models.hf_files import load_hf_config, plain_config
from tests.support.family_reference import Array, ModelOutputs, as_rows, token_ids


def trainer_of(folder: Path, policy: PolicyConfig, num_steps: int = 1) -> Any:
    """Return this rank's trainer, with the weights of a folder."""
    from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

    return MegatronTrainer(policy, plain_config(load_hf_config(str(folder))), folder, num_steps=num_steps)


def files_beside(folder: Path) -> dict[str, bytes]:
    """Return what is to lie beside the weights of a folder's model when they are written."""
    return {"config.json": (folder / "config.json").read_bytes()}


def outputs_of_trainer(trainer: Any) -> ModelOutputs | None:
    """Return the logits and chosen experts of the trainer's weights, on rank 0. Every rank calls it.

    Each data-parallel rank runs its share of the rows; tensor-parallel ones hold parts of the vocabulary and of the
    sequence; pipeline stages hold layers.
    """
    place, rows = trainer.coordinates, token_ids(trainer.hf_config.vocab_size)
    mine = rows.chunk(place.data_parallel_size)[place.data_parallel_rank]
    # Interleaved stages want as many microbatches as there are stages.
    microbatches = mine.chunk(2)
    with _routed_experts(trainer.chunks, len(microbatches[0])) as found:
        logits = _logits(trainer, microbatches)
    chosen = {layer: np.concatenate(of_microbatches) for layer, of_microbatches in found.items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (place, chosen, np.concatenate(logits) if logits else None))
    if dist.get_rank() != 0:
        return None
    whole = _joined([(where, part) for where, _, part in parts if part is not None], tensor_axis=2)
    layers = {layer for _, of_rank, _ in parts for layer in of_rank}
    by_layer = [
        _joined([(where, of_rank[layer]) for where, of_rank, _ in parts if layer in of_rank], tensor_axis=1)
        for layer in sorted(layers)
    ]
    return ModelOutputs(whole[..., : trainer.hf_config.vocab_size], by_layer, [])


def _joined(parts: Sequence[tuple[Any, Array]], tensor_axis: int) -> Array:
    """Put the ranks' parts of one array together: data-parallel ranks along the rows."""
    held = {(where.data_parallel_rank, where.tensor_rank): part for where, part in parts}
    data_ranks, tensor_ranks = (sorted(set(ranks)) for ranks in zip(*held, strict=True))
    blocks = [np.concatenate([held[data, tensor] for tensor in tensor_ranks], tensor_axis) for data in data_ranks]
    return np.concatenate(blocks)


@contextmanager
def _routed_experts(chunks: Sequence[nn.Module], num_rows: int) -> Iterator[dict[int, list[Array]]]:
    """By the number of the layer, the chosen experts of each microbatch of this rank, `[rows, its columns, k]`."""
    from megatron.core.transformer.moe.router import TopKRouter

    chosen: dict[int, list[Array]] = {}

    def keep(router: Any, arguments: Any, output: Any) -> None:
        indices = output[1]
        if indices.dtype is torch.bool:
            indices = indices.nonzero()[:, 1].reshape(len(indices), -1)
        # The model's tokens run sequence first.
        by_column = as_rows(indices, (len(indices) // num_rows, num_rows))
        chosen.setdefault(router.layer_number, []).append(by_column.transpose(1, 0, 2))

    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    handles = [router.register_forward_hook(keep) for router in routers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def _logits(trainer: Any, microbatches: Sequence[Tensor]) -> list[Array]:
    """Return one forward pass of each through all stages; this rank's part of the vocabulary, on the last stage
    alone.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rows, columns = microbatches[0].shape
    positions = torch.arange(columns).expand(rows, columns)
    local = trainer.policy.megatron_cfg.layer_spec == "local"
    mask = torch.ones(columns, columns, dtype=torch.bool).triu_(1)[None, None] if local else None

    def step(iterator: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        # The schedule divides the loss in place, and does nothing else with it.
        return model(next(iterator), positions, mask), lambda logits: (logits.new_zeros(()), logits)

    chunks = list(trainer.chunks)
    for chunk in chunks:
        chunk.eval()
    iterators = [iter(microbatches) for _ in chunks]
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=columns,
            micro_batch_size=rows,
            forward_only=True,
        )
    return [logits.numpy() for logits in found]
