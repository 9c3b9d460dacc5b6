# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Images as tokens of samples: their number and places, the masks around them, and images in batches."""

import json
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, PreTrainedTokenizerBase

from nemo_rl_moe.data.image_files import ImageReader
from nemo_rl_moe.data.image_tokens import ImageTokenizer, RecordImages, image_tokenizer
from nemo_rl_moe.data.loader import collate
from nemo_rl_moe.data.preferences import collate_pairs, load_preferences
from nemo_rl_moe.data.prompts import prompt_inputs, without_training_prompts
from nemo_rl_moe.data.sft import TokenizedDataset, load_sft_dataset
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.distributed.batch import Destination
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.generation.interface import GeneratedSequence, GenerationRequest
from nemo_rl_moe.launch.generate import responses
from nemo_rl_moe.models.image_rules import load_image_rule
from nemo_rl_moe.models.images import IMAGE_IDS, IMAGE_SIZES, IS_IMAGE, PIXELS
from tests.unit.data.test_prompts import load as load_prompts_of
from tests.unit.generation.test_generate_all import SAMPLING, Backwards, runner_over

ASSETS = Path(__file__).parents[3] / "examples/assets"
QUESTION = "how many shapes ?"
Kit = tuple[PreTrainedTokenizerBase, ImageTokenizer]


def kit_of(name: str, folder: Path) -> Kit:
    path = str(ASSETS / name)
    tokenizer = load_tokenizer(path)
    rule = load_image_rule(path, AutoConfig.from_pretrained(path))
    assert rule is not None
    return tokenizer, image_tokenizer(rule, tokenizer, ImageReader(folder, 10_000))


@pytest.fixture
def qwen(tmp_path: Path) -> Kit:
    return kit_of("tiny_qwen3_vl_moe", tmp_path)


def draw(folder: Path, name: str, width: int = 32, height: int = 32, seed: int = 0) -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return name


def asked(*images: str, answer: str = "4") -> dict[str, object]:
    parts = [{"type": "image", "image": image} for image in images]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def load(kit: Kit, path: str, longest: int = 99, **options: object) -> TokenizedDataset:
    return load_sft_dataset(path, "train", kit[0], longest, images=RecordImages("images", kit[1]), **options)


