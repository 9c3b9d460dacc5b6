# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Load of `nemo-rl-moe serve`: many clients at a time, answers per second, errors, and memory.

    python benchmarks/serve_load.py --clients 64 --seconds 60

Half of the requests are chats with routed experts, the others score or continue prompts. Every tenth is malformed, and
must get status 400. Prints one JSON line. `memory_mb` has the resident memory of the server and all its processes, and
the used part of Ray's object store, at each sixth of the time.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from small_model import TOKENIZER

KEY = "benchmark"
_START_S = 600
_SAMPLES = 6


def main() -> None:
    """Start the server, put it under load, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", type=Path, help="a model's folder (default: the demo's model with random weights)")
    parser.add_argument("overrides", nargs="*", help="more words of `serve`, such as --backend vllm after --")
    options = parser.parse_args()
    words = ["policy.init=random"] if options.model is None else []
    command = [sys.executable, "-m", "nemo_rl_moe.cli", "serve", "--model", str(options.model or TOKENIZER)]
    command += ["--served-model-name", "m", "--port", "0", *options.overrides, *words]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        with log.open("wb") as output:
            server = subprocess.Popen(
                command, cwd=folder, stdout=output, stderr=output, env={**os.environ, "NEMO_RL_MOE_API_KEY": KEY}
            )
        try:
            url = _url(server, log)
            result = asyncio.run(_loaded(url, server.pid, options.clients, options.seconds))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
    print(json.dumps(result))


def _url(server: "subprocess.Popen[bytes]", log: Path) -> str:
    until = time.monotonic() + _START_S
    while "serving at " not in (text := log.read_text()):
        if server.poll() is not None or time.monotonic() > until:
            sys.exit(text)
        time.sleep(0.2)
    return text.partition("serving at ")[2].partition(";")[0]


async def _loaded(url: str, process_id: int, num_clients: int, seconds: float) -> dict[str, Any]:
    answers: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    until = time.monotonic() + seconds
    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {KEY}"}, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        clients = [_client(session, url, number, until, answers, errors) for number in range(num_clients)]
        memory = asyncio.create_task(_memory(process_id, seconds))
        await asyncio.gather(*clients)
    return {
        "clients": num_clients,
        "seconds": seconds,
        "answers": dict(answers),
        "answers_per_second": round(answers.total() / seconds, 1),
        "errors": dict(errors),
        "memory_mb": await memory,
    }


async def _client(
    session: aiohttp.ClientSession,
    url: str,
    number: int,
    until: float,
    answers: Counter[str],
    errors: Counter[str],
) -> None:
    generator = random.Random(number)
    while time.monotonic() < until:
        kind, path, body = _request(generator)
        try:
            async with session.post(f"{url}/{path}", json={"model": "m", **body}) as reply:
                found = await reply.json()
                expected = 400 if kind == "malformed" else 200
                if reply.status == expected and ("error" in found) == (expected == 400):
                    answers[kind] += 1
                else:
                    errors[f"{kind}: {reply.status} {found}"[:200]] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            errors[f"{kind}: {type(error).__name__}: {error}"[:200]] += 1


def _request(generator: random.Random) -> tuple[str, str, dict[str, Any]]:
    digits = "".join(generator.choices("0123456789+=", k=generator.randint(1, 100)))
    if generator.random() < 0.1:
        return "malformed", "chat/completions", {"messages": [{"role": "nobody", "content": digits}]}
    sampling = {"max_tokens": generator.choice([4, 16, 32]), "temperature": generator.choice([0, 1])}
    if generator.random() < 0.5:
        messages = [{"role": "user", "content": digits}]
        return "chat", "chat/completions", {"messages": messages, "return_routed_experts": True, **sampling}
    if generator.random() < 0.5:
        return "score", "completions", {"prompt": digits, "echo": True, "logprobs": 1, "max_tokens": 1}
    return "completion", "completions", {"prompt": digits, **sampling}


async def _memory(process_id: int, seconds: float) -> list[dict[str, float]]:
    found = []
    for _ in range(_SAMPLES):
        await asyncio.sleep(seconds / _SAMPLES)
        processes = [psutil.Process(process_id), *psutil.Process(process_id).children(recursive=True)]
        sizes = [_sizes(process) for process in processes]
        resident, shared = (round(sum(column) / 2**20, 1) for column in zip(*sizes, strict=True))
        found.append({"private": round(resident - shared, 1), "shared": shared})
    return found


def _sizes(process: psutil.Process) -> tuple[int, int]:
    try:
        memory = process.memory_info()
    except psutil.NoSuchProcess:
        return 0, 0
    return memory.rss, memory.shared


if __name__ == "__main__":
    main()
