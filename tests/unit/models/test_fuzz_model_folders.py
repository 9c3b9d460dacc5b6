# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders that nobody has thought of, through `plan`, `data` and `convert`.

What is taken is what transformers and safetensors themselves read.
"""

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import REPOSITORY_ROOT
from tests.support.fuzzing import (
    ODD_NUMBERS,
    ODD_TEXTS,
    Case,
    Output,
    command,
    fuzz,
    mutated_bytes,
    mutated_json,
    mutated_tree,
)
from tests.support.hf_folders import tiny_tensors, write_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

TINY = REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe"
INDEX = "model.safetensors.index.json"
SMALL = {"num_hidden_layers": 2, "num_experts": 4, "max_window_layers": 2, "vocab_size": 32, "hidden_size": 16}


@cache
def model_folder() -> Path:
    """A model of two layers in two files, made once in a process."""
    folder = Path(mkdtemp(prefix="fuzz_model_")) / "model"
    config = json.loads((TINY / "config.json").read_text()) | SMALL
    write_folder(tiny_tensors(SimpleNamespace(**config)), folder, num_files=2)
    for path in TINY.iterdir():
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "eos_token_id": 1}')
    return folder


def _copied(folder: Path) -> Path:
    return Path(shutil.copytree(model_folder(), folder / "model"))


def _convert(model: Path) -> Callable[[], int]:
    return command(
        "convert", "--from", "hf", "--to", "hf", "--input", str(model), "--output", str(model.parent / "out")
    )


def _plan(model: Path) -> Callable[[], int]:
    return command("plan", "--config", "sft_tiny_moe.yaml", f"policy.model_name={model}")


def _same_weights(model: Path) -> Callable[[Output], str | None]:
    """Difference of the converted weights from what the library reads in the files that the index names."""

    def difference(output: Output) -> str | None:
        index = model / INDEX
        entries = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        files = {name: load_file(model / name) for name in set(entries.values()) or {"model.safetensors"}}
        held = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
        held = {name: held[name] for name in entries or held}
        made = {name: t for path in (model.parent / "out").glob("*.safetensors") for name, t in load_file(path).items()}
        if made.keys() != held.keys():
            return f"other tensors: {sorted(made.keys() ^ held.keys())[:5]}"
        # Those that are wider than the format of most were said to be rounded.
        other = [n for n, t in held.items() if not torch.equal(t.to(made[n].dtype), made[n]) and not t.isnan().any()]
        return f"other numbers in {other[:5]}" if other else None

    return difference


def configurations(generator: random.Random, folder: Path) -> Case:
    model = _copied(folder)
    path = model / "config.json"
    config = json.loads(path.read_text())
    if generator.random() < 0.2:
        content, what = mutated_bytes(generator, path.read_bytes())
    elif generator.random() < 0.5:
        name = generator.choice(list(config))
        config[name] = generator.choice([*ODD_NUMBERS, *ODD_TEXTS[:6], 2, 3, 7, 16, 10**6, 10**9])
        content, what = json.dumps(config).encode(), f"{name} = {config[name]!r:.60}"
    else:
        content, what = mutated_json(generator, config)
    path.write_bytes(content)
    if generator.random() < 0.3:
        return Case(f"convert, {what}", _convert(model), _same_weights(model))
    return Case(f"plan, {what}", _plan(model), _plan_is_whole)


def _plan_is_whole(output: Output) -> str | None:
    words = ("Layout:", "whole model", "at the fullest moment")
    return next((f"the plan lacks {word!r}" for word in words if word not in output.printed), None)


def _tampered_header(generator: random.Random, path: Path) -> str:
    """Changes the header of a safetensors file, whose length is put right most times."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = generator.choice([key for key in header if key != "__metadata__"])
    entry, how = header[name], generator.randrange(10)
    begin, end = entry["data_offsets"]
    what = f"{name}: "
    if how == 0:
        entry["data_offsets"] = generator.choice(
            [[begin - 4, end - 4], [end, begin], [begin, end + 4], [0, 4], [-4, 0], [2**63, 2**64], [begin, 2**40], []]
        )
        what += f"data_offsets = {entry['data_offsets']}"
    elif how == 1:
        entry["dtype"] = generator.choice(["BF16", "F16", "F64", "I32", "U8", "BOOL", "F8_E4M3", "f32", "", None, 3])
        what += f"dtype = {entry['dtype']}"
    elif how == 2:
        shape = entry["shape"]
        longer, larger = [[*shape, 1], [1, *shape], [shape[0] * 2]], [[-1, -1], [2**32, 2**32], [2**62] * 4]
        entry["shape"] = generator.choice([shape[::-1], *longer, [], [0], *larger, None])
        what += f"shape = {entry['shape']}"
    elif how == 3:
        other = generator.choice([key for key in header if key != "__metadata__"])
        header[name], header[other] = header[other], header[name]
        what += f"swapped with {other}"
    elif how == 4:
        header["__metadata__"] = generator.choice([None, [], {"format": 3}, {"format": "x" * 10**5}, "pt", {"a": {}}])
        what = "metadata"
    elif how == 5:
        header[generator.choice(["", "\x1b[2J", "x" * 10**4, "../x", f"{name}_"])] = header.pop(name)
        what += "renamed"
    elif how == 6:
        header, more = mutated_tree(generator, header, 1)
        what = more
    text = json.dumps(header).encode()
    if how == 7:
        text = text.replace(b"{", f'{{"{name}": {json.dumps(entry)}, '.encode(), 1)
        what += "twice"
    elif how == 8:
        text, more = mutated_bytes(generator, text)
        what = f"header of {more}"
    size = len(text)
    if how == 9:
        size = generator.choice([0, 1, size - 1, size + 1, len(content), 2**31, 2**63, 2**64 - 1, 100_000_001])
        what = f"header length {size} of {len(text)}"
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return what


