# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Additional training passes that do not change the step.

A forward and backward pass changes more than gradients: random states, the routers' counts for the expert bias, the
recorded auxiliary losses, and the data-parallel wrapper's record of finished gradients.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_rl_moe.models.megatron.checkpoint.contents import random_states, restore_random_states
from nemo_rl_moe.models.megatron.model.releases import recorded_auxiliary_losses


@contextmanager
def side_pass(chunks: Sequence[DistributedDataParallel], config: TransformerConfig) -> Iterator[None]:
    """Keep the unreduced gradients of a forward and backward pass in `main_grad`, and undo the pass at exit.

    Gradients are 0 when the context opens and when it closes. The expert-load recorder and the router hooks still count
    the pass, unless the caller switches them off.
    """
    zero_gradients(chunks)
    with ExitStack() as stack:
        stack.enter_context(_kept_random_states())
        stack.enter_context(_kept_router_buffers(chunks))
        stack.enter_context(_kept_auxiliary_losses())
        stack.enter_context(_unreduced_gradients(chunks, config))
        try:
            yield
        finally:
            zero_gradients(chunks)


def zero_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Zero the gradient buffers, and clear the wrapper's record of reduced gradients."""
    for chunk in chunks:
        chunk.zero_grad_buffer()


@contextmanager
def _kept_random_states() -> Iterator[None]:
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


@contextmanager
def _kept_router_buffers(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Restore the expert bias, and the tokens counted for it, at exit."""
    kept = [
        (buffer, buffer.clone())
        for chunk in chunks
        for router in chunk.modules()
        if isinstance(router, TopKRouter)
        for buffer in router.buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for buffer, values in kept:
            buffer.copy_(values)


@contextmanager
def _kept_auxiliary_losses() -> Iterator[None]:
    kept: dict[str, Tensor] = {name: values.clone() for name, values in recorded_auxiliary_losses().items()}
    try:
        yield
    finally:
        for name, values in recorded_auxiliary_losses().items():
            values.copy_(kept[name]) if name in kept else values.zero_()


@contextmanager
def _unreduced_gradients(chunks: Sequence[DistributedDataParallel], config: TransformerConfig) -> Iterator[None]:
    """Prevent the schedule's reduction of gradients, and its updates in the same call (such as the expert bias's)."""
    with ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())
        for name in ("no_sync_func", "grad_sync_func", "finalize_model_grads_func"):
            stack.callback(setattr, config, name, getattr(config, name))
            setattr(config, name, None)
        yield
