# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What `nemo-rl-moe convert` does around Megatron-Core: names, number formats, its staging folder, messages."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_rl_moe.errors import CheckpointError, ConfigurationError
from nemo_rl_moe.launch.convert import Conversion, _check_size, _dtype_of, _policy, _reported_of, _staged, convert
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

HALF = torch.ones(4, dtype=torch.bfloat16)
CONSOLE = ConsoleLogger(total_steps=0, live="never")


@pytest.mark.parametrize("name", ["2024", "true", "[z]", "a: b", "${x}", "null", "-1.5", "x #y"])
def test_any_folder_s_name_is_taken_as_it_is(name: str) -> None:
    policy = _policy(Path(name), "bfloat16")
    assert (policy.model_name, policy.precision, policy.init) == (name, "bfloat16", "pretrained")
    assert not policy.megatron_cfg.moe_transformer_fields


@pytest.mark.parametrize(
    ("tensors", "stated", "expected", "reported"),
    [
        ({"a": torch.ones(4)}, {"dtype": "float32"}, "float32", ()),
        ({"a": torch.ones(4)}, {"dtype": "bfloat16"}, "float32", ("has bfloat16, but most weights are float32",)),
        ({"a": torch.ones(4)}, {"torch_dtype": "float16"}, "float32", ("has float16, but most weights are float32",)),
        ({"a": HALF}, {}, "bfloat16", ()),
        ({"a": HALF, "bias": torch.ones(1)}, {"dtype": "bfloat16"}, "bfloat16", ("1 of 2", "float32 (bias)", "rounds")),
        ({"a": HALF, "b": torch.ones(9)}, {"dtype": "bfloat16"}, "float32", ("most weights are float32",)),
        ({"a": torch.ones(4, dtype=torch.int8)}, {}, "float32", ()),
    ],
)
def test_number_format_is_that_of_the_files(
    tensors: dict[str, torch.Tensor],
    stated: dict[str, str],
    expected: str,
    reported: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    console = ConsoleLogger(total_steps=0, live="never")
    assert _dtype_of(stated, SafetensorsFolder(tmp_path), console) == expected
    printed = capsys.readouterr().out
    assert bool(printed) is bool(reported)
    assert all(words in printed for words in reported)


def test_number_format_that_is_not_written_is_refused(tmp_path: Path) -> None:
    save_file({"a": HALF.half()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match="most weights: got float16, a format that convert cannot"):
        _dtype_of({"dtype": "bfloat16"}, SafetensorsFolder(tmp_path), CONSOLE)
    with pytest.raises(ConfigurationError, match=r"config\.json: dtype: got float8, a format that convert cannot"):
        _dtype_of({"dtype": "float8"}, None, CONSOLE)
    assert _dtype_of({"torch_dtype": "bfloat16"}, None, CONSOLE) == "bfloat16"
    assert _dtype_of({}, None, CONSOLE) == "float32"


def test_a_model_many_times_as_large_as_its_files_is_refused(tmp_path: Path) -> None:
    save_file({"a": HALF}, tmp_path / "model.safetensors")
    held = SafetensorsFolder(tmp_path)
    _check_size(held, 16)
    with pytest.raises(ConfigurationError, match="a model of 17 parameters, and the files hold 4 numbers"):
        _check_size(held, 17)


def test_an_adapter_is_not_added_to_the_weights_that_contain_it(tmp_path: Path) -> None:
    final, output = tmp_path / "final", tmp_path / "out"
    (final / "adapter").mkdir(parents=True)
    (final / "files.json").write_text("{}")
    for adapter in (final, final / "adapter"):
        with pytest.raises(ConfigurationError, match=f"--adapter: {adapter} is merged into --input {final} already"):
            convert(Conversion("hf", "hf", final, output, None, adapter))
    assert not output.exists()


def test_output_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with _staged(target) as staging:
        assert not target.exists()
        staging.mkdir()
        (staging / "config.json").write_text("{}")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "new",
        "new/out",
        "new/out/config.json",
    ]


def test_output_may_be_an_empty_folder_that_is_there(tmp_path: Path) -> None:
    target = tmp_path / "made_by_mktemp"
    target.mkdir()
    with _staged(target) as staging:
        staging.mkdir()
        (staging / "config.json").write_text("{}")
    assert [path.name for path in target.iterdir()] == ["config.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["made_by_mktemp"]


def test_output_that_holds_anything_or_is_no_folder_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / ".hidden").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name in ("full", "file", "link", "nowhere"):
        with pytest.raises(ConfigurationError, match="exists already; name a new or an empty folder"):
            convert(Conversion("hf", "megatron", tmp_path / "model", tmp_path / name, None))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full"), CheckpointError("full")])
def test_nothing_but_what_others_have_made_stays(error: BaseException, tmp_path: Path) -> None:
    for name in ("out.incomplete", "out.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs").write_text("kept")

    def write() -> None:
        with _staged(tmp_path / "out") as staging:
            staging.mkdir()
            (staging.parent / f"{staging.name}.incomplete").mkdir()
            raise error

    with pytest.raises((type(error), ConfigurationError)):
        write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.incomplete", "out.replaced"]
    assert (tmp_path / "out.incomplete" / "theirs").read_text() == "kept"


def test_output_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    def write() -> None:
        with _staged(tmp_path / "out") as staging:
            staging.mkdir()
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "theirs").write_text("kept")

    with pytest.raises(ConfigurationError, match="has appeared meanwhile"):
        write()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_names_the_output_and_not_the_staging_folder(tmp_path: Path) -> None:
    def write() -> None:
        with _staged(tmp_path / "out") as staging:
            raise CheckpointError(f"{staging}: cannot be written: rank 0: the disk is full")

    with pytest.raises(ConfigurationError) as caught:
        write()
    assert caught.value.problems == [
        f"--output: {tmp_path / 'out'}: cannot be written: rank 0: the disk is full; no output is written"
    ]


def test_the_system_s_refusals_name_the_folder_they_are_about(tmp_path: Path) -> None:
    def read() -> None:
        with _reported_of("--input", tmp_path):
            (tmp_path / "nothing").read_bytes()

    with pytest.raises(ConfigurationError) as caught:
        read()
    assert caught.value.problems == [f"--input: {tmp_path}: {tmp_path / 'nothing'}: No such file or directory"]


@pytest.mark.parametrize(
    ("config_json", "expected"),
    [
        ("3", "config.json: got 3, expected an object with the model's fields"),
        ("null", "config.json: got null, expected an object with the model's fields"),
        (None, "holds no config.json"),
        ("model", "holds no *.safetensors file"),
    ],
)
def test_what_is_no_model_is_one_line(
    config_json: str | None, expected: str, tmp_path: Path, repository_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    source = tmp_path / "source"
    source.mkdir()
    if config_json == "model":
        config_json = (repository_root / "examples/assets/tiny_qwen3_moe/config.json").read_text()
    if config_json is not None:
        (source / "config.json").write_text(config_json)
    with pytest.raises(ConfigurationError) as caught:
        convert(Conversion("hf", "megatron", source, tmp_path / "out", None))
    (line,) = caught.value.problems
    assert line.startswith("--input: ")
    assert line.endswith(expected), "without what helps in a run alone"


def test_a_checkpoint_of_an_older_version_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "step_3" / "policy").mkdir(parents=True)
    with pytest.raises(ConfigurationError) as caught:
        convert(Conversion("megatron", "hf", tmp_path / "step_3", tmp_path / "out", None))
    assert caught.value.problems == [
        f"--input: the folder {tmp_path / 'step_3'} holds no config.json, only weights: copy the model's config.json "
        "and tokenizer into it"
    ]
