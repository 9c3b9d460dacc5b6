# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server for agents: on the loopback interface, with a key of the run and a path for each trajectory."""

import asyncio
import hmac
import json
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from nemo_rl_moe.rollouts.agents.chat_requests import RequestError
from nemo_rl_moe.rollouts.agents.replies import as_events

HOST = "127.0.0.1"
MOST_BODY_BYTES = 64 << 20
MOST_NESTED = 100
"""Deepest nesting of lists and objects in a body. It is limited because code that reads a body is recursive."""
_CLOSING_LIMIT_S = 20.0

Ask = Callable[[object], "Future[dict[str, Any]]"]
"""Returns a future of the reply to the body of a request. It is called in the server's thread, and must not block."""
Unread = Callable[[object, dict[str, Any]], object]
"""Takes body and reply of a request whose client disconnected before it read the reply."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _is_of_us(record: logging.LogRecord) -> bool:
    """Return whether to log a record. Errors of malformed HTTP requests, which any local process can send, are not
    logged."""
    return not isinstance(record.exc_info[1] if record.exc_info else None, HttpProcessingError)


_LOG = logging.getLogger("aiohttp.server.agents")
_LOG.addFilter(_is_of_us)


class EndpointServer:
    """An OpenAI-compatible server in a separate thread, as a context manager.

    Attributes:
        key: Random key that requests need.
        port: Port on which it listens.
    """

    def __init__(self, model: str):
        self._model = model
        self.key = secrets.token_urlsafe(32)
        self.port = 0
        self._sessions: dict[str, tuple[Ask, Unread]] = {}
        self._loop = asyncio.new_event_loop()
        self._started: Future[web.AppRunner] = Future()
        self._thread = threading.Thread(target=self._run, name="endpoint of agents", daemon=True)

    def __enter__(self) -> "EndpointServer":
        self._thread.start()
        self._runner = self._started.result()
        return self

    def __exit__(self, *error: object) -> None:
        self._sessions.clear()
        try:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(_CLOSING_LIMIT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSING_LIMIT_S)

    @contextmanager
    def session(self, ask: Ask, unread: Unread = lambda body, reply: None) -> Iterator[str]:
        """Answer the requests of one trajectory at a separate URL, which the context yields."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = ask, unread
        try:
            yield f"http://{HOST}:{self.port}/sessions/{name}/v1"
        finally:
            self._sessions.pop(name, None)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._started.set_result(self._loop.run_until_complete(self._start()))
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._loop.run_forever()
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application(middlewares=[self._guarded], client_max_size=MOST_BODY_BYTES)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._complete)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        # Handlers of disconnected clients are cancelled. No client compresses its requests.
        runner = web.AppRunner(
            app, logger=_LOG, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, auto_decompress=False
        )
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        self.port = runner.addresses[0][1]
        return runner

    @web.middleware
    async def _guarded(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse requests without the key, and answer errors in OpenAI's form."""
        try:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
                raise RequestError("the key is not the one of this run", status=401, code="invalid_api_key")
            return await handler(request)
        except RequestError as error:
            return web.json_response(error.body, status=error.status)
        except web.HTTPException as error:
            expected = (
                "; expected POST .../v1/chat/completions or GET .../v1/models" if error.status in (404, 405) else ""
            )
            message = f"{request.method} {request.path}: {error.reason}{expected}"
            return web.json_response(RequestError(message).body, status=error.status)

    async def _complete(self, request: web.Request) -> web.Response:
        ask, unread = self._session_of(request)
        try:
            body = json.loads(await request.read())  # whatever encoding its header names
        except (ValueError, RecursionError):  # JSON, its encoding or its depth
            raise RequestError("the body is no JSON") from None
        if _is_nested_deeper(body, MOST_NESTED):
            raise RequestError(f"the body is nested deeper than {MOST_NESTED} lists and objects")
        asked = ask(body)
        try:
            reply = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:  # the client has disconnected, maybe while the reply was made
            if not asked.cancel():
                asked.add_done_callback(lambda late: late.exception() or unread(body, late.result()))
            raise
        if request.transport is None or request.transport.is_closing():
            unread(body, reply)
        if isinstance(body, dict) and body.get("stream"):
            options = body.get("stream_options")
            events = as_events(reply, with_usage=isinstance(options, dict) and bool(options.get("include_usage")))
            return web.Response(body=events, content_type="text/event-stream")
        return web.json_response(reply, dumps=json.dumps)

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "nemo_rl_moe"}
        return web.json_response({"object": "list", "data": [model]})

    def _session_of(self, request: web.Request) -> tuple[Ask, Unread]:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            message = "this trajectory has ended, or there never was one of this name"
            raise RequestError(message, status=404, code="session_not_found")
        return session


def _is_nested_deeper(value: object, most: int) -> bool:
    level: list[object] = [value]
    for _ in range(most + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True
