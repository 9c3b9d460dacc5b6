# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe data`: what is trained on, context and truncated, as a program in a terminal and in this process."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.config.loading import load_any_config
from nemo_rl_moe.data.chat import TokenizedExample
from nemo_rl_moe.launch.data_view import ShownSequence, sequence_text, show_data
from tests.support.chat_templates import THINKING, make_byte_tokenizer
from tests.support.published_templates import PUBLISHED, SPECIAL_TOKENS

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples/assets/tiny_qwen3_moe"
ADDS_A_PROMPT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %};<think>{% endif %}"
ENDS_TURNS = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + eos_token -}}"
    "{%- endgeneration -%};{%- else -%}{{- m.content -}}{%- endif -%}{%- endfor -%}"
)
SPEECH = (
    "stop tokens: ",
    "no stop token: ",
    "the assistant's turns end with ",
    "thinking: ",
    "tool calls: ",
    "warning: the chat template ends ",
)
RECORDS = [
    {"prompt": "12+3=", "completion": "<think>2+3=5</think>15"},
    {"prompt": "4+4=", "completion": "8" * 100},
    {"prompt": "1=", "completion": "\x1b[31m"},
    {"prompt": "3" * 70, "completion": "1"},
]


def arguments(*more: str, config: str = "sft_tiny_moe.yaml") -> list[str]:
    data = [f"data.{name}.path=train.jsonl" for name in ("train", "validation")]
    return ["--config", config, f"policy.model_name={MODEL}", "policy.init=random", *data, *more]


