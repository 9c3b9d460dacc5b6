# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The calls on a machine with a GPU, and the rows that their results become."""

import json
import math
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_moe.algorithms.losses.supervised import sft_loss
from tests.gpu import calls, models, run, table
from tests.gpu.calls import CALLS
from tests.support.gloo_ranks import run_ranks_with_engine
from tests.support.tiny_model import parallel_job

LINE: dict[str, Any] = {
    "name": "refit",
    "status": "passed",
    "why": "",
    "numbers": {"transport": "cuda_ipc", "bytes": 13_700_000_000, "seconds": 0.91234, "losses": [1.0], "mfu": None},
    "seconds": 20.0,
    "date": "2026-11-27",
    "card": "NVIDIA H100 80GB HBM3",
    "torch": "2.11.0+cu130",
    "transformer_engine": "2.17.1",
    "megatron-core": "0.19.2",
}
TAG = f"{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}"
"""Of an extension for this Python and torch."""
ROW = (
    "| 2026-11-27 | NVIDIA H100 80GB HBM3 | 2.11.0+cu130, 2.17.1 | `refit` |"
    " transport cuda_ipc, GB 13.70, seconds 0.9123 |\n"
)


def test_rows_of_results() -> None:
    others = [{"status": "failed"}, {"status": "skipped", "card": None}, {"card": "CPU"}]
    assert table.rows([LINE, *(LINE | other for other in others)]) == [ROW]
    numbers = {"tokens_per_second": 3210.7, "parameters": 5_170_000_000, "growing": {}}
    (row,) = table.rows([LINE | {"numbers": numbers}])
    assert row.endswith("| tokens per second 3,211, parameters 5,170,000,000 |\n")


def test_rows_go_into_the_page_once(tmp_path: Path, repository_root: Path) -> None:
    original = (repository_root / "docs/gpu.md").read_text(encoding="utf-8")
    assert original.count(table.HEADER) == 1
    page, results = tmp_path / "gpu.md", tmp_path / "results.jsonl"
    page.write_text(f"# Title\n\n{table.HEADER}{table.NONE}\nmore | text\n")
    results.write_text(f"{json.dumps(LINE)}\n")
    for _ in range(2):
        assert table.main([str(results), "--write", str(page)]) == 0
        assert page.read_text() == f"# Title\n\n{table.HEADER}{ROW}\nmore | text\n"
    later = ROW.replace("2026-11-27", "2026-12-01")
    assert table.with_rows(page.read_text(), [later]) == f"# Title\n\n{table.HEADER}{later}{ROW}\nmore | text\n"
    with pytest.raises(ValueError, match="there is no table"):
        table.with_rows("# Title\n", [ROW])


def test_a_page_without_measurements_says_so() -> None:
    page = f"{table.HEADER}{table.NONE}\nmore\n"
    assert table.with_rows(page, []) == page


def test_the_calls_name_checks_and_their_minutes() -> None:
    names = {check.name for check in run.CHECKS}
    assert all(names.issuperset(call.checks) for call in CALLS.values())
    assert sum(call.limit_s + calls.START_S for call in CALLS.values()) <= calls.DEVICE_TIME_S
    text = calls.__doc__ or ""
    for number, call in CALLS.items():
        assert f"tests.gpu.calls {number}    {call.limit_s / 60:2.0f} minutes" in text
    in_a_call = {name for call in CALLS.values() for name in call.checks}
    needing_more = {check.name for check in run.CHECKS if {"vllm", "flash_attn"} & set(check.needs)}
    assert in_a_call == names - needing_more - {"refusal_without_engine"}


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit with one wheel of a package of its own, and a compiler's script that makes another."""
    folder = tmp_path / ".gpu"
    (folder / "wheels").mkdir(parents=True)
    (folder / "kit.json").write_text(json.dumps({"architectures": [90]}))
    write_wheel(folder / "wheels/carried_by_the_kit-1-py3-none-any.whl", "carried_by_the_kit")
    write_wheel(tmp_path / "compiled-1-py3-none-any.whl", "compiled")
    (folder / "build_te.sh").write_text(
        f'mkdir -p "$2/{TAG}"\ncp {tmp_path}/compiled-1-py3-none-any.whl "$2/{TAG}"\necho compiled\n'
    )
    monkeypatch.setattr(calls, "SITE", tmp_path / "site")
    monkeypatch.setattr(calls, "BUILT", tmp_path / "built")
    return folder


