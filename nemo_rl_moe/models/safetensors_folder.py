# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and types of a Hugging Face folder's tensors, from its index and file headers.

The folder is untrusted. An index may name only plain files in the same folder, files are never unpickled, and every
mismatch is an error before the first tensor is read.
"""

import copy
import hashlib
import json
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from safetensors import SafetensorError, safe_open

from nemo_rl_moe.errors import ConfigurationError

INDEX_FILE = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
MOST_LISTED = 10
"""Maximum number of names in a message. Further names are only counted."""
_LARGEST_INDEX_BYTES = 2**27  # a model of a trillion parameters with 384 experts per layer needs 15 MB
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """Shape, type and file of a stored tensor, from the file's header."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class NoWeightsError(ConfigurationError):
    """A folder without any file of weights."""


class SafetensorsFolder:
    """The tensors of a folder. If the folder has an index, files that the index does not name are ignored.

    Attributes:
        tensors: Name -> stored tensor.
        without_entry: Name -> file, for each tensor that is in a file of the index but has no entry in the index.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        entries = read_index(folder)
        held = self._headers(sorted(set(entries.values()) or {self._single_file()}))
        if not entries:
            entries = {name: file for file, tensors in held.items() for name in tensors}
        lacking = [name for name, file in entries.items() if name not in held[file]]
        if lacking:
            first = lacking[0]
            raise _error(
                self.folder,
                f"{INDEX_FILE}: {entries[first]} does not hold {listed(lacking)}, which the index expects there",
            )
        self.tensors: Mapping[str, StoredTensor] = {name: held[file][name] for name, file in entries.items()}
        self.without_entry: Mapping[str, str] = {
            name: file for file, tensors in held.items() for name in tensors if name not in entries
        }

    def only(self, patterns: Sequence[str]) -> Self:
        """Return the folder with only the tensors whose names match one of the regular expressions."""
        chosen = copy.copy(self)
        chosen.tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if any(re.fullmatch(pattern, name) for pattern in patterns)
        }
        return chosen

    @property
    def fingerprint(self) -> str:
        """Hash of names, shapes, types and files, to compare the folders that several machines read."""
        return hashlib.sha256(repr(sorted(self.tensors.items())).encode()).hexdigest()

    def _single_file(self) -> str:
        """Return the file of a folder without an index."""
        try:
            names = sorted(path.name for path in self.folder.iterdir())
        except OSError as error:
            raise _error(self.folder, f"cannot be read: {error.strerror}") from None
        files = [name for name in names if name.endswith(".safetensors")]
        if ONE_FILE in files or len(files) == 1:
            return ONE_FILE if ONE_FILE in files else files[0]
        if files:
            raise _error(self.folder, f"holds several *.safetensors files ({listed(files)}) and no {INDEX_FILE}")
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise _error(
                self.folder,
                f"holds {listed(pickles)} and no *.safetensors file: reading pickled weights can run code hidden in "
                "them; convert them to safetensors if you trust them",
            )
        raise NoWeightsError(f"policy.model_name: {self.folder}: holds no *.safetensors file")

    def _headers(self, names: list[str]) -> dict[str, dict[str, StoredTensor]]:
        """Return file -> name -> tensor for all files, or raise an error that lists the damaged files."""
        held, problems = {}, []
        for name in names:
            try:
                held[name] = self._header(name)
            except ConfigurationError as error:
                problems += error.problems
        if problems:
            more = [_error(self.folder, f"{len(problems) - MOST_LISTED} more files are damaged or missing").problems[0]]
            raise ConfigurationError(problems[:MOST_LISTED] + (more if len(problems) > MOST_LISTED else []))
        return held

    def _header(self, name: str) -> dict[str, StoredTensor]:
        """Return name -> tensor of one file. `safe_open` checks the file's length against its header."""
        path = self.folder / name
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise _error(self.folder, f"{name}: no plain file")
            path.open("rb").close()  # safetensors reports an unreadable file as missing
            with safe_open(path, framework="pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  (no dict)
                return {
                    key: StoredTensor(name, tuple(found.get_shape()), found.get_dtype())
                    for key, found in slices.items()
                }
        except OSError as error:
            raise _error(self.folder, f"{name}: cannot be read: {error.strerror or one_line(error)}") from None
        except SafetensorError as error:
            raise _error(self.folder, f"{name}: damaged or no safetensors file: {one_line(error)}") from None


def read_index(folder: Path) -> dict[str, str]:
    """Return name -> file of each tensor in the index, or nothing without an index.

    The index may name only files in its folder.
    """
    path = folder / INDEX_FILE
    try:
        if not path.is_symlink() and not path.exists():
            return {}
        if not stat.S_ISREG(path.stat().st_mode):
            raise _error(folder, f"{INDEX_FILE}: no plain file")
        with path.open("rb") as file:
            content = file.read(_LARGEST_INDEX_BYTES + 1)
    except OSError as error:
        raise _error(folder, f"{INDEX_FILE}: cannot be read: {error.strerror}") from None
    if len(content) > _LARGEST_INDEX_BYTES:
        raise _error(folder, f"{INDEX_FILE}: larger than {_LARGEST_INDEX_BYTES >> 20} MiB")
    try:
        index = json.loads(content.decode("utf-8"), object_pairs_hook=_once_each, parse_constant=_refuse)
    except RecursionError:
        raise _error(folder, f"{INDEX_FILE}: not valid JSON: nested too deeply") from None
    except ValueError as error:  # also bytes that are not UTF-8
        raise _error(folder, f"{INDEX_FILE}: not valid JSON: {one_line(error)}") from None
    return _checked_entries(folder, index)


def _checked_entries(folder: Path, index: Any) -> dict[str, str]:
    entries = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise _error(folder, f"{INDEX_FILE}: expected an object 'weight_map' that names each tensor's file")
    for name, file in entries.items():
        if not isinstance(file, str) or not file.isprintable():
            raise _error(folder, f"{INDEX_FILE}: {shown(name)}: got {shown(file)}, expected the name of a file")
        if not file or file in (".", "..") or "/" in file or "\\" in file:
            raise _error(
                folder,
                f"{INDEX_FILE}: {shown(name)}: got {shown(file)}, which leaves the folder; expected the name of a "
                "file in it",
            )
        if not file.endswith(".safetensors"):
            raise _error(folder, f"{INDEX_FILE}: {shown(name)}: got {shown(file)}, expected a *.safetensors file")
    return entries


def _error(folder: Path, problem: str) -> ConfigurationError:
    return ConfigurationError(f"policy.model_name: {folder}: {problem}")


def listed(names: list[str]) -> str:
    """Return a text with the first few names and the number of other names."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(shown(name) for name in names[:MOST_LISTED]) + more


def count_of(names: Sequence[str]) -> str:
    """Return the number of tensors, such as `3 tensors`."""
    return f"{len(names)} tensor{'' if len(names) == 1 else 's'}"


def shown(value: Any) -> str:
    """Return a value from a file as one line of text. Plain names are unchanged, others are quoted and truncated."""
    text = str(value)
    return text if isinstance(value, str) and text.isprintable() and 0 < len(text) <= 200 else repr(value)[:200]


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    # The text of a KeyError is the key alone.
    return (f"KeyError: {text}" if isinstance(error, KeyError) else text or type(error).__name__)[:300]


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary. Duplicate keys are an error, because readers use different ones of them."""
    if len(pairs) != len(dict(pairs)):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} occurs twice")
    return dict(pairs)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")
