# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Reading a Hugging Face folder: what does not fit is reported by all ranks first, and each reads its own part."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_rl_moe.checksums import HEADER, read_inventory
from tests.support.family_reference import assert_same_tensors, tensors_in
from tests.support.gloo_ranks import run_ranks
from tests.support.hf_folders import DAMAGED, UNFIT, stacked, tiny_tensors, write_folder
from tests.support.hf_runs import (
    bytes_reported_while_loading,
    last_rows_of_vocabulary,
    load_and_save,
    load_from_each,
    load_with_each_damaged,
    spoil_while_loading,
)
from tests.support.quick_list import full, slow
from tests.support.tiny_model import layout, tiny_hf_config, tiny_policy
from tests.unit.models.megatron.tiny_trainers import EXPERT_BIAS

TIED = {"tie_word_embeddings": True}
# A layer for each of two stages, two experts for each of two ranks: the folder is read once for every tensor.
SMALLEST = {"num_hidden_layers": 2, "num_experts": 4}


def through_ranks(
    tensors: dict[str, torch.Tensor], folder: Path, num_ranks: int, model: Mapping[str, Any] = {}, **changes: Any
) -> tuple[Path, Path, list[Any]]:
    """Write the tensors, have ranks read and save them; the two folders, and what each rank answers."""
    source, target = folder / "source", folder / "target"
    write_folder(tensors, source)
    policy = tiny_policy(num_ranks, **changes)
    return source, target, run_ranks(load_and_save, num_ranks, policy, model, str(source), str(target), {})


