# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads what the `datasets` library reads: a hub's name, a folder, a parquet, json, csv or arrow file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.data.records import BadLine, RecordError
from nemo_rl_moe.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

Parsed = TypeVar("Parsed")

_BUILDER_OF_SUFFIX = {".parquet": "parquet", ".json": "json", ".csv": "csv", ".arrow": "arrow"}


def load_table(path: str, split: str) -> "Dataset":
    """The rows of one split.

    Args:
        path: A hub's name; a folder of data files, or one that `save_to_disk` wrote; or a data file.
        split: The split's name.

    Raises:
        DataError: There is no such dataset or split.
    """
    from datasets import Dataset

    table = _load(path, split)
    if not isinstance(table, Dataset):
        raise DataError(f"{path}: split {split!r} is {type(table).__name__}, expected one table of rows")
    return table


def read_table(
    table: "Dataset", path: str, split: str, parse: Callable[[object, str], Parsed]
) -> Iterator[Parsed | BadLine]:
    """Yields, for each row in order (counted from 0), what it holds or what is wrong with it.

    Args:
        table: The rows.
        path: What was loaded.
        split: Its split.
        parse: Gets a row and its `path[split]:row`; raises `RecordError` for one that cannot be used.
    """
    for number, row in enumerate(table):
        sample_id = f"{path}[{split}]:{number}"
        try:
            yield parse(row, sample_id)
        except RecordError as error:
            yield BadLine(sample_id, str(error))


def _load(path: str, split: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    local = Path(path)
    saved = (local / "dataset_dict.json").is_file() or (local / "state.json").is_file()
    try:
        if saved:
            loaded: Any = load_from_disk(path)
        elif local.is_file():
            builder = _BUILDER_OF_SUFFIX.get(local.suffix)
            if builder is None:
                allowed = ", ".join((".jsonl", *_BUILDER_OF_SUFFIX))
                raise DataError(f"{path}: a file that ends in {local.suffix or 'no suffix'}, expected one of {allowed}")
            loaded = load_dataset(builder, data_files=path)
        else:
            loaded = load_dataset(path)
    except DataError:
        raise
    except Exception as error:  # the library raises dozens of types, of its own, the hub's and the file formats'
        cause = next(iter(str(error).splitlines()), "")
        raise DataError(f"{path}: datasets cannot load it: {type(error).__name__}: {cause}") from error
    if not isinstance(loaded, DatasetDict):
        return loaded
    if split not in loaded:
        hint = did_you_mean(nearest(split, list(loaded)))
        raise DataError(f"{path}: has no split {split!r}; its splits: {', '.join(loaded)}{hint}")
    return loaded[split]
