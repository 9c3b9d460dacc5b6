# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The HTTP server for agents: on the loopback interface, with a key of the run and a path for each trajectory."""

import asyncio
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from nemo_rl_moe.endpoint.http import HOST, application, json_or_stream, listen, read_json
from nemo_rl_moe.endpoint.replies import chat_chunks
from nemo_rl_moe.endpoint.request_error import RequestError

_CLOSING_LIMIT_S = 20.0

Ask = Callable[[object], "Future[dict[str, Any]]"]
"""Returns a future of the reply to the body of a request. It is called in the server's thread, and must not block."""
Unread = Callable[[object, dict[str, Any]], object]
"""Takes body and reply of a request whose client disconnected before it read the reply."""


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
        routes = "POST .../v1/chat/completions or GET .../v1/models"
        app = application(self.key, "the key is not the one of this run", routes)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._complete)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        runner, self.port = await listen(app)
        return runner

    async def _complete(self, request: web.Request) -> web.Response:
        ask, unread = self._session_of(request)
        body = await read_json(request)
        asked = ask(body)
        try:
            reply = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:  # the client has disconnected, maybe while the reply was made
            if not asked.cancel():
                asked.add_done_callback(lambda late: late.exception() or unread(body, late.result()))
            raise
        if request.transport is None or request.transport.is_closing():
            unread(body, reply)
        return json_or_stream(reply, body, chat_chunks)

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
