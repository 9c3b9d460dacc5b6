# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and exported models with damage of every kind: reported by name, or harmless; never a silent
difference."""

import itertools
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.functional import sft_runs, shared_ray
from tests.support.quick_list import slow

pytestmark = [pytest.mark.shared_ray, pytest.mark.timeout(900)]

NUM_DAMAGES = 200
NUM_STEPS = 4


def settings(folder: Path, data: Path, num_steps: int = NUM_STEPS) -> list[str]:
    """A run of one worker that keeps every checkpoint."""
    return sft_runs.settings(
        folder,
        data,
        sft__max_num_steps=num_steps,
        sft__val_period=0,
        sft__val_at_start=False,
        sft__val_at_end=False,
        checkpointing__metric_name=None,
        checkpointing__save_period=1,
        checkpointing__keep_top_k=None,
        policy__megatron_cfg__scheduler__lr_warmup_iters=1,
        policy__megatron_cfg__scheduler__lr_decay_iters=NUM_STEPS,
        policy__train_global_batch_size=16,
        policy__train_micro_batch_size=8,
        cluster__cpu_workers_per_node=1,
        **sft_runs.only_jsonl(),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sft_runs.make_additions(tmp_path_factory.mktemp("data"), 100, 20)


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run that nothing has happened to."""
    folder = tmp_path_factory.mktemp("whole")
    sft_runs.run_here(settings(folder, data), folder)
    return sft_runs.only_run_folder(folder) / "checkpoints"


Damage = Callable[[random.Random, Path, Path], list[Path]]
"""Changes something in a folder, given an older one of the same kind; returns the files that are another now."""


def some_file(generator: random.Random, folder: Path) -> Path:
    return generator.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 16))


def flip_a_bit(generator: random.Random, folder: Path, older: Path) -> list[Path]:
    path = some_file(generator, folder)
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)
    return [path]


def zero_a_block(generator: random.Random, folder: Path, older: Path) -> list[Path]:
    path = some_file(generator, folder)
    content = bytearray(path.read_bytes())
    start = generator.randrange(len(content))
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)
    return [path]


def cut_off(generator: random.Random, folder: Path, older: Path) -> list[Path]:
    path = some_file(generator, folder)
    path.write_bytes(path.read_bytes()[: generator.randrange(path.stat().st_size)])
    return [path]


def swap_two(generator: random.Random, folder: Path, older: Path) -> list[Path]:
    first, second = some_file(generator, folder), some_file(generator, folder)
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    return [first, second]


def take_an_older_file(generator: random.Random, folder: Path, older: Path) -> list[Path]:
    path = some_file(generator, folder)
    path.write_bytes((older / path.relative_to(folder)).read_bytes())
    return [path]


DAMAGES: list[Damage] = [flip_a_bit, zero_a_block, cut_off, swap_two, take_an_older_file]


