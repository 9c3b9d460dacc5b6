# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts: read or sampled, tokenized as in supervised fine-tuning, and their order."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_moe.config.schema_grpo import PromptDataConfig, PromptSourceConfig
from nemo_rl_moe.data.prompts import Prompt, PromptLoader, load_prompts, without_training_prompts
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.errors import ConfigurationError, DataError
from tests.support.grpo_inputs import environment_section
from tests.unit.data.conftest import refused

CHATML = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SUMS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
    "whitespace": "no_space",
}


def load(tokenizer: Any, path: str | None, env: str | None = "math", longest: int = 64, **changes: Any):
    settings: dict[str, Any] = {
        "split": "train",
        "num_items": None,
        "seed": 0,
        "prompt_key": "prompt",
        "prompt_template": None,
        "answer_key": "answer",
        "on_bad_line": "stop",
        "shuffle": True,
        "load_timeout_s": 60.0,
        "image_key": "images",
        "image_root": None,
        "max_image_pixels": 1000,
        "chat_template_kwargs": {},
        "tools": [],
        "parameters": SUMS,
    } | changes
    source = PromptSourceConfig(path=path, **{key: settings.pop(key) for key in ("split", "num_items", "seed")})
    response_key = settings.pop("response_key", None)
    task = {"task": "basic_arithmetic", "parameters": settings.pop("parameters")}
    keys = {"reasoning_gym": task, "callable": {"function": "a:b"}, "custom": {"factory": "a:b"}}
    reward = None if env is None else {"kind": env, **keys.get(env, {})}
    environment = environment_section(reward, settings.pop("driver", None))
    images = settings.pop("images", None)
    data = PromptDataConfig(train=source, validation=None, **settings)
    return load_prompts(source, data, tokenizer, longest, environment, images, response_key=response_key)


def problems(*args: Any, **kwargs: Any) -> list[str]:
    return refused(load, *args, **kwargs)


def test_prompts_come_back_in_order(write_jsonl, demo_tokenizer):
    path = write_jsonl({"prompt": "1+1=", "answer": "2", "level": 3}, {"prompt": "2+2=", "answer": 4})
    prompts = load(demo_tokenizer, path)
    assert [prompt.sample_id for prompt in prompts] == [f"{path}:1", f"{path}:2"]
    assert [prompt.text for prompt in prompts] == ["1+1=", "2+2="]
    assert [demo_tokenizer.decode(prompt.token_ids) for prompt in prompts] == ["1+1=", "2+2="]
    assert prompts[0].record == {"question": "1+1=", "prompt": "1+1=", "answer": "2", "level": 3}
    assert prompts[1].record["answer"] == "4", "a number becomes text"
    assert all(type(token) is int for token in prompts[0].token_ids)
    assert prompts.report.summary() == f"{path}: 2 prompts, 8 tokens"
    assert len(load(demo_tokenizer, path, num_items=1)) == 1


def test_numbers_become_text_and_whole_ones_have_no_fraction(write_jsonl, demo_tokenizer):
    answers = [6, 6.0, 0.50, 1e-7, 1e21, "6.0", ["6"]]
    path = write_jsonl(*({"prompt": f"{place}=", "answer": answer} for place, answer in enumerate(answers)))
    assert [prompt.record["answer"] for prompt in load(demo_tokenizer, path)] == [
        *("6", "6", "0.5", "0.0000001", "1000000000000000000000", "6.0", "6")
    ]


@pytest.mark.parametrize(
    ("answer", "choices", "read"),
    [
        (1, ["4", "6", "8", "0"], "B"),
        (3, ["4", "6", "8", "0"], "D"),
        ("1", ["4", "6", "8", "0"], "1"),
        (4, ["4", "6", "8", "0"], "4"),
        (1, [4, 6, 8, 0], "1"),
        (1, None, "1"),
        ("C", ["4", "6", "8", "0"], "C"),
    ],
)
def test_an_index_of_choices_is_their_letter(write_jsonl, demo_tokenizer, answer, choices, read):
    """MMLU's answers are indices of `choices`, or letters."""
    path = write_jsonl({"prompt": "1+5=", "choices": choices, "answer": answer})
    (prompt,) = load(demo_tokenizer, path)
    assert prompt.record["answer"] == read
    assert prompt.record["choices"] == choices


