# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The task of coloured shapes: its data, and the tiny models' folders that go with it."""

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from nemo_rl_moe.models.families import family_of
from nemo_rl_moe.models.hf_files import load_hf_config
from nemo_rl_moe.models.image_rules import load_image_rule

EXAMPLES = Path(__file__).parents[3] / "examples"
MODELS = ("tiny_internvl_moe", "tiny_qwen3_vl_moe")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker() -> Iterator[ModuleType]:
    module = script("make_shapes_data.py")
    yield module
    del sys.modules[module.__name__]


def test_files_are_made_once_and_distinguish_themselves_from_others(
    maker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shapes"
    arguments = ["--output", str(folder), "--num-train", "40", "--num-validation", "12", "--num-grpo-prompts", "8"]
    assert maker.main(arguments) == 0
    before = {path.name: path.read_bytes() for path in folder.glob("*.json*")}
    assert maker.main(arguments) == 0
    assert "already made with these parameters" in capsys.readouterr().out
    assert maker.main([*arguments, "--force"]) == 0
    assert {path.name: path.read_bytes() for path in folder.glob("*.json*")} == before
    assert maker.main([*arguments, "--seed", "1"]) == 0
    assert (folder / "train.jsonl").read_bytes() != before["train.jsonl"]
    line = json.loads(before["train.jsonl"].splitlines()[0])
    assert (folder / line["messages"][0]["content"][0]["image"]).is_file()
    foreign = tmp_path / "photos"
    (foreign / "images").mkdir(parents=True)
    assert maker.main(["--output", str(foreign), *arguments[2:]]) == 2
    assert "which this script has not made" in capsys.readouterr().err


def test_sets_share_nothing_and_ask_in_equal_parts(maker: ModuleType) -> None:
    sets = maker.draw_sets(maker.Parameters(0, 400, 60, 40))
    keys = [(item.png, item.question) for items in sets.values() for item in items]
    assert len(set(keys)) == len(keys) == 500
    kinds = Counter(" ".join(item.question.split()[:2]) for item in sets["train"])
    assert kinds == {"how many": 200, "colour of": 100, "which side": 100}


def test_answers_are_what_the_images_show(maker: ModuleType) -> None:
    """Counted in the pixels: each shape of the counting tasks fills the middle of its cell of 8 x 8."""
    chance = Random(5)
    grey = np.array((245, 245, 245))
    for number in range(200):
        task = maker.TASKS[number % 4]
        item = maker.draw_item(chance, task)
        pixels = np.asarray(Image.open(BytesIO(item.png))).astype(int)
        middles = pixels[4::8, 4::8].reshape(-1, 3)
        if task == "count":
            assert int(item.answer) == (middles != grey).any(1).sum()
        elif task == "count_colour":
            colour = maker.COLOURS[item.question.split()[2]]
            assert int(item.answer) == (middles == colour).all(1).sum()
        elif task == "largest":
            sizes = {name: (pixels == colour).all(2).sum() for name, colour in maker.COLOURS.items()}
            assert item.answer == max(sizes, key=lambda name: sizes[name])
        else:
            dots = (pixels == (20, 20, 20)).all(2)
            more = dots[:, :16].sum() > dots[:, 16:].sum()
            assert item.answer == ("left" if more else "right")


def test_folders_are_what_the_script_makes(tmp_path: Path) -> None:
    module = script("assets/make_tiny_vision_models.py")
    module.write_model_folders(tmp_path)
    for model in MODELS:
        made = {path.name: path.read_bytes() for path in (tmp_path / model).iterdir()}
        assert made == {path.name: path.read_bytes() for path in (EXAMPLES / "assets" / model).iterdir()}


@pytest.mark.parametrize("model", MODELS)
def test_every_word_of_the_task_is_one_token(maker: ModuleType, model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "assets" / model)
    chance = Random(3)
    for number in range(60):
        item = maker.draw_item(chance, maker.TASKS[number % 4])
        text = f"{item.question}{item.answer}<eos>"
        ids = tokenizer.encode(text)
        assert len(ids) == len(item.question.split()) + 2
        assert tokenizer.decode(ids[:-1]) == f"{item.question} {item.answer}"


def test_data_and_model_agree_on_the_tokens_of_a_image() -> None:
    folder = str(EXAMPLES / "assets" / "tiny_internvl_moe")
    hf_config = load_hf_config(folder)
    rule = load_image_rule(folder, hf_config)
    family = family_of(hf_config)
    assert rule is not None
    assert family.vision is not None
    assert rule.num_tokens(32, 32) == family.vision.num_image_tokens(hf_config, 32, 32) == 16
