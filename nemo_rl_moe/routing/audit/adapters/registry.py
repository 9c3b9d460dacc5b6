# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Readable formats, recognition of a file's format, and the files of a folder by step."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.routing.audit.adapters import areal, nemo_rl, prime_rl, router_logits, sglang, skyrl, slime, verl, vllm
from nemo_rl_moe.routing.audit.adapters.inert_pickle import read_pickle
from nemo_rl_moe.routing.audit.adapters.miles_parquet import MAGIC, load_parquet
from nemo_rl_moe.routing.audit.adapters.router_shape import RouterShape
from nemo_rl_moe.routing.audit.adapters.verl_queue import FILE_NAME as QUEUE_FILE
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence

_Read = Callable[[Any, str, RouterShape | None], Iterator[CapturedSequence]]


@dataclass(frozen=True)
class Adapter:
    """Reader of one file format. `read` raises a DataError if a field is missing or does not fit the others."""

    made_by: str
    claims: Callable[[Any], bool]
    read: _Read


ADAPTERS: Mapping[str, Adapter] = {
    "transformers": Adapter("router logits of transformers", router_logits.claims, router_logits.read),
    "slime": Adapter("slime or miles", slime.claims, slime.read),
    "areal": Adapter("AReaL", areal.claims, areal.read),
    "skyrl": Adapter("SkyRL", skyrl.claims, skyrl.read),
    "nemo-rl": Adapter("NeMo-RL", nemo_rl.claims, nemo_rl.read),
    "verl": Adapter("verl", verl.claims, verl.read),
    "prime-rl": Adapter("prime-rl", prime_rl.claims, prime_rl.read),
    "sglang": Adapter("SGLang", sglang.claims, sglang.read),
    "vllm": Adapter("vLLM", vllm.claims, vllm.read),
}
"""Adapters by their name for `--format`, in the order in which they are tried. miles writes slime's format."""


class JsonLines(list[Any]):
    """Values of a JSON lines file, one per line.

    Attributes:
        unread: Numbers of the lines that are not JSON, such as an unfinished last one.
    """

    unread: tuple[int, ...] = ()


def load(path: Path) -> Any:
    """Return the content of a file: JSON, JSON lines, a pickle or `torch.save` file, safetensors, MessagePack, or
    miles' Parquet.

    Raises:
        DataError: The file has none of these formats, is damaged, or is a pickle that names other code.
    """
    if path.exists() and not path.is_file():  # a pipe can be read only once, and may never get a writer
        raise DataError(f"{path}: cannot be read: expected a regular file, got a pipe or a device")
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if head.startswith((b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return read_pickle(path.read_bytes(), str(path))
    try:
        if head.startswith(MAGIC):
            return load_parquet(path)
        if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size:
            from safetensors.torch import load_file

            return load_file(path)
        if head.lstrip()[:1] in (b"{", b"["):
            return _json(path)
        if head and (0x90 <= head[0] <= 0x9F or head[0] in (0xDC, 0xDD)):
            import msgpack

            return msgpack.unpackb(path.read_bytes())
    except Exception as error:  # each library has different errors
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
    raise DataError(f"{path}: is neither JSON nor a pickle, a torch.save, safetensors, MessagePack or Parquet file")


def _json(path: Path) -> Any:
    """Return a JSON value, or the values of all complete lines."""
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        return [found] if path.suffix == ".jsonl" and isinstance(found, dict) else found
    except json.JSONDecodeError as error:
        found, unread = JsonLines(), []
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                found += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError:
                unread.append(number)
        if not any(isinstance(value, dict) for value in found):
            raise error
        found.unread = tuple(unread)
        return found


def recognised(content: Any) -> str | None:
    """Return the name of the format of a file's content, if it is known."""
    return next((name for name, adapter in ADAPTERS.items() if adapter.claims(content)), None)


_SUFFIXES = (".pkl", ".pt", ".pth", ".dp", ".json", ".jsonl", ".bin", ".safetensors", ".parquet")
_LEFT_OUT = ("eval_", "val_", ".")


def files_by_step(path: Path) -> dict[int, list[Path]]:
    """Return step -> its files in a folder and its subfolders, in the order of the steps, without files of evaluations.
    For a file, return this file.

    The step is the number after "step", or the first number, in the file's name, otherwise in its folder's name,
    otherwise 0.
    """
    files = [path]
    if path.is_dir():
        found = (file for file in sorted(path.rglob("*")) if file.suffix in _SUFFIXES and file.is_file())
        files = [
            file
            for file in found
            if not file.name.startswith(_LEFT_OUT) and file.name not in ("config.json", "meta.json")
        ]
    steps: dict[int, list[Path]] = {}
    for file in files:
        steps.setdefault(_step_of(file), []).append(file)
    return dict(sorted(steps.items()))


def _step_of(path: Path) -> int:
    if path.name == QUEUE_FILE:  # {step}/{part of the step}/tq_batch.pt
        path = path.parent.parent
    for pattern in (r"step[_-]?(\d+)", r"(\d+)"):
        for text in (path.stem, path.parent.name):
            if (match := re.search(pattern, text)) is not None:
                return int(match.group(1))
    return 0