def test_what_does_not_fit_is_reported_by_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    spoiled = {**DAMAGED, **UNFIT}
    folders = [tmp_path / str(number) / "folder" for number in range(len(spoiled))]
    for folder, (spoil, _) in zip(folders, spoiled.values(), strict=True):
        write_folder(tiny_tensors(tiny_hf_config()), folder)
        spoil(folder)
    whole = tmp_path / "whole"
    write_folder(tiny_tensors(tiny_hf_config()), whole)
    policy = tiny_policy(2, **layout(pp=2))
    outcomes = run_ranks(load_from_each, 2, policy, [[str(folder)] * 2 for folder in [*folders, whole]])
    assert outcomes[0] == outcomes[1]
    *errors, last = outcomes[0]
    assert last == "loaded"
    for folder, error, (_, words) in zip(folders, errors, spoiled.values(), strict=True):
        assert all(line.startswith(f"policy.model_name: {folder}: ") for line in error.split("\n"))
        assert "rank" not in error
        for word in words:
            assert word in error


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        full(1, {}),
        full(2, {}),
        full(2, {"ep": 2}),
        full(2, {"tp": 2, "etp": 2}),
        (2, {"pp": 2}),
        full(4, {"tp": 2, "ep": 2}),
    ],
)
def test_damage_of_any_part_is_reported_by_name_in_every_layout(
    world_size: int, sizes: dict[str, int], tmp_path: Path
) -> None:
    """Tensors that a rank reads whole are compared while it does so, the others before."""
    _, folder, _ = through_ranks(tiny_tensors(tiny_hf_config(**SMALLEST)), tmp_path, 1, SMALLEST)
    places, files = {"": (str(folder / "files.json"), -1)}, {}
    for file, entry in read_inventory(folder).items():
        start = 0
        for part in entry.parts:
            if part.name != HEADER:  # which the safetensors library reads before, and refuses
                places[part.name], files[part.name] = (str(folder / file), start + part.num_bytes // 2), file
            start += part.num_bytes
    outcomes = run_ranks(
        load_with_each_damaged, world_size, tiny_policy(world_size, **layout(**sizes)), SMALLEST, places
    )
    assert len(files) > 20
    for outcome in outcomes:
        assert outcome.pop("") == "loaded"
        for name, error in outcome.items():
            said = f"policy.model_name: {folder / files[name]}: damaged in {name}: not the bytes "
            assert error.startswith(said), error
            assert error.count("\n") == 0


def test_rank_that_cannot_reach_the_folder_or_finds_another_is_named(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_hf_config())
    write_folder(tensors, tmp_path / "whole")
    write_folder(tensors, tmp_path / "other", num_files=1)
    nowhere, whole, other = (str(tmp_path / name) for name in ("nowhere", "whole", "other"))
    policy = tiny_policy(2, **layout(ep=2))
    outcomes = run_ranks(load_from_each, 2, policy, [[whole, nowhere], [nowhere, whole], [whole, other]])
    for rank in (0, 1):
        first, second, third = outcomes[rank]
        assert first == f"policy.model_name: {nowhere}: cannot be read: No such file or directory (on rank 1)"
        assert second == f"policy.model_name: {nowhere}: cannot be read: No such file or directory (on rank 0)"
        assert "rank 1 finds other tensors than rank 0; all ranks must share the folder" in third


def test_fault_while_reading_ends_all_ranks(tmp_path: Path) -> None:
    write_folder(tiny_tensors(tiny_hf_config()), tmp_path / "whole")
    first, second = run_ranks(spoil_while_loading, 2, tiny_policy(2, **layout(pp=2)), str(tmp_path / "whole"))
    assert first == second
    assert "cannot be read: [Errno 5] Input/output error (on rank 1)" in first


def test_ranks_that_want_the_same_say_so_once(tmp_path: Path) -> None:
    write_folder(tiny_tensors(tiny_hf_config()), tmp_path / "whole")
    for heard, wanted in run_ranks(bytes_reported_while_loading, 2, tiny_policy(2), str(tmp_path / "whole")):
        assert wanted < heard < 1.5 * wanted


def expected_bytes(tensors: dict[str, torch.Tensor], changes: dict[str, Any], sizes: dict[str, int]) -> int:
    """Return what the ranks of a layout read together: where nothing is split there are copies, and each is read."""
    model_ranks = max(sizes.values())

    def copies(name: str) -> int:
        if ".experts." in name:
            return 1 if sizes.get("ep", 1) * sizes.get("etp", 1) * sizes.get("pp", 1) > 1 else model_ranks
        if name == "model.embed_tokens.weight" and changes and sizes.get("pp", 1) > 1:
            return 2
        is_cut = tensors[name].ndim == 2 and "mlp.gate" not in name
        return 1 if sizes.get("pp", 1) > 1 or (sizes.get("tp", 1) > 1 and is_cut) else model_ranks

    return sum(tensor.nbytes * copies(name) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        slow({"pp": 2}, {}),
        ({"pp": 2}, TIED),
        slow({"ep": 2}, {}),
        full({"tp": 2, "ep": 2}, {}),
        full({"tp": 2, "etp": 2}, {"vocab_size": 61}),
    ],
)
def test_each_rank_reads_what_it_holds(sizes: dict[str, int], changes: dict[str, Any], tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_hf_config(**changes))
    source, target, outcomes = through_ranks(tensors, tmp_path, 2, changes, **layout(**sizes))
    read = [num_bytes for _, _, num_bytes in outcomes]
    assert sum(read) == expected_bytes(tensors, changes if changes == TIED else {}, sizes)
    assert max(read) < 0.75 * sum(read)
    assert_same_tensors(target, source)


@pytest.mark.parametrize(
    ("world_size", "sizes", "layer_spec"),
    [
        full(2, {"pp": 2, "vpp": 2}, "auto"),
        full(2, {"pp": 2, "last": 1}, "auto"),
        (2, {"tp": 2, "etp": 2}, "local"),
        full(2, {"ep": 2}, "local"),
        slow(2, {}, "auto"),
        slow(4, {"tp": 2, "ep": 2, "pp": 2}, "auto"),
        slow(4, {"tp": 2, "etp": 2, "ep": 2}, "local"),
    ],
)
def test_round_trip_keeps_every_bit(world_size: int, sizes: dict[str, int], layer_spec: str, tmp_path: Path) -> None:
    changes = {"layer_spec": layer_spec, **layout(**sizes)}
    source, target, _ = through_ranks(tiny_tensors(tiny_hf_config()), tmp_path, world_size, **changes)
    assert_same_tensors(target, source)


