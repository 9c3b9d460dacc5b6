# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
import socket
from datetime import timedelta

import pytest

from nemo_rl_moe.distributed.worker_process import bound_socket
from nemo_rl_moe.models.megatron.model.parallel_state import rendezvous_store


def test_a_reserved_port_serves_the_rendezvous_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound_socket() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        store = rendezvous_store(0, 1, timedelta(seconds=10))
        store.set("key", "value")
        assert store.port == port
        assert store.get("key") == b"value"
