# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading and writing Hugging Face folders as the ranks of a test's job do it."""

import pickle
import pkgutil
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import CheckpointError, ConfigurationError
from nemo_rl_moe.models.families import FAMILIES, decoder
from nemo_rl_moe.models.families.rules import Rule, RuleTable, rule
from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks
from nemo_rl_moe.models.megatron.model.transformer_config import build_transformer_config
from nemo_rl_moe.models.megatron.weights import hf_import
from nemo_rl_moe.models.megatron.weights.hf_export import save_weights, tensors_of_this_rank
from nemo_rl_moe.models.megatron.weights.hf_import import load_weights
from nemo_rl_moe.models.megatron.weights.parameter_layout import parameter_pieces
from nemo_rl_moe.models.megatron.weights.starting_weights import initialize_weights
from nemo_rl_moe.models.safetensors_files import SliceReader
from tests.support.tiny_model import parallel_job, tiny_hf_config

# isort: split
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

Model = tuple[list[GPTModel], TransformerConfig, Any]

NOTE = "note.txt"
"""What the tests write beside weights."""


def build_model(policy: PolicyConfig, changes: Mapping[str, Any]) -> Model:
    """Return this rank's chunks of the tiny model, full of 7s."""
    hf_config = tiny_hf_config(**changes)
    config = build_transformer_config(policy, hf_config)
    chunks = build_model_chunks(policy, config, hf_config)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(7.0)
    return chunks, config, hf_config


