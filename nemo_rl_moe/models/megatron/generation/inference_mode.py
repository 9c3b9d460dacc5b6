# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The state that a model generates in; training finds everything as it was."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from nemo_rl_moe.models.megatron.token_statistics import hidden_states_only

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

# What modules of Megatron-Core call it.
_SEQUENCE_PARALLEL = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


@contextmanager
def inference(
    chunks: Sequence[GPTModel], config: TransformerConfig, device: torch.device, *, own_forward: bool
) -> Iterator[None]:
    """While open, the chunks are in evaluation mode, return hidden states, and cut no sequence among ranks.

    They stay in evaluation mode; everything else is put back, random states included.

    Args:
        chunks: This rank's model chunks.
        config: Their configuration.
        device: Where they are.
        own_forward: Nothing but this project's forward pass runs. Torch's inference mode is faster than a mere absence
            of gradients, but what other code keeps from it (Transformer Engine its sequence boundaries, Megatron-Core a
            router's bias) can never again be saved for a backward pass.
    """
    for chunk in chunks:
        chunk.eval()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(_kept_random_states())
        stack.enter_context(_without_sequence_parallelism(chunks, config))
        stack.enter_context(hidden_states_only(chunks))
        stack.enter_context(torch.inference_mode() if own_forward else torch.no_grad())
        yield


@contextmanager
def _kept_random_states() -> Iterator[None]:
    """Megatron-Core has random states of its own, which noise on the router's input draws from, say."""
    tracker = get_cuda_rng_tracker()
    states = {name: state.clone() for name, state in tracker.get_states().items()}
    try:
        yield
    finally:
        tracker.set_states(states)


@contextmanager
def _without_sequence_parallelism(chunks: Sequence[GPTModel], config: TransformerConfig) -> Iterator[None]:
    """One token cannot be cut among ranks.

    Megatron-Core has a function for this, which remembers modules by the address of their model: a later model at the
    same address would get the first one's.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    changed = [
        (owner, name) for owner in (config, *modules) for name in _SEQUENCE_PARALLEL if getattr(owner, name, False)
    ]
    try:
        for owner, name in changed:
            setattr(owner, name, False)
        yield
    finally:
        for owner, name in changed:
            setattr(owner, name, True)
