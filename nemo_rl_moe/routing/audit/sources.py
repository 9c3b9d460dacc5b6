# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sources of an audit: a capture folder, or files of another framework, which are converted in memory one at a time.

The routes and log-probabilities of training may be in separate files, which are matched by token ids.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nemo_rl_moe.errors import DataError, counted, one_line
from nemo_rl_moe.routing.audit.adapters.registry import (
    ADAPTERS,
    Adapter,
    JsonLines,
    files_by_step,
    load,
    recognised,
)
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.runs.folder.capture_folder import (
    DESCRIPTION_FILE,
    described_by,
    existing_capture,
    read_description,
    read_step,
    steps_of,
    writers_of,
)
from nemo_rl_moe.runs.folder.captured_sequences import (
    EXPERTS,
    UNKNOWN,
    CaptureDescription,
    CapturedRows,
    CapturedSequence,
    rows_of,
    sequences_of,
)
from nemo_rl_moe.runs.folder.folder import newest_run_folders, read_run_id

AUTO, CAPTURE, TRACE = "auto", "capture", "nemo-rl-trace"
FORMATS = (AUTO, CAPTURE, *ADAPTERS, TRACE)
_OF_TRAINING = ("training_experts", "margins", "training_logprobs", "repeated_experts", "repeated_logprobs")
_SAVE_CAPTURE = "policy.megatron_cfg.routing_measurements.save_capture"
Steps = tuple[int | None, int | None]


@dataclass(frozen=True)
class Source:
    """Sequences of a run that is audited.

    Attributes:
        read: Step -> function that yields the routes and other columns of its sequences, a few at a time.
        sequences: Step -> function that yields its sequences, to write a capture. None if the source is a capture.
        notices: Assumptions about the files, one per line. Reading a step may add more.
        unread: Unreadable file -> reason. Reading a step may add more.
    """

    description: CaptureDescription
    read: Mapping[int, Callable[[], Iterator[CapturedRows]]]
    sequences: Mapping[int, Callable[[], Iterator[list[CapturedSequence]]]] | None = None
    notices: list[str] = field(default_factory=list)
    writers: Sequence[str] = ()
    unread: Mapping[Path, str] = field(default_factory=dict)


def open_source(
    path: Path, kind: str, model: RouterShape | None, training: Path | None, chosen: Steps | None
) -> Source:
    """Return a run as a source of sequences.

    Args:
        path: A capture folder, the folder of a run of this project with a capture, or a framework's file or folder.
        kind: One of `FORMATS`.
        training: Files with the routes and log-probabilities of training for the same sequences.

    Raises:
        DataError: There is nothing to read.
    """
    capture = _capture_folder(path) if kind in (AUTO, CAPTURE) else None
    if capture is None and kind in (AUTO, CAPTURE) and (problem := _problem_of_run(path)) is not None:
        raise DataError(problem)
    if capture is not None or kind == CAPTURE:
        if training is not None:
            raise DataError(f"--training {training}: is for other formats; a capture has its own columns for training")
        return _capture(capture or path, chosen)
    for name, place in (("", path), ("--training ", training)):
        if place is not None and not place.exists():
            raise DataError(f"{name}{place}: there is no such file or folder{_format_hint(place)}")
    files = _Files(path, kind, model, chosen)
    converted = _Converted(files, None if training is None else _training_files(training, model))
    description = converted.description()
    if all(file in files.unread for of_step in files.steps.values() for file in of_step):
        raise DataError(list(files.unread.values()))
    parts = [files, *([converted.training] if isinstance(converted.training, _Files) else [])]
    return Source(
        description,
        {step: partial(_rows, description, step, partial(converted.sequences, step)) for step in files.steps},
        {step: partial(converted.sequences, step) for step in files.steps},
        converted.notices,
        [_file_name(number) for number in range(max(map(len, files.steps.values())))],
        ChainMap(*(unread for part in parts for unread in (part.unread, part.partly))),
    )


def _capture_folder(path: Path) -> Path | None:
    """Return the capture folder at a path or in the folder of a run, if any."""
    return path if described_by(path).is_file() else existing_capture(path)


