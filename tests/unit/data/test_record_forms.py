# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Records in the forms of published sets and of other frameworks, and the settings for the others."""

from typing import Any

import datasets
import pytest

from nemo_rl_moe.data.preferences import load_preferences, parse_preference
from nemo_rl_moe.data.record_values import RecordError
from nemo_rl_moe.data.records import parse_record
from nemo_rl_moe.data.sft import load_sft_dataset
from nemo_rl_moe.errors import DataError

ASKED, RIGHT, WRONG = "2+2=", "4", "5"
SYSTEM = {"role": "system", "content": "Add."}
USER = {"role": "user", "content": ASKED}
GOOD, BAD = {"role": "assistant", "content": RIGHT}, {"role": "assistant", "content": WRONG}
HUMAN, GPT = {"from": "human", "value": ASKED}, {"from": "gpt", "value": RIGHT}

SAMPLES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Alpaca": ({"instruction": ASKED, "input": "", "output": RIGHT, "text": "..."}, {}),
    "prompt and response": ({"prompt": ASKED, "response": RIGHT}, {}),
    "question and answer": ({"question": ASKED, "answer": RIGHT}, {}),
    "query and response": ({"query": ASKED, "response": RIGHT, "history": []}, {}),
    "input and output": ({"input": ASKED, "output": RIGHT}, {}),
    "our own keys first": ({"prompt": ASKED, "completion": RIGHT, "question": "?", "answer": "x"}, {}),
    "nulls of a table": ({"instruction": ASKED, "output": RIGHT, "messages": None, "question": None}, {}),
    "hh-rlhf before a response": ({"prompt": "\n\nHuman: 2+2=\n\nAssistant:", "response": " 4"}, {}),
    "an answer of a list": ({"q": ASKED, "a": {"text": [RIGHT, "four"]}}, {"prompt": "q", "completion": "a.text.0"}),
    "named": ({"q": ASKED, "a": RIGHT, "answer": "x"}, {"prompt": "q", "completion": "a"}),
    "named in an object": ({"row": {"q": ASKED}, "output": RIGHT}, {"prompt": "row.q"}),
    "one of two named": ({"question": ASKED, "answer": "x", "response": RIGHT}, {"completion": "response"}),
    "named beside messages": (
        {"messages": [USER, BAD], "question": ASKED, "answer": RIGHT},
        {"prompt": "question", "completion": "answer"},
    ),
}


@pytest.mark.parametrize(("record", "keys"), SAMPLES.values(), ids=SAMPLES.keys())
def test_samples(record: dict[str, Any], keys: dict[str, str]) -> None:
    example = parse_record(record, "f:1", keys=keys)
    assert example.messages == (USER, GOOD)
    assert example.plain is not None
    assert [text.removeprefix("\n\nHuman: ").removesuffix("\n\nAssistant:").strip() for text in example.plain] == [
        ASKED,
        RIGHT,
    ]
    assert example.trained_messages == {1}