def test_null_is_no_answer(write_jsonl, demo_tokenizer):
    path = write_jsonl({"prompt": "1+5=", "answer": None})
    expected = f"{path}:1: answer is null, expected a string or a number; write it as a string"
    assert problems(demo_tokenizer, path)[0] == expected
    assert problems(demo_tokenizer, path, "exact")[0] == expected


def test_keys_reach_into_objects(write_jsonl, demo_tokenizer):
    record = {"task": {"text": "1+1=", "truth": {"value": "2"}}, "answer": "about two", "question": "How much?"}
    (prompt,) = load(demo_tokenizer, write_jsonl(record), prompt_key="task.text", answer_key="task.truth.value")
    assert prompt.text == "1+1="
    assert prompt.record == {**record, "answer": "2"}, "the answer is the one that the key names, a question stays"
    (prompt,) = load(demo_tokenizer, write_jsonl({"a.b": "1=", "a": {"b": "2="}, "answer": "1"}), prompt_key="a.b")
    assert prompt.text == "1="


def test_hub_rows(tmp_path, demo_tokenizer, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"problem": problem, "reward_model": {"ground_truth": "2"}, "more": None} for problem in ("1+1=", "2+0=")]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    path = str(tmp_path / "rows.parquet")
    keys = {"prompt_key": "problem", "answer_key": "reward_model.ground_truth"}
    prompts = load(demo_tokenizer, path, **keys)
    assert [prompt.sample_id for prompt in prompts] == [f"{path}[train]:0", f"{path}[train]:1"]
    assert prompts[0].record == {**rows[0], "question": "1+1=", "answer": "2"}
    assert problems(demo_tokenizer, path, **{**keys, "prompt_key": "problems"}) == [
        f"{path}: has no column 'problems' (data.prompt_key=problems); its columns: problem, reward_model, more; "
        "did you mean problem?"
    ]
    assert problems(demo_tokenizer, path, prompt_key="problem")[0].startswith(f"{path}: has no column 'answer' (data.")


@pytest.mark.parametrize(
    ("record", "env", "reason"),
    [
        ([1], "math", "the line is a list, expected an object with prompt"),
        (
            {"promt": "1"},
            "math",
            "the line has no prompt (data.prompt_key=prompt); its keys: promt; did you mean promt?",
        ),
        ({"prompt": 1, "answer": "1"}, "math", "prompt is a number, expected a string or a list of messages"),
        ({"prompt": "", "answer": "1"}, "math", "prompt is empty"),
        ({"prompt": "1="}, "math", "the line has no answer (data.answer_key=answer); its keys: prompt"),
        ({"prompt": "1=", "answer": True}, "math", "answer is a boolean, expected a string or a number"),
        ({"prompt": "1=", "answer": " "}, "math", "answer is empty: there is nothing to compare a response with"),
        ({"prompt": "1=", "answer": "1"}, "reasoning_gym", "the line has no metadata, which the reasoning_gym"),
        ({"prompt": "1=", "answer": "1", "metadata": 3}, "reasoning_gym", "metadata is a number, expected an object"),
        ({"prompt": "\u00e9", "answer": "1"}, "math", "the tokenizer cannot encode the text"),
        (
            {"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}], "answer": "1"},
            "math",
            "prompt ends in a turn of role 'assistant', expected user or tool: a model answers it",
        ),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "math", "prompt[0] has no content"),
    ],
)
def test_bad_lines(write_jsonl, demo_tokenizer, record, env, reason):
    good, other = ({"prompt": prompt, "answer": "2", "metadata": {}} for prompt in ("1+1=", "2+0="))
    path = write_jsonl(good, record, other, b"{")
    found = problems(demo_tokenizer, path, env)
    assert len(found) == 3
    assert found[0].startswith(f"{path}:2: {reason}")
    assert found[1].startswith(f"{path}:4: not valid JSON")
    assert found[2] == f"{path}: data.on_bad_line=skip skips such lines and counts them"
    report = load(demo_tokenizer, path, env, on_bad_line="skip").report
    assert (report.num_kept, report.num_bad_lines) == (2, 2)
    assert report.summary() == f"{path}: 2 prompts, 8 tokens, 2 bad lines left out, the first: {report.bad_lines[0]}"


