# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The states of a rank's random number generators, as tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nemo_rl_moe.models.megatron import cpu_backend

# isort: split
from megatron.core.tensor_parallel import get_cuda_rng_tracker

_TRACKED = "tracked."


def random_states() -> dict[str, Tensor]:
    """Copies of the states: torch's own, the GPU's where there is one, and those that Megatron-Core keeps by name."""
    states = {"torch": torch.get_rng_state()}
    if not cpu_backend.ACTIVE:
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    states |= {f"{_TRACKED}{name}": state for name, state in tracked.items() if isinstance(state, Tensor)}
    return {name: state.cpu().clone() for name, state in states.items()}


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Puts back what `random_states` returned, or some of it."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and not cpu_backend.ACTIVE:
        torch.cuda.set_rng_state(states["cuda"])
    tracker = get_cuda_rng_tracker()
    tracked = tracker.get_states()
    tracked |= {name.removeprefix(_TRACKED): s for name, s in states.items() if name.startswith(_TRACKED)}
    tracker.set_states(tracked)
