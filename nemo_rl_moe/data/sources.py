# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Sources of records: files of text, and tables that the `datasets` library reads, with a time limit on reading.

The library also finds files of text in folders and on the hub. This package reads these files itself, because the
library guesses the types of their values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from nemo_rl_moe.alarms import TimeIsUp, interrupted_after
from nemo_rl_moe.config.suggestions import did_you_mean, nearest
from nemo_rl_moe.data.image_records import image_columns
from nemo_rl_moe.data.record_forms import MORE_KEYS, NO_KEYS, SAMPLE_KEYS, FormOfLines, Keys
from nemo_rl_moe.data.record_values import RecordError, columns_of, names_in
from nemo_rl_moe.data.records import OTHER_KEYS, BadLine, Example, parse_record
from nemo_rl_moe.data.table_rows import rows_of
from nemo_rl_moe.data.template_inputs import TEMPLATE_COLUMNS
from nemo_rl_moe.data.text_files import (
    KIND_OF_SUFFIX,
    ChooseColumns,
    Parse,
    Parsed,
    TextKind,
    count_lines,
    open_text_file,
    read_text,
)
from nemo_rl_moe.errors import DataError, one_line
from nemo_rl_moe.models.hub import hub_or_cache_alone, hub_silence, hub_text_files

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDER_OF_SUFFIX = {".parquet": "parquet", ".arrow": "arrow"}


def load_table(path: str, split: str) -> "Dataset":
    """Load one split of a data set, which is a name on the hub, a folder (also one of `save_to_disk`), or a data file.
    Return its rows as a table."""
    from datasets import Dataset

    table = _load(path, split)
    if not isinstance(table, Dataset):
        raise DataError(f"{path}: split {split!r} is {type(table).__name__}, expected one table of rows")
    return table


def read_table(table: "Dataset", path: str, split: str, parse: Parse[Parsed]) -> Iterator[Parsed | BadLine]:
    """Yield the record of each row, or a `BadLine`. Sample ids are `path[split]:row`, with rows counted from 0."""
    for number, row in enumerate(rows_of(table)):
        sample_id = f"{path}[{split}]:{number}"
        try:
            if isinstance(row, RecordError):
                raise row
            yield parse(row, sample_id)
        except RecordError as error:
            yield BadLine(sample_id, str(error))


