# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A judge behind a real endpoint: marks, retries, limits, the cache, and a key that goes nowhere else."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_moe.config.environments.rewards import JudgeConfig
from nemo_rl_moe.config.loading import dump_resolved, load_grpo_config
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.rewards.interface import Fault, Score, ScoringItem
from nemo_rl_moe.rewards.judge import Judge, JudgeError
from nemo_rl_moe.rewards.registry import make_reward_function
from nemo_rl_moe.rewards.worker import score_within
from tests.support.grpo_inputs import reward_section

SECRET = "sk-1234567890abcdef"
TEMPLATE = "Mark {response} to {prompt} against {answer}, from 0 to 10."


@dataclass
class Endpoint:
    """An endpoint that answers requests from a list: a text, or a status with a body; a number of seconds is a wait."""

    answers: list[Any]
    url: str = ""
    requests: list[tuple[dict[str, Any], str | None]] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.requests.append((body, handler.headers["Authorization"]))
        answer = self.answers.pop(0)
        if isinstance(answer, float):
            time.sleep(answer)
            return  # the connection ends without a reply
        completion = {"choices": [{"message": {"content": answer}}]}
        status, content = answer if isinstance(answer, tuple) else (200, json.dumps(completion))
        handler.send_response(status)
        if status == 302:
            handler.send_header("Location", content)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content.encode())


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint([])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            endpoint.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)  # its shutdown waits for so long
    thread.start()
    yield endpoint
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setattr("nemo_rl_moe.rewards.judge._FIRST_WAIT_S", 0.01)


def parameters(endpoint: Endpoint, **changes: Any) -> dict[str, Any]:
    return {
        "url": endpoint.url,
        "model": "judge",
        "template": TEMPLATE,
        "full_marks": 10,
        "max_tokens": 64,
        "request_timeout_s": 30.0,
        "attempts": 3,
        "api_key_env": "JUDGE_KEY",
        "cache_folder": None,
        **changes,
    }


def judge_of(endpoint: Endpoint, **changes: Any) -> Judge:
    config = reward_section("judge", **parameters(endpoint, **changes))
    assert isinstance(config, JudgeConfig)
    return Judge(config)


def item(response: str = "4") -> ScoringItem:
    return ScoringItem("train:0", "2+2={answer}", response, False, {"answer": "4"})


def test_the_mark_is_the_last_number_of_the_reply(endpoint: Endpoint) -> None:
    endpoint.answers = ["3 of 4 steps are right.\nMark: 7.5", "10"]
    judge = judge_of(endpoint)
    assert judge.score(item()) == Score(0.75, False)
    assert judge.score(item()) == Score(1.0, True)
    (body, authorization), _ = endpoint.requests
    assert body["messages"] == [{"role": "user", "content": "Mark 4 to 2+2={answer} against 4, from 0 to 10."}], (
        "what stands in a prompt is no place"
    )
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("judge", 64, 0)
    assert authorization == f"Bearer {SECRET}"


@pytest.mark.parametrize(
    "reply", ["Mark: 8/10", "**8** / 10.", "8 out of 10", "5/5 steps are right: 8 of 10.0", ".8/10"]
)
def test_full_marks_behind_a_mark_are_not_the_mark(reply: str, endpoint: Endpoint) -> None:
    endpoint.answers = [reply]
    assert judge_of(endpoint).score(item()).reward == (0.08 if reply[0] == "." else 0.8)


@pytest.mark.parametrize(
    "trouble", [(503, "busy"), (429, "slow down"), "no number", "11", "-1", "4/6", (200, "no json"), (200, "[]"), 0.01]
)
def test_another_attempt_where_it_may_help(trouble: Any, endpoint: Endpoint) -> None:
    endpoint.answers = [trouble, "5"]
    assert judge_of(endpoint).score(item()).reward == 0.5


@pytest.mark.parametrize("status", [400, 401, 404])
def test_no_other_attempt_where_the_request_is_wrong_and_no_key_in_the_error(status: int, endpoint: Endpoint) -> None:
    endpoint.answers = [(status, f"bad key {SECRET}"), "5"]
    with pytest.raises(JudgeError) as caught:
        judge_of(endpoint).score(item())
    assert len(endpoint.requests) == 1
    assert str(caught.value) == f"{endpoint.url}/chat/completions: HTTP {status}: bad key ***"


def test_redirects_do_not_take_the_key_elsewhere(endpoint: Endpoint) -> None:
    endpoint.answers = [(302, endpoint.url + "/elsewhere"), "5"]
    with pytest.raises(JudgeError, match="HTTP 302"):
        judge_of(endpoint).score(item())
    assert len(endpoint.requests) == 1


def test_attempts_end(endpoint: Endpoint) -> None:
    endpoint.answers = [(500, "")] * 3
    with pytest.raises(JudgeError, match="HTTP 500"):
        judge_of(endpoint).score(item())
    assert len(endpoint.requests) == 3


def test_time_limits_of_an_attempt_and_of_a_response(endpoint: Endpoint) -> None:
    endpoint.answers = [60.0, "5", 60.0]
    assert judge_of(endpoint, request_timeout_s=0.3).score(item()).reward == 0.5
    assert score_within(0.3, judge_of(endpoint), item()).fault is Fault.TIMEOUT


def test_the_cache_answers_for_equal_requests_alone(endpoint: Endpoint, tmp_path: Path) -> None:
    endpoint.answers = ["no mark", "5", "6", "7"]
    folder = str(tmp_path / "cache")
    assert [judge_of(endpoint, cache_folder=folder).score(item()).reward for _ in range(2)] == [0.5, 0.5]
    assert judge_of(endpoint, cache_folder=folder).score(item("5")).reward == 0.6
    assert judge_of(endpoint, cache_folder=folder, model="other").score(item()).reward == 0.7
    assert len(endpoint.requests) == 4
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert not any(SECRET in path.read_text() for path in files)
    for path in files:
        path.write_text("{")
    endpoint.answers = ["8"]
    assert judge_of(endpoint, cache_folder=folder).score(item()).reward == 0.8, "what cannot be read is asked for again"


def test_it_is_an_environment_whose_key_is_in_no_dump(endpoint: Endpoint) -> None:
    overrides = [f"env.reward={json.dumps({'kind': 'judge', **parameters(endpoint)})}"]
    config = load_grpo_config("grpo_tiny_moe.yaml", overrides, check_paths=False)
    endpoint.answers = ["5"]
    assert isinstance(config.env.reward, JudgeConfig)
    assert make_reward_function(config.env.reward, config.env).score(item()).reward == 0.5
    assert SECRET not in json.dumps(dump_resolved(config))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "judge:8000"}, "url: got 'judge:8000', expected http://HOST/v1"),
        ({"url": f"https://me:{SECRET}@judge/v1"}, "without a password in it"),
        ({"template": "Mark it."}, "template: got 'Mark it.', expected a text with {response}"),
        ({"cache_folder": f"{__file__}/cache"}, "test_judge.py/cache', which cannot be made (NotADirectoryError"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set"),
    ],
)
def test_what_cannot_be_used_is_an_error_before_anything_starts(
    change: dict[str, Any], said: str, endpoint: Endpoint
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        judge_of(endpoint, **change)
    assert said in str(caught.value)
    assert SECRET not in str(caught.value)
