# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Refits on one rank of a vLLM engine, and the fingerprints of the weights that the rank stores."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from nemo_rl_moe.errors import WeightSyncError
from nemo_rl_moe.generation.vllm import releases
from nemo_rl_moe.generation.vllm.adapters import AdapterSettings, held_factors, is_factor, put_adapter
from nemo_rl_moe.generation.vllm.images import ImageSettings, as_loader_expects
from nemo_rl_moe.generation.vllm.stored_weights import stored_tensors
from nemo_rl_moe.weight_sync.fingerprints import fingerprints_of
from nemo_rl_moe.weight_sync.transport import NamedTensor, TransportSpec


def receive(
    worker: Any,
    spec: TransportSpec,
    first_receiver: int,
    number: int,
    image_settings: ImageSettings | None,
    adapters: AdapterSettings | None,
) -> str | None:
    """Receive weights on this rank of an engine; return the problem or None.

    Args:
        worker: vLLM's worker of the rank.
        first_receiver: Number of the engine's first rank among all receivers of the transfer.
        number: Number of the engine's refit, from 1 on.
        adapters: None if weights arrive merged.
    """
    runner = worker.model_runner
    factors: dict[str, torch.Tensor] = {}

    def take_factors(tensors: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """Keep the factors of adapters, and yield the other tensors."""
        for name, tensor in tensors:
            if not is_factor(name):
                yield name, tensor
            elif name in factors:
                raise WeightSyncError(f"{name} has arrived twice")
            else:
                factors[name] = tensor.clone()
            del tensor

    def load(tensors: Iterator[NamedTensor]) -> None:
        if adapters is None:
            load_base(tensors)
            return
        if spec.changed_only:  # only factors
            deque(take_factors(tensors), maxlen=0)
        else:
            load_base(take_factors(tensors))
        put_adapter(worker, adapters, number, factors)

    def load_base(tensors: Iterator[NamedTensor]) -> None:
        packed, held = releases.PackedExperts(runner.get_model()), releases.held_experts(runner.get_model())
        if not spec.changed_only:
            packed.forget_all()

        def as_expected() -> Iterator[NamedTensor]:
            for name, tensor in tensors:
                if releases.is_held(name, held):
                    packed.forget(name)
                    # The reload keeps tensors until a layer is complete, longer than they are valid in the transport.
                    yield name, as_loader_expects(image_settings, name, tensor).clone()
                del tensor  # or a view of the last bucket would outlive it, and the sender keep its memory

        runner.reload_weights(weights_iterator=as_expected())
        releases.pack_tied_anew(runner.get_model())

    try:
        spec.receive(first_receiver + getattr(worker, "rank", 0), load)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fingerprints(worker: Any, number_format: str, adapters: AdapterSettings | None) -> dict[str, str]:
    """Return the fingerprints of the weights and factors that this rank stores, by name."""
    with torch.inference_mode():
        factors = () if adapters is None else held_factors(worker, adapters)
        return fingerprints_of(chain(stored_tensors(worker.model_runner.get_model()), factors), number_format)
