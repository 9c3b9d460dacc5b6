# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of another framework, or of a capture, by step, and the sequences in them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    read_description,
    read_step,
    steps_of,
)
from nemo_rl_moe.runs.folder.captured_sequences import (
    EXPERTS,
    CapturedSequence,
    sequences_of,
)

AUTO, CAPTURE, TRACE = "auto", "capture", "nemo-rl-trace"
FORMATS = (AUTO, CAPTURE, *ADAPTERS, TRACE)
Steps = tuple[int | None, int | None]


def is_chosen(step: int, chosen: Steps | None) -> bool:
    """Return whether a step is among the chosen ones, from the first to the last one."""
    first, last = chosen or (None, None)
    return (first is None or step >= first) and (last is None or step <= last)


def only_chosen(steps: dict[int, list[Path]], chosen: Steps | None, path: Path) -> dict[int, list[Path]]:
    """Return the chosen steps. Raise a DataError if there are none."""
    kept = {step: paths for step, paths in steps.items() if is_chosen(step, chosen)}
    if not kept:
        raise DataError(f"{path}: holds {'none of the chosen steps' if chosen else 'no step'}")
    return kept


class Files:
    """A framework's files. Those of a folder that cannot be read are named in `unread`."""

    def __init__(self, path: Path, kind: str, model: RouterShape | None, chosen: Steps | None):
        self.path, self.model = path, model
        self.unread: dict[Path, str] = {}
        """Unreadable file of a folder -> reason."""
        self.partly: dict[Path, str] = {}
        """File of JSON lines with unreadable lines -> message."""
        self.left_out: dict[int, list[Path]] = {}
        """Step -> its files of other known kinds, which need a separate audit."""
        steps = files_by_step(path)
        if not steps:
            raise DataError(f"{path}: holds neither {DESCRIPTION_FILE} nor files of a format that is read")
        steps = only_chosen(steps, chosen, path)
        if path.is_dir():
            known = next((file for files in steps.values() for file in files if self._may_be(file, kind)), None)
            if known is None:
                raise DataError([_unknown(path), *(f"not read: {text}" for text in self.unread.values())])
            # Other kinds of files in the folder may belong to other programs.
            firsts = {file.suffix: file for files in reversed(steps.values()) for file in reversed(files)}
            others = {suffix for suffix, file in firsts.items() if suffix != known.suffix and _is_recognised(file)}
            self.left_out = {step: [file for file in files if file.suffix in others] for step, files in steps.items()}
            steps = {step: [file for file in files if file.suffix == known.suffix] for step, files in steps.items()}
            steps = {step: files for step, files in steps.items() if files}
        else:
            known = path
        self.steps = steps
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


def _is_recognised(file: Path) -> bool:
    try:
        return recognised(load(file)) is not None
    except DataError:
        return False


class CapturedRoutes:
    """The files of a capture, as training's routes for files of another framework."""

    def __init__(self, folder: Path, model: RouterShape | None):
        self.path, self._description = folder, read_description(folder)
        self.steps = only_chosen(steps_of(folder), None, folder)
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


def _unknown(path: Path) -> str:
    return f"{path}: is of no format that is known; --format takes {', '.join(FORMATS)}"


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
