# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The documented installation on GPUs: one torch for all that is compiled against it, and a check that it stays so."""

import importlib
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nemo_rl_moe.distributed import install_transformer_engine
from nemo_rl_moe.distributed.install_transformer_engine import (
    BUILD_TOOLS,
    CUDA,
    EXTENSION,
    build_environment,
    compile_command,
    problem_with_extension,
    torch_of_extension,
)
from tests.gpu.kit.pins import pins

# Older ones load whole wheels for a `--dry-run`: ten gigabytes here.
PIP_WITH_METADATA = "pip==26.3"
OLDER_FOR_VLLM = {"fastapi", "numpy", "setuptools", "transformers"}
ENGINE_OF_MEGATRON = {"0.16.1": ">=2.9,<2.12", "0.19.2": "==2.17.1"}
PYTHONS = ("3.11", "3.12", "3.13")
RESOLVER_LIMIT_S = 3600


def documented_lines(root: Path) -> list[str]:
    section = (root / "docs/gpu.md").read_text().partition("## Installing\n")[2].partition("\n## ")[0]
    return re.findall(r"^(?:pip|python) .*$", section, flags=re.MULTILINE)


def extra(root: Path, name: str) -> dict[str, Requirement]:
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return {requirement.name: requirement for requirement in map(Requirement, extras[name])}


def test_the_documented_lines_are_the_makefiles(repository_root: Path) -> None:
    recipe = (repository_root / "Makefile").read_text().partition("\n$(GPU_STAMP):")[2].partition("\n\n")[0]
    shorter = {"$(PIP_INSTALL)": "pip install", "$(VENV)/bin/python": "python", " $(TORCH_PIP_ARGUMENTS)": ""}
    for long, short in shorter.items():
        recipe = recipe.replace(long, short)
    lines = re.findall(r"^\t@((?:pip|python) .*)$", recipe, flags=re.MULTILINE)
    assert len(lines) == 3
    assert lines == documented_lines(repository_root)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_for_gpus_are_the_tested_ones_and_fit_each_other(python: str, repository_root: Path) -> None:
    tested = pins(repository_root / "constraints.txt", python)
    gpu = pins(repository_root / "constraints-gpu.txt", python)
    assert tested.keys() <= gpu.keys()
    assert {name for name in tested if tested[name] != gpu[name]} - OLDER_FOR_VLLM == set()
    vllm = extra(repository_root, "vllm")
    assert all(gpu[name] in vllm[name].specifier for name in ("vllm", "torch"))
    engine = Requirement(f"transformer-engine{ENGINE_OF_MEGATRON[gpu['megatron-core']]}")
    for part in ("transformer-engine", EXTENSION, f"transformer-engine-cu{CUDA}"):
        assert gpu[part] in engine.specifier, part
    for part in ("nvcc", "crt", "cccl", "runtime"):
        assert gpu[f"nvidia-cuda-{part}"].startswith(gpu["cuda-toolkit"][:5]), part
    assert gpu["cuda-toolkit"].startswith(f"{CUDA}.")


@pytest.mark.slow
@pytest.mark.timeout(RESOLVER_LIMIT_S + 120)
def test_pip_finds_one_torch_for_the_documented_lines(repository_root: Path, tmp_path: Path) -> None:
    """Asks the package index of this machine; skipped where none answers."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    newer = subprocess.run([*pip, "install", "--target", str(tmp_path / "pip"), PIP_WITH_METADATA], check=False)
    if newer.returncode != 0:
        pytest.skip("no package index answers")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "pip")}
    found = []
    for number, line in enumerate(documented_lines(repository_root)):
        command, _, *arguments = shlex.split(line)
        if command != "pip":  # the compiler's turn: of the extension pip knows nothing before torch is there
            arguments = ["--constraint", "constraints-gpu.txt", *BUILD_TOOLS, *install_transformer_engine.COMPILER]
            arguments += [f"transformer-engine[core_cu{CUDA}]"]
        arguments = [argument for argument in arguments if argument != "--editable"]
        report = tmp_path / f"{number}.json"
        options = ["--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run(
            [*pip, "install", *options, *arguments],
            check=True,
            cwd=repository_root,
            env=environment,
            timeout=RESOLVER_LIMIT_S,
        )
        chosen = [entry["metadata"] for entry in json.loads(report.read_text())["install"]]
        found.append({canonicalize_name(each["name"]): each["version"].partition("+")[0] for each in chosen})
    python = ".".join(map(str, sys.version_info[:2]))
    expected = pins(repository_root / "constraints-gpu.txt", python)
    assert [each.get("torch", expected["torch"]) for each in found] == [expected["torch"]] * 3
    everything = {name: version for each in found for name, version in each.items()}
    assert everything["vllm"] == expected["vllm"]
    everything.pop("nemo-rl-moe")
    assert everything == {name: expected.get(name, "no pin") for name in everything}


def test_the_compiler_and_all_headers_come_from_pip(tmp_path: Path) -> None:
    found = build_environment({"PATH": "/bin", "CUDA_HOME": "/usr/local/cuda", "HOME": "/root"}, tmp_path)
    assert found == {
        "PATH": f"{tmp_path}/nvidia/cu13/bin:/bin",
        "CUDA_HOME": f"{tmp_path}/nvidia/cu13",
        "CPATH": f"{tmp_path}/nvidia/cudnn/include:{tmp_path}/nvidia/nccl/include",
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "HOME": "/root",
    }


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package of that name, of plain Python, by the very command that compiles the real one."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    (source / "transformer_engine_torch.py").write_text("")
    (source / "setup.py").write_text(
        f"from setuptools import setup; setup(name={EXTENSION!r}, version='0', py_modules=['transformer_engine_torch'])"
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    *command, _ = compile_command(pip, ["--no-deps", "--target", str(installed)], "2.13.0+cu130")
    subprocess.run([*command, str(source)], check=True)
    monkeypatch.syspath_prepend(installed)
    return installed


def test_the_extension_notes_which_torch_it_was_compiled_for(
    extension: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert torch_of_extension() == "2.13.0+cu130"
    monkeypatch.setattr(torch, "__version__", "2.14.0+cu130")
    assert problem_with_extension() == (
        "Transformer Engine was compiled for torch 2.13.0+cu130, found torch 2.14.0+cu130; compile it anew: make gpu"
    )
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    loaded = ModuleType("transformer_engine.pytorch")
    monkeypatch.setattr(importlib, "import_module", lambda name: loaded)
    assert problem_with_extension() is None


def test_an_extension_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_of_extension() is None

    def refuse(name: str) -> ModuleType:
        raise ImportError("transformer_engine_torch.so: undefined symbol: _ZN3c10\nand more")

    monkeypatch.setattr(importlib, "import_module", refuse)
    assert problem_with_extension() == (
        f"Transformer Engine does not load with torch {torch.__version__} (ImportError: transformer_engine_torch.so:"
        " undefined symbol: _ZN3c10); compile it anew: make gpu"
    )


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a build for CUDA")
def test_a_torch_for_cpus_is_refused_before_anything_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert install_transformer_engine.main([]) == 2
    assert capsys.readouterr().err == (
        f"error: torch {torch.__version__} is no build for CUDA 13, which Transformer Engine is compiled for here;"
        " in an environment with the build for CPUs: make clean, then make gpu\n"
    )
