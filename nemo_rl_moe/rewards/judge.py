# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A judge as reward function: a model at an OpenAI-compatible endpoint gives each response a mark."""

import hashlib
import json
import os
import re
import tempfile
import time
from contextlib import suppress
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from nemo_rl_moe.config.environments.rewards import JudgeConfig
from nemo_rl_moe.errors import ConfigurationError, one_line
from nemo_rl_moe.masking import MASK
from nemo_rl_moe.rewards.interface import Score, ScoringItem

KEY = "env.reward"
_NUMBER = r"-?(?:\d+(?:\.\d+)?|\.\d+)"
_MARK = re.compile(rf"({_NUMBER})(?:[\s*_]*(?:/|\b(?:out\s+)?of\b)[\s*_]*({_NUMBER}))?")
"""A number and, in `8/10` or `8 out of 10`, the full marks."""
_PLACES = re.compile(r"\{(prompt|response|answer)\}")
_WORTH_ANOTHER_ATTEMPT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 8.0
_LARGEST_REPLY = 1 << 20
_SHOWN = 200


class JudgeError(Exception):
    """The judge gave no mark."""


class Judge:
    """Reward function whose reward is the judge's mark, the last number of its reply, divided by `full_marks`. A
    response is right if its reward is 1.

    If `full_marks` is 10, a reply may also end with `8/10` or `8 out of 10`. A reply such as `4/5` has no mark then.
    `env.reward.timeout_s` limits all attempts for a response together, with the pauses between them.
    """

    def __init__(self, config: JudgeConfig):
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            shown = "an address with a user's name" if "@" in parts.netloc else repr(config.url)
            raise ConfigurationError(
                f"{KEY}.url: got {shown}, expected http://HOST/v1 or https://HOST/v1, without a password in it"
            )
        if "{response}" not in config.template:
            raise ConfigurationError(
                f"{KEY}.template: got {config.template!r}, expected a text with {{response}} in it"
            )
        if config.api_key_env is not None and not os.environ.get(config.api_key_env):
            raise ConfigurationError(f"{KEY}.api_key_env: the environment variable {config.api_key_env} is not set")
        self._address = f"{config.url.rstrip('/')}/chat/completions"
        self._request = {"model": config.model, "max_tokens": config.max_tokens, "temperature": 0.0}
        self._template, self._full_marks, self._key_env = config.template, config.full_marks, config.api_key_env
        self._timeout_s, self._attempts = config.request_timeout_s, config.attempts
        self._cache = None if config.cache_folder is None else _folder_for_replies(config.cache_folder)
        self._opener = build_opener(_NoRedirect())

    def score(self, item: ScoringItem) -> Score:
        """Return the score of a response. Raises JudgeError if no attempt gives a mark."""
        places = {"prompt": item.prompt, "response": item.response, "answer": str(item.record.get("answer", ""))}
        text = _PLACES.sub(lambda place: places[place[1]], self._template)
        body = json.dumps({**self._request, "messages": [{"role": "user", "content": text}]}, sort_keys=True)
        cached = self._cached(body)
        mark = self._mark_of(cached) if cached is not None else None
        if mark is None:
            mark = self._asked(body)
        reward = mark / self._full_marks
        return Score(reward, reward >= 1)

    def _asked(self, body: str) -> float:
        problem = ""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(min(_FIRST_WAIT_S * 2 ** (attempt - 1), _LONGEST_WAIT_S))
            try:
                reply = self._reply(body)
            except HTTPError as error:
                problem = f"HTTP {error.code}: {self._without_key(_beginning(error))}"
                if error.code not in _WORTH_ANOTHER_ATTEMPT:
                    break
                continue
            except (OSError, HTTPException, ValueError) as error:
                problem = self._without_key(f"{type(error).__name__}: {error}")
                continue
            mark = self._mark_of(reply)
            if mark is not None:
                self._keep(body, reply)
                return mark
            problem = f"no mark from 0 to {self._full_marks:g} in its reply {reply[-_SHOWN:]!r}"
        raise JudgeError(f"{self._address}: {problem}")

    def _reply(self, body: str) -> str:
        headers = {"Content-Type": "application/json"}
        if self._key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ.get(self._key_env, '')}"
        request = Request(self._address, body.encode(), headers, method="POST")
        with self._opener.open(request, timeout=self._timeout_s) as response:
            content = json.loads(response.read(_LARGEST_REPLY))
        try:
            text = content["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise ValueError("the reply is no chat completion") from None
        return text if isinstance(text, str) else ""

    def _mark_of(self, reply: str) -> float | None:
        marks = _MARK.findall(reply)
        if not marks:
            return None
        mark, out_of = marks[-1]
        is_mark = 0 <= float(mark) <= self._full_marks and float(out_of or self._full_marks) == self._full_marks
        return float(mark) if is_mark else None

    def _cached(self, body: str) -> str | None:
        if self._cache is None:
            return None
        try:
            reply = json.loads(self._place_of(self._cache, body).read_bytes())["reply"]
        except (OSError, ValueError, KeyError, TypeError):  # an unreadable reply is requested again
            return None
        return reply if isinstance(reply, str) else None

    def _keep(self, body: str, reply: str) -> None:
        """Write a reply to the cache. The write is atomic, because several processes may write the same reply."""
        if self._cache is None:
            return
        place = self._place_of(self._cache, body)
        with suppress(OSError):  # without a cached reply, the next run sends another request
            place.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=place.parent, delete=False) as file:
                json.dump({"reply": reply}, file)
            Path(file.name).replace(place)

    def _place_of(self, folder: Path, body: str) -> Path:
        digest = hashlib.sha256(f"{self._address}\n{body}".encode()).hexdigest()
        return folder / digest[:2] / f"{digest}.json"

    def _without_key(self, text: str) -> str:
        """Return a text of the endpoint with the key masked, because some endpoints repeat the key."""
        key = os.environ.get(self._key_env, "") if self._key_env is not None else ""
        return text.replace(key, MASK) if key else text


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, because they would send the key to another host."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


def _folder_for_replies(name: str) -> Path:
    try:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"{KEY}.cache_folder: got {name!r}, which cannot be made ({one_line(error)}); expected a folder, or null"
        ) from error
    return folder


def _beginning(error: HTTPError) -> str:
    """Return the first characters of an endpoint's error text, as one line."""
    try:
        said = error.read(_LARGEST_REPLY).decode("utf-8", "replace")
    except (OSError, HTTPException):
        said = ""
    return " ".join(said.split())[:_SHOWN] or str(error.reason)
