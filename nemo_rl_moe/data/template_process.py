# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A separate process for chat templates, with limits on time and memory.

A template is a program of the tokenizer's author. Jinja's sandbox denies it files and Python, but not endless loops or
filling the memory. Requests and replies are lines of JSON.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from nemo_rl_moe.data.left_out import NOTES
from nemo_rl_moe.data.template_renderer import Rendered, RenderRequest, TemplateProblem, TemplateRenderer, TemplateSetup
from nemo_rl_moe.data.turn_spans import RenderError

CPU_LIMIT_S = 2
"""Seconds of computing that one rendering may take."""
MEMORY_LIMIT = 384 << 20
"""Bytes that renderings may take, beside what the process itself has and `_BYTES_A_CHARACTER`."""
_BYTES_A_CHARACTER = 64
_REQUESTS_AT_ONCE = 100
_BYTES_AT_ONCE = 1_000_000
_TOO_DEEP = b"null"
_PACKAGE_ROOT = Path(__file__).parents[2]
_PROGRAM = f"import sys; sys.path.insert(0, {str(_PACKAGE_ROOT)!r}); from {__name__} import serve; serve()"


class TemplateFailure(Exception):
    """A chat template that cannot be used at all; the message follows the words `the chat template`.

    Attributes:
        place: Index of the request at which it failed.
    """

    place = 0


class TemplateProcess:
    """A lazily started process, restarted after a template has broken its limits."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._loaded: list[TemplateSetup] = []

    def start(self) -> None:
        """Start the process without waiting, so that it imports its packages early."""
        if self._child is None:
            self._start()

    def variables(self, setup: TemplateSetup) -> list[str]:
        """Return the names that a template reads.

        Raises:
            TemplateFailure: The template cannot be used.
        """
        reply = self._ask(json.dumps({"setup": asdict(setup)}).encode())
        if "problem" in reply:
            raise TemplateFailure(reply["problem"])
        self._loaded.append(setup)
        names: list[str] = reply["variables"]
        return names

    def render(self, setup: TemplateSetup, requests: Sequence[RenderRequest]) -> list[Rendered | str]:
        """Render conversations or prompts; give for each its text or what is wrong with it.

        Raises:
            TemplateFailure: The template has broken a limit.
        """
        results: list[Rendered | str] = []
        try:
            for lines in _together([_as_json(request) for request in requests]):
                try:
                    results += self._render(setup, lines)
                except TemplateFailure:
                    for line in lines:  # one of them is at fault: which?
                        results += self._render(setup, [line])
        except TemplateFailure as failure:
            failure.place = len(results)
            raise
        return results

    def same_texts(self, setup: TemplateSetup, other: TemplateSetup) -> bool:
        """Return whether two templates give the same texts for conversations with and without tools and thinking.

        Raises:
            TemplateFailure: One of them cannot be used, or has broken a limit.
        """
        answer = self._ask(json.dumps({"compare": [self._place(setup), self._place(other)]}).encode())
        return bool(answer["same"])

    def _place(self, setup: TemplateSetup) -> int:
        if setup not in self._loaded:
            self.variables(setup)
        return self._loaded.index(setup)

    def _render(self, setup: TemplateSetup, lines: Sequence[bytes]) -> list[Rendered | str]:
        place = b"%d" % self._place(setup)
        answer = self._ask(b'{"template": ' + place + b', "requests": [' + b", ".join(lines) + b"]}")
        return [
            Rendered(
                reply["text"],
                tuple((first, end) for first, end in reply["spans"]),
                tuple(NOTES[place] for place in reply["notes"]),
            )
            if isinstance(reply, dict)
            else str(reply)
            for reply in answer["replies"]
        ]

    def _ask(self, question: bytes) -> dict[str, Any]:
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(question + b"\n")
            child.stdin.flush()
            reply = child.stdout.readline()
        except BrokenPipeError:
            reply = b""
        except BaseException:  # interrupted in the middle: what it says next would be the answer to this
            self._stop()
            raise
        if not reply:
            exit_code = child.wait()
            self._stop()
            raise TemplateFailure(_how_it_broke(exit_code))
        answer: dict[str, Any] = json.loads(reply)
        if "broken" in answer:
            self._stop()
            raise TemplateFailure(answer["broken"])
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", _PROGRAM]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._child = child
        weakref.finalize(self, _end, child)
        return child

    def _stop(self) -> None:
        if self._child is not None:
            _end(self._child)
        self._child, self._loaded = None, []


def _as_json(request: RenderRequest) -> bytes:
    try:
        return json.dumps(vars(request), default=str).encode()
    except RecursionError:
        return _TOO_DEEP


def _together(lines: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield the group the requests, in order, into messages of moderate size."""
    some: list[bytes] = []
    for line in lines:
        if some and (len(some) == _REQUESTS_AT_ONCE or sum(map(len, some)) + len(line) > _BYTES_AT_ONCE):
            yield some
            some = []
        some.append(line)
    if some:
        yield some