@pytest.mark.slow
def test_every_damage_is_reported_by_name_or_is_harmless(whole: Path, tmp_path: Path) -> None:
    pairs = [(whole / f"step_{NUM_STEPS}", whole / "step_1"), (whole / "final", whole / "final")]
    num_reported = num_harmless = num_accepted = 0
    for seed in itertools.count():
        if num_reported == NUM_DAMAGES:
            break
        generator = random.Random(seed)
        source, older = pairs[seed % 2]
        folder = tmp_path / str(seed) / source.name
        shutil.copytree(source, folder)
        paths = DAMAGES[seed // 2 % len(DAMAGES)](generator, folder, older)
        changed = [path for path in paths if path.read_bytes() != (source / path.relative_to(folder)).read_bytes()]
        done = shared_ray.called_here(["verify", str(folder)], exit_code=None)
        if [path.name for path in changed] == ["files.json"]:
            # Harmless where it is a space, or the name of a tensor: the files are what was written. Where the list is
            # another checkpoint's, it names the files that it is not of.
            assert done.returncode == 0 or done.stderr.startswith(f"error: {folder}"), (seed, done.stderr)
            num_harmless += done.returncode == 0
            num_accepted += done.returncode != 0
            # The files are whole, and only their list is not: the user's word for them mends it.
            shared_ray.called_here(["verify", "--accept", str(folder)])
            shared_ray.called_here(["verify", str(folder)])
        elif changed:
            num_reported += 1
            assert done.returncode == 1, (seed, changed)
            # A file, or the list of files that it stands in.
            named = [path for path in folder.rglob("*") if f"error: {path}: " in done.stderr]
            assert set(named) & {*changed, *(path.parent / "files.json" for path in changed)}, (seed, done.stderr)
        else:
            num_harmless += 1
            assert done.returncode == 0, (seed, done.stderr)
        shutil.rmtree(folder)
    print(
        f"{num_reported} reported by name; {num_accepted} of files.json alone, reported and accepted;"
        f" {num_harmless} harmless"
    )
    assert num_accepted, "no damage of files.json alone"


def damage_a_tensor(folder: Path, pattern: str, at: float) -> Path:
    """Zeroes 4,096 bytes of the largest file that a pattern finds, somewhere in it; its size stays."""
    path = max(folder.glob(pattern), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    start = int(at * len(content))
    assert any(content[start : start + 4096])
    content[start : start + 4096] = bytes(4096)
    path.write_bytes(content)
    return path


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.slow
def test_a_run_goes_on_from_the_newest_whole_checkpoint(whole: Path, data: Path, tmp_path: Path) -> None:
    sft_runs.run_here(settings(tmp_path, data, 3), tmp_path)
    checkpoints = sft_runs.only_run_folder(tmp_path) / "checkpoints"
    path = damage_a_tensor(checkpoints / "step_3", "policy/*.distcp", 0.05)
    done = sft_runs.run_here(settings(tmp_path, data), tmp_path)
    output = " ".join((done.stdout + done.stderr).split())
    assert f"warning: {path}: damaged in decoder.layers." in output
    assert f"going on from {checkpoints / 'step_2'}: 2 of {NUM_STEPS} steps are done" in output
    found, expected = weights_of(checkpoints / "final"), weights_of(whole / "final")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    shared_ray.called_here(["verify", str(checkpoints)])  # the damaged one was written anew


@pytest.mark.slow
def test_damaged_checkpoints_alone_end_the_run(whole: Path, data: Path, tmp_path: Path) -> None:
    sft_runs.run_here(settings(tmp_path, data, 1), tmp_path)
    path = damage_a_tensor(sft_runs.only_run_folder(tmp_path) / "checkpoints/step_1", "policy/*.distcp", 0.9)
    before = path.read_bytes()
    done = sft_runs.run_here(settings(tmp_path, data), tmp_path, exit_code=2)
    assert re.search(rf"^error: {re.escape(str(path))}: damaged in optimizer\.state\.", done.stderr, re.MULTILINE)
    assert path.read_bytes() == before


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "pattern"), [("final", "*.safetensors"), slow(f"step_{NUM_STEPS}", "policy/*.distcp")]
)
def test_damaged_weights_are_neither_converted_nor_trained(
    whole: Path, data: Path, tmp_path: Path, source: str, pattern: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole / source, folder)
    path = damage_a_tensor(folder, pattern, 0.05)
    formats = ["--from", "hf", "--to", "megatron"] if source == "final" else ["--from", "megatron", "--to", "hf"]
    done = shared_ray.called_here(
        ["convert", *formats, "--input", str(folder), "--output", str(tmp_path / "out")], exit_code=2
    )
    assert f"{path}: damaged in " in done.stderr
    assert not (tmp_path / "out").exists()
    overrides = settings(tmp_path / "run", data)
    done = sft_runs.run_here(
        [*overrides, f"policy.model_name={folder}", "policy.init=pretrained"], tmp_path, exit_code=2
    )
    assert f"{path}: damaged in " in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_file_that_was_edited_on_purpose_is_accepted(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole / "final", folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# mine #}")
    words = ["convert", "--from", "hf", "--to", "hf", "--input", str(folder), "--output", str(tmp_path / "out")]
    done = shared_ray.called_here(words, exit_code=2)
    assert f"nemo-rl-moe verify --accept {folder}" in done.stderr
    for command in (["verify", "--accept", str(folder)], words, ["verify", str(tmp_path / "out")]):
        shared_ray.called_here(command)
