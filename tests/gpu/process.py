# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A job of this process alone, as a worker joins one."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl_moe.config.schema_policy import PolicyConfig


@contextmanager
def job_of_one(policy: PolicyConfig) -> Iterator[None]:
    """Process groups of one rank, with NCCL on a GPU and gloo without."""
    # First of all that imports Megatron-Core.
    from nemo_rl_moe.models.megatron.model.parallel_state import destroy_parallel_state, initialize_parallel_state

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(listener.getsockname()[1])
    os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"] = "0", "1", "0"
    initialize_parallel_state(policy.megatron_cfg, rank=0, world_size=1, local_rank=0, seed=0)
    try:
        yield
    finally:
        destroy_parallel_state()