_shared: "weakref.ref[TemplateProcess] | None" = None


def template_process() -> TemplateProcess:
    """Return this program's process; it ends with its last reference."""
    global _shared
    process = _shared() if _shared is not None else None
    if process is None:
        process = TemplateProcess()
        _shared = weakref.ref(process)
    return process


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the process; does nothing the second time."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):  # what it has not read is written at closing
            if pipe is not None:
                pipe.close()


def _how_it_broke(exit_code: int) -> str:
    if exit_code == -signal.SIGXCPU:
        return f"takes longer than {CPU_LIMIT_S} s to render"
    what = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
    return f"ends the process that renders it ({what})"


def serve() -> NoReturn:  # pragma: no cover  (runs in the other process)
    """Run the process: reply to each request until there are no more."""
    from transformers.utils import chat_template_utils  # noqa: F401  before the limits: takes a second

    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())  # packages may write there
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(requests, replies)
    os._exit(0)


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:  # pragma: no cover
    renderers: list[TemplateRenderer] = []
    base = _address_space()

    def limit(size: int) -> None:
        most = base + MEMORY_LIMIT + _BYTES_A_CHARACTER * size
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        used = resource.getrusage(resource.RUSAGE_SELF)
        spent = int(used.ru_utime + used.ru_stime)
        resource.setrlimit(resource.RLIMIT_CPU, (spent + 1 + CPU_LIMIT_S, resource.RLIM_INFINITY))

    for line in requests:
        try:
            reply = json.dumps(_answer(json.loads(line), renderers, limit, len(line))).encode()
        except MemoryError:
            reply = json.dumps({"broken": f"needs more than {MEMORY_LIMIT >> 20} MB of memory to render"}).encode()
        replies.write(reply + b"\n")
        replies.flush()


def _answer(
    question: dict[str, Any], renderers: list[TemplateRenderer], limit: Callable[[int], None], size: int
) -> dict[str, Any]:  # pragma: no cover
    if "setup" in question:
        try:
            renderer = TemplateRenderer(TemplateSetup(**question["setup"]), limit)
        except TemplateProblem as problem:
            return {"problem": str(problem)}
        renderers.append(renderer)
        return {"variables": renderer.variables}
    if "compare" in question:
        first, second = (renderers[place] for place in question["compare"])
        return {"same": first.renders_as(second)}
    renderer = renderers[question["template"]]
    return {"replies": [_reply(renderer, request, size) for request in question["requests"]]}


def _reply(renderer: TemplateRenderer, request: Any, size: int) -> dict[str, Any] | str:  # pragma: no cover
    if request is None:
        return "the conversation is nested too deeply"
    try:
        rendered = renderer.render(RenderRequest(**request), size)
    except RenderError as error:
        return str(error)
    return {"text": rendered.text, "spans": rendered.spans, "notes": [NOTES.index(note) for note in rendered.notes]}


def _address_space() -> int:  # pragma: no cover
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
