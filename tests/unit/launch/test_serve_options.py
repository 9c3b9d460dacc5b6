# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Options of `serve` that are wrong, and lengths that follow from others."""

import argparse
import socket
from pathlib import Path

import pytest

from nemo_rl_moe import cli
from nemo_rl_moe.launch import serve_command

MODEL = "examples/assets/tiny_qwen3_moe"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "./nowhere"], "error: --model: nowhere not found in the working folder"),
        (["--adapter", "nowhere"], "error: --adapter: nowhere holds no adapter: there is no adapter_config.json"),
        (["--backend", "megatron"], "error: --backend: got megatron, expected megatron_separate or vllm"),
        (["--backend", "vlm"], "error: --backend: got 'vlm'"),
        (["--max-model-len", "100", "--max-new-tokens", "200"], "error: --max-new-tokens: got 200"),
        (["--max-model-len", "many"], "error: --max-model-len: got 'many'"),
        (["policy.generation.temperature=0.5"], "error: policy.generation.temperature: got 0.5, expected 1"),
        (["policy.generation.stop_strings=null"], "error: policy.generation.stop_strings: got null, expected a list"),
    ],
)
def test_wrong_options_are_reported_before_anything_starts(
    repository_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", "--model", str(repository_root / MODEL), *words]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_reported_before_a_worker_starts(
    repository_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--model", str(repository_root / MODEL), "--port", str(port)]) == 2
    expected = f"error: --port: got {port}, on which the server cannot listen: Address already in use\n"
    assert capsys.readouterr().err == expected
    with pytest.raises(SystemExit):
        cli.main(["serve", "--model", str(repository_root / MODEL), "--port", "99999"])
    assert "argument --port: got '99999', expected a number from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "length", "response"), [(None, 4096, 512), ("200", 200, 100), ("3000", 3000, 512)])
def test_a_response_is_at_most_half_of_a_short_sequence(
    repository_root: Path, given: str | None, length: int, response: int
) -> None:
    options = argparse.Namespace(
        model=str(repository_root / MODEL), adapter=None, backend=None, max_model_len=given, max_new_tokens=None
    )
    policy = serve_command.load(options, []).policy
    assert (policy.max_total_sequence_length, policy.generation.max_new_tokens) == (length, response)
