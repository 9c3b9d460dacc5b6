# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders of the tiny model, whole and spoiled, written without transformers."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_moe.models.safetensors_folder import INDEX_FILE

NUM_FILES = 3
_SOME_TENSOR = "model.layers.2.self_attn.k_proj.weight"


def tiny_tensors(hf_config: Any) -> dict[str, Tensor]:
    """Return the random tensors of a Qwen3-MoE with experts in every layer, under the names of its files."""
    hidden, head_dim, width = hf_config.hidden_size, hf_config.head_dim, hf_config.moe_intermediate_size
    queries, keys = hf_config.num_attention_heads * head_dim, hf_config.num_key_value_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (hf_config.vocab_size, hidden)}
    for layer in range(hf_config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        rows = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (count, hidden) for name, count in rows.items()}
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{prefix}mlp.gate.weight"] = (hf_config.num_experts, hidden)
        for expert in range(hf_config.num_experts):
            of_expert = f"{prefix}mlp.experts.{expert}."
            shapes |= {f"{of_expert}{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
            shapes[f"{of_expert}down_proj.weight"] = (hidden, width)
    shapes["model.norm.weight"] = (hidden,)
    if not hf_config.tie_word_embeddings:
        shapes["lm_head.weight"] = (hf_config.vocab_size, hidden)
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stacked(tensors: Mapping[str, Tensor], hf_config: Any) -> dict[str, Tensor]:
    """Return the same with all experts of a layer in `[experts, ...]`, as newer transformers has them in memory."""
    changed = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(hf_config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."

        def of_experts(part: str, prefix: str = prefix) -> Tensor:
            return torch.stack(
                [tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(hf_config.num_experts)]
            )

        changed[f"{prefix}gate_up_proj"] = torch.cat([of_experts("gate"), of_experts("up")], dim=1)
        changed[f"{prefix}down_proj"] = of_experts("down")
    return changed


def write_folder(tensors: Mapping[str, Tensor], folder: Path, num_files: int = NUM_FILES) -> None:
    folder.mkdir(parents=True)
    names = list(tensors)
    if num_files == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        mine = names[number * len(names) // num_files : (number + 1) * len(names) // num_files]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _file_of(folder: Path, name: str = _SOME_TENSOR) -> Path:
    return folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]


def _change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX_FILE).read_text())
    change(index)
    (folder / INDEX_FILE).write_text(json.dumps(index))


def _set_entry(folder: Path, name: str, file: Any) -> None:
    _change_index(folder, lambda index: index["weight_map"].update({name: file}))