@pytest.mark.parametrize(
    ("record", "keys", "messages"),
    [
        ({"instruction": "Add.", "input": "2+2", "output": "4"}, {}, [("user", "Add.\n2+2"), ("assistant", "4")]),
        (
            {"system": "Add.", "query": ASKED, "response": RIGHT},
            {},
            [("system", "Add."), ("user", ASKED), ("assistant", RIGHT)],
        ),
        ({"chat": [USER, GOOD]}, {"messages": "chat"}, [("user", ASKED), ("assistant", RIGHT)]),
        (
            {"turns": [HUMAN, GPT], "messages": [USER, BAD]},
            {"messages": "turns"},
            [("user", ASKED), ("assistant", RIGHT)],
        ),
        (
            {"chosen": "\n\nHuman: 2+2=\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2=\n\nAssistant: 5"},
            {"messages": "chosen"},
            [("user", ASKED), ("assistant", RIGHT)],
        ),
        ({"conversations": [USER, GOOD]}, {}, [("user", ASKED), ("assistant", RIGHT)]),
        (
            {"instruction": "Add.", "context": "2+2", "response": "4", "category": "closed_qa"},
            {},
            [("user", "Add.\n2+2"), ("assistant", "4")],
        ),
        ({"instruction": "Add.", "context": "", "response": "4"}, {}, [("user", "Add."), ("assistant", "4")]),
        (
            {"context": "x is 2.", "question": "x+2=", "answer": "4"},
            {},
            [("user", "x is 2.\n\nx+2="), ("assistant", "4")],
        ),
        (
            {"context": "x is 2.", "question": "x+2=", "answers": {"text": ["4"]}},
            {"prompt": "question", "completion": "answers.text.0", "system": "context"},
            [("system", "x is 2."), ("user", "x+2="), ("assistant", "4")],
        ),
        *(
            (
                {**asked, "response": RIGHT, "history": [["1+1=", "2"]], "system": "Add."},
                {},
                [("system", "Add."), ("user", "1+1="), ("assistant", "2"), ("user", ASKED), ("assistant", RIGHT)],
            )
            for asked in ({"query": ASKED}, {"instruction": ASKED}, {"prompt": ASKED}, {"prompt": [USER]})
        ),
        (
            {"prompt": [SYSTEM, USER], "response": RIGHT, "history": [["1+1=", "2"]]},
            {},
            [("system", "Add."), ("user", "1+1="), ("assistant", "2"), ("user", ASKED), ("assistant", RIGHT)],
        ),
        # A system turn beside whatever else there is; one of the messages' own stays.
        *(
            (record, keys, [("system", "Add."), ("user", ASKED), ("assistant", RIGHT)])
            for record, keys in (
                ({"system_prompt": "Add.", "question": ASKED, "response": RIGHT}, {}),
                ({"system": "Add.", "prompt": ASKED, "completion": RIGHT}, {}),
                ({"system": "Add.", "prompt": [USER], "response": RIGHT}, {}),
                ({"system": "Add.", "messages": [USER, GOOD]}, {}),
                ({"system": "Other.", "messages": [SYSTEM, USER, GOOD]}, {}),
                ({"system": "Add.", "chat": [HUMAN, GPT]}, {"messages": "chat"}),
                ({"system": "Add.", "prompt": ASKED, "a": RIGHT}, {"completion": "a"}),
                ({"s": "Add.", "system": "Other.", "messages": [USER, GOOD]}, {"system": "s"}),
                ({"system": "Add.", "system_prompt": "Add.", "messages": [USER, GOOD]}, {}),
            )
        ),
        (
            {"prompt": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 2+2=\n\nAssistant:", "completion": RIGHT},
            {},
            [("user", "hi"), ("assistant", "hello"), ("user", ASKED), ("assistant", RIGHT)],
        ),
        ({"messages": [HUMAN, GPT], "instruction": "?", "output": "?"}, {}, [("user", ASKED), ("assistant", RIGHT)]),
    ],
)
def test_conversations(record: dict[str, Any], keys: dict[str, str], messages: list[tuple[str, str]]) -> None:
    found = parse_record(record, "f:1", keys=keys).messages
    assert [(message["role"], message["content"]) for message in found] == messages


@pytest.mark.parametrize(
    ("record", "keys", "reason"),
    [
        (
            {"question": "q", "answer": "a", "response": "b"},
            {},
            "the line has response and answer, each of which may be the completion: set data.completion_key to one of"
            " them",
        ),
        (
            {"question": "q", "query": "p", "answer": "a"},
            {},
            "the line has question and query, each of which may be the prompt: set data.prompt_key to one of them",
        ),
        (
            {"question": "q", "text": "a"},
            {},
            "the line has question but no completion; its keys: question, text; to use another key, set"
            " data.completion_key",
        ),
        (
            {"user": "q", "bot": "a"},
            {"prompt": "usr", "completion": "bot"},
            "the line has no usr (data.prompt_key=usr); its keys: user, bot; did you mean user?",
        ),
        ({"question": 1, "answer": "a"}, {}, "question is a number, expected a string or a list of messages"),
        (
            {"instruction": "i", "input": {"a": 1}, "output": "o"},
            {},
            "instruction is a string and input an object, expected two strings",
        ),
        (
            {"instruction": "i", "output": "o", "history": "a"},
            {},
            "history is a string, expected a list of pairs of question and answer; write the turns as messages, or set"
            " data.prompt_key=instruction to ignore history",
        ),
        (
            {"messages": [USER, GOOD], "history": [["a", "b"]]},
            {},
            "the line has both history and messages, expected one of the two; write all turns in messages",
        ),
        (
            {"question": "q", "context": {"title": ["t"]}, "answer": "a"},
            {},
            "question is a string and context an object, expected two strings",
        ),
        (
            {"question": "q", "system": "s", "system_prompt": "t", "answer": "a"},
            {},
            "the line has system and system_prompt, each of which may be the system turn: set data.system_key to one of"
            " them",
        ),
        (
            {"question": "q", "system": ["s"], "answer": "a"},
            {},
            "system is a list, expected a string; to use another key, set data.system_key",
        ),
        (
            {"prompt": "\n\nHuman: q\n\nAssistant: Well,", "completion": "a"},
            {},
            "prompt ends in text of the assistant, and a response follows: prompt must end in 'Assistant:'",
        ),
        (
            {"prompt": None, "completion": "a", "messages": [USER, GOOD]},
            {"prompt": "prompt"},
            "prompt is null (data.prompt_key=prompt), expected a value in each line",
        ),
        (
            {"q": "q", "a": {"text": []}},
            {"prompt": "q", "completion": "a.text.0"},
            "a.text has 0 members, and no 0 (data.completion_key=a.text.0)",
        ),
    ],
)
def test_samples_that_cannot_be_read(record: dict[str, Any], keys: dict[str, str], reason: str) -> None:
    with pytest.raises(RecordError) as error:
        parse_record(record, "f:1", keys=keys)
    assert str(error.value) == reason


PAIRS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "hh-rlhf": ({"chosen": "\n\nHuman: 2+2=\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2=\n\nAssistant: 5"}, {}),
    "hh-rlhf before the responses": ({"prompt": "\n\nHuman: 2+2=\n\nAssistant:", "chosen": " 4", "rejected": " 5"}, {}),
    "a prompt with other blanks": ({"prompt": f"{ASKED} \n", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
    "messages that end in the better response": ({"messages": [USER, GOOD], "chosen": RIGHT, "rejected": WRONG}, {}),
    "response_chosen": ({"prompt": ASKED, "response_chosen": RIGHT, "response_rejected": WRONG}, {}),
    "chosen_response": ({"question": ASKED, "chosen_response": RIGHT, "rejected_response": WRONG}, {}),
    "ms-swift": ({"messages": [USER, GOOD], "rejected_response": WRONG}, {}),
    "ms-swift with messages": ({"messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, {}),
    "ms-swift before messages": ({"query": ASKED, "response": RIGHT, "rejected_response": WRONG}, {}),
    "LLaMA-Factory": ({"conversations": [HUMAN], "chosen": GPT, "rejected": {**GPT, "value": WRONG}}, {}),
    "LLaMA-Factory's Alpaca": ({"instruction": ASKED, "input": "", "chosen": RIGHT, "rejected": WRONG}, {}),
    "UltraFeedback": (
        {"prompt": ASKED, "chosen": [USER, GOOD], "rejected": [USER, BAD], "messages": [USER, GOOD], "score": 8.0},
        {},
    ),
    "UltraFeedback with another question": (
        {"question": "another", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {},
    ),
    "HelpSteer3": ({"context": [USER], "response1": WRONG, "response2": RIGHT, "overall_preference": 2}, {}),
    "HelpSteer2": ({"prompt": ASKED, "response_1": RIGHT, "response_2": WRONG, "preference_strength": -1}, {}),
    "named": ({"q": ASKED, "win": RIGHT, "lose": WRONG}, {"prompt": "q", "chosen": "win", "rejected": "lose"}),
    "named against the usual": (
        {"prompt": ASKED, "chosen": WRONG, "rejected": RIGHT},
        {"chosen": "rejected", "rejected": "chosen"},
    ),
}


@pytest.mark.parametrize(("record", "keys"), PAIRS.values(), ids=PAIRS.keys())
def test_pairs(record: dict[str, Any], keys: dict[str, str]) -> None:
    pair = parse_preference(record, "f:1", keys=keys)
    assert pair.chosen.messages == (USER, GOOD)
    assert pair.rejected.messages == (USER, BAD)
    assert pair.chosen.trained_messages == pair.rejected.trained_messages == {1}


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [HUMAN], "chosen": GPT, "rejected": {**GPT, "value": WRONG}},
        {"messages": [USER], "chosen": RIGHT, "rejected": WRONG},
        {"prompt": ASKED, "chosen": RIGHT, "rejected": WRONG},
        {"prompt": ASKED, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": "\n\nHuman: 2+2=\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2=\n\nAssistant: 5"},
        {"messages": [USER, GOOD], "rejected_response": WRONG},
        {"question": ASKED, "response_chosen": RIGHT, "response_rejected": WRONG},
    ],
)
@pytest.mark.parametrize("key", ["system", "system_prompt", "s"])
def test_the_system_turn_of_a_pair(record: dict[str, Any], key: str) -> None:
    pair = parse_preference({**record, key: "Add."}, "f:1", keys={"system": "s"} if key == "s" else {})
    assert pair.chosen.messages == (SYSTEM, USER, GOOD)
    assert pair.rejected.messages == (SYSTEM, USER, BAD)
    assert pair.chosen.trained_messages == {2}
    assert pair.chosen.plain is None


def test_earlier_turns_of_a_pair() -> None:
    record = {"query": ASKED, "response": RIGHT, "rejected_response": WRONG, "history": [["1+1=", "2"]]}
    turns = [message["content"] for message in parse_preference(record, "f:1").rejected.messages]
    assert turns == ["1+1=", "2", ASKED, WRONG]


FIRST = {"prompt": "1+1=", "completion": "2"}


@pytest.mark.parametrize(
    ("first", "second", "key", "expected"),
    [
        (FIRST | {"answer": "two"}, {"prompt": "2+2=", "answer": "4"}, "answer", "completion"),
        (FIRST, {"prompt": "2+2=", "completion": None, "answer": "4"}, "answer", "completion"),
        (FIRST, {"question": "2+2=", "completion": "4"}, "question", "prompt"),
    ],
)
def test_lines_of_two_forms(
    write_jsonl: Any, demo_tokenizer: Any, first: dict[str, Any], second: dict[str, Any], key: str, expected: str
) -> None:
    path = write_jsonl(first, second)
    reason = f"{path}:2: the line has {key} where {path}:1 has {expected}: expected the same keys in all lines; or set"
    with pytest.raises(DataError) as error:
        load_sft_dataset(path, "train", demo_tokenizer, 64)
    assert f"{reason} data.{expected}_key" in str(error.value)


def test_pairs_of_two_forms(write_jsonl: Any, demo_tokenizer: Any) -> None:
    compared = {"prompt": ASKED, "response1": RIGHT, "response2": WRONG}
    first, second = ({**compared, "overall_preference": number} for number in (-1, 1))
    assert len(load_preferences(write_jsonl(first, second), "train", demo_tokenizer, 64)) == 2
    path = write_jsonl(first, {"prompt": ASKED, "chosen": RIGHT, "rejected": WRONG})
    with pytest.raises(DataError, match=r"the line has chosen and rejected where .*:1 has response1 and response2: .*"):
        load_preferences(path, "train", demo_tokenizer, 64)


def test_whole_conversations_with_a_system_turn_have_their_prompt_once() -> None:
    record = {"prompt": ASKED, "chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}
    pair = parse_preference(record, "f:1")
    assert pair.chosen.messages == (SYSTEM, USER, GOOD)
    assert pair.rejected.trained_messages == {2}


def test_several_turns_of_hh_rlhf() -> None:
    begin = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: Human: and 2+2=?\n\nAssistant: "
    pair = parse_preference({"chosen": f"{begin}4", "rejected": f"{begin}5\n"}, "f:1")
    assert [message["role"] for message in pair.chosen.messages] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in pair.rejected.messages] == ["hi", "hello", "Human: and 2+2=?", "5"]
    assert pair.chosen.trained_messages == {3}


@pytest.mark.parametrize(
    ("record", "keys", "reason"),
    [
        (
            {"prompt": "q", "response1": "a", "response2": "b", "overall_preference": 0},
            {},
            "overall_preference is 0: neither response is better",
        ),
        (
            {"prompt": "q", "response_1": "a", "response_2": "b"},
            {},
            "the line has response_1 and response_2, expected one of overall_preference, preference_strength to"
            " compare the responses; or set data.chosen_key and data.rejected_key",
        ),
        (
            {"prompt": "q", "response_1": "a", "response_2": "b", "preference_strength": "A"},
            {},
            "preference_strength is a string, expected a number: below 0 if response_1 is better",
        ),
        (
            {"prompt": "q", "response": "c", "chosen_response": "a", "rejected_response": "b"},
            {},
            "the line has chosen_response, rejected_response and response, rejected_response: set data.chosen_key and"
            " data.rejected_key to one pair of them",
        ),
        (
            {"messages": [USER, BAD], "chosen": RIGHT, "rejected": "6"},
            {},
            "messages ends in a turn of role assistant, and chosen begins with one of role assistant: the prompt"
            " must contain all messages before the responses, and the responses must not repeat them",
        ),
        (
            {"prompt": "another", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            {},
            "prompt ends in a turn of role user, and chosen begins with one of role user: the prompt must contain all"
            " messages before the responses, and the responses must not repeat them",
        ),
        (
            {"q": None, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            {"prompt": "q"},
            "q is null (data.prompt_key=q), expected a value in each line",
        ),
        (
            {"text": "q", "chosen": "a", "rejected": "b"},
            {},
            "the line has no prompt, and chosen and rejected do not begin with the same messages; to use another key as"
            " prompt, set data.prompt_key",
        ),
        (
            {"prompt": "q", "better": "a", "rejected": "b"},
            {"chosen": "beter"},
            "the line has no beter (data.chosen_key=beter); its keys: prompt, better, rejected; did you mean better?",
        ),
    ],
)
def test_pairs_that_cannot_be_read(record: dict[str, Any], keys: dict[str, str], reason: str) -> None:
    with pytest.raises(RecordError) as error:
        parse_preference(record, "f:1", keys=keys)
    assert str(error.value) == reason


def test_tables(tmp_path: Any, demo_tokenizer: Any) -> None:
    file = str(tmp_path / "data.parquet")
    datasets.Dataset.from_list([{"id": 1, "question": ASKED, "answer": RIGHT}]).to_parquet(file)
    (example,) = load_sft_dataset(file, "train", demo_tokenizer, 64)
    assert demo_tokenizer.decode(example.input_ids) == "2+2=4<eos>"
    datasets.Dataset.from_list([{"id": 1, "row": {"q": ASKED}, "win": RIGHT, "lose": WRONG}]).to_parquet(file)
    keys = {"prompt": "row.q", "chosen": "win", "rejected": "lose"}
    (pair,) = load_preferences(file, "train", demo_tokenizer, 64, keys=keys)
    assert demo_tokenizer.decode(pair.rejected.input_ids) == "2+2=5<eos>"
    with pytest.raises(DataError, match=r"has no column 'won' \(data.chosen_key=won\); its columns: .*mean win"):
        load_preferences(file, "train", demo_tokenizer, 64, keys={**keys, "chosen": "won"})
