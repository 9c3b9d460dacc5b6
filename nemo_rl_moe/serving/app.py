# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The HTTP application of a served model."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from aiohttp import web

from nemo_rl_moe.endpoint.http import application, json_or_stream, read_json
from nemo_rl_moe.endpoint.replies import chat_chunks, completion_chunks
from nemo_rl_moe.endpoint.request_error import RequestError
from nemo_rl_moe.errors import GenerationError
from nemo_rl_moe.serving.service import Service

ROUTES = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, or GET / for the page of experts"
_PAGE = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Path -> file and type of the page's parts, which need no key."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

_MOST_BODY_BYTES = 4 << 20
"""All clients wait while a body is decoded."""

_Answer = Callable[[object], Awaitable[dict[str, Any]]]
_Chunks = Callable[[dict[str, Any]], list[dict[str, Any]]]


def served_application(service: Service, key: str, failed: "asyncio.Future[None]") -> web.Application:
    """Return the application that answers requests with a service.

    Args:
        failed: Gets the exception if the engine fails.
    """
    app = application(key, "the key is not the server's", ROUTES, public=_PAGE, most_body_bytes=_MOST_BODY_BYTES)

    def handler(answer: _Answer, as_chunks: _Chunks) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            body = await read_json(request)
            try:
                reply = await answer(body)
            except GenerationError as error:
                if not failed.done():
                    failed.set_exception(error)
                raise RequestError(f"the engine has failed: {str(error).splitlines()[0]}", status=500) from error
            return json_or_stream(reply, body, as_chunks)

        return handle

    async def models(request: web.Request) -> web.Response:
        return web.json_response(service.models())

    def part(name: str, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        text = files("nemo_rl_moe.serving").joinpath("page", name).read_text()

        async def show(request: web.Request) -> web.Response:
            return web.Response(text=text, content_type=kind, headers=_HEADERS)

        return show

    app.router.add_post("/v1/chat/completions", handler(service.chat, chat_chunks))
    app.router.add_post("/v1/completions", handler(service.complete, completion_chunks))
    app.router.add_get("/v1/models", models)
    for path, (name, kind) in _PAGE.items():
        app.router.add_get(path, part(name, kind))
    return app
