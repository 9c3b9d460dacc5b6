# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sources of an audit: a capture folder, or files of another framework, which are converted in memory one at a time.

The routes and log-probabilities of training may be in separate files, which `Partners` matches by token ids.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from nemo_rl_moe.errors import DataError, counted
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.routing.audit.dump_files import (
    AUTO,
    CAPTURE,
    FORMATS,
    CapturedRoutes,
    Files,
    Steps,
    is_chosen,
    only_chosen,
)
from nemo_rl_moe.routing.audit.partners import Partners
from nemo_rl_moe.runs.folder.capture_folder import (
    described_by,
    existing_capture,
    read_description,
    read_step,
    steps_of,
    writers_of,
)
from nemo_rl_moe.runs.folder.captured_sequences import (
    EXPERTS,
    CaptureDescription,
    CapturedRows,
    CapturedSequence,
    rows_of,
)
from nemo_rl_moe.runs.folder.folder import newest_run_folders, read_run_id

_SAVE_CAPTURE = "policy.megatron_cfg.routing_measurements.save_capture"


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
    files = Files(path, kind, model, chosen)
    converted = _Converted(files, None if training is None else _training_files(training, model), chosen)
    description = converted.description()
    if all(file in files.unread for of_step in files.steps.values() for file in of_step):
        raise DataError(list(files.unread.values()))
    parts = [files, *([converted.training] if isinstance(converted.training, Files) else [])]
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
    steps = only_chosen(steps_of(folder), chosen, folder)
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


def _training_files(path: Path, model: RouterShape | None) -> Files | CapturedRoutes:
    capture = _capture_folder(path)
    return Files(path, AUTO, model, None) if capture is None else CapturedRoutes(capture, model)


class _Converted:
    def __init__(self, files: Files, training: Files | CapturedRoutes | None, chosen: Steps | None):
        self._files, self.training, self._model = files, training, files.model
        self.notices: list[str] = []
        for side, prefix in ((files, ""), (training, "--training: ")):
            if not isinstance(side, Files):
                continue
            # Partners finds sequences of any step in training files of a single step.
            is_read = [step for step in side.left_out if is_chosen(step, chosen) or list(side.steps) == [step]]
            if left_out := [file for step in is_read for file in side.left_out[step]]:
                self.notices.append(
                    f"{prefix}{counted(len(left_out), 'file')} of another kind not read, such as {left_out[0].name}: an"
                    " audit reads one kind of file"
                )

    def description(self) -> CaptureDescription:
        """Return the capture's layers and experts: from the model's configuration or, without one, from all files."""
        made_by, indexer = self._files.adapter.made_by, self._indexer_shape()
        shape: tuple[int, ...] | None = None
        largest, written = -1, np.zeros(0, dtype=bool)
        both: list[Files | CapturedRoutes] = [self._files, *([] if self.training is None else [self.training])]
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
        partners = None if self.training is None else Partners(self.training, step)
        for part in self._files.read(step):
            yield part if partners is None else [partners.joined(sequence) for sequence in part]
        if partners is not None and (text := partners.reported(step)):
            self.notices.append(text)


def _experts(parts: Iterator[list[CapturedSequence]]) -> Iterator[np.ndarray]:
    for part in parts:
        for sequence in part:
            yield from (sequence.columns[name] for name in EXPERTS if name in sequence.columns)