def test_a_function_of_the_user_s_own_may_do_without_an_answer(write_jsonl, demo_tokenizer):
    path = write_jsonl({"prompt": "1="}, {"prompt": "1=", "answer": ["1", "one"]})
    assert [prompt.record["answer"] for prompt in load(demo_tokenizer, path, "callable")] == [None, ["1", "one"]]


def test_long_prompts_are_left_out_and_counted(write_jsonl, demo_tokenizer):
    path = write_jsonl(*({"prompt": "1" * length, "answer": "1"} for length in (3, 4, 5, 6)))
    prompts = load(demo_tokenizer, path, longest=4)
    assert [len(prompt.token_ids) for prompt in prompts] == [3, 4]
    assert prompts.report.summary() == (
        f"{path}: 2 prompts, 7 tokens, 2 left out: longer than a prompt may be (the first: {path}:3)"
    )
    assert problems(demo_tokenizer, path, longest=2) == [
        f"{path}: no prompt is left to use",
        f"{path}: 4 prompts longer than 2 tokens, which is policy.max_total_sequence_length less "
        "policy.generation.max_new_tokens",
    ]
    empty = write_jsonl(name="empty.jsonl")
    assert problems(demo_tokenizer, empty) == [f"{empty}: no prompt is left to use", f"{empty}: it has no lines"]


@pytest.mark.parametrize("kind", ["demo", "template", "plain", "plain with begin token"])
def test_a_model_is_asked_with_the_tokens_that_it_was_taught(write_jsonl, demo_tokenizer, byte_tokenizer, kind):
    from tokenizers.processors import TemplateProcessing

    tokenizer = demo_tokenizer if kind == "demo" else byte_tokenizer(CHATML if kind == "template" else None)
    if kind == "plain with begin token":
        tokenizer = byte_tokenizer(bos_token="<s>")
        begin = ("<s>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[begin])
    (taught,) = load_sft_dataset(write_jsonl({"prompt": "12+3=", "completion": "15"}), "train", tokenizer, 99)
    (asked,) = load(tokenizer, write_jsonl({"prompt": "12+3=", "answer": "15"}))
    first = int(taught.token_mask.argmax())
    assert asked.token_ids == tuple(taught.input_ids[:first])
    assert asked.text == "12+3="
    expected = {"template": "<|start|>user\n12+3=<|end|>\n<|start|>assistant\n", "plain with begin token": "<s>12+3="}
    assert tokenizer.decode(asked.token_ids) == expected.get(kind, "12+3=")


def test_messages(write_jsonl, byte_tokenizer):
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    path = write_jsonl({"prompt": messages, "answer": "2"})
    tokenizer = byte_tokenizer(CHATML)
    (prompt,) = load(tokenizer, path, longest=200)
    assert tokenizer.decode(prompt.token_ids) == (
        "<|start|>system\nAdd.<|end|>\n<|start|>user\n1+1=<|end|>\n<|start|>assistant\n"
    )
    assert prompt.text == prompt.record["question"] == "Add.\n\n1+1="
    assert problems(byte_tokenizer(), path)[0] == (
        f"{path}:1: the prompt is a list of messages, but the tokenizer has no chat template; "
        "set policy.tokenizer.chat_template, or give the prompt as a string"
    )


def test_sampled_prompts(byte_tokenizer):
    prompts = load(byte_tokenizer(), None, "reasoning_gym", num_items=60, seed=3)
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 60
    assert prompts[0].sample_id == "basic_arithmetic[seed 3]:0"
    for prompt in prompts:
        assert set(prompt.record) == {"question", "answer", "metadata"}
        assert prompt.record["question"] == prompt.text
        left, right = prompt.record["metadata"]["expression"].split("+")
        assert prompt.record["answer"] == str(int(left) + int(right))
    report = prompts.report
    assert report.num_repeated > 0
    assert report.summary() == (
        f"basic_arithmetic[seed 3]: 60 prompts, {report.num_tokens} tokens, "
        f"{report.num_repeated} repeated prompts left out"
    )
    again = load(byte_tokenizer(), None, "reasoning_gym", num_items=60, seed=3)
    assert list(again) == list(prompts)


def test_nothing_to_draw_from(byte_tokenizer):
    with pytest.raises(ConfigurationError, match="has no such parameter"):
        load(byte_tokenizer(), None, "reasoning_gym", num_items=3, parameters={"digits": 3})
    with pytest.raises(ConfigurationError, match="reasoning_gym and num_items"):
        load(byte_tokenizer(), None, "reasoning_gym")


def some(count: int) -> list[Prompt]:
    return [Prompt(str(index), str(index), (index,), {}) for index in range(count)]


def order(loader: PromptLoader, epoch: int) -> list[int]:
    return [int(prompt.sample_id) for step in loader.epoch(epoch) for prompt in step]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 3))