def _problem_of_run(path: Path) -> str | None:
    """Return the problem of a run's folder without a capture, or of a log folder, or None for any other path."""
    if read_run_id(path) is not None:
        return f"{path}: the run has no capture; {_SAVE_CAPTURE}=true saves the routes that a run measures"
    runs = [run for run in newest_run_folders(path) if read_run_id(run) is not None]
    found = next((run for run in runs if existing_capture(run) is not None), next(iter(runs), None))
    return None if found is None else f"{path}: is the log folder of runs; did you mean {found}?"


def _format_hint(path: Path) -> str:
    """Return a hint at `--format` if a path that does not exist is the name of a format, otherwise an empty text."""
    return f"; for a format: --format {path}" if str(path) in FORMATS else ""


def _capture(folder: Path, chosen: Steps | None) -> Source:
    if not folder.is_dir():
        raise DataError(f"{folder}: is no folder{_format_hint(folder)}")
    description = read_description(folder)
    steps = _only(steps_of(folder), chosen, folder)
    unread: dict[Path, str] = {}
    read = {step: partial(_readable, description, step, paths, unread) for step, paths in steps.items()}
    return Source(description, read, writers=writers_of(folder), unread=unread)


def _readable(
    description: CaptureDescription, step: int, files: Sequence[Path], unread: dict[Path, str]
) -> Iterator[CapturedRows]:
    """Yield the rows of a step's files in a capture. Unreadable files are added to `unread`."""
    for file in files:
        try:
            yield from read_step(description, step, [file])
        except DataError as error:
            unread[file] = str(error)


def _only(steps: dict[int, list[Path]], chosen: Steps | None, path: Path) -> dict[int, list[Path]]:
    first, last = chosen or (None, None)
    kept = {
        step: paths
        for step, paths in steps.items()
        if (first is None or step >= first) and (last is None or step <= last)
    }
    if not kept:
        raise DataError(f"{path}: holds {'none of the chosen steps' if chosen else 'no step'}")
    return kept


def _rows(
    description: CaptureDescription, step: int, sequences: Callable[[], Iterator[list[CapturedSequence]]]
) -> Iterator[CapturedRows]:
    for number, part in enumerate(sequences()):
        try:
            rows = rows_of(description, step, part)
        except ValueError as error:
            raise DataError(f"step {step}: {error}") from None
        yield replace(rows, writer=_file_name(number))


def _file_name(number: int) -> str:
    return f"of file {number + 1} of the step"


class _Files:
    def __init__(self, path: Path, kind: str, model: RouterShape | None, chosen: Steps | None):
        self.path, self.model = path, model
        self.unread: dict[Path, str] = {}
        """Unreadable file of a folder -> reason."""
        self.partly: dict[Path, str] = {}
        """File of JSON lines with unreadable lines -> message."""
        steps = files_by_step(path)
        if path.is_dir():
            if not steps:
                raise DataError(f"{path}: holds neither {DESCRIPTION_FILE} nor files of a format that is read")
            known = next((file for files in steps.values() for file in files if self._may_be(file, kind)), None)
            if known is None:
                raise DataError([_unknown(path), *(f"not read: {text}" for text in self.unread.values())])
            # Other kinds of files in the folder belong to other programs.
            steps = {step: [file for file in files if file.suffix == known.suffix] for step, files in steps.items()}
            steps = {step: files for step, files in steps.items() if files}
        else:
            known = path
        self.steps = _only(steps, chosen, path)
        name = (recognised(load(known)) or "") if kind == AUTO else kind
        if name not in ADAPTERS:
            raise DataError(_unknown(path))
        self.adapter: Adapter = ADAPTERS[name]

    def _may_be(self, file: Path, kind: str) -> bool:
        try:
            found = recognised(load(file))
        except DataError as error:
            self.unread[file] = str(error)
            return False
        return found is not None or kind != AUTO

    def read(self, step: int) -> Iterator[list[CapturedSequence]]:
        """Yield the sequences of each file of a step. In a folder, unreadable files are added to `unread`."""
        for file in self.steps[step]:
            if file in self.unread:
                continue
            try:
                found = self._sequences(file)
            except DataError as error:
                if not self.path.is_dir():
                    raise
                self.unread[file] = str(error)
                continue
            if found:
                yield found

    def _sequences(self, file: Path) -> list[CapturedSequence]:
        content: Any = load(file)
        if isinstance(content, JsonLines) and content.unread:
            self.partly[file] = (
                f"{file}: {counted(len(content.unread), 'line')}, the last of them {content.unread[-1]}: no JSON"
            )
        if not self.adapter.claims(content):
            raise DataError(f"{file}: is no file of {self.adapter.made_by}; --format takes {', '.join(FORMATS)}")
        try:
            return [self._fitted(sequence, file) for sequence in self.adapter.read(content, str(file), self.model)]
        except DataError:
            raise
        except Exception as error:  # fields may hold anything
            raise DataError(f"{file}: no file of {self.adapter.made_by}: {one_line(error)}") from error

    def _fitted(self, sequence: CapturedSequence, path: Path) -> CapturedSequence:
        """Return the sequence with only the layers that have experts."""
        columns = dict(sequence.columns)
        for name in (*EXPERTS, "margins"):
            if name in columns and self.model is not None:
                columns[name] = _of_moe_layers(columns[name], self.model, f"{path}: sequence {sequence.name}: {name}")
        return replace(sequence, columns=columns)


