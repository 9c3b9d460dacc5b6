# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The CPU backend is on where it must be, off where there is an accelerator, and loud about what it does not know."""

import importlib.machinery
import importlib.metadata
import os
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from nemo_rl_moe.models.megatron.cpu import cpu_backend
from nemo_rl_moe.models.megatron.cpu.cpu_backend import SourceEdit
from tests.support.gloo_ranks import STAND_IN

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator")


def run_python(program: str, first_on_path: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    folders = [str(folder) for folder in (*first_on_path, Path.cwd())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


ACCELERATOR = """
import sys, torch
torch.cuda.is_available = lambda: True
names = ("current_device", "Stream", "Event", "current_stream", "stream", "synchronize", "get_rng_state",
         "set_rng_state", "manual_seed", "empty_cache")
before = [getattr(torch.cuda, name) for name in names]
random_state = torch.cuda.random.get_rng_state
from nemo_rl_moe.models.megatron.cpu import cpu_backend
assert cpu_backend.ACTIVE is False
assert before == [getattr(torch.cuda, name) for name in names]
assert torch.cuda.random.get_rng_state is random_state
assert not [finder for finder in sys.meta_path if "nemo_rl_moe" in type(finder).__module__], "no finder"
"""
TRANSFORMER_ENGINE = """
import importlib.util, os
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
assert importlib.util.find_spec("transformer_engine") is not None, "the stand-in is installed"
from tests.support.tiny_model import tiny_policy
from tests.support.training_run import RunSettings, train_run
(loss, _) = train_run(RunSettings(tiny_policy())).losses
assert 3.0 < loss < 6.0, loss
assert importlib.util.find_spec("transformer_engine") is None
"""
"""Megatron-Core takes the real package's optimizer wherever it imports, and that one asks for a GPU."""
WANDB = """
import sys
import nemo_rl_moe.models.megatron.training.trainer
assert "megatron.core" in sys.modules
assert "wandb" not in sys.modules, "neither imported nor hidden"
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "first_on_path"),
    [
        pytest.param(ACCELERATOR, (), id="with an accelerator nothing is touched"),
        pytest.param(TRANSFORMER_ENGINE, (STAND_IN,), id="an installed Transformer Engine is left alone"),
        pytest.param(WANDB, (), id="Megatron-Core is imported without W&B"),
    ],
)
def test_a_program_in_another_process(program: str, first_on_path: Sequence[Path]) -> None:
    done = run_python(program, first_on_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_wrong_order_and_unknown_versions_are_refused() -> None:
    program = """
import importlib.metadata, sys, torch
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.99.0" if name == "megatron-core" else real(name)
try:
    import nemo_rl_moe.models.megatron.cpu.cpu_backend
except ImportError as error:
    print(error)
sys.modules["megatron.core.utils"] = sys
try:
    import nemo_rl_moe.models.megatron.cpu.cpu_backend
except ImportError as error:
    print(error)
print(len(sys.meta_path), torch.cuda.synchronize.__module__)
"""
    done = run_python(program)
    assert done.stdout.splitlines()[:2] == [
        "megatron-core 0.99.0 was not tried on a CPU; install one of 0.16.1, 0.19.2",
        "import nemo_rl_moe.models.megatron.cpu.cpu_backend before anything of megatron.core",
    ], done.stderr
    assert done.stdout.splitlines()[2].endswith("torch.cuda"), "nothing was replaced"


def test_without_an_accelerator_it_is_on() -> None:
    assert cpu_backend.ACTIVE is True
    assert str(torch.cuda.current_device()) == "cpu"
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    event = torch.cuda.Event()
    event.record()
    assert event.query() is True


def test_device_random_state_is_the_hosts() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_edits_are_those_of_the_installed_version() -> None:
    """Every module that is edited was imported from its edited source, or can be."""
    edits = cpu_backend._source_edits(importlib.metadata.version("megatron-core"))
    assert len(edits) == 13
    for name in edits:
        module = importlib.import_module(name)
        assert isinstance(module.__loader__, cpu_backend._EditingLoader), name


@pytest.fixture
def module_path(tmp_path: Path) -> Path:
    path = tmp_path / "edited.py"
    path.write_text("""a = make(device="cuda")\nb = make(device='cuda')\n""")
    return path


def test_edit_is_made_in_every_place(module_path: Path) -> None:
    loader = cpu_backend._EditingLoader("edited", str(module_path), [cpu_backend._on_cpu(2)])
    devices: list[torch.device] = []
    module = types.ModuleType("edited")
    module.torch = torch  # type: ignore[attr-defined]
    module.make = lambda device: devices.append(device)  # type: ignore[attr-defined]
    loader.exec_module(module)
    assert devices == [torch.device("cpu")] * 2


@pytest.mark.parametrize("expected", [0, 1, 3])
def test_edit_that_matches_another_number_of_places_is_an_error(module_path: Path, expected: int) -> None:
    loader = cpu_backend._EditingLoader("edited", str(module_path), [SourceEdit("cuda", "cpu", expected)])
    with pytest.raises(
        ImportError, match=rf"edited: 'cuda' matches 2 places, expected {expected}; .*0\.16\.1, 0\.19\.2"
    ):
        loader.get_code("edited")


def test_bytecode_of_the_unedited_source_is_not_used(module_path: Path) -> None:
    importlib.machinery.SourceFileLoader("edited", str(module_path)).get_code("edited")
    loader = cpu_backend._EditingLoader("edited", str(module_path), [cpu_backend._on_cpu(2)])
    assert "current_device" in loader.get_code("edited").co_names
    assert "cuda" not in repr(loader.get_code("edited").co_consts)
