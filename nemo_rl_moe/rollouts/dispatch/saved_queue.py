# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The queue of asynchronous rollouts in a checkpoint: prompts in `queue.json`, tokens in `queue.safetensors`.

Finished groups are restored, and running ones are generated again. Finished groups are generated again, too, if they
have images, sampling masks or positions of indexers, or if their routed experts were lost with an engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Shaped
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    model_validator,
)
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from nemo_rl_moe.checksums import find_damage, write_inventory
from nemo_rl_moe.data.prompts import Prompt
from nemo_rl_moe.distributed.stored_rows import Fetch, RowStore, StoredRows
from nemo_rl_moe.errors import CheckpointError, DamagedCheckpointError
from nemo_rl_moe.rewards.interface import Fault
from nemo_rl_moe.rollouts.dispatch.groups import Finished, Ticket
from nemo_rl_moe.rollouts.dispatch.prompts import OpenPrompt, QueueState
from nemo_rl_moe.rollouts.trajectory import FinishReason, TokenSequence, Trajectory, sequences_of
from nemo_rl_moe.runs.folder.conversations import (
    ConversationTurn,
    RolloutTimes,
    conversation_json,
    conversation_of,
    times_json,
    times_of,
)

FOLDER = "rollouts"
"""Folder in a checkpoint."""
JSON_FILE, TENSOR_FILE = "queue.json", "queue.safetensors"

_PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "weight_versions")
_ROUTES = "routed_experts"
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="strings")
Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(strict=False)]
"""A number from an environment. Bools count as 0 or 1. NaN and infinities are strings in JSON."""

Conversation = Annotated[
    tuple[ConversationTurn, ...],
    PlainValidator(lambda found: found if isinstance(found, tuple) else tuple(conversation_of(found))),
    PlainSerializer(conversation_json),
]
Times = Annotated[
    RolloutTimes,
    PlainValidator(lambda found: found if isinstance(found, RolloutTimes) else times_of(found)),
    PlainSerializer(times_json),
]


class _Sequence(BaseModel):
    model_config = _STRICT

    num_tokens: Count
    num_route_rows: Count | None


class _Trajectory(BaseModel):
    model_config = _STRICT

    sequences: Annotated[list[_Sequence], Field(min_length=1)]
    sample_id: str
    group_id: str
    reward: Number
    is_correct: bool
    finish_reason: FinishReason
    num_turns: Count
    num_retries: Count = 0
    prompt_text: str
    response_text: str
    fault: str | None
    fault_message: str
    overlong: str
    rewards: dict[str, Number]
    metrics: dict[str, Number]
    conversation: Conversation = ()
    times: Times | None = None
    environment: str = ""
    turn_lengths: list[Count] = []
    turn_order: list[Count] = []
    turn_rewards: list[Number] = []

    @model_validator(mode="before")
    @classmethod
    def _of_one_sequence(cls, found: Any) -> Any:
        """Return an entry of format version 1, in which a trajectory has one sequence, in the form of version 2."""
        if not isinstance(found, dict) or "num_tokens" not in found:
            return found
        only = {name: found[name] for name in _Sequence.model_fields if name in found}
        return {name: value for name, value in found.items() if name not in only} | {"sequences": [only]}


class _Group(BaseModel):
    model_config = _STRICT

    position: Count
    sample_id: str
    version: Count
    admitted_version: Count
    attempt: Count
    num_faults: Count
    lost_s: float
    finished_version: Count
    number: Count
    trajectories: list[_Trajectory]


class _OpenPrompt(BaseModel):
    model_config = _STRICT

    position: Count
    sample_id: str
    attempt: Count
    num_faults: Count


class _Queue(BaseModel):
    model_config = _STRICT

    format_version: Literal[1, 2]
    version: Count
    num_taken: Count
    open: list[_OpenPrompt]
    given_up: list[Count]
    groups: list[_Group]