def test_each_image_becomes_its_tokens(qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    draw(tmp_path, "a.png")
    draw(tmp_path, "b.png", 24, 16, seed=1)
    first, second, text = load(qwen, write_jsonl(asked("a.png"), asked("a.png", "b.png"), asked()))
    shown = "<|vision_start|>{}<|vision_end|>"
    words = f"{QUESTION}4<eos>"
    for example, images in ((first, [16]), (second, [16, 6]), (text, [])):
        spelled = "".join(shown.format("<|image_pad|>" * count) for count in images) + words
        assert example.input_ids.tolist() == qwen[0].encode(spelled)
        assert example.token_mask.tolist() == [False] * (len(example) - 2) + [True] * 2
        assert example.images is not None
        is_pad = example.input_ids == qwen[1].rule.token_id
        assert np.array_equal(example.images.is_image(len(example)), is_pad)


def test_tiles_stand_between_two_tokens(tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    tokenizer, tokens = kit = kit_of("tiny_internvl_moe", tmp_path)
    draw(tmp_path, "a.png", 80, 50)
    (example,) = load(kit, write_jsonl(asked("a.png")))
    spelled = f"<img>{'<IMG_CONTEXT>' * 16}</img>{QUESTION}4<eos>"
    assert example.input_ids.tolist() == tokenizer.encode(spelled)
    assert example.images is not None
    assert example.images.runs == ((1, 16),)
    assert example.images.is_image(len(example)).sum() == 16
    assert collate([example], 0).columns[IMAGE_SIZES].values.tolist() == [[32, 32]]
    assert tokens.before != tokens.behind


def test_batches_carry_images(qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    draw(tmp_path, "a.png")
    draw(tmp_path, "b.png", 24, 16, seed=1)
    dataset = load(qwen, write_jsonl(asked("a.png"), asked(), asked("b.png", "a.png")))
    batch = collate([dataset[0], dataset[1], dataset[2]], 0)
    assert batch.columns[IMAGE_SIZES].sizes.tolist() == [1, 0, 2]
    assert batch.columns[IMAGE_SIZES].values.tolist() == [[32, 32], [16, 24], [32, 32]]
    first, _, again = batch.columns[IMAGE_IDS].values.tolist()
    assert first == again
    whole = np.asarray(Image.open(tmp_path / "a.png")).reshape(-1)
    pixels = batch.shared[PIXELS].arrays
    assert [len(arrays) for arrays in pixels] == [1, 0, 2]
    assert np.array_equal(pixels[0][0], whole)
    assert pixels[2][1] is pixels[0][0]
    is_image = batch.columns[IS_IMAGE]
    assert is_image.values.tolist() == (batch.input_ids == qwen[1].rule.token_id).tolist()
    assert {column.goes_to for column in batch.columns.values()} == {Destination.MODEL}
    assert dataset.report.num_images == 3
    assert ", 3 images" in dataset.report.summary()


def test_both_responses_of_a_pair_see_the_image(qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    draw(tmp_path, "a.png")
    record = {"prompt": QUESTION, "chosen": "4", "rejected": "5", "images": ["a.png"]}
    (pair,) = load_preferences(write_jsonl(record), "train", qwen[0], 99, images=RecordImages("images", qwen[1]))
    batch = collate_pairs([pair], 0)
    assert batch.columns[IMAGE_IDS].sizes.tolist() == [1, 1]
    assert batch.group_size == 2


def test_a_sample_is_never_cut_within_an_image(qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    draw(tmp_path, "a.png")
    path = write_jsonl(asked("a.png", answer="4 4 4"), asked(answer="4 4 4"))
    whole = load(qwen, path, 23)  # 18 tokens of the image, 4 of the question, one of the answer
    assert [len(example) for example in whole] == [23, 8]
    assert whole[0].truncated
    for longest in (10, 5):
        kept = load(qwen, path, longest)
        assert [example.sample_id[-1] for example in kept] == ["2"]
        assert "1 left out: no response, or not all images, before truncation" in kept.report.summary()


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (asked("no.png"), r"messages\[0\].content\[0\].image: .*no.png does not exist"),
        (asked(answer="4 <|image_pad|>"), r"a text contains <\|image_pad\|>, which stands for an image"),
        ({"images": "long.png", **asked()}, "has 8 x 1616 pixels, expected no side more than 200 times the other"),
    ],
)
def test_bad_lines(
    qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str], record: dict[str, object], reason: str
) -> None:
    draw(tmp_path, "a.png")
    qwen = (qwen[0], ImageTokenizer(qwen[1].rule, ImageReader(tmp_path, 20_000), qwen[1].token))
    draw(tmp_path, "long.png", 1616, 8)
    path = write_jsonl(asked("a.png"), record)
    with pytest.raises(DataError, match=reason):
        load(qwen, path)
    report = load(qwen, path, on_bad_line="skip").report
    assert (report.num_kept, report.num_bad_lines) == (1, 1)


def test_a_template_that_shows_no_images_is_an_error(
    qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]
) -> None:
    draw(tmp_path, "a.png")
    qwen[0].chat_template = "{% for m in messages %}{{ m.content if m.content is string else '?' }}{% endfor %}"
    with pytest.raises(DataError, match="the chat template shows 0 of 1 images"):
        load(qwen, write_jsonl(asked("a.png")))


def test_a_model_of_text_stops_at_the_first_image(
    qwen: Kit, demo_tokenizer: PreTrainedTokenizerBase, write_jsonl: Callable[..., str]
) -> None:
    path = write_jsonl({"prompt": "1+1=", "completion": "2"}, asked("a.png"))
    with pytest.raises(DataError, match=r"data.jsonl:2: .* is an image, and the model \(policy.model_name\) takes"):
        load_sft_dataset(path, "train", qwen[0], 99, "skip")
    beside = write_jsonl({"prompt": "1+1=", "completion": "2", "images": ["a.png"]})
    with pytest.raises(DataError, match=r"data.image_key=null"):
        load_sft_dataset(beside, "train", demo_tokenizer, 99, images=RecordImages("images"))
    assert len(load_sft_dataset(beside, "train", demo_tokenizer, 99)) == 1


def test_a_file_that_changes_ends_the_run(qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]) -> None:
    draw(tmp_path, "a.png")
    dataset = load(qwen, write_jsonl(asked("a.png")))
    draw(tmp_path, "a.png", seed=5)
    with pytest.raises(DataError, match=r"data.jsonl:1: .*a.png has changed since the data was read"):
        collate([dataset[0]], 0)


def test_images_of_a_parquet_file_are_not_decoded_by_datasets(qwen: Kit, tmp_path: Path) -> None:
    from datasets import Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    stream = BytesIO()
    Image.new("RGB", (32, 32), 7).save(stream, "PNG")
    rows = {
        "prompt": [QUESTION, QUESTION],
        "completion": ["4", "5"],
        "images": [[{"bytes": stream.getvalue(), "path": None}], []],
    }
    features = Features({"prompt": Value("string"), "completion": Value("string"), "images": List(ImageFeature())})
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "data.parquet"))
    first, second = load(qwen, str(tmp_path / "data.parquet"))
    assert (len(first), len(second)) == (24, 6)
    # One that would fill the memory is known by its header alone.
    bomb = bytearray(stream.getvalue())
    bomb[16:24] = (60000).to_bytes(4, "big") * 2
    rows["images"][0][0]["bytes"] = bytes(bomb)
    Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "bomb.parquet"))
    assert load(qwen, str(tmp_path / "bomb.parquet"), on_bad_line="skip").report.num_bad_lines == 1