def test_no_prompt_twice_in_an_epoch_and_only_the_incomplete_step_left_out(size, step, seed, epoch):
    if step > size:
        with pytest.raises(DataError):
            PromptLoader(some(size), step, seed, shuffle=True)
        return
    loader = PromptLoader(some(size), step, seed, shuffle=True)
    steps = list(loader.epoch(epoch))
    assert len(steps) == len(loader) == size // step
    assert all(len(prompts) == step for prompts in steps)
    assert len(set(order(loader, epoch))) == size // step * step


def test_order_depends_on_seed_and_epoch_alone():
    first, again = (PromptLoader(some(50), 10, 7, shuffle=True) for _ in range(2))
    assert order(first, 3) == order(again, 3) != order(first, 0)
    assert order(first, 0) != order(PromptLoader(some(50), 10, 8, shuffle=True), 0)
    assert order(PromptLoader(some(7), 3, 7, shuffle=False), 5) == [0, 1, 2, 3, 4, 5]


def test_too_few_prompts():
    assert refused(PromptLoader, some(3), 4, 0, shuffle=True) == [
        "grpo.num_prompts_per_step: got 4, but the training data has only 3 prompts that can be used"
    ]


def test_template_goes_around_the_last_turn(demo_tokenizer: Any, write_jsonl: Any) -> None:
    path = write_jsonl({"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"})
    first, second = load(demo_tokenizer, path, prompt_template="3+{prompt}")
    assert (first.text, second.text) == ("3+1+1=", "3+2+2=")
    # The environment sees the question as the data have it.
    assert first.record["question"] == "1+1="


def test_template_goes_around_sampled_prompts_too(byte_tokenizer: Any) -> None:
    plain, around = (
        load(byte_tokenizer(), None, "reasoning_gym", num_items=5, prompt_template=template)
        for template in (None, "Think. {prompt} Well?")
    )
    assert [prompt.text for prompt in around] == [f"Think. {prompt.text} Well?" for prompt in plain]
    assert byte_tokenizer().decode(around[0].token_ids) == around[0].text
    # The verifier sees the task's own item.
    assert [prompt.record for prompt in around] == [prompt.record for prompt in plain]