class _CapturedRoutes:
    def __init__(self, folder: Path, model: RouterShape | None):
        self.path, self._description = folder, read_description(folder)
        self.steps = _only(steps_of(folder), None, folder)
        layers = self._description.layers
        if model is not None and layers != model.moe_layers:
            raise DataError(
                f"--training {folder}: has routes of the layers {_numbers(layers)}, expected "
                f"{_numbers(model.moe_layers)} as --model says"
            )

    def read(self, step: int) -> Iterator[list[CapturedSequence]]:
        for rows in read_step(self._description, step, self.steps[step]):
            yield sequences_of(rows)


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def _training_files(path: Path, model: RouterShape | None) -> _Files | _CapturedRoutes:
    capture = _capture_folder(path)
    return _Files(path, AUTO, model, None) if capture is None else _CapturedRoutes(capture, model)


def _unknown(path: Path) -> str:
    return f"{path}: is of no format that is known; --format takes {', '.join(FORMATS)}"


class _Converted:
    def __init__(self, files: _Files, training: _Files | _CapturedRoutes | None):
        self._files, self.training, self._model = files, training, files.model
        self.notices: list[str] = []

    def description(self) -> CaptureDescription:
        """Return the capture's layers and experts: from the model's configuration or, without one, from all files."""
        made_by, indexer = self._files.adapter.made_by, self._indexer_shape()
        shape: tuple[int, ...] | None = None
        largest, written = -1, np.zeros(0, dtype=bool)
        both: list[_Files | _CapturedRoutes] = [self._files, *([] if self.training is None else [self.training])]
        for files in both:
            for step in files.steps:
                for experts in _experts(files.read(step)):
                    if shape is not None and experts.shape[1:] != shape and self._model is None:
                        raise DataError(
                            f"{files.path}: step {step}: routes have shape {list(experts.shape[1:])} (layers, experts"
                            f" per token), earlier ones {list(shape)}; add --model DIR, whose config.json shows which"
                            " layers have experts"
                        )
                    if shape is None:
                        shape, written = experts.shape[1:], np.zeros(experts.shape[1], dtype=bool)
                    if self._model is None:
                        largest = max(largest, int(experts.max(initial=-1)))
                        written |= (experts > 0).any((0, 2))
                if shape and self._model:
                    break
        if shape is None:
            self.notices.append("no sequence has routed experts: routes are not checked")
            return CaptureDescription((), 0, 0, made_by, indexer_shape=indexer)
        if self._model is not None:
            shape_of_model = self._model.moe_layers, self._model.num_experts, self._model.topk
            return CaptureDescription(*shape_of_model, made_by, indexer_shape=indexer)
        self.notices.append(
            f"num_experts: {largest + 1}, the highest expert id plus 1; --model DIR gives the exact number"
        )
        if not written.all():
            layers = ", ".join(map(str, np.flatnonzero(~written)))
            self.notices.append(
                f"layers {layers} hold expert 0 alone everywhere: --model DIR shows whether they are dense"
            )
        return CaptureDescription(tuple(range(shape[0])), largest + 1, shape[1], made_by, indexer_shape=indexer)

    def _indexer_shape(self) -> tuple[int, int]:
        """Return (number of layers, positions per token) of a sparse attention's indexer, or (0, 0) without one."""
        for step in self._files.steps:
            for part in self._files.read(step):
                for sequence in part:
                    if (found := sequence.columns.get("rollout_indexer")) is not None:
                        return int(found.shape[1]), int(found.shape[2])
                return 0, 0
        return 0, 0

    def sequences(self, step: int) -> Iterator[list[CapturedSequence]]:
        partners = None if self.training is None else _Partners(self.training, step)
        for part in self._files.read(step):
            yield part if partners is None else [partners.joined(sequence) for sequence in part]
        if partners is not None and (text := partners.reported(step)):
            self.notices.append(text)


