# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""All Hugging Face tensors on every rank's device, for engines that take the tensors from the device.

Nothing passes through the host. The ranks first agree on the rank that gathers each tensor. Then, layer by layer, they
gather the tensors, and each rank broadcasts its tensors of the layer in one buffer.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.model.agreement import SharedFailure
from nemo_rl_moe.models.megatron.weights.hf_export import raise_problems, whole_tensor
from nemo_rl_moe.models.megatron.weights.hf_gather import Delivery, plan_deliveries
from nemo_rl_moe.weight_sync.packing import Packing, Row, packed, row_of

_NUMBER = re.compile(r"^(.*?\.\d+)\.")


def round_of(name: str) -> str:
    """Return the name of the round that sends a tensor: its layer, such as `model.layers.3`, or else its own name."""
    found = _NUMBER.match(name)
    return name if found is None else found[1]


@dataclass(frozen=True)
class Broadcast:
    """Tensors that the rank `root` sends to all ranks in one round: its tensors of a layer, or one other tensor."""

    round: str
    root: int
    packing: Packing


def plan_broadcasts(rows_of_ranks: Sequence[Sequence[Row]]) -> list[Broadcast]:
    """Return the broadcasts in the order in which all ranks enter them, layer by layer.

    Args:
        rows_of_ranks: For each rank, the headers of the tensors that it gathers, in the order of gathering.
    """
    by_round: dict[str, dict[int, list[Row]]] = {}
    for rank, rows in enumerate(rows_of_ranks):
        for row in rows:
            by_round.setdefault(round_of(row[0]), {}).setdefault(rank, []).append(row)
    return [
        Broadcast(name, root, Packing(by_round[name][root])) for name in by_round for root in sorted(by_round[name])
    ]


def rows_of(deliveries: Sequence[Delivery]) -> list[Row]:
    """Return the headers of the tensors that this rank gathers."""
    headers = [delivery.header for delivery in deliveries if delivery.is_mine]
    return [row_of(header.name, header.dtype, header.shape) for header in headers]


def tensors_on_every_rank(
    chunks: Sequence[GPTModel],
    config: TransformerConfig,
    hf_config: Any,
    is_wanted: Callable[[str], bool] = lambda name: True,
) -> Iterator[tuple[str, Tensor]]:
    """Yield all Hugging Face names and full tensors on every rank's device, layer by layer.

    Every rank must exhaust the iterator.

    Args:
        is_wanted: Function of a name: whether to yield the tensor.

    Raises:
        RuntimeError: A rank failed, for example because its memory is full. Raised at the end on every rank.
    """
    deliveries, _ = plan_deliveries(chunks, config, hf_config, is_wanted)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, rows_of(deliveries))
    of_rounds: dict[str, list[Delivery]] = {}
    for delivery in deliveries:
        of_rounds.setdefault(round_of(delivery.header.name), []).append(delivery)
    broadcasts, failure, device = plan_broadcasts(of_ranks), SharedFailure(), next(chunks[0].parameters()).device
    for name, in_round in itertools.groupby(broadcasts, key=lambda broadcast: broadcast.round):
        gathered = _gathered(of_rounds.get(name, []), hf_config, failure)
        for broadcast in in_round:
            yield from _taken_part(broadcast, gathered, failure, device)
    raise_problems(failure)


def _gathered(deliveries: Sequence[Delivery], hf_config: Any, failure: SharedFailure) -> dict[str, Tensor]:
    """Return name -> tensor for the tensors of a round that this rank gathers. They may be views of parameters."""
    found: dict[str, Tensor] = {}
    for delivery in deliveries:
        full = whole_tensor(delivery, hf_config, failure, move=lambda entry: entry)
        if full is not None:
            found[delivery.header.name] = full
    return found


def _taken_part(
    broadcast: Broadcast, gathered: Mapping[str, Tensor], failure: SharedFailure, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Take part in a broadcast, and yield its names and tensors. The tensors are views of one buffer."""
    buffer: Tensor | None = None
    with failure.caught():
        if failure.has_failed:
            pass  # tensors may be missing after a failure
        elif broadcast.root == dist.get_rank():
            buffer = packed([gathered[name] for name, *_ in broadcast.packing.rows], device)
        else:
            buffer = torch.empty(broadcast.packing.num_bytes, dtype=torch.uint8, device=device)
    if not failure.none_failed(None, device) or buffer is None:
        return
    dist.broadcast(buffer, src=broadcast.root)
    yield from broadcast.packing.cut(buffer).items()
