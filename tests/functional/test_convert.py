# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe convert` as a user types it, and training from what it makes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.functional import sft_runs, shared_ray
from tests.support.loggers import read_jsonl

pytestmark = pytest.mark.shared_ray

INDEX = "model.safetensors.index.json"


def convert(
    source: Path, target: Path, source_format: str, target_format: str, *more: str, exit_code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs the command in this process."""
    formats = ["--from", source_format, "--to", target_format]
    words = ["convert", *formats, "--input", str(source), "--output", str(target), *more]
    return shared_ray.called_here(words, exit_code=exit_code)


def converted(source: Path, target: Path, source_format: str, target_format: str, *more: str) -> Path:
    """The target of a conversion that has succeeded."""
    convert(source, target, source_format, target_format, *more)
    return target


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_tensors(folder: Path, other: Path) -> None:
    """Names, types and every bit."""
    found, expected = tensors_in(folder), tensors_in(other)
    assert found.keys() == expected.keys()
    assert all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped tiny model with random weights in several files, and a generation configuration."""
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("convert") / "model"
    shutil.copytree(sft_runs.MODEL, folder)
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(Qwen3MoeConfig.from_pretrained(folder))
    reference.generation_config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=1)
    reference.save_pretrained(folder, max_shard_size="1MB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.fixture(scope="module")
def megatron_model(model: Path) -> Path:
    return converted(model, model.with_name("megatron"), "hf", "megatron")


def test_there_and_back_changes_nothing(model: Path, megatron_model: Path) -> None:
    assert sorted(path.name for path in megatron_model.glob("policy/.metadata")) == [".metadata"]
    assert not list(megatron_model.glob("*.safetensors"))
    back = converted(megatron_model, model.with_name("back"), "megatron", "hf")
    assert_same_tensors(back, model)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((back / name).read_text()) == json.loads((model / name).read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (back / name).read_bytes() == (model / name).read_bytes()
    assert not list(model.parent.glob("*.incomplete"))


@pytest.mark.full
def test_output_reports_the_router_settings_and_what_to_do_with_it(model: Path, tmp_path: Path) -> None:
    """The command is run as a user types it."""
    words = ["convert", "--from", "hf", "--to", "megatron", "--input", str(model), "--output", str(tmp_path / "out")]
    done = sft_runs.run_command([sys.executable, "-m", "nemo_rl_moe.cli", *words], tmp_path)
    assert "moe_router_topk: 2  (config.json: num_experts_per_tok)" in done.stdout
    assert "moe_aux_loss_coeff: 0.01  (config.json: router_aux_loss_coef)" in done.stdout
    assert f"policy.model_name={tmp_path / 'out'}" in done.stdout
    assert done.stderr == ""


def test_number_format_can_be_changed(model: Path, tmp_path: Path) -> None:
    target = converted(model, tmp_path / "out", "hf", "hf", "--dtype", "bfloat16")
    assert {tensor.dtype for tensor in tensors_in(target).values()} == {torch.bfloat16}
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    expected = tensors_in(model)
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in tensors_in(target).items())


def test_names_formats_and_leftovers_are_taken_as_they_are(model: Path, tmp_path: Path) -> None:
    """A folder's name that is YAML, float32 files that config.json calls bfloat16, a tokenizer with code of its own."""
    source, theirs = tmp_path / "[z]", tmp_path / "out.incomplete"
    shutil.copytree(model, source)
    theirs.mkdir()
    for name, changes in (
        ("config.json", {"dtype": "bfloat16"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]}}),
    ):
        content = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps(content | changes))
    for name in ("tiktoken.model", "tokenization_moonshot.py"):
        (source / name).write_text(name)
    done = convert(source, tmp_path / "out", "hf", "hf")
    assert done.stderr == ""
    assert_same_tensors(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert "config.json has bfloat16, but most weights are float32" in done.stdout
    assert "the tokenizer needs code of its own (tokenization_moonshot.py), which is not copied" in done.stdout
    assert (tmp_path / "out" / "tiktoken.model").is_file()
    assert not (tmp_path / "out" / "tokenization_moonshot.py").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["[z]", "out", "out.incomplete"]


def spoil_truncated(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:-100])
    return file.name


