# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP on the loopback interface: the key, JSON bodies, errors in OpenAI's form, and streams."""

import hmac
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from nemo_rl_moe.endpoint.request_error import RequestError

HOST = "127.0.0.1"
MOST_BODY_BYTES = 64 << 20
MOST_NESTED = 100
"""Deepest nesting of lists and objects in a body. It is limited because code that reads a body is recursive."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _is_of_us(record: logging.LogRecord) -> bool:
    """Return whether to log a record. Errors of malformed HTTP requests, which any local process can send, are not
    logged."""
    return not isinstance(record.exc_info[1] if record.exc_info else None, HttpProcessingError)


_LOG = logging.getLogger("aiohttp.server.endpoint")
_LOG.addFilter(_is_of_us)


def application(
    key: str, wrong_key: str, routes: str, public: Collection[str] = (), most_body_bytes: int = MOST_BODY_BYTES
) -> web.Application:
    """Return an application without routes. It refuses requests without the key.

    Args:
        wrong_key: Message for a request with another key or none.
        routes: The known routes, for the message about an unknown one.
        public: Paths that need no key.
    """

    @web.middleware
    async def guarded(request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse requests without the key, and answer errors in OpenAI's form."""
        try:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            is_known = hmac.compare_digest(given, f"Bearer {key}".encode())
            if not is_known and request.path not in public:
                raise RequestError(wrong_key, status=401, code="invalid_api_key")
            return await handler(request)
        except RequestError as error:
            return web.json_response(error.body, status=error.status)
        except web.HTTPException as error:
            expected = f"; expected {routes}" if error.status in (404, 405) else ""
            message = f"{request.method} {request.path}: {error.reason}{expected}"
            return web.json_response(RequestError(message).body, status=error.status)
        except Exception:
            _LOG.exception("%s %s failed", request.method, request.path)
            failed = RequestError("the server failed to answer; its output has the reason", status=500)
            return web.json_response(failed.body, status=failed.status)

    middlewares: list[Middleware] = [guarded]
    return web.Application(middlewares=middlewares, client_max_size=most_body_bytes)


async def listen(app: web.Application, bound: socket.socket | None = None) -> tuple[web.AppRunner, int]:
    """Start an application on the loopback interface. Return its runner and its port.

    Args:
        bound: A socket that is bound to the address. None: a free port.
    """
    # Handlers of disconnected clients are cancelled. No client compresses its requests.
    runner = web.AppRunner(
        app, logger=_LOG, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, auto_decompress=False
    )
    await runner.setup()
    site = web.TCPSite(runner, HOST, 0) if bound is None else web.SockSite(runner, bound)
    await site.start()
    return runner, runner.addresses[0][1]


async def read_json(request: web.Request) -> object:
    """Return the JSON of a request's body, whatever encoding its header names.

    Raises:
        RequestError: The body is no JSON, or is nested too deeply.
    """
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):  # JSON, its encoding or its depth
        raise RequestError("the body is no JSON") from None
    if _is_nested_deeper(body, MOST_NESTED):
        raise RequestError(f"the body is nested deeper than {MOST_NESTED} lists and objects")
    return body


def json_or_stream(
    reply: dict[str, Any], body: object, as_chunks: Callable[[dict[str, Any]], list[dict[str, Any]]]
) -> web.Response:
    """Return the HTTP response with a reply: as JSON, or as a stream of chunks if the body asks for one.

    Args:
        as_chunks: Function that splits a reply into chunks. The last one has no choices and the numbers of tokens. It
            is sent only if the request asks for it.
    """
    if not isinstance(body, dict) or not body.get("stream"):
        return web.json_response(reply, dumps=json.dumps)
    options = body.get("stream_options")
    with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    chunks = as_chunks(reply) if with_usage else as_chunks(reply)[:-1]
    events = "".join(f"data: {each}\n\n" for each in (*map(json.dumps, chunks), "[DONE]"))
    return web.Response(body=events.encode(), content_type="text/event-stream")


def _is_nested_deeper(value: object, most: int) -> bool:
    level: list[object] = [value]
    for _ in range(most + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True
