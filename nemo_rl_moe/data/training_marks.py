# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Marks by which data excludes turns from training: `weight` (OpenAI), `loss` (ms-swift), `train` and `training`
(axolotl)."""

from collections.abc import Sequence

from nemo_rl_moe.data.messages import Message
from nemo_rl_moe.data.record_values import RecordError

MARKS = ("weight", "loss", "train", "training")
REFUSED_MARKS = ("train_detail", "training_detail", "loss_scale", "loss_mask", "loss_weight", "trainable")
"""Marks for parts of a turn or for shares of its loss. They are not supported."""


def take_training_marks(messages: Sequence[Message], name: str) -> tuple[list[Message], frozenset[int]]:
    """Return messages without the marks, so that no chat template sees them, and the turns that are marked as context.

    Returns:
        The messages, and the indices of the assistant's turns that are context.
    """
    context = frozenset(
        index
        for index, message in enumerate(messages)
        if _mark_of(message, f"{name}[{index}]") is False and message["role"] == "assistant"
    )
    return [{key: value for key, value in message.items() if key not in MARKS} for message in messages], context


def _mark_of(message: Message, name: str) -> bool | None:
    """Return whether a message is trained on according to its marks, or None if it has no marks."""
    for key in REFUSED_MARKS:
        if key in message:
            raise RecordError(
                f"{name} has {key!r}, which is not read, expected {', '.join(MARKS)}: a turn is trained on as a whole,"
                " or is context"
            )
    said: dict[str, bool] = {}
    for key in MARKS:
        if (value := message.get(key)) is None:
            continue
        # Allowed are JSON's 0, 1, 0.0, 1.0, false and true.
        if not isinstance(value, int | float) or value not in (0, 1):
            raise RecordError(
                f"{name}.{key} is {str(value)[:100]!r}, expected 0 or false (context), 1 or true (trained on)"
            )
        said[key] = bool(value)
    if len(set(said.values())) > 1:
        raise RecordError(
            f"{name} has marks that contradict each other: {', '.join(f'{key} {message[key]}' for key in said)}"
        )
    if message["role"] != "assistant" and any(said.values()):
        raise RecordError(
            f"{name}.{next(iter(said))} marks a turn of role {message['role']}, expected assistant: the model learns"
            " its own turns alone"
        )
    return next(iter(said.values()), None)