def load_from_each(
    policy: PolicyConfig, folders: Sequence[Sequence[str]], changes: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Load each folder in turn, this rank its own of each list.

    Returns:
        The errors' text; "loaded" where there is none. A parameter that an error has left changed is reported, too.
    """
    outcomes = []
    with parallel_job(policy) as rank:
        model = build_model(policy, changes)
        for choice in folders:
            try:
                load_weights(*model, Path(choice[rank]))
                outcomes.append("loaded")
            except ConfigurationError as error:
                outcomes.append(str(error))
                if any(not (parameter == 7.0).all() for chunk in model[0] for parameter in chunk.parameters()):
                    outcomes.append("parameters have changed")
    return outcomes


def load_with_each_damaged(
    policy: PolicyConfig, changes: Mapping[str, Any], places: Mapping[str, tuple[str, int]]
) -> dict[str, str]:
    """Load a folder with one byte changed, and once as it is, after each of which it is as it was.

    Args:
        policy: The layout.
        changes: Of the model's configuration.
        places: For each outcome a file and the place of the byte in it; a place before the file's first: no change.

    Returns:
        The errors' text; "loaded" where there is none.
    """
    outcomes = {}
    with parallel_job(policy) as rank:
        model = build_model(policy, changes)
        for name, (path, place) in places.items():
            _flip(Path(path), place, rank)
            try:
                load_weights(*model, Path(path).parent)
                outcomes[name] = "loaded"
            except ConfigurationError as error:
                outcomes[name] = str(error)
            _flip(Path(path), place, rank)
    return outcomes


def _flip(path: Path, place: int, rank: int) -> None:
    dist.barrier()
    if rank == 0 and place >= 0:
        with path.open("r+b") as file:
            file.seek(place)
            (old,) = file.read(1)
            file.seek(place)
            file.write(bytes([old ^ 1]))
    dist.barrier()


def spoil_while_loading(policy: PolicyConfig, folder: str) -> str:
    """Load a folder that the last rank cannot read to its end; returns the error's text."""

    class FailingReader(SliceReader):
        def read_into(self, *arguments: Any) -> None:
            if self.bytes_read > 10_000:
                raise OSError(5, "Input/output error")
            super().read_into(*arguments)

    with parallel_job(policy) as rank:
        model = build_model(policy, {})
        reader = FailingReader if rank == 1 else SliceReader
        with patch.object(hf_import, "SliceReader", reader):
            try:
                load_weights(*model, Path(folder))
            except ConfigurationError as error:
                return str(error)
    return "loaded"


def load_and_save(
    policy: PolicyConfig, changes: Mapping[str, Any], source: str, target: str, options: Mapping[str, Any]
) -> tuple[list[str], list[str], int]:
    """Load one folder and writes another.

    Args:
        policy: The layout.
        changes: Of the model's configuration.
        source: Where from.
        target: Where to.
        options: Of `save_weights`; with `stacks_experts` the family's own tensors hold all experts.

    Returns:
        What was left out on the way in, and out; and how many bytes this rank has read.
    """
    readers: list[SliceReader] = []

    class KeptReader(SliceReader):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            readers.append(self)

    options = dict(options)
    families = {"qwen3_moe": _with_stacked_experts()} if options.pop("stacks_experts", False) else {}
    with parallel_job(policy), patch.dict(FAMILIES, families):
        model = build_model(policy, changes)
        with patch.object(hf_import, "SliceReader", KeptReader):
            notices = load_weights(*model, Path(source))
        without_rule = save_weights(*model, Path(target), lambda folder: (folder / NOTE).touch(), **options)
    return notices, without_rule, sum(reader.bytes_read for reader in readers)


def last_rows_of_vocabulary(policy: PolicyConfig, changes: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Load; the last row that this rank has of the embedding and of the output layer, by their names."""
    with parallel_job(policy):
        chunks, config, hf_config = build_model(policy, changes)
        load_weights(chunks, config, hf_config, Path(source))
        pieces = parameter_pieces(chunks, config)
        return {piece.name: piece.local[-1].numpy().copy() for piece in pieces if piece.is_vocabulary}


def _with_stacked_experts() -> Any:
    def stacks(found: Rule) -> Rule:
        return rule(*found.alternatives[0])

    experts = {name: stacks(found) for name, found in decoder.EXPERTS.items()}
    rules = {**decoder.DECODER, **decoder.QK_NORMS, **decoder.ROUTER, **experts}
    return replace(FAMILIES["qwen3_moe"], rules=RuleTable(rules))


def names_handed_out(policy: PolicyConfig, source: str) -> dict[str, Any]:
    """Return the tensors that this rank hands to an engine, as arrays; taken before the model changes."""
    with parallel_job(policy):
        model = build_model(policy, {})
        load_weights(*model, Path(source))
        tensors = dict(tensors_of_this_rank(*model))
        for chunk in model[0]:
            for parameter in chunk.parameters():
                parameter.data.zero_()
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def save_twice(
    policy: PolicyConfig, first: str, second: str, file_limit: int | None, fails_beside: bool
) -> list[tuple[str, list[str], list[str]]]:
    """Write random weights into two folders, the first with a fault.

    Args:
        policy: The layout.
        first: Where to; `{rank}` stands for the rank.
        second: Where to; may be the same.
        file_limit: Bytes that a file of the last rank may have while the first one is written.
        fails_beside: What lies beside the weights cannot be written into the first one.

    Returns:
        For each the error's text, or "saved"; then what the folder holds, and what the folder lies among.
    """
    outcomes: list[tuple[str, list[str], list[str]]] = []
    with parallel_job(policy) as rank:
        chunks, config, hf_config = build_model(policy, {})
        initialize_weights(chunks, config, hf_config, 1)

        def write_beside(folder: Path) -> None:
            (folder / NOTE).write_text("beside")
            if fails_beside and not outcomes:
                raise PermissionError(13, "not allowed", "tokenizer.json")

        for number, folder in enumerate((Path(first.format(rank=rank)), Path(second))):
            if file_limit is not None and rank == dist.get_world_size() - 1:
                limit = file_limit if number == 0 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                save_weights(chunks, config, hf_config, folder, write_beside)
                outcome = "saved"
            except CheckpointError as error:
                outcome = str(error)
            outcomes.append((outcome, _names_in(folder), _names_in(folder.parent)))
            dist.barrier()
    return outcomes


def outcomes_with_failure(policy: PolicyConfig, folder: str, target: str) -> list[str]:
    """Hand weights out and write them, while the last rank runs out of memory in one function; then writes again.

    Args:
        policy: The layout.
        folder: Where to.
        target: The function's full name; the third call fails, and all later ones.

    Returns:
        The errors' text; "done" where there is none.
    """
    original, outcomes = pkgutil.resolve_name(target), []
    with parallel_job(policy) as rank, patch.dict(FAMILIES, {"qwen3_moe": _with_stacked_experts()}):
        model = build_model(policy, {})
        initialize_weights(*model, 1)

        def attempt(function: Callable[[], Any], *, fails: bool) -> None:
            num_calls = 0

            def failing(*arguments: Any, **options: Any) -> Any:
                nonlocal num_calls
                num_calls += 1
                if num_calls > 2:
                    raise RuntimeError("not enough memory:\n you tried to allocate 7 bytes")
                return original(*arguments, **options)

            replaced = failing if fails and rank == dist.get_world_size() - 1 else original
            with patch(target, replaced):
                try:
                    function()
                    outcomes.append("done")
                except (CheckpointError, RuntimeError) as error:
                    outcomes.append(str(error))

        def write() -> list[str]:
            return save_weights(*model, Path(folder), lambda _: None)

        attempt(lambda: list(tensors_of_this_rank(*model)), fails=True)
        attempt(write, fails=True)
        attempt(write, fails=False)
    return outcomes


def bytes_reported_while_loading(policy: PolicyConfig, folder: str) -> tuple[int, int]:
    """Load; bytes of what this rank heard from all, and of the names that it wanted itself."""
    heard: list[bytes] = []

    def listening(function: Callable[..., None]) -> Callable[..., None]:
        def listen(messages: list[Any], *arguments: Any, **options: Any) -> None:
            function(messages, *arguments, **options)
            heard.append(pickle.dumps(messages))

        return listen

    with parallel_job(policy):
        model = build_model(policy, {})
        with (
            patch.object(dist, "all_gather_object", listening(dist.all_gather_object)),
            patch.object(dist, "broadcast_object_list", listening(dist.broadcast_object_list)),
        ):
            load_weights(*model, Path(folder))
        wanted = hf_import._plan(*model, Path(folder)).wanted
    return sum(map(len, heard)), len(pickle.dumps(wanted))


def _names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def memory_of_saving(policy: PolicyConfig, changes: Mapping[str, Any], folder: str, max_shard_bytes: int) -> list[int]:
    """Write random weights; bytes of the model, and bytes that writing has added at most."""
    with parallel_job(policy):
        chunks, config, hf_config = build_model(policy, changes)
        initialize_weights(chunks, config, hf_config, 1)
        before = _begin_measuring()
        save_weights(chunks, config, hf_config, Path(folder), lambda _: None, max_shard_bytes=max_shard_bytes)
        return [_model_bytes(chunks), _memory("VmHWM") - before]


def memory_of_loading(policy: PolicyConfig, changes: Mapping[str, Any], folder: str) -> list[int]:
    """Read weights; bytes of the model, and bytes that reading has added at most."""
    with parallel_job(policy):
        model = build_model(policy, changes)
        before = _begin_measuring()
        load_weights(*model, Path(folder))
        added = _memory("VmHWM") - before
        assert not any((parameter == 7.0).all() for chunk in model[0] for parameter in chunk.parameters())
        return [_model_bytes(model[0]), added]


def _model_bytes(chunks: Sequence[GPTModel]) -> int:
    return sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())


def _begin_measuring() -> int:
    """Forget the largest size so far; bytes of this process in memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(name: str) -> int:
    """Return the bytes, by the kernel's name: pages of mapped files count, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (text,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(text) * 1024