def _change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the file that holds the tensor of the examples, and the index with it."""
    path = _file_of(folder)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    _change_index(
        folder,
        lambda index: index.update(
            weight_map={name: file for name, file in index["weight_map"].items() if file != path.name}
            | dict.fromkeys(tensors, path.name)
        ),
    )


def _point_to(target: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.copy(_file_of(folder), folder.parent / "elsewhere.safetensors")
        file = target.format(parent=folder.parent)
        _set_entry(folder, _SOME_TENSOR, file)

    return change


def _truncate(folder: Path) -> None:
    path = _file_of(folder)
    path.write_bytes(path.read_bytes()[:-1000])


def _one_file(content: bytes) -> Callable[[Path], None]:
    return lambda folder: (_file_of(folder).write_bytes(content), None)[1]


def _only_pickles(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def _write_index(text: str) -> Callable[[Path], None]:
    return lambda folder: ((folder / INDEX_FILE).write_text(text), None)[1]


def _twice_in_the_index(folder: Path) -> None:
    path = folder / INDEX_FILE
    text = json.dumps(json.loads(path.read_text()))
    path.write_text(text.replace('"weight_map": {', f'"weight_map": {{"{_SOME_TENSOR}": "a.safetensors", ', 1))


def _rename(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.self_attn.k_proj.wight"] = tensors.pop(_SOME_TENSOR)


def _to(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return lambda folder: _change_tensors(folder, lambda held: held.update({_SOME_TENSOR: change(held[_SOME_TENSOR])}))


DAMAGED: Mapping[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "truncated file": (_truncate, (".safetensors: damaged", "not fully covered")),
    "missing file": (lambda folder: _file_of(folder).unlink(), (".safetensors: cannot be read: No such file",)),
    "empty file": (_one_file(b""), (".safetensors: damaged", "too small")),
    "garbage in a header": (_one_file((20).to_bytes(8, "little") + b"x" * 30), (".safetensors: damaged", "JSON")),
    "huge header": (_one_file((2**62).to_bytes(8, "little") + b"{}"), (".safetensors: damaged", "too large")),
    "tensor not in its file": (
        lambda folder: _set_entry(folder, "lm_head.bias", "model-00001-of-00003.safetensors"),
        (f"{INDEX_FILE}: model-00001-of-00003.safetensors does not hold lm_head.bias",),
    ),
    "path that leaves the folder": (
        _point_to("../elsewhere.safetensors"),
        (f"{_SOME_TENSOR}: got ../elsewhere.safetensors, which leaves the folder",),
    ),
    "absolute path": (_point_to("{parent}/elsewhere.safetensors"), ("elsewhere.safetensors, which leaves the folder",)),
    "pickle in the index": (_point_to("pytorch_model.bin"), ("got pytorch_model.bin, expected a *.safetensors file",)),
    "number for a file": (
        lambda folder: _set_entry(folder, _SOME_TENSOR, 3),
        (f"{_SOME_TENSOR}: got 3, expected the name of a file",),
    ),
    "name that no file can have": (
        lambda folder: _set_entry(folder, _SOME_TENSOR, "\ud800.safetensors"),
        (rf"{_SOME_TENSOR}: got '\ud800.safetensors', expected the name of a file",),
    ),
    "index is no JSON": (_write_index("{"), (f"{INDEX_FILE}: not valid JSON",)),
    "index is nested": (_write_index("[" * 100_000), (f"{INDEX_FILE}: not valid JSON: nested too deeply",)),
    "index is no object": (_write_index("[]"), ("expected an object 'weight_map'",)),
    "index without a map": (_write_index('{"weight_map": {}}'), ("expected an object 'weight_map'",)),
    "entry stands twice": (_twice_in_the_index, (f"not valid JSON: the key {_SOME_TENSOR} occurs twice",)),
    "no index": (
        lambda folder: (folder / INDEX_FILE).unlink(),
        ("holds several *.safetensors files", f"no {INDEX_FILE}"),
    ),
    "pickles": (_only_pickles, ("holds pytorch_model.bin", "convert them to safetensors")),
}
"""What makes a folder one that cannot be used: the damage, and words of the error."""

UNFIT: Mapping[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing entry of the index": (
        lambda folder: _change_index(folder, lambda index: index["weight_map"].pop(_SOME_TENSOR)),
        (f"1 tensor missing: {_SOME_TENSOR}; the index has no entry for {_SOME_TENSOR}, though model-",),
    ),
    "missing tensor": (
        lambda folder: _change_tensors(folder, lambda tensors: tensors.pop(_SOME_TENSOR)),
        (f"1 tensor missing: {_SOME_TENSOR}",),
    ),
    "other name": (
        lambda folder: _change_tensors(folder, _rename),
        (f"1 tensor missing: {_SOME_TENSOR}\n", "1 tensor that the model has no place for", "k_proj.wight"),
    ),
    "other shape": (
        _to(lambda tensor: tensor.T.contiguous()),
        (f"1 tensor of another shape: {_SOME_TENSOR} (got [32, 16], expected [16, 32])",),
    ),
    "other type": (
        _to(lambda tensor: tensor.to(torch.float8_e4m3fn)),
        (f"{_SOME_TENSOR} (F8_E4M3); allowed: F64, F32, BF16, F16; convert",),
    ),
    "whole numbers": (_to(lambda tensor: tensor.to(torch.int8)), (f"{_SOME_TENSOR} (I8); allowed",)),
    "many extra tensors": (
        lambda folder: _change_tensors(
            folder, lambda tensors: tensors.update({f"extra.{number:02d}": torch.zeros(1) for number in range(25)})
        ),
        ("25 tensors that the model has no place for: extra.00, extra.01", "extra.09 and 15 more"),
    ),
}
"""What makes a folder one of another model: the change, and words of the error."""
