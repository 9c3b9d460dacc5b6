# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Which keys name a secret, and what is left of a value, a text and an override that hold one."""

from typing import Any

import pytest

from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.nemo_rl_keys import ROWS
from nemo_rl_moe.config.validation import known_keys
from nemo_rl_moe.errors import printable
from nemo_rl_moe.masking import MASK, is_secret, masked, masked_assignment, masked_text, masks_in
from tests.support.quick_list import some_of

# fmt: off
SECRET_NAMES = [
    "HF_TOKEN", "GITHUB_TOKEN_2", "token", "auth_token", "accessToken", "access_tokens", "WANDB_API_KEY",
    "OPENAI_KEY", "api_keys", "apiKey", "APIKEY", "AWS_SECRET_ACCESS_KEY", "client_secret", "secrets", "password",
    "DB_PASSWORD", "MY_PASS", "db_pwd", "PASSPHRASE", "credentials", "HTTP_AUTH", "Authorization",
    "AZURE_STORAGE_CONNECTION_STRING", "private_key", "cookie",
]
# fmt: on
# fmt: off
OTHER_NAMES = [
    "num_tokens", "max_new_tokens", "tokenizer", "TOKENIZERS_PARALLELISM", "eos_token", "pad_token", "image_token",
    "stop_token_ids", "token_level_loss", "tokens", "key", "keys", "image_key", "output_key", "prompt_key",
    "num_key_value_heads", "pass", "pass_at_k", "PWD", "HF_TOKEN_PATH", "password_file", "NCCL_DEBUG", "author",
    "monkey", "keyboard", "secretary",
]
# fmt: on


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert is_secret(f"policy.megatron_cfg.env_vars.{name}")
    assert masked({"a": [{name: "s3cret"}]}) == {"a": [{name: MASK}]}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret(name)
    assert masked({name: "open"}) == {name: "open"}


def test_no_key_of_ours_or_of_nemo_rl_is_a_secret() -> None:
    ours = {key for algorithm in ALGORITHMS.values() for key in known_keys(algorithm.config_class)}
    assert [key for key in (*ours, *(row.theirs for row in ROWS)) if is_secret(key)] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:p@h/db", "postgresql://me:***@h/db"),
        ("mysql+pymysql://me:p@ss@h:33/db", "mysql+pymysql://me:***@h:33/db"),
        ("https://me:a/b@h", "https://me:***@h"),
        ("https://t0ken@h/x", "https://***@h/x"),
        ("failed: http://a:b@c, then http://d:e@f.", "failed: http://a:***@c, then http://d:***@f."),
        ("https://h/x?token=abc&x=1", "https://h/x?token=***&x=1"),
        ("http://localhost:5000", "http://localhost:5000"),
        ("http://h:80/a@b", "http://h:80/a@b"),
        ("ssh://git@h/x", "ssh://git@h/x"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
    ],
)
def test_passwords_in_addresses(text: str, shown: str) -> None:
    assert masked_text(text) == shown
    assert masked_text(shown) == shown
    assert masked({"tracking_uri": text}) == {"tracking_uri": shown}
    assert printable(text) == shown  # whatever is reported on the console or as an error goes through it


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ({"password": 1234, "secret": True, "api_key": None}, {"password": MASK, "secret": True, "api_key": None}),
        ({"credentials": {"user": "me", "keys": ["a", "b"]}}, {"credentials": {"user": MASK, "keys": [MASK, MASK]}}),
        ({"think_token": "<think>", "token": 151667}, {"think_token": "<think>", "token": 151667}),
        ({"HF_TOKEN": ""}, {"HF_TOKEN": ""}),
    ],
)
def test_trees(value: Any, left: Any) -> None:
    assert masked(value) == left


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a.b.HF_TOKEN=x, y", "a.b.HF_TOKEN=***"),
        ("a.b.HF_TOKEN = x", "a.b.HF_TOKEN =***"),
        ("a.b={HF_TOKEN: abc, X: 1}", "a.b={HF_TOKEN: ***, X: 1}"),
        ("a.b={'HF_TOKEN': 'a,b'", "a.b={'HF_TOKEN': ***"),
        ("+logger.mlflow.tracking_uri=http://me:p@h", "+logger.mlflow.tracking_uri=http://me:***@h"),
        ("data.train.path=key.jsonl", "data.train.path=key.jsonl"),
        ("env.parameters.credentials.user=b", "env.parameters.credentials.user=***"),
        ("env.parameters={api_key: [s1, s2], y: 2}", "env.parameters=***"),
        ("env.parameters={'credentials': {user: a, pass: b}}", "env.parameters=***"),
    ],
)
def test_overrides(text: str, shown: str) -> None:
    assert masked_assignment(text) == shown


@pytest.mark.parametrize("part", some_of(["a://b:", "a://b:c", "a", "a ", "HF_TOKEN=", "https://", "?a=", "AbC"], 3))
def test_long_texts_end(part: str) -> None:
    """Time grows with the length of a text, whatever it is: a square would end in the limit of the test."""
    text = part * (600_000 // len(part))
    assert len(masked_text(text)) > 0
    assert len(masked_assignment(text)) > 0
    assert not is_secret("a" * 600_000)


def test_masks_are_found_again() -> None:
    addresses = {"uri": "http://me:***@h", "query": "https://h/x?a=1&token=***"}
    values = {"a": {"HF_TOKEN": MASK, "name": MASK}, **addresses, "list": [{"password": MASK}]}
    assert list(masks_in(values)) == ["a.HF_TOKEN", "uri", "query", "list.0.password"]
