# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Writing a Hugging Face folder: whole or not at all, from any layout, and what fails on one rank ends all of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from nemo_rl_moe.models.safetensors_folder import INDEX_FILE
from tests.support.family_reference import assert_same_tensors
from tests.support.gloo_ranks import run_ranks
from tests.support.hf_folders import stacked, tiny_tensors, write_folder
from tests.support.hf_runs import NOTE, load_and_save, names_handed_out, outcomes_with_failure, save_twice
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, tiny_hf_config, tiny_policy


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, {"ep": 2}),
        full(2, {"tp": 2, "etp": 2}),
        slow(4, {"pp": 2, "ep": 2}),
        slow(4, {"tp": 2, "ep": 2, "etp": 2}),
        slow(4, {"ep": 2}),
    ],
)
def test_stacked_experts_come_together_in_one_tensor(world_size: int, sizes: dict[str, int], tmp_path: Path) -> None:
    hf_config = tiny_hf_config()
    source, target = tmp_path / "source", tmp_path / "target"
    write_folder(stacked(tiny_tensors(hf_config), hf_config), source)
    policy = tiny_policy(world_size, **layout(**sizes))
    run_ranks(load_and_save, world_size, policy, {}, str(source), str(target), {"stacks_experts": True})
    assert_same_tensors(target, source)


def test_files_are_as_small_as_asked_for_and_shared_by_the_ranks(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_hf_config())
    source, target = tmp_path / "source", tmp_path / "target"
    write_folder(tensors, source)
    # Data-parallel ranks hold the same, and write half of it each.
    run_ranks(load_and_save, 2, tiny_policy(2), {}, str(source), str(target), {"max_shard_bytes": 50_000})
    index = json.loads((target / INDEX_FILE).read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    count = len(files)
    assert count > 4
    assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    held: dict[str, str] = {}
    for file in files:
        with safe_open(target / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            held |= dict.fromkeys(opened.keys(), file)
        assert (target / file).stat().st_size < 60_000
    assert index["weight_map"] == held
    assert index["metadata"] == {
        "total_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
    }
    assert held.keys() == tensors.keys()


def test_one_file_has_no_index(tmp_path: Path) -> None:
    write_folder(tiny_tensors(tiny_hf_config()), tmp_path / "source")
    target = tmp_path / "target"
    run_ranks(load_and_save, 1, tiny_policy(), {}, str(tmp_path / "source"), str(target), {})
    assert sorted(path.name for path in target.iterdir()) == ["files.json", "model.safetensors", NOTE]


def test_tensors_handed_out_are_copies_and_each_is_handed_out_once(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_hf_config())
    write_folder(tensors, tmp_path / "source")
    first, second = run_ranks(names_handed_out, 2, tiny_policy(2, **layout(ep=2)), str(tmp_path / "source"))
    assert not first.keys() & second.keys()
    found = first | second
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.numpy())


TWO_RANKS = tiny_policy(2, **layout(tp=2, etp=2))
WRITTEN = ["files.json"] + [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)] + [INDEX_FILE, NOTE]


@pytest.mark.parametrize(
    ("file_limit", "fails_beside", "expected"),
    [
        (30_000, False, "rank 1: [Errno 27] File too large"),
        (None, True, "rank 0: [Errno 13] not allowed: 'tokenizer.json'"),
    ],
)
def test_fault_of_one_rank_ends_all_and_leaves_the_earlier_folder(
    file_limit: int | None, fails_beside: bool, expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "earlier").touch()
    first, second = run_ranks(save_twice, 2, TWO_RANKS, str(folder), str(folder), file_limit, fails_beside)
    assert first == second
    error = f"{folder}: cannot be written: {expected}"
    assert first == [(error, ["earlier"], ["weights"]), ("saved", WRITTEN, ["weights"])]


@pytest.mark.parametrize(
    ("sizes", "function"),
    [
        slow({"tp": 2, "etp": 2}, "torch.Tensor.new_empty"),
        full({"tp": 2, "etp": 2}, "nemo_rl_moe.models.megatron.weights.hf_gather._joined"),
        full({"ep": 2}, "nemo_rl_moe.models.megatron.weights.hf_gather._as_bytes"),
        ({"pp": 2}, "nemo_rl_moe.models.safetensors_files.SafetensorsWriter.write"),
    ],
)
def test_rank_without_memory_keeps_nobody_waiting(sizes: dict[str, int], function: str, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    policy = tiny_policy(2, **layout(**sizes))
    first, second = run_ranks(outcomes_with_failure, 2, policy, str(folder), function)
    assert first == second
    handed_out, written, last = first
    problem = "rank 1: not enough memory: you tried to allocate 7 bytes"
    assert handed_out == (f"the weights cannot be exported: {problem}" if "Writer" not in function else "done")
    assert (written, last) == (f"{folder}: cannot be written: {problem}", "done")


def test_a_disk_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    full, with_room = small_disk / "weights", tmp_path / "room" / "weights"
    first, second = run_ranks(save_twice, 2, TWO_RANKS, str(full), str(with_room), None, False)
    assert first == second
    (error, inside, around), last = first
    assert error.startswith(f"{full}: cannot be written: rank 0: [Errno 28] No space left on device")
    assert (inside, around) == ([], [])
    assert last == ("saved", WRITTEN, ["weights"])


def test_ranks_that_do_not_share_the_folder(tmp_path: Path) -> None:
    apart = str(tmp_path / "of_{rank}" / "weights")
    first, second = run_ranks(save_twice, 2, TWO_RANKS, apart, str(tmp_path / "weights"), None, False)
    expected = f"rank 1: there is no folder {tmp_path}/of_1/weights.incomplete; all ranks must share it"
    for rank, outcomes in enumerate((first, second)):
        folder = apart.format(rank=rank)
        assert outcomes[0][0] == f"{folder}: cannot be written: {expected}"
        assert outcomes[0][2] == []
        assert outcomes[1][0] == "saved"


def test_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    blocked = tmp_path / "file" / "weights"
    first, second = run_ranks(save_twice, 2, TWO_RANKS, str(blocked), str(tmp_path / "weights"), None, False)
    assert first == second
    assert first[0][0].startswith(f"{blocked}: cannot be written: rank 0: [Errno 20] Not a directory")
    assert first[1][0] == "saved"