def write_queue(checkpoint: Path, state: QueueState, fetch: Fetch) -> None:
    """Write a queue into the folder of a checkpoint.

    Args:
        fetch: Fetches routed experts by their handles.
    """
    routes = {found.ticket.position: _fetched_routes(found.group, fetch) for found in state.queue}
    state = state.keeping(lambda found: routes[found.ticket.position] is not None, state.version)
    queue = _Queue(
        format_version=2,
        version=state.version,
        num_taken=state.num_taken,
        open=[_OpenPrompt(**vars(prompt)) for prompt in state.open],
        given_up=list(state.given_up),
        groups=[_group(found, routes[found.ticket.position] or []) for found in state.queue],
    )
    folder = checkpoint / FOLDER
    folder.mkdir()
    (folder / JSON_FILE).write_text(queue.model_dump_json(indent=1) + "\n", encoding="utf-8")
    sequences = sequences_of([trajectory for found in state.queue for trajectory in found.group])
    tensors = {name: _joined([getattr(each, name) for each in sequences]) for name in _PER_TOKEN if sequences}
    rows = [each for found in state.queue for each in routes[found.ticket.position] or [] if each is not None]
    save_file(tensors | ({_ROUTES: _joined(rows)} if rows else {}), folder / TENSOR_FILE)
    write_inventory(folder)


