# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The error with which a request is refused."""

from typing import Any


class RequestError(Exception):
    """A request is refused.

    Attributes:
        status: HTTP status.
        code: OpenAI's code of the error, if it has one.
        parameter: The wrong parameter, if it is a single one.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, parameter: str | None = None):
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter

    @property
    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = {401: "authentication_error", 500: "server_error", 503: "server_error"}.get(
            self.status, "invalid_request_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}