def _experts(parts: Iterator[list[CapturedSequence]]) -> Iterator[np.ndarray]:
    for part in parts:
        for sequence in part:
            yield from (sequence.columns[name] for name in EXPERTS if name in sequence.columns)


def _of_moe_layers(values: np.ndarray, model: RouterShape, where: str) -> np.ndarray:
    """Return the routes in the MoE layers, from routes of only these layers or of all layers."""
    if values.ndim == 3 and values.shape[2] != model.topk:
        raise DataError(f"{where}: got {values.shape[2]} experts of a token, expected {model.topk} as --model says")
    if values.shape[1] == len(model.moe_layers):
        return values
    if values.shape[1] != model.num_layers:
        raise DataError(
            f"{where}: got {values.shape[1]} layers, expected {model.num_layers} as --model says, or the"
            f" {len(model.moe_layers)} of them with experts"
        )
    return values[:, list(model.moe_layers)]


class _Partners:
    """Sequences of training files. Each is the *partner* of the rollout's sequence with the same token ids."""

    def __init__(self, files: _Files | _CapturedRoutes, step: int):
        self._path, self._missing, self._joined = files.path, 0, 0
        steps: Sequence[int] = (step,) if step in files.steps else list(files.steps) if len(files.steps) == 1 else ()
        self._columns: dict[bytes, list[Mapping[str, np.ndarray]]] = {}
        for number in steps:
            for part in files.read(number):
                for sequence in part:
                    if "token_ids" in sequence.columns:
                        self._columns.setdefault(token_key(sequence.columns), []).append(_as_training(sequence))

    def joined(self, sequence: CapturedSequence) -> CapturedSequence:
        """Return the sequence with the columns of its partner, the training sequence with the same token ids.

        If several training sequences have these ids, each is the partner of one sequence.
        """
        if "token_ids" not in sequence.columns:
            raise DataError(f"--training {self._path}: sequence {sequence.name} has no token ids to find it by")
        found = self._columns.get(token_key(sequence.columns))
        if not found:
            self._missing += 1
            routes = sequence.columns.get("rollout_experts")
            if routes is None:
                return sequence
            # If one sequence lacked this column, it would count as missing in all other sequences too.
            unknown = np.full((sequence.num_tokens, *routes.shape[1:]), UNKNOWN, dtype=np.int16)
            return replace(sequence, columns={**sequence.columns, "training_experts": unknown})
        self._joined += 1
        return replace(sequence, columns={**sequence.columns, **(found.pop(0) if len(found) > 1 else found[0])})

    def reported(self, step: int) -> str:
        """Return a notice about sequences that the training files lack, or an empty text."""
        if not self._joined:
            raise DataError(f"--training {self._path}: has the token ids of no sequence of step {step}")
        total = self._joined + self._missing
        return f"step {step}: --training has {self._joined} of {total} sequences" if self._missing else ""


def token_key(columns: Mapping[str, np.ndarray]) -> bytes:
    """Return a key that is equal for sequences with the same token ids."""
    return np.asarray(columns["token_ids"], dtype=np.int64).tobytes()


def _as_training(sequence: CapturedSequence) -> Mapping[str, np.ndarray]:
    """Return the columns of training. If a format (such as verl's) has only one column of routes, it is training's."""
    found = {name: sequence.columns[name] for name in _OF_TRAINING if name in sequence.columns}
    if "training_experts" not in found and "rollout_experts" in sequence.columns:
        found["training_experts"] = sequence.columns["rollout_experts"]
    if "advantages" in sequence.columns:
        found["advantages"] = sequence.columns["advantages"]
    return found
