# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Records and files that nobody has thought of, through `data`: reported by line, or shown whole beside all others."""

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from nemo_rl_moe.errors import printable
from tests.conftest import REPOSITORY_ROOT
from tests.support.chat_templates import make_byte_tokenizer
from tests.support.fuzzing import Case, Output, command, fuzz, mutated_bytes, mutated_json, mutated_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

MODEL = REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe"
# Shows all that a conversation may hold, in one line each.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}<|start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
USER = {"role": "user", "content": "how much is 1+2?"}
ANSWER = {"role": "assistant", "content": "it is 3."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]}
TALK = [{"role": "system", "content": "be brief"}, USER, CALL, RESULT, ANSWER]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {"prompt": "1+1=", "completion": "2"},
        {"messages": [USER, ANSWER, PARTS, ANSWER]},
        {"messages": TALK, "tools": [ADD], "chat_template_kwargs": {}},
        {"messages": TALK, "tools": json.dumps([ADD])},
        {"prompt": [USER], "completion": [ANSWER]},
    ],
    "dpo": [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "4"}]},
        {"prompt": [USER], "chosen": [CALL], "rejected": [ANSWER], "tools": [ADD]},
    ],
    "rm": [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "4"}], "margin": -1},
    ],
    "grpo": [
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": [USER], "answer": 3},
        {"prompt": TALK[:4], "answer": "3", "tools": [ADD]},
    ],
}
MOST_TOKENS = 40_000


@cache
def tokenizer_folder() -> Path:
    """Made once in a process."""
    from tempfile import mkdtemp

    folder = Path(mkdtemp(prefix="fuzz_tokenizer_"))
    make_byte_tokenizer(TEMPLATE).save_pretrained(folder)
    return folder


def data_command(algorithm: str, path: Path, on_bad_line: str) -> Callable[[], int]:
    more = ["env.reward.kind=math", "data.answer_key=answer", "policy.generation.max_new_tokens=9"]
    return command(
        "data",
        *("--config", f"{algorithm}_tiny_moe.yaml", "--show", "50"),
        *(f"policy.model_name={MODEL}", "policy.init=random", f"policy.tokenizer.name={tokenizer_folder()}"),
        *(f"policy.max_total_sequence_length={MOST_TOKENS}", f"data.on_bad_line={on_bad_line}"),
        *(f"data.train.path={path}", "data.validation=null", *(more if algorithm == "grpo" else [])),
    )


def expected_texts(record: Any) -> list[str]:
    """Texts of a record that must be shown where it is taken."""
    found = []
    for key in ("prompt", "completion", "chosen", "rejected", "messages"):
        value = record.get(key) if isinstance(record, dict) else None
        if key in ("prompt", "completion") and record.get("messages") is not None:
            continue
        turns = value if isinstance(value, list) else [{"content": value}] if isinstance(value, str) else []
        for turn in turns:
            content = turn.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            found += [part["text"] for part in parts if isinstance(part.get("text"), str)]
            found += [call["function"]["name"] for call in turn.get("tool_calls") or []]
    return [printable(text.strip()) for text in found]


def shows(output: Output, good: Sequence[tuple[int, Any]], other: tuple[int, Any] | None) -> str | None:
    """Return what the view lacks of the good records, by their numbers, and of the other one where it is read."""
    report = next(line for line in output.printed.splitlines() if re.search(r": \d[\d,]* (example|pair|prompt)", line))
    heads = re.findall(r"^(\S*):(\d+)(?: \(chosen\)| \(rejected\))?: ", output.printed, re.MULTILINE)
    shown = {int(number) for _, number in heads}
    if "repeated" in report and other is not None:  # the odd one asks the same as one behind it, which is left out
        good = [(number, record) for number, record in good if record["prompt"] != other[1]["prompt"]]
    for number, record in good:
        if number not in shown:
            return f"record {number} is not shown: {report}"
        if lacking := [text for text in expected_texts(record) if text not in output.printed]:
            return f"record {number} is shown without {lacking}"
    is_whole = other is not None and other[0] in shown and "truncated\n" not in output.printed
    lacking = [text[:200] for text in expected_texts(other[1]) if text not in output.printed] if is_whole else []
    return f"the odd record is taken without {lacking}" if lacking else None


def lines_of_json(generator: random.Random, folder: Path) -> Case:
    algorithm = generator.choice(list(RECORDS))
    records = RECORDS[algorithm]
    line, what = mutated_json(generator, generator.choice(records))
    line = line.replace(b"\n", b" ")
    number = generator.randrange(len(records) + 1)
    lines = [json.dumps(record).encode() for record in records]
    lines.insert(number, line)
    path = folder / "train.jsonl"
    path.write_bytes(b"\n".join(lines) + generator.choice([b"", b"\n", b"\r\n"]))
    good = [(index + 1 + (index >= number), record) for index, record in enumerate(records)]

    def difference(output: Output) -> str | None:
        try:
            other = (number + 1, json.loads(line.decode("utf-8")))
        except (ValueError, RecursionError):
            other = None
        return shows(output, good, other)

    on_bad_line = generator.choice(["stop", "stop", "skip"])
    return Case(f"{algorithm}, {on_bad_line}: {what}", data_command(algorithm, path, on_bad_line), difference)


