# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `serve` as a user types it, and the model that it serves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from openai import OpenAI
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.functional import sft_runs

KEY = "key-of-the-tests"
NAME = "tiny"
_MOST_S = 300


def make_model(folder: Path) -> Path:
    """Write a tiny MoE with random weights, large enough for clear choices, in Hugging Face's form."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sft_runs.MODEL), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(4.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(sft_runs.MODEL).save_pretrained(folder)
    return folder


@dataclass
class Served:
    """A server that runs. `log` has its output."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=_MOST_S)

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_MOST_S)


@contextmanager
def serving(model: Path, folder: Path, *words: str) -> Iterator[Served]:
    """Serve a model on a free port within this context. It may have ended before."""
    log = folder / "serve.log"
    command = [sys.executable, "-m", "nemo_rl_moe.cli", "serve", "--model", str(model), "--served-model-name", NAME]
    environment = {**os.environ, "NEMO_RL_MOE_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", "0", *words], cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while "serving at " not in (text := log.read_text()):
            assert process.poll() is None, text
            time.sleep(0.1)
        yield Served(process, text.partition("serving at ")[2].partition("/v1")[0], log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(_MOST_S)