def spoil_missing_file(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    return file.name


def spoil_missing_entry(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.layers.1.mlp.gate.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    return "model.layers.1.mlp.gate.weight"


def spoil_path(folder: Path) -> str:
    index = json.loads((folder / INDEX).read_text())
    outside = folder.parent / "outside.safetensors"
    name = "model.norm.weight"
    save_file({name: torch.ones(128)}, outside)
    index["weight_map"][name] = "../outside.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    return "../outside.safetensors, which leaves the folder"


def _with_tensor(folder: Path, name: str, tensor: torch.Tensor) -> None:
    file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    save_file(load_file(file) | {name: tensor}, file)


def spoil_shape(folder: Path) -> str:
    _with_tensor(folder, "model.norm.weight", torch.ones(127))
    return "model.norm.weight (got [127], expected [128])"


def spoil_dtype(folder: Path) -> str:
    _with_tensor(folder, "model.norm.weight", torch.ones(128, dtype=torch.int8))
    return "model.norm.weight (I8)"


def spoil_field(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_hyper_attention": True}))
    return "use_hyper_attention: got True"


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_missing_entry,
        spoil_path,
        spoil_truncated,
        spoil_missing_file,
        spoil_shape,
        spoil_dtype,
        spoil_field,
    ],
)
def test_spoilt_input_is_one_line_and_nothing_is_written(spoil: Any, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    expected = spoil(folder)
    before = sorted(path.name for path in tmp_path.iterdir())
    done = convert(folder, tmp_path / "out", "hf", "megatron", exit_code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --input: ")
    assert expected in line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_wrong_folders_are_reported(model: Path, megatron_model: Path, tmp_path: Path) -> None:
    def refused(*arguments: Any) -> str:
        done = convert(*arguments, exit_code=2)
        (line,) = done.stderr.splitlines()
        return line

    there = refused(model, megatron_model, "hf", "megatron")
    assert there == f"error: --output: {megatron_model} exists already; name a new or an empty folder"
    assert "did you mean --from megatron?" in refused(megatron_model, tmp_path / "out", "hf", "hf")
    assert "did you mean --from hf?" in refused(model, tmp_path / "out", "megatron", "hf")
    inner = refused(megatron_model / "policy", tmp_path / "out", "megatron", "hf")
    assert f"did you mean --input {megatron_model}?" in inner
    assert "which is no folder" in refused(tmp_path / "nothing", tmp_path / "out", "hf", "hf")
    assert not (tmp_path / "out").exists()


def test_damaged_megatron_weights_are_reported(megatron_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(megatron_model, folder)
    file = next((folder / "policy").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1000])
    done = convert(folder, tmp_path / "out", "megatron", "hf", exit_code=2)
    assert f"{file}: damaged" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def train(folder: Path, data: Path, model: Path) -> Path:
    """Three steps on one worker with a checkpoint after the second; returns where the checkpoints are."""
    checkpoints = folder / "checkpoints"
    overrides = sft_runs.settings(
        folder,
        data,
        model,
        policy__init="pretrained",
        sft__max_num_steps=3,
        sft__val_period=0,
        sft__val_at_start=False,
        sft__val_at_end=False,
        checkpointing__checkpoint_dir=str(checkpoints),
        checkpointing__metric_name=None,
        checkpointing__save_period=1,
        checkpointing__keep_top_k=None,
        policy__megatron_cfg__scheduler__lr_warmup_iters=1,
        policy__train_global_batch_size=16,
        policy__train_micro_batch_size=8,
        cluster__cpu_workers_per_node=1,
        **sft_runs.only_jsonl(),
    )
    sft_runs.run_here(overrides, folder)
    return checkpoints


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_runs.make_additions(tmp_path_factory.mktemp("data"), 200, 20)


@pytest.fixture(scope="module")
def checkpoints(megatron_model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("from_megatron"), data, megatron_model)


@pytest.mark.full
def test_a_checkpoint_becomes_the_model_that_the_run_ended_with(checkpoints: Path, tmp_path: Path) -> None:
    target = converted(checkpoints / "step_3", tmp_path / "exported", "megatron", "hf")
    assert_same_tensors(target, checkpoints / "final")
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (target / name).read_bytes() == (checkpoints / "final" / name).read_bytes()
    generation = json.loads((target / "generation_config.json").read_text())
    assert generation["temperature"] == 0.7
    # Loaded from the checkpoint folder's parent by mistake: its checkpoints are named.
    done = convert(checkpoints, tmp_path / "other", "megatron", "hf", exit_code=2)
    assert f"name one, such as --input {checkpoints / 'step_3'}" in done.stderr


@pytest.mark.full
def test_transformers_loads_a_finished_run(checkpoints: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(checkpoints / "final")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "final")
    ids = tokenizer("12+34=", return_tensors="pt").input_ids
    assert loaded.dtype == torch.float32
    assert loaded(ids).logits.isfinite().all()
    assert loaded.generation_config.temperature == 0.7


@pytest.mark.slow
def test_both_formats_train_alike(checkpoints: Path, model: Path, data: Path, tmp_path: Path) -> None:
    other = train(tmp_path, data, model)
    assert_same_tensors(other / "final", checkpoints / "final")
    assert not all(torch.equal(tensor, tensors_in(model)[name]) for name, tensor in tensors_in(other / "final").items())
    losses = [
        read_jsonl(sft_runs.only_run_folder(folder) / "metrics.jsonl")["train/loss"]
        for folder in (checkpoints.parent, tmp_path)
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_another(checkpoints: Path, data: Path, tmp_path: Path) -> None:
    """Its weights alone: `policy.model_name` is a checkpoint's folder."""
    from_checkpoint = train(tmp_path / "checkpoint", data, checkpoints / "step_3")
    from_final = train(tmp_path / "final", data, checkpoints / "final")
    assert_same_tensors(from_checkpoint / "final", from_final / "final")