@pytest.mark.full
def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    changes = {"vocab_size": 61}
    tensors = tiny_tensors(tiny_hf_config(**changes))
    write_folder(tensors, tmp_path / "source")
    policy = tiny_policy(2, **layout(tp=2, etp=2))
    first, second = run_ranks(last_rows_of_vocabulary, 2, policy, changes, str(tmp_path / "source"))
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
    assert first.keys() == second.keys() == names.keys()
    for ours, theirs in names.items():
        # Of 62 rows each rank has 31, and there is no 62nd in the files.
        np.testing.assert_array_equal(first[ours], tensors[theirs][30].numpy())
        assert not second[ours].any()


@pytest.mark.parametrize("sizes", [slow({"ep": 2}), {"tp": 2, "etp": 2}])
def test_experts_may_be_stacked(sizes: dict[str, int], tmp_path: Path) -> None:
    hf_config = tiny_hf_config()
    tensors = tiny_tensors(hf_config)
    _, target, _ = through_ranks(stacked(tensors, hf_config), tmp_path, 2, **layout(**sizes))
    written = tensors_in(target)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


@pytest.mark.full
def test_other_types_are_cast(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in tiny_tensors(tiny_hf_config()).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    _, target, _ = through_ranks(tensors, tmp_path, 1)
    written = tensors_in(target)
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert all(torch.equal(written[name], tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize("sizes", [{"tp": 2, "etp": 2}, slow({"ep": 2})])
def test_model_of_half_the_bits_keeps_them(sizes: dict[str, int], tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in tiny_tensors(tiny_hf_config()).items()}
    source, target, _ = through_ranks(tensors, tmp_path, 2, precision="bfloat16", **layout(**sizes))
    assert_same_tensors(target, source)


def test_a_head_that_is_not_the_embedding_is_not_dropped(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_hf_config(**TIED))
    head = tensors["model.embed_tokens.weight"].clone()
    head[63, 31] += 1e-3
    write_folder({**tensors, "lm_head.weight": head}, tmp_path / "other")
    write_folder({**tensors, "lm_head.weight": head[:, :16].contiguous()}, tmp_path / "narrow")
    paths = [str(tmp_path / name) for name in ("other", "narrow")]
    outcomes = run_ranks(load_from_each, 2, tiny_policy(2, **layout(pp=2)), [[path] * 2 for path in paths], TIED)
    for outcome in outcomes:
        for path, error in zip(paths, outcome, strict=True):
            assert error == (
                f"policy.model_name: {path}: lm_head.weight is not model.embed_tokens.weight, though"
                " tie_word_embeddings is true; transformers keeps both then. Expected tie_word_embeddings false in"
                " config.json, or a folder without lm_head.weight"
            )


def test_tensors_of_a_mixed_folder_that_are_rounded_are_named(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_hf_config())
    mixed = {name: tensor if name.endswith("norm.weight") else tensor.bfloat16() for name, tensor in tensors.items()}
    changes = {"precision": "bfloat16", **layout(pp=2)}
    source, _, (((line,), _, _), _) = through_ranks(mixed, tmp_path / "mixed", 2, **changes)
    assert line.startswith(f"{source}: 17 tensors of type F32 rounded to policy.precision, which is")
    _, _, ((notices, _, _), _) = through_ranks(tensors, tmp_path / "float32", 2, **changes)
    assert notices == []


def test_tensors_without_use_are_left_out_and_reported(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_hf_config(**TIED))
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    more |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(4)}
    changes = {**layout(pp=2), **EXPERT_BIAS}
    source, target, outcomes = through_ranks({**tensors, **more}, tmp_path, 2, TIED, **changes)
    assert outcomes[0][:2] == outcomes[1][:2]
    notices, without_rule, _ = outcomes[0]
    assert notices == [
        f"{source}: 1 tensor left out: lm_head.weight: the output layer is the embedding (tie_word_embeddings)",
        f"{source}: 4 tensors left out: {', '.join(sorted(more)[1:])}: buffers of the rotary embedding, which follow "
        "from config.json",
    ]
    assert without_rule == [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in range(4)]
    assert tensors_in(target).keys() == tensors.keys()
