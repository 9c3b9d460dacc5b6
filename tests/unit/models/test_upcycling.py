# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe upcycle`: models with experts that compute what transformers computes with the dense ones."""

import errno
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_rl_moe.checksums import find_damage
from nemo_rl_moe.cli import main
from nemo_rl_moe.launch.upcycle import LogitsDifference, UpcyclingRequest, compare_logits, upcycle
from nemo_rl_moe.models import upcycling
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.safetensors_files import SafetensorsWriter
from nemo_rl_moe.models.safetensors_folder import INDEX_FILE, SafetensorsFolder
from nemo_rl_moe.models.upcycling import ExpertShape, Upcycling
from tests.support.family_models import FAMILY_MODELS

COPIES, HALVES, QUARTERS = ExpertShape(4, 2), ExpertShape(8, 4, granularity=2), ExpertShape(8, 4, granularity=4)
ROUNDING = 3e-6
"""Of float32, as a share of the largest logit."""


def dense_model(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny model of a family with random weights, biases and norms, in several files."""
    from transformers import AutoModelForCausalLM

    found = FAMILY_MODELS[name]
    config = replace(found, fields={**found.fields, **changes}).transformers_config()
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size="40KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return dense_model(tmp_path / "dense")


def command(dense: Path, moe: Path, shape: str, *more: str) -> list[str]:
    """Return the words of the command. The shape is the experts, the top-k and the granularity, with blanks."""
    experts, top_k, granularity = shape.split()
    sizes = ["--experts", experts, "--top-k", top_k, "--granularity", granularity]
    return ["upcycle", "--model", str(dense), *sizes, "--output", str(moe), *more]


def upcycled(source: Path, target: Path, shape: ExpertShape, seed: int = 0) -> Path:
    upcycle(UpcyclingRequest(source, target, shape, seed, is_checked=False))
    return target


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def words_of(printed: str) -> str:
    """Return what a command printed without its line breaks."""
    return " ".join(printed.split())


def assert_same(found: LogitsDifference) -> None:
    assert found.largest <= ROUNDING * found.scale, found
    assert found.num_same == found.num_tokens


@pytest.mark.parametrize(
    "shape", [COPIES, HALVES, QUARTERS, ExpertShape(3, 1), ExpertShape(6, 6, granularity=3)], ids=str
)
@pytest.mark.parametrize("name", ["llama", "llama3_positions", "mistral", "qwen2", "qwen3", "qwen3_tied"])
def test_model_with_experts_computes_what_the_dense_one_does(name: str, shape: ExpertShape, tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense", name)
    moe = upcycled(dense, tmp_path / "moe", shape)
    assert_same(compare_logits(dense, moe))
    # Supported here, and as large as it was said to be.
    config = load_hf_config(str(moe))
    assert config.num_experts_per_tok == shape.top_k
    assert {path.name for path in moe.iterdir()} >= {"tokenizer.json", "chat_template.jinja", "generation_config.json"}
    assert find_damage(moe) == []


@pytest.mark.parametrize("shape", [COPIES, HALVES, QUARTERS], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_wrong_scaling_is_seen(name: str, shape: ExpertShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = upcycling._slice_of

    def wrong(along: int, index: int, count: int, factor: float) -> Callable[[Tensor], Tensor]:
        return right(along, index, count, factor * (1.01 if along == 1 else 1.0))

    monkeypatch.setattr(upcycling, "_slice_of", wrong)
    dense = dense_model(tmp_path / "dense", name)
    found = compare_logits(dense, upcycled(dense, tmp_path / "moe", shape))
    assert found.largest > 100 * ROUNDING * found.scale


def test_cube_roots_on_all_three_matrices_are_only_near(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As Megatron-Core scales them: what is exact here lies within that approximation.
    right = upcycling._slice_of

    def cube_roots(along: int, index: int, count: int, factor: float) -> Callable[[Tensor], Tensor]:
        return right(along, index, count, count ** (1 / 3))

    exact = compare_logits(dense, upcycled(dense, tmp_path / "exact", HALVES))
    monkeypatch.setattr(upcycling, "_slice_of", cube_roots)
    near = compare_logits(dense, upcycled(dense, tmp_path / "near", HALVES))
    assert near.largest > 1000 * exact.largest
    assert near.largest < near.scale


@pytest.mark.parametrize("shape", [HALVES, QUARTERS], ids=str)
def test_powers_of_two_round_nothing_in_bfloat16(shape: ExpertShape, tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense", dtype=torch.bfloat16)
    moe = upcycled(dense, tmp_path / "moe", shape)
    assert {tensor.dtype for tensor in tensors_in(moe).values()} == {torch.bfloat16}
    assert_same(compare_logits(dense, moe))


def test_fields_whose_defaults_differ_between_families_are_written_out(tmp_path: Path) -> None:
    # Files of older releases leave out what was Llama's default; Mixtral's is another one.
    dense = dense_model(
        tmp_path / "dense",
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    path = dense / "config.json"
    content = json.loads(path.read_text())
    for name in ("num_key_value_heads", "rms_norm_eps", "rope_parameters", "head_dim", "hidden_act"):
        content.pop(name, None)
    path.write_text(json.dumps(content | {"attention_bias": False, "pretraining_tp": 1}))
    moe = upcycled(dense, tmp_path / "moe", COPIES)
    found, expected = load_hf_config(str(moe)), load_hf_config(str(dense))
    for name in ("num_key_value_heads", "rms_norm_eps", "head_dim"):
        assert getattr(found, name) == getattr(expected, name)
    assert_same(compare_logits(dense, moe))


def test_slices_of_a_copy_share_their_row_of_the_router_and_seeds_differ(dense: Path, tmp_path: Path) -> None:
    first, again, other = (
        tensors_in(upcycled(dense, tmp_path / name, HALVES, seed))
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    routers = [name for name in first if name.endswith("block_sparse_moe.gate.weight")]
    assert len(routers) == 2
    for name in routers:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])
        rows = first[name]
        assert torch.equal(rows[0::2], rows[1::2])
        assert len(rows.unique(dim=0)) == 4
        assert 0.05 < rows.std() < 0.2  # initializer_range is 0.1
    assert not torch.equal(*(first[name] for name in routers))
    assert all(torch.equal(first[name], other[name]) for name in first if name not in routers)


def test_files_have_their_greatest_size_and_hold_the_same(dense: Path, tmp_path: Path) -> None:
    whole = upcycled(dense, tmp_path / "whole", HALVES)
    hf_config = load_hf_config(str(dense))
    Upcycling(SafetensorsFolder(dense), hf_config, HALVES, 0).write(tmp_path / "cut", {}, max_shard_bytes=30_000)
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 3
    assert all(path.stat().st_size < 30_000 + 4096 for path in files)  # with their headers
    assert not (whole / INDEX_FILE).exists()
    assert SafetensorsFolder(tmp_path / "cut").without_entry == {}
    found, expected = tensors_in(tmp_path / "cut"), tensors_in(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert find_damage(tmp_path / "cut") == []


def test_command_says_what_it_made_and_how_it_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, moe = dense_model(tmp_path / "dense", "qwen2"), tmp_path / "moe"
    assert main(command(dense, moe, "8 2 1", "--check")) == 0
    printed = words_of(capsys.readouterr().out)
    parameters = sum(tensor.numel() for tensor in tensors_in(moe).values())
    unused = 6 * 3 * 48 * 32 * 2  # experts of each of two layers
    assert f"{parameters:,} parameters, of which a token uses {parameters - unused:,}" in printed
    assert "logits of 64 random tokens differ by at most" in printed
    assert "the most likely next token is the same at 64" in printed
    assert main(command(dense, tmp_path / "unchecked", "8 2 1", "--no-check")) == 0
    assert "logits" not in capsys.readouterr().out


def test_model_without_room_in_memory_is_not_computed(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    little = psutil.virtual_memory()._replace(available=10_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    assert main(command(dense, tmp_path / "moe", "4 2 1")) == 0
    assert "logits are not compared" in capsys.readouterr().out


def test_full_disk_leaves_nothing(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = SafetensorsWriter.write
    left = iter(range(20))

    def until_full(writer: SafetensorsWriter, numbers: Tensor) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, numbers)

    monkeypatch.setattr(SafetensorsWriter, "write", until_full)
    place = tmp_path / "place"
    assert main(command(dense, place / "moe", "4 2 1")) == 2
    assert list(place.iterdir()) == []


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = tensors_in(folder)
        change(tensors)
        for path in (*folder.glob("*.safetensors"), folder / INDEX_FILE):
            path.unlink()
        save_file(tensors, folder / "model.safetensors")

    return changed


UP = "model.layers.1.mlp.up_proj.weight"
REFUSED: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    "more than there are": (lambda f: None, "2 3 1", ("--top-k: got 3, expected at most --experts 2",)),
    "experts that are no whole copies": (lambda f: None, "7 2 2", ("--experts: got 7, expected a multiple",)),
    "a part of a copy for a token": (lambda f: None, "8 2 4", ("--top-k: got 2, expected a multiple",)),
    "a width that does not divide": (lambda f: None, "10 5 5", ("--granularity: got 5", "intermediate_size 48")),
    "no number": (lambda f: None, "four 2 1", ("got 'four', expected a whole number from 1 to 10,000",)),
    "a family without experts": (_config(model_type="gemma3"), "4 2 1", ("'gemma3' has no counterpart", "llama (to")),
    "experts already": (_config(model_type="mixtral", num_local_experts=4), "4 2 1", ("has experts already",)),
    "an unsupported field": (_config(mlp_bias=True), "4 2 1", ("--model: config.json: mlp_bias: got True",)),
    "no config.json": (lambda f: (f / "config.json").unlink(), "4 2 1", ("--model: the folder", "holds no config")),
    "no folder": (lambda f: shutil.rmtree(f), "4 2 1", ("which is no folder",)),
    "Megatron-Core's weights": (lambda f: (f / "policy").mkdir(), "4 2 1", ("nemo-rl-moe convert --from megatron",)),
    "output is there": (lambda f: (f.parent / "moe" / "x").mkdir(parents=True), "4 2 1", ("exists already",)),
    "a missing tensor": (_tensors(lambda t: t.pop(UP)), "4 2 1", (f"tensors missing: {UP}",)),
    "a strange tensor": (_tensors(lambda t: t.update(score=t[UP].clone())), "4 2 1", ("has no place for: score",)),
    "another shape": (_tensors(lambda t: t.update({UP: t[UP].T.contiguous()})), "4 2 1", ("another shape", UP)),
    "another type": (_tensors(lambda t: t.update({UP: t[UP].to(torch.int8)})), "4 2 1", ("are not F64", UP)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_come_before_anything_is_written(
    case: str, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, numbers, expected = REFUSED[case]
    moe = tmp_path / "moe"
    change(dense)
    before = sorted(tmp_path.iterdir())
    try:
        code = main(command(dense, moe, numbers))
    except SystemExit as error:
        code = int(error.code or 0)
    printed = words_of(capsys.readouterr().err)
    assert code == 2, printed
    assert all(words in printed for words in expected), printed
    assert sorted(tmp_path.iterdir()) == before


def test_widths_that_are_no_multiple_of_16_bytes_are_compared(tmp_path: Path) -> None:
    # Half of 54 is 27 numbers.
    dense = dense_model(tmp_path / "dense", intermediate_size=54)
    assert_same(compare_logits(dense, upcycled(dense, tmp_path / "moe", HALVES)))


def test_rotary_buffers_of_older_releases_are_left_out(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moe = tmp_path / "moe"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _tensors(lambda tensors: tensors.update({name: torch.ones(4)}))(dense)
    assert main(command(dense, moe, "4 2 1")) == 0
    assert f"left out: {name}" in words_of(capsys.readouterr().out)
    assert name not in tensors_in(moe)


@pytest.mark.parametrize(
    ("dtype", "shape", "is_warned"),
    [
        (torch.bfloat16, "6 3 3", True),
        (torch.float16, "6 3 3", True),
        (torch.bfloat16, "8 4 4", False),
        (torch.float32, "6 3 3", False),
    ],
)
def test_factors_that_round_weights_are_said(
    dtype: torch.dtype, shape: str, is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, moe = dense_model(tmp_path / "dense", dtype=dtype), tmp_path / "moe"
    assert main(command(dense, moe, shape, "--no-check")) == 0
    assert ("no power of two" in capsys.readouterr().out) is is_warned
    difference = compare_logits(dense, moe)
    assert (difference.largest > 100 * ROUNDING * difference.scale) is is_warned


@pytest.mark.parametrize(("shape", "is_said"), [("4 2 1", False), ("8 4 2", True)])
def test_routers_of_slices_are_to_compute_in_float32(
    shape: str, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, moe = dense_model(tmp_path / "dense", dtype=torch.bfloat16), tmp_path / "moe"
    _, top_k, granularity = map(int, shape.split())
    assert main(command(dense, moe, shape, "--no-check")) == 0
    assert ("moe_router_dtype=fp32" in words_of(capsys.readouterr().out)) is is_said
    # Why: a router's logits in bfloat16 tie, and some tokens get slices of two copies.
    router = tensors_in(moe)["model.layers.0.block_sparse_moe.gate.weight"]
    tokens = torch.randn(20_000, router.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()

    def has_torn_copies(dtype: torch.dtype) -> bool:
        chosen = (tokens.to(dtype) @ router.to(dtype).T).topk(top_k).indices // granularity
        counts = torch.nn.functional.one_hot(chosen).sum(1)
        return bool((counts % granularity).any())

    assert not has_torn_copies(torch.float32)
    assert has_torn_copies(torch.bfloat16) is is_said


def test_additional_templates_are_copied_and_the_dense_models_code_is_not_named(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (dense / "additional_chat_templates").mkdir()
    (dense / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (dense / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokens.Own", null]}}')
    _config(auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})(dense)
    moe = upcycled(dense, tmp_path / "moe", COPIES)
    assert (moe / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    assert find_damage(moe) == []
    content = json.loads((moe / "config.json").read_text())
    assert "auto_map" not in content
    # The weight of the loss that keeps routers from choosing few experts: the default of transformers' own classes.
    assert content["router_aux_loss_coef"] == 0.001
    assert "needs code of its own (tokens.py), which is not copied" in words_of(capsys.readouterr().out)


BOTH = ("--check", "--no-check")


def _with_infinity_in_halves(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.half()
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 60_000  # twice of it is more than float16 has


def _with_infinite_logits(tensors: dict[str, Tensor]) -> None:
    for name in ("model.norm.weight", "lm_head.weight"):  # each weight is a number, and their product is none
        tensors[name].fill_(1e30)


@pytest.mark.parametrize(
    ("change", "expected", "checks"),
    [
        (lambda tensors: tensors[UP][3, 4:6].fill_(math.nan), f"{UP}: 2 of 1,536 weights are NaN or infinite", BOTH),
        (
            lambda tensors: tensors["model.norm.weight"][0].fill_(math.inf),
            "model.norm.weight: 1 of 32 weights are NaN or infinite",
            BOTH,
        ),
        (_with_infinity_in_halves, "model.layers.1.mlp.down_proj.weight: slices of it exceed float16", BOTH),
        (_with_infinite_logits, "logits are NaN or infinite", ("--check",)),
    ],
)
def test_weights_and_logits_that_are_no_numbers_are_refused(
    change: Any, expected: str, checks: tuple[str, ...], dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _tensors(change)(dense)
    for check in checks:
        assert main(command(dense, tmp_path / "moe", "8 4 4", check)) == 2
        assert expected in words_of(capsys.readouterr().err)
        assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_output_inside_the_model_is_refused(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(dense, dense / "moe", "4 2 1")) == 2
    assert "lies in the model's folder" in capsys.readouterr().err