def read_queue(checkpoint: Path, prompts: Iterator[Prompt], store: RowStore) -> QueueState | None:
    """Return the queue from the folder of a checkpoint. None if it has none.

    Args:
        prompts: Prompts of all epochs, from the first one on.
        store: Stores routed experts.

    Raises:
        DamagedCheckpointError: The files have changed since they were written.
        CheckpointError: The prompts differ, or another release has written the files.
    """
    folder = checkpoint / FOLDER
    if not folder.is_dir():
        return None
    if problems := find_damage(folder):
        raise DamagedCheckpointError(problems)
    try:
        queue = _Queue.model_validate_json((folder / JSON_FILE).read_bytes())
        tensors = load_file(folder / TENSOR_FILE)
    except (OSError, ValidationError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {str(error).splitlines()[0]}") from None
    num_needed = max([queue.num_taken, *(group.position + 1 for group in queue.groups)])
    by_position = dict(enumerate(islice(prompts, num_needed)))
    return QueueState(
        queue.version,
        queue.num_taken,
        tuple(OpenPrompt(**dict(prompt)) for prompt in queue.open),
        tuple(queue.given_up),
        tuple(_finished(queue, tensors, by_position, store)),
    )


def _fetched_routes(group: Sequence[Trajectory], fetch: Fetch) -> list[Shaped[np.ndarray, "rows ..."] | None] | None:
    """Return each sequence's routed experts as an array, or None for a sequence without them.

    Return None instead of the list if the group cannot be written: routes are lost, or it has images, kept tokens or
    positions of indexers.
    """
    found: list[Shaped[np.ndarray, "rows ..."] | None] = []
    for sequence in sequences_of(group):
        stored = sequence.routed_experts
        others = (sequence.kept_tokens, sequence.indexer_positions)
        if sequence.model_inputs or any(each is not None for each in others):
            return None
        if stored is None:
            found.append(None)
            continue
        arrays = fetch([piece.source for piece in stored.pieces])
        parts = [
            None if array is None else array[piece.first : piece.first + piece.num_rows]
            for array, piece in zip(arrays, stored.pieces, strict=True)
        ]
        present = [part for part in parts if part is not None]
        if len(present) < len(parts) or sum(map(len, present)) < stored.end:
            return None  # arrays were lost with an engine, or there is a gap
        found.append(_joined(present).astype(stored.dtype, copy=False))
    return found


def _joined(arrays: Sequence[Shaped[np.ndarray, "rows ..."]]) -> Shaped[np.ndarray, "rows ..."]:
    return np.ascontiguousarray(np.concatenate(arrays))


def _group(found: Finished, routes: Sequence[Shaped[np.ndarray, "rows ..."] | None]) -> _Group:
    ticket, of_sequences = found.ticket, iter(routes)
    return _Group(
        position=ticket.position,
        sample_id=ticket.prompt.sample_id,
        version=ticket.version,
        admitted_version=ticket.admitted_version,
        attempt=ticket.attempt,
        num_faults=ticket.num_faults,
        lost_s=ticket.lost_s,
        finished_version=found.version,
        number=found.number,
        trajectories=[_trajectory(each, of_sequences) for each in found.group],
    )


def _trajectory(trajectory: Trajectory, routes: Iterator[Shaped[np.ndarray, "rows ..."] | None]) -> _Trajectory:
    """Return the JSON form of a trajectory. Take the routes of its sequences from an iterator."""
    return _Trajectory(
        sequences=[
            _Sequence(num_tokens=len(sequence), num_route_rows=None if (rows := next(routes)) is None else len(rows))
            for sequence in trajectory.sequences
        ],
        sample_id=trajectory.sample_id,
        group_id=trajectory.group_id,
        reward=trajectory.reward,
        is_correct=bool(trajectory.is_correct),  # may be numpy's bool
        finish_reason=trajectory.finish_reason,
        num_turns=trajectory.num_turns,
        num_retries=trajectory.num_retries,
        prompt_text=trajectory.prompt_text,
        response_text=trajectory.response_text,
        fault=None if trajectory.fault is None else trajectory.fault.value,
        fault_message=trajectory.fault_message,
        overlong=trajectory.overlong,
        rewards=dict(trajectory.rewards),
        metrics=dict(trajectory.metrics),
        conversation=trajectory.conversation,
        times=trajectory.times,
        environment=trajectory.environment,
        turn_lengths=list(trajectory.turn_lengths),
        turn_order=list(trajectory.turn_order),
        turn_rewards=list(trajectory.turn_rewards),
    )


def _finished(
    queue: _Queue,
    tensors: Mapping[str, Shaped[np.ndarray, "..."]],
    prompts: Mapping[int, Prompt],
    store: RowStore,
) -> Iterator[Finished]:
    """Yield the groups, in the order in which they were written."""
    sequences = _sequences(queue, tensors, store)
    for group in queue.groups:
        prompt = prompts.get(group.position)
        if prompt is None or prompt.sample_id != group.sample_id:
            now = "missing" if prompt is None else prompt.sample_id
            raise CheckpointError(
                f"prompt {group.position} was {group.sample_id} in the checkpoint's run, but is {now} in this run:"
                " resume with the same data, or set checkpointing.resume=never"
            )
        trajectories = [_restored(each, tuple(islice(sequences, len(each.sequences)))) for each in group.trajectories]
        ticket = Ticket(
            prompt,
            group.position,
            group.version,
            group.admitted_version,
            group.attempt,
            group.num_faults,
            group.lost_s,
        )
        yield Finished(ticket, trajectories, group.finished_version, group.number)


def _sequences(
    queue: _Queue, tensors: Mapping[str, Shaped[np.ndarray, "..."]], store: RowStore
) -> Iterator[TokenSequence]:
    """Yield the sequences of all trajectories, in the order in which they were written."""
    first_token = first_row = 0
    saved = (each for group in queue.groups for trajectory in group.trajectories for each in trajectory.sequences)
    for each in saved:
        tokens = slice(first_token, first_token + each.num_tokens)
        first_token += each.num_tokens
        routes: StoredRows | None = None
        if each.num_route_rows is not None:
            (routes,) = store.keep([tensors[_ROUTES][first_row : first_row + each.num_route_rows]])
            first_row += each.num_route_rows
        token_ids, loss_mask, logprobs, versions = (tensors[name][tokens] for name in _PER_TOKEN)
        yield TokenSequence(token_ids, loss_mask, logprobs, versions, routes)


def _restored(saved: _Trajectory, sequences: tuple[TokenSequence, ...]) -> Trajectory:
    names = {each.name for each in fields(Trajectory)}
    values: dict[str, Any] = {name: value for name, value in saved if name in names}
    values |= {
        "sequences": sequences,
        **{name: tuple(values[name]) for name in ("turn_lengths", "turn_order", "turn_rewards")},
    }
    values["fault"] = None if saved.fault is None else Fault(saved.fault)
    return Trajectory(**values)