def bytes_of_json(generator: random.Random, folder: Path) -> Case:
    algorithm = generator.choice(list(RECORDS))
    whole = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS[algorithm])
    content, what = mutated_bytes(generator, whole)
    path = folder / "train.jsonl"
    path.write_bytes(content)

    def difference(output: Output) -> str | None:
        good = []
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line in [json.dumps(record).encode() for record in RECORDS[algorithm]]:
                good.append((number, json.loads(line)))
        return shows(output, good, None)

    on_bad_line = generator.choice(["stop", "skip"])
    return Case(f"{algorithm}, {on_bad_line}: {what}", data_command(algorithm, path, on_bad_line), difference)


def _odd_column(generator: random.Random, num_rows: int) -> pa.Array:
    return generator.choice(
        [
            pa.nulls(num_rows),
            pa.array([1] * num_rows),
            pa.array([[["a"], None]] * num_rows),
            pa.array([b"\xff\xfe"] * num_rows),
            pa.array([b"\xff\xfe"] * num_rows).view(pa.string()),
            pa.array(["a"] * num_rows).dictionary_encode(),
            pa.array(["a"] * num_rows, pa.large_string()),
            pa.array([0] * num_rows, pa.timestamp("ns")),
            pa.array([{"role": "user"}] * num_rows),
            pa.array([[{"role": "user", "content": None}]] * num_rows),
            pa.array(["x" * 1_000_000] * num_rows),  # a record takes memory in proportion to its length
            pa.array([[]] * num_rows, pa.list_(pa.string())),
            pa.array([[("a", 1)]] * num_rows, pa.map_(pa.string(), pa.int64())),
            pa.array([float("nan")] * num_rows),
        ]
    )


def _write_table(table: pa.Table, path: Path, compression: str) -> None:
    """Writes the format that the name says; what it has no form for is an empty table in it."""
    try:
        if path.suffix == ".parquet":
            pq.write_table(table, path, compression=compression)
        elif path.suffix == ".csv":
            csv.write_csv(table, path)
        elif path.suffix == ".json":
            path.write_text("\n".join(map(json.dumps, table.to_pylist())))
        else:
            with pa.ipc.new_stream(path, table.schema) as file:
                file.write_table(table)
    except (pa.ArrowException, TypeError, ValueError):
        path.write_bytes(b"")


def tables(generator: random.Random, folder: Path) -> Case:
    algorithm = generator.choice(list(RECORDS))
    # A column of a table has one type.
    record = generator.choice([record for record in RECORDS[algorithm] if PARTS not in record.get("messages", ())])
    record = {key: value for key, value in record.items() if key != "chat_template_kwargs"}
    table = pa.Table.from_pylist([copy.deepcopy(record) for _ in range(3)])
    compression = generator.choice(["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
    path = folder / f"train.{generator.choice(['parquet', 'parquet', 'parquet', 'arrow', 'csv', 'json'])}"
    how = generator.choice(["whole", "whole", "bytes", "bytes", "bytes", "column", "column", "rows", "names", "tree"])
    what = how
    if how == "column":
        place = generator.randrange(table.num_columns)
        column = _odd_column(generator, 3)
        table = table.set_column(place, table.column_names[place], column)
        what = f"{table.column_names[place]} of type {column.type}"
    elif how == "rows":
        table = table.slice(0, 0)
    elif how == "names":
        place = generator.randrange(table.num_columns)
        names = list(table.column_names)
        names[place] = generator.choice(["", "\x1b[2J", "x" * 10_000, names[0], "a.b", "_x"])
        table, what = table.rename_columns(names), f"columns {names}"[:200]
    elif how == "tree":
        changed, what = mutated_tree(generator, record)
        try:
            table = pa.Table.from_pylist([changed] * 3)
        except (pa.ArrowException, OverflowError, TypeError, AttributeError, ValueError):
            what = "whole"
    _write_table(table, path, compression)
    if how == "bytes":
        content, what = mutated_bytes(generator, path.read_bytes())
        path.write_bytes(content)

    def difference(output: Output) -> str | None:
        if path.suffix != ".parquet":
            return None
        rows = pq.read_table(path).to_pylist()
        found = re.search(r": (\d[\d,]*) (?:example|pair|prompt)", output.printed)
        assert found is not None
        number = int(found[1].replace(",", ""))
        repeated = re.search(r"([\d,]+) repeated", output.printed)
        number += int(repeated[1]) if repeated else 0
        if on_bad_line == "stop" and number != len(rows) and "left out" not in output.printed:
            return f"{number} of {len(rows)} rows are taken"
        shown = "truncated\n" in output.printed
        lacking = [text for row in rows[:1] for text in expected_texts(row) if text not in output.printed]
        return (
            f"shown without {[text[:100] for text in lacking]}"
            if lacking and not shown and on_bad_line == "stop"
            else None
        )

    on_bad_line = generator.choice(["stop", "stop", "skip"])
    what = f"{algorithm}, {on_bad_line}, {path.suffix}, {compression}: {what}"
    return Case(what, data_command(algorithm, path, on_bad_line), difference)


def test_lines(tmp_path: Path) -> None:
    fuzz(lines_of_json, tmp_path)


def test_bytes(tmp_path: Path) -> None:
    fuzz(bytes_of_json, tmp_path)


def test_tables(tmp_path: Path) -> None:
    fuzz(tables, tmp_path)