def test_repeated_prompts_are_taken_once(demo_tokenizer: Any, write_jsonl: Any) -> None:
    first, second = {"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}
    path = write_jsonl({**first, "row": 1}, {**first, "row": 2}, second, {**first, "answer": 2}, {**first, "answer": 3})
    prompts = load(demo_tokenizer, path)
    # The first of each stays; another answer makes another prompt.
    assert [(prompt.sample_id, prompt.record["answer"]) for prompt in prompts] == [
        (f"{path}:1", "2"),
        (f"{path}:3", "4"),
        (f"{path}:5", "3"),
    ]
    assert prompts.report.summary() == (
        f"{path}: 3 prompts, 12 tokens, 2 repeated prompts left out (the first: {path}:2, as {path}:1)"
    )
    # Repeats do not count among those that are asked for, and what is not read is no repeat.
    limited = load(demo_tokenizer, path, num_items=2)
    assert [prompt.text for prompt in limited] == ["1+1=", "2+2="]
    assert limited.report.num_repeated == 1


def test_a_text_is_not_the_message_that_says_the_same(byte_tokenizer: Any, write_jsonl: Any) -> None:
    system, user = {"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}
    path = write_jsonl(
        *({"prompt": prompt, "answer": "2"} for prompt in ("1+1=", [user], [system, user], [system, user]))
    )
    report = load(byte_tokenizer(CHATML), path, longest=200).report
    assert (report.num_kept, report.num_repeated) == (3, 1)


@pytest.mark.parametrize(("env", "kept"), [("math", 1), ("reasoning_gym", 2)])
def test_what_the_verifier_reads_distinguishes_prompts(
    demo_tokenizer: Any, write_jsonl: Any, env: str, kept: int
) -> None:
    path = write_jsonl(
        *({"prompt": "1=", "answer": "1", "metadata": {"level": level}, "row": level} for level in (1, 2))
    )
    assert len(load(demo_tokenizer, path, env)) == kept


def test_a_function_may_read_all_of_a_record(demo_tokenizer: Any, write_jsonl: Any) -> None:
    path = write_jsonl(*({"prompt": "1=", "tests": tests} for tests in ("a", "b", "a")))
    assert [prompt.record["tests"] for prompt in load(demo_tokenizer, path, "callable")] == ["a", "b"]


WHOLE_RECORDS = [
    {"env": None, "driver": {"kind": "openenv", "server": "a:app", "action_key": "a", "observation_key": "o"}},
    {"driver": {"kind": "agent", "program": "agents:answer"}},
    {"driver": {"kind": "agent", "program": ["agent"]}},
    {"driver": {"kind": "function", "function": "rollouts:Twice"}},
    {"env": "callable"},
    {"env": "custom"},
]


@pytest.mark.parametrize("driver", WHOLE_RECORDS, ids=str)
def test_records_differ_by_all_that_code_and_libraries_read(
    demo_tokenizer: Any, write_jsonl: Any, driver: dict[str, Any]
) -> None:
    """The first record comes again with its keys in another order."""
    same = {"prompt": "403+275=", "answer": "678"}
    levels = [{**same, "reset": {"level": level, "seed": 1}} for level in (0, 1, 2, 3)]
    again = {"reset": {"seed": 1, "level": 0}, **same}
    choices = {"env": "exact"} | driver
    training = load(demo_tokenizer, write_jsonl(*levels[:3], again), **choices)
    assert [prompt.record["reset"]["level"] for prompt in training] == [0, 1, 2]
    assert training.report.num_repeated == 1
    held_out = load(demo_tokenizer, write_jsonl(*levels[2:], name="held_out.jsonl"), **choices)
    left = without_training_prompts(held_out, training)
    assert [prompt.record["reset"]["level"] for prompt in left] == [3]
    assert left.report.num_training_prompts == 1


def test_a_number_that_the_task_gives_its_items_makes_no_other_record(byte_tokenizer: Any) -> None:
    choices = {"env": "reasoning_gym", "driver": {"kind": "function", "function": "rollouts:Twice"}, "num_items": 60}
    training, held_out = (load(byte_tokenizer(), None, seed=seed, **choices) for seed in (0, 1))
    assert all("source_index" in prompt.record["metadata"] for prompt in training)
    asked = {prompt.text for prompt in training}
    left = [prompt.text for prompt in without_training_prompts(held_out, training)]
    assert left == [prompt.text for prompt in held_out if prompt.text not in asked]
    assert 0 < len(left) < 60


def test_given_responses_distinguish_prompts(demo_tokenizer: Any, write_jsonl: Any) -> None:
    path = write_jsonl(*({"prompt": "1+1=", "answer": "2", "solution": text} for text in ("2", "=2", "2")))
    assert len(load(demo_tokenizer, path)) == 1
    given = load(demo_tokenizer, path, response_key="solution")
    assert [prompt.record["solution"] for prompt in given] == ["2", "=2"]


def test_an_answer_that_is_no_text_is_a_bad_line_with_the_cure(demo_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "days.parquet"
    Dataset.from_dict({"prompt": ["1+1="], "answer": [datetime(2024, 1, 5)]}).to_parquet(path)
    assert problems(demo_tokenizer, str(path), "exact")[0] == (
        f"{path}[train]:0: answer is a datetime, expected a string or a number; write it as a string"
    )


def test_training_prompts_are_left_out_of_validation(demo_tokenizer: Any, write_jsonl: Any) -> None:
    training = load(demo_tokenizer, write_jsonl({"prompt": "1+1=", "answer": "2"}, {"prompt": "9=", "answer": "9"}))
    path = write_jsonl(*({"prompt": f"{n}+1=", "answer": "5"} for n in (1, 20, 3)), name="held_out.jsonl")
    held_out = load(demo_tokenizer, path)
    left = without_training_prompts(held_out, training)
    assert [prompt.text for prompt in left] == ["20+1=", "3+1="]
    assert left.report.summary() == (
        f"{path}: 2 prompts, 9 tokens, 1 left out: they are training prompts "
        f"(the first: {path}:1, as {training[0].sample_id})"
    )
    assert without_training_prompts(left, training) is left
    assert refused(without_training_prompts, held_out, held_out) == [
        f"data.validation: each of the 3 prompts of {path} is a training prompt too; set data.validation to held-out"
        " data or to null"
    ]


class OnlySo(list[int]):
    """Lengths of texts that were tokenized."""

    def watch(self, tokenizer: Any) -> Any:
        def tokenized(texts: Sequence[str], *args: Any, **options: Any) -> Any:
            self.extend(map(len, texts))
            return tokenizer(texts, *args, **options)

        class Watched:
            def __getattr__(self, name: str) -> Any:
                return getattr(tokenizer, name)

            def __call__(self, texts: Sequence[str], *args: Any, **options: Any) -> Any:
                return tokenized([texts] if isinstance(texts, str) else texts, *args, **options)

        return Watched()


def test_a_text_that_is_far_too_long_is_not_tokenized_to_its_end(demo_tokenizer: Any, write_jsonl: Any) -> None:
    """With a limit of 10 tokens, 704 characters: the tokens of all of a text take 200 bytes a character."""
    long = "1" * 100_000
    seen = OnlySo()
    path = write_jsonl({"prompt": long, "answer": "1"}, {"prompt": "1=", "answer": "1"})
    prompts = load(seen.watch(demo_tokenizer), path, longest=10)
    assert [prompt.text for prompt in prompts] == ["1="]
    assert prompts.report.num_dropped == 1
    path = write_jsonl({"prompt": "1=", "completion": long}, {"prompt": "1=", "completion": "1"})
    whole, short = load_sft_dataset(path, "train", seen.watch(demo_tokenizer), 10)
    assert (len(whole), whole.truncated, whole.token_mask.tolist()) == (10, True, [False] * 2 + [True] * 8)
    assert (len(short), short.truncated) == (4, False)
    assert max(seen) == 704