@pytest.fixture(autouse=True)
def _in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Standard output of the command, without how the model speaks and the time that reading took."""

    def show(*more: str, config: str = "sft_tiny_moe.yaml") -> str:
        assert cli.main(["data", *arguments(*more, config=config)]) == 0
        output, errors = capsys.readouterr()
        assert errors == ""
        lines = output.splitlines()
        first = next(place for place, line in enumerate(lines) if line.startswith("reading "))
        before = [line for line in lines[:first] if not line.startswith(SPEECH)]
        return "\n".join([*before, *lines[first + 2 :]])

    return show


def read_to_the_end(terminal: int) -> str:
    output = b""
    try:
        while block := os.read(terminal, 4096):
            output += block
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(terminal)
    return output.decode()


@pytest.mark.slow
def test_as_a_program_in_a_terminal(tmp_path: Path) -> None:
    front, back = pty.openpty()
    command = [sys.executable, "-m", "nemo_rl_moe.cli", "data", *arguments("--show=2", "data.on_bad_line=skip")]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color"}
    program = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=back)
    os.close(back)
    output = read_to_the_end(front)
    assert program.wait(timeout=280) == 0
    assert "\x1b[1;32m<think>2+3=5</think>15<eos>\x1b[0m" in output
    assert f"\x1b[9;31m{'8' * 40}<eos>\x1b[0m" in output
    assert "[[" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


@pytest.mark.parametrize(("no_color", "form"), [("1", "[[{}]]"), ("", "\x1b[1;32m{}\x1b[0m")])
def test_marks_in_a_terminal_without_colours(monkeypatch: pytest.MonkeyPatch, no_color: str, form: str) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    front, back = pty.openpty()
    config = load_any_config("sft_tiny_moe.yaml", [*arguments()[2:], "data.on_bad_line=skip"])
    with os.fdopen(back, "w") as stream:
        show_data(config, 1, stream)
    assert form.format("<think>2+3=5</think>15<eos>") in read_to_the_end(front)


def test_conversations(shown: Callable[..., str]) -> None:
    report, longest, legend, *samples = shown("--show", "2", "data.on_bad_line=skip").splitlines()
    assert report.startswith(
        "train.jsonl: 2 examples, 79 tokens (70 to train on), 1 truncated at the maximum length "
        "(the first: train.jsonl:2), "
        "1 left out: no response before truncation (the first: train.jsonl:4), "
        "1 bad line left out, the first: train.jsonl:3: the tokenizer cannot encode the text: "
    )
    assert (longest, legend) == ("longest: 64 tokens, of at most 64", "tokens: context [[trained on]] {{truncated}}")
    assert samples == [
        "",
        "train.jsonl:1: 15 tokens, 10 to train on",
        "12+3=[[<think>2+3=5</think>15<eos>]]",
        "",
        "train.jsonl:2: 64 tokens, 60 to train on, 41 truncated",
        f"4+4=[[{'8' * 60}]]{{{{{'8' * 40}<eos>}}}}",
    ]


@pytest.mark.parametrize("config", ["dpo_tiny_moe.yaml", "rm_tiny_moe.yaml"])
def test_pairs_with_what_was_cut_of_each(config: str, tmp_path: Path, shown: Callable[..., str]) -> None:
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3" * 300}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    text = shown("data.train.path=pairs.jsonl", config=config)
    _, _, shown_pairs = text.partition("{{truncated}}\n")
    assert shown_pairs == (
        "\npairs.jsonl:1 (chosen): 6 tokens, 2 to train on\n1+1=[[2<eos>]]\n"
        "\npairs.jsonl:1 (rejected): 64 tokens, 60 to train on, more than 200 truncated\n"
        f"1+1=[[{'3' * 60}]]{{{{{'3' * 200}}}}}{{{{ ...}}}}"
    )


@pytest.mark.parametrize(
    ("config", "padding", "chosen", "rejected"),
    [
        ("dpo_tiny_moe.yaml", "<pad>", "[[2<eos>]];", f"[[4<eos>]];{'5' * 57}{{{{{'5' * 43}6<eos>;}}}}"),
        ("rm_tiny_moe.yaml", "<pad>", "[[2<eos>]]", f"[[4<eos>]]{{{{;{'5' * 100}6<eos>;}}}}"),
        ("rm_tiny_moe.yaml", "<eos>", "[[2]]", f"[[4]]{{{{<eos>;{'5' * 100}6<eos>;}}}}"),
    ],
)
def test_pairs_of_a_reward_model_end_with_the_token_of_their_score(
    config: str, padding: str, chosen: str, rejected: str, tmp_path: Path, shown: Callable[..., str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "pad_token_id": ["<pad>", "<eos>"].index(padding)}))
    (model / "chat_template.jinja").write_text(ENDS_TURNS)
    turns = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "5" * 100}]
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": [*turns, {"role": "assistant", "content": "6"}]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair))
    text = shown("data.train.path=pairs.jsonl", f"policy.model_name={model}", config=config)
    assert text.splitlines()[-1] == f"1+1={rejected}"
    assert text.splitlines()[-4] == f"1+1={chosen}"


def test_prompts_with_what_the_template_adds(tmp_path: Path, shown: Callable[..., str]) -> None:
    (tmp_path / "template.jinja").write_text(ADDS_A_PROMPT)
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "9=", "completion": "9"}))
    overrides = ["env.reward.kind=math", "data.answer_key=completion"]
    overrides += ["data.validation.path=other.jsonl", "policy.tokenizer.chat_template=template.jinja", "--show=1"]
    assert shown(*overrides, config="grpo_tiny_moe.yaml").splitlines() == [
        "train.jsonl: 3 prompts, 17 tokens, 1 left out: longer than a prompt may be (the first: train.jsonl:4)",
        "longest: 7 tokens, of at most 33",
        "tokens: context [[trained on]] {{truncated}}",
        "",
        "train.jsonl:1: 7 tokens",
        "12+3=;<think>",
    ]


def test_what_the_template_leaves_out_is_counted_and_named(tmp_path: Path, shown: Callable[..., str]) -> None:
    make_byte_tokenizer(THINKING).save_pretrained(tmp_path / "tokenizer")
    thought = {"role": "assistant", "content": "<think>x</think>b"}
    turns = [{"role": "user", "content": "q"}, thought, {"role": "user", "content": "r"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "c"}]}))
    settings = [f"policy.tokenizer.name={tmp_path / 'tokenizer'}", "policy.max_total_sequence_length=500"]
    report, *more = shown(*settings).splitlines()
    title = next(line for line in more if line.startswith("train.jsonl:1: "))
    thinking = "with thinking of earlier turns that the chat template leaves out"
    empty = "with an empty <think> block that is trained on"
    first = "(the first: train.jsonl:1)"
    assert report.endswith(f", 1 {thinking} {first}, 1 {empty} {first}")
    assert title.endswith(f" to train on, {thinking}, {empty}")


def test_a_template_of_ours_in_place_of_a_published_one(tmp_path: Path, shown: Callable[..., str]) -> None:
    begin, end, *more = SPECIAL_TOKENS["Mistral"]
    special = {"more_special": (begin, end, *more), "bos_token": begin, "eos_token": end}
    make_byte_tokenizer(PUBLISHED["Mistral"], **special).save_pretrained(tmp_path / "tokenizer")
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": turns}))
    reported, *_, text = shown(f"policy.tokenizer.name={tmp_path / 'tokenizer'}").splitlines()
    assert reported.startswith(
        "chat template: that of Mistral loses the system turn; mistral.jinja of this package replaces it "
    )
    assert text == "u[/INST][[ a</s>]]"


def test_how_the_model_speaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.6, "top_k": 20}))
    assert cli.main(["data", *arguments("data.on_bad_line=skip", f"policy.model_name={model}")]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "stop tokens: '<eos>' 1 (tokenizer, config.json), '<pad>' 0 (generation_config.json)",
        "the assistant's turns end with '<eos>'",
        "the model's own sampling, not applied: temperature 0.6, top_k 20",
    ]


@pytest.mark.parametrize("in_colour", [False, True])
def test_control_characters_of_the_data_are_written_out(in_colour: bool) -> None:
    ids = np.frombuffer(b"a\x1b[2J\nb\x07", dtype=np.uint8).astype(np.int32)
    example = TokenizedExample(ids, ids == ord("b"), False, "f:1")
    text = sequence_text(ShownSequence(example, 7), lambda some: bytes(some).decode(), in_colour).plain
    assert text == (r"a\x1b[2J" + "\n" + (r"b\x07" if in_colour else r"[[b]]{{\x07}}"))


def test_a_space_that_a_tokenizer_drops_at_the_beginning() -> None:
    example = TokenizedExample(np.array([0, 1, 2], np.int32), np.array([False, True, True]), False, "f:1")
    words = ("the", " answer", " is")
    text = sequence_text(ShownSequence(example, 9), lambda ids: "".join(words[i] for i in ids).lstrip(), False)
    assert text.plain == "the[[ answer is]]"


def test_bad_data_ends_with_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", *arguments()]) == 2
    first, _ = capsys.readouterr().err.splitlines()
    assert first.startswith("error: train.jsonl:3: the tokenizer cannot encode the text")


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5"])
def test_number_of_samples(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "--config", "sft_tiny_moe.yaml", f"--show={number}"])
    assert ended.value.code == 2
    assert f"--show: got '{number}', expected a whole number above 0" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("--show N", "NO_COLOR", "truncated", "nemo-rl-moe data --config sft_tiny_moe.yaml", "section.key="):
        assert word in text