def _load(path: str, split: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    local = Path(path)
    with _load_errors(path):
        if _is_saved(local):
            loaded: Any = load_from_disk(path)
        elif local.is_file():
            builder = _BUILDER_OF_SUFFIX.get(local.suffix)
            if builder is None:
                allowed = ", ".join((*KIND_OF_SUFFIX, *_BUILDER_OF_SUFFIX))
                raise DataError(f"{path}: got the suffix {local.suffix or '(none)'}, expected one of {allowed}")
            loaded = load_dataset(builder, data_files=path)
        else:
            with nullcontext() if local.is_dir() else hub_or_cache_alone():
                loaded = load_dataset(path)
    table = _of_split(loaded, path, split) if isinstance(loaded, DatasetDict) else loaded
    if not local.exists() and table.info.builder_name in KIND_OF_SUFFIX.values():
        raise DataError(
            f"{path}: the hub cannot be reached, and the cache of `datasets` has values whose types were guessed from"
            f" {table.info.builder_name} files, perhaps wrongly; start once while the hub can be reached, or set the"
            " path to local files"
        )
    return table


def _of_split(splits: Mapping[str, Any], path: str, split: str) -> Any:
    if split not in splits:
        hint = did_you_mean(nearest(split, list(splits)))
        raise DataError(f"{path}: has no split {split!r}; its splits: {', '.join(splits)}{hint}")
    return splits[split]


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


@contextmanager
def _load_errors(path: str) -> Iterator[None]:
    """In this context, any error of the library becomes a `DataError` of one line."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except (DataError, TimeIsUp):
        raise
    except Exception as error:  # the library, the hub and the file formats raise dozens of types
        if not Path(path).exists() and (silence := hub_silence()) is not None:
            raise DataError(
                f"{path}: cannot be loaded from the hub ({silence}) or from its cache: {one_line(error)}"
            ) from error
        # `DatasetGenerationError` only wraps another error.
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        raise DataError(f"{path}: datasets cannot load it: {one_line(cause)}") from error


def _text_files(path: str, split: str) -> Sequence[tuple[Path, TextKind]] | None:
    """Return the files of text of a split in a folder or on the hub, each with its kind, or None if the data has other
    files."""
    from datasets import DownloadManager, load_dataset_builder

    with _load_errors(path):
        folder = Path(path) if Path(path).is_dir() else hub_text_files(path)
        if folder is None or _is_saved(folder):
            return None
        builder = load_dataset_builder(str(folder))
        kind: TextKind | None = next((kind for kind in KIND_OF_SUFFIX.values() if kind == builder.name), None)
        if kind is None:
            return None
        files = _of_split({str(name): found for name, found in builder.config.data_files.items()}, path, split)
        manager = DownloadManager()
        return [(Path(file), kind) for file in manager.iter_files(manager.download_and_extract(list(files)))]


@dataclass(frozen=True)
class LineSource(Generic[Parsed]):
    """An opened data set: the number of its good and bad lines, and the lines, which can be read once."""

    name: str
    num_lines: int
    lines: Iterator[Parsed | BadLine]


def open_source(path: str, split: str, image_key: str | None = None, keys: Keys = NO_KEYS) -> LineSource[Example]:
    """Open examples for supervised fine-tuning."""
    columns = partial(_example_columns, image_key=image_key, keys=keys)
    parse = partial(parse_record, image_key=image_key, keys=keys, form=FormOfLines())
    return open_lines(path, split, parse, columns)


def open_lines(path: str, split: str, parse: Parse[Parsed], choose_columns: ChooseColumns) -> LineSource[Parsed]:
    """Open a file of text, or a data set that `datasets` can find. `split` is ignored for a file of text."""
    if (kind := KIND_OF_SUFFIX.get(Path(path).suffix)) is not None:
        return LineSource(path, *open_text_file(Path(path), kind, parse, choose_columns))
    name = f"{path}[{split}]"
    files = None if Path(path).is_file() else _text_files(path, split)
    if files is not None:
        opened = [open_text_file(file, kind, parse, choose_columns) for file, kind in files]
        return LineSource(name, sum(number for number, _ in opened), chain.from_iterable(lines for _, lines in opened))
    table = load_table(path, split)
    table = table.select_columns(list(choose_columns(path, table.column_names)))
    return LineSource(name, len(table), read_table(table, path, split, parse))


TEXT_SUFFIX = ".txt"


def open_text(path: str, key: str, parse: Parse[Parsed]) -> LineSource[Parsed]:
    """Open a plain text file. Each line is a record with the key `key`."""
    return LineSource(path, count_lines(Path(path)), read_text(Path(path), key, parse))


def _example_columns(path: str, names: Sequence[str], image_key: str | None, keys: Keys) -> list[str]:
    named = columns_of(path, names, {f"data.{own}_key": key for own, key in keys.items()})
    if not named and not any(name in names for name in SAMPLE_KEYS):
        raise DataError(
            f"{path}: has neither messages nor prompt and completion; its columns: {names_in(names)}; {OTHER_KEYS}"
        )
    wanted = (*named, *SAMPLE_KEYS, *MORE_KEYS, *TEMPLATE_COLUMNS, *image_columns(names, image_key))
    return [name for name in dict.fromkeys(wanted) if name in names]


@contextmanager
def load_limit(limit_s: float, name: str) -> Iterator[None]:
    """Raise `DataError` if the body of this context, which reads a data set, takes longer than `limit_s` seconds. Only
    works in the main thread."""
    try:
        with interrupted_after(limit_s):
            yield
    except TimeIsUp:
        raise DataError(f"{name}: reading it took longer than data.load_timeout_s = {limit_s:g} s") from None
