# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Calls of a loss function. An error in a user's function names the function, and its outputs are checked."""

import re
from collections.abc import Mapping

from torch import Tensor

from nemo_rl_moe.config.user_code import described, named_in_errors
from nemo_rl_moe.errors import UserCodeError
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossFunction, LossInputs, LossOutputs

_KEY = "loss function"
_PACKAGE = __name__.partition(".")[0]


def outputs_of(loss_function: LossFunction, inputs: LossInputs) -> LossOutputs:
    """Call a loss function, and return its outputs. Raises `UserCodeError` if the user's code fails."""
    name = name_of(loss_function)
    if re.split("[.:]", name)[0] == _PACKAGE:
        return loss_function(inputs)
    with named_in_errors(_KEY, name):
        outputs = loss_function(inputs)
    if problem := problem_of(outputs):
        raise UserCodeError(f"{_KEY}: {name} returned {problem}")
    return outputs


def name_of(loss_function: object) -> str:
    """Return `module:name` of a function, or of an object's class."""
    named = loss_function if hasattr(loss_function, "__qualname__") else type(loss_function)
    return f"{named.__module__}:{named.__qualname__}"


def problem_of(outputs: object) -> str | None:
    """Return why a loss function's outputs cannot be used, and what is expected. None if they can be used."""
    if not isinstance(outputs, LossOutputs):
        return f"{described(outputs)}, expected a LossOutputs"
    if not _is_scalar(outputs.loss):
        return f"a loss {_of_kind(outputs.loss)}, expected a tensor of shape []"
    metrics: object = outputs.metrics
    if not isinstance(metrics, Mapping):
        return f"metrics as {described(metrics)}, expected a dict"
    for name, metric in metrics.items():
        if not (isinstance(metric, tuple) and len(metric) == 2 and isinstance(metric[1], Reduction)):
            return f"the metric {name!r} as {described(metric)}, expected a tensor of shape [] with its Reduction"
        if not _is_scalar(metric[0]):
            return f"the metric {name!r} {_of_kind(metric[0])}, expected a tensor of shape []"
    return None


def _is_scalar(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _of_kind(value: object) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"as {described(value)}"
