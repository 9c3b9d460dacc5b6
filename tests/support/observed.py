# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Access to one of a trainer's observers."""

from typing import TypeVar

from nemo_rl_moe.models.megatron.training.step_observer import StepObserver
from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

Kind = TypeVar("Kind", bound=StepObserver)


def observer_of(trainer: MegatronTrainer, kind: type[Kind]) -> Kind:
    """Return the one observer of a class that the trainer has."""
    (found,) = (observer for observer in trainer.observers if isinstance(observer, kind))
    return found