@pytest.mark.parametrize("answers", [{"completion": ["4"]}, {"chosen": ["4"], "rejected": ["5"]}])
def test_a_column_of_images_under_another_name_is_reported(
    answers: dict[str, list[str]], qwen: Kit, tmp_path: Path
) -> None:
    from datasets import Dataset

    path = str(tmp_path / "data.parquet")
    Dataset.from_dict({"prompt": ["<image>?"], "image": ["a.png"], **answers}).to_parquet(path)
    read = load_sft_dataset if "completion" in answers else load_preferences
    with pytest.raises(DataError, match=r"data.parquet.*: there are images in image, .*data.image_key=image"):
        read(path, "train", qwen[0], 99, images=RecordImages("images", qwen[1]))


def test_prompts_with_other_images_are_other_prompts(
    qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]
) -> None:
    for seed, name in enumerate(("a.png", "b.png")):
        draw(tmp_path, name, seed=seed)
    (tmp_path / "copy.png").write_bytes((tmp_path / "a.png").read_bytes())
    lines = [{"question": QUESTION, "answer": "4", "images": [name]} for name in ("a.png", "b.png", "a.png")]
    common = {"prompt_key": "question", "max_image_pixels": 10_000, "images": qwen[1]}
    training = load_prompts_of(qwen[0], write_jsonl(*lines), env="math", **common)
    assert [prompt.sample_id[-1] for prompt in training] == ["1", "2"]
    assert training.report.num_repeated == 1
    (inputs,) = prompt_inputs(training[:1])
    assert list(inputs) == [PIXELS, IMAGE_SIZES, IMAGE_IDS, IS_IMAGE]
    assert len(inputs[IS_IMAGE].values) == len(training[0].token_ids)
    other = {"question": QUESTION, "answer": "4", "images": [draw(tmp_path, "c.png", seed=9)]}
    copy = {"question": QUESTION, "answer": "4", "images": ["copy.png"]}
    held_out = load_prompts_of(qwen[0], write_jsonl(copy, other, name="v.jsonl"), env="math", **common)
    kept = without_training_prompts(held_out, training)
    assert [prompt.sample_id[-1] for prompt in kept] == ["2"]
    assert (kept.report.num_training_prompts, kept.report.num_images) == (1, 1)
    assert json.dumps(dict(kept[0].record))


def test_images_of_prompts_are_read_when_their_chunk_is_asked_for(
    qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]
) -> None:
    """The image of the last of three chunks is missing: the responses to the others are there."""
    names = [draw(tmp_path, f"{number}.png", seed=number) for number in range(3)]
    lines = [{"question": QUESTION, "answer": "4", "images": [name]} for name in names]
    common = {"prompt_key": "question", "max_image_pixels": 10_000, "images": qwen[1]}
    prompts = load_prompts_of(qwen[0], write_jsonl(*lines), env="math", **common)
    (tmp_path / names[2]).unlink()
    inner, found = RememberingRequests(), []
    with pytest.raises(DataError, match=r"data.jsonl:3: .*2.png"):
        found.extend(responses(runner_over(inner), prompts, 2, SAMPLING, 0, 1))
    assert [(prompt.sample_id[-1], sample) for prompt, sample, _ in found] == [("1", 0), ("1", 1), ("2", 0), ("2", 1)]
    # Both responses to a prompt are asked for with the same arrays.
    assert [len(requests) for requests in inner.asked] == [2, 2]
    for first, second in inner.asked:
        assert first.model_inputs[PIXELS].values[0] is second.model_inputs[PIXELS].values[0]


class RememberingRequests(Backwards):
    """An engine that keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Sequence[GenerationRequest]] = []

    def backwards(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, GeneratedSequence]]:
        self.asked.append(requests)
        return super().backwards(requests)


def test_a_sample_whose_second_image_is_cut_is_left_out(
    qwen: Kit, tmp_path: Path, write_jsonl: Callable[..., str]
) -> None:
    """Its first turn has an answer to train on, and its image whole."""
    draw(tmp_path, "a.png")
    draw(tmp_path, "b.png", seed=1)
    turns = [turn for name in ("a.png", "b.png") for turn in asked(name)["messages"]]  # type: ignore[attr-defined]
    path = write_jsonl({"messages": turns}, asked())
    assert [len(example) for example in load(qwen, path, 48)] == [48, 6]
    for longest in (42, 41, 30, 25):  # the second image ends with token 41, and one behind it closes it
        kept = [example.sample_id[-1] for example in load(qwen, path, longest)]
        assert kept == (["1", "2"] if longest >= 41 else ["2"])