def write_wheel(path: Path, module: str) -> None:
    info = f"{module}-1.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_the_extension_is_compiled_once(kit: Path, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    extension = calls.Extension(kit, log)
    assert extension.wheel() is None
    extension.start_build()
    wheel = extension.wait(60.0)
    assert (wheel.name, wheel.parent.parent) == ("compiled-1-py3-none-any.whl", tmp_path / "built")
    extension.start_build()
    assert log.read_text() == "compiled\n"
    calls.install(kit, [wheel])
    assert (tmp_path / "site/compiled.py").is_file()


def test_an_extension_in_the_kit_is_taken(kit: Path, tmp_path: Path) -> None:
    (kit / "extension" / TAG).mkdir(parents=True)
    write_wheel(kit / "extension" / TAG / "compiled-1-py3-none-any.whl", "compiled")
    extension = calls.Extension(kit, tmp_path / "build.log")
    extension.start_build()
    assert extension.wait(0.0).parent.parent == kit / "extension"
    assert not (tmp_path / "build.log").exists()


def test_an_extension_that_does_not_come_is_reported(kit: Path, tmp_path: Path) -> None:
    (kit / "build_te.sh").write_text("exit 1\n")
    extension = calls.Extension(kit, tmp_path / "build.log")
    extension.start_build()
    with pytest.raises(calls.NotReady, match=r"not compiled after 0 s: see .*build\.log"):
        extension.wait(0.0)


def test_a_kit_that_is_not_there_or_for_others_is_one_line(
    kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "out"), "--rehearse"]
    assert calls.main(["1", "--kit", str(tmp_path / "nowhere"), *output]) == 2
    assert capsys.readouterr().err.startswith(f"error: there is no kit at {tmp_path}/nowhere: make gpu-kit")
    (kit / "wheels/other-1-cp39-cp39-win32.whl").write_bytes(b"")
    assert calls.main(["1", "--kit", str(kit), *output]) == 2
    assert "made for another Python than" in capsys.readouterr().err


def train_as_on_a_gpu(kind: str) -> tuple[list[float], str]:
    """Take two steps with the settings of a check that is not rehearsed; return the losses and the moments' type.

    The model is small; a rehearsal would leave out what only Transformer Engine has.
    """
    from nemo_rl_moe.models.megatron.training.trainer import MegatronTrainer

    config = {
        "run": lambda: models.run_config(rehearse=False, tokens=64),
        "save_and_resume": lambda: models.run_config(rehearse=False, tokens=64, **models.BF16_MOMENTS),
        "recipe": lambda: models.recipe_config(rehearse=False, tokens=64),
    }[kind]()
    hf_config = models.slice_config(rehearse=True)
    with parallel_job(config.policy):
        trainer = MegatronTrainer(config.policy, hf_config, None, num_steps=10)
        shards = [models.packed_shard(config, hf_config.vocab_size, seed) for seed in range(2)]
        losses = [trainer.train([shard], sft_loss).global_loss for shard in shards]
        optimizers = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        return losses, str(optimizers[0].config.exp_avg_dtype)


@pytest.mark.parametrize(
    ("kind", "moments"), [("run", "torch.float32"), ("save_and_resume", "torch.bfloat16"), ("recipe", "torch.bfloat16")]
)
def test_a_call_trains_with_the_settings_of_a_gpu(kind: str, moments: str) -> None:
    ((losses, found),) = run_ranks_with_engine(train_as_on_a_gpu, 1, kind)
    assert found == moments
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", CALLS)
def test_a_call_is_rehearsed(kit: Path, tmp_path: Path, number: int, capfd: pytest.CaptureFixture[str]) -> None:
    """At the checks' own sizes for CPUs, with a kit whose packages nothing imports; in the time that they need here."""
    call = calls.Call(10_000, CALLS[number].checks)
    assert calls.run(call, kit, tmp_path / "out", rehearse=True) == 0, capfd.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert {line["name"] for line in lines} == set(call.checks)
    assert {line["status"] for line in lines} == {"passed"}
    assert {line["card"] for line in lines} == {"CPU"}
    assert (tmp_path / "site/carried_by_the_kit.py").is_file()