def weights(generator: random.Random, folder: Path) -> Case:
    model = _copied(folder)
    path = generator.choice(sorted(model.glob("*.safetensors")))
    how = generator.randrange(10)
    if how < 6:
        what = _tampered_header(generator, path)
    elif how == 6:
        content, what = mutated_bytes(generator, path.read_bytes())
        path.write_bytes(content)
    else:
        index = json.loads((model / INDEX).read_text())
        if how == 7:
            content, what = mutated_json(generator, index)
        elif how == 8:
            entries = index["weight_map"]
            name = generator.choice(list(entries))
            targets = ["../model.safetensors", "/etc/passwd", ".", "", "a\0.safetensors", "\ud800", "config.json"]
            entries[name] = generator.choice([*targets, path.name, "x" * 300 + ".safetensors", None, [path.name], 3])
            content, what = json.dumps(index).encode(), f"{name} in {entries[name]!r:.50}"
        else:
            content, what = mutated_bytes(generator, (model / INDEX).read_bytes())
        (model / INDEX).write_bytes(content)
    return Case(what, _convert(model), _same_weights(model))


def tokenizers(generator: random.Random, folder: Path) -> Case:
    model = _copied(folder)
    name = generator.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    path = model / name
    whole = json.loads(path.read_text())
    content, what = (
        mutated_bytes(generator, path.read_bytes()) if generator.random() < 0.3 else mutated_json(generator, whole)
    )
    path.write_bytes(content)
    if name == "generation_config.json" or generator.random() < 0.1:

        def difference(output: Output) -> str | None:
            made = (folder / "out" / name).read_bytes()
            return None if made == content else f"{name} has changed"

        return Case(f"convert, {name}: {what}", _convert(model), difference)
    data = folder / "train.jsonl"
    data.write_text('{"prompt": "12+3=", "completion": "15"}\n{"prompt": "1=", "completion": "<think>1</think>1"}\n')
    words = [f"policy.model_name={model}", "policy.init=random", f"data.train.path={data}", "data.validation=null"]
    return Case(f"{name}: {what}", command("data", "--config", "sft_tiny_moe.yaml", *words))


def test_configurations(tmp_path: Path) -> None:
    fuzz(configurations, tmp_path)


def test_weights(tmp_path: Path) -> None:
    fuzz(weights, tmp_path)


def test_tokenizers(tmp_path: Path) -> None:
    fuzz(tokenizers, tmp_path)
