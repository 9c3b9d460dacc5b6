# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`make gpu-kit`: a library cut down to one architecture, wheels that pip installs, a folder whole or not at all."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.gpu.kit import make
from tests.gpu.kit.closure import IMPORTED, carried
from tests.gpu.kit.fatbin import NotALibrary, entries, keep_architectures, sections
from tests.gpu.kit.pins import pins
from tests.gpu.kit.slim_wheel import slim

SIZES = {80: 40, 90: 24, 100: 64}
"""Bytes of device code of the library below, by architecture."""
DEBUG = b"names of functions"


def container(codes: Mapping[int, bytes]) -> bytes:
    """Return device code as CUDA's compiler packs it; the headers are longer than what is read of them."""
    body = b"".join(
        struct.pack("<HHIQ", 2, 1, 64, len(code)) + bytes(12) + struct.pack("<I", architecture) + bytes(32) + code
        for architecture, code in codes.items()
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 24, len(body)) + bytes(8) + body


def library(codes: Mapping[int, bytes]) -> bytes:
    """Return an ELF file with two containers, code for the host, and debug information."""
    content = {".text": b"host code", ".nv_fatbin": container(codes) + bytes(8) + container(codes), ".debug_str": DEBUG}
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*content, ".shstrtab"))
    body, rows = bytearray(64), []
    for name, data in {**content, ".shstrtab": names}.items():
        rows.append(struct.pack("<IIQQQQIIQQ", names.index(name.encode()), 1, 0, 0, len(body), len(data), 0, 0, 8, 0))
        body += data + bytes(-len(data) % 8)
    struct.pack_into("<4sB", body, 0, b"\x7fELF", 2)
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<HHH", body, 0x3A, 64, len(rows), len(rows) - 1)
    return bytes(body + b"".join(rows))


CODES = {architecture: bytes([architecture]) * size for architecture, size in SIZES.items()}


def test_code_of_one_architecture_is_kept() -> None:
    whole = library(CODES)
    cut = bytearray(whole)
    assert keep_architectures(cut, [90]) == {architecture: 2 * size for architecture, size in SIZES.items()}
    assert len(cut) == len(whole)
    assert sections(cut) == sections(whole)
    found = list(entries(cut, *sections(cut)[".nv_fatbin"]))
    assert [entry.architecture for entry in found] == 2 * list(SIZES)
    for entry in found:
        code = CODES[90] if entry.architecture == 90 else bytes(SIZES[entry.architecture])
        assert cut[entry.begin : entry.begin + entry.size] == code
    assert b"host code" in cut
    assert DEBUG not in cut
    differing = sum(a != b for a, b in zip(cut, whole, strict=True))
    assert differing == 2 * (SIZES[80] + SIZES[100]) + len(DEBUG)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x7fELF\x01" + bytes(100), "no ELF file of 64 bits"),
        (library({80: b"code"}), "has no device code for 90; it has: 80"),
        (library({}), "has no device code for 90; it has: none"),
    ],
)
def test_other_files_are_refused(content: bytes, problem: str) -> None:
    with pytest.raises(NotALibrary, match=problem):
        keep_architectures(bytearray(content), [90])


def make_wheel(folder: Path, name: str, release: str, files: Mapping[str, bytes]) -> Path:
    module = name.replace("-", "_")
    path = folder / f"{module}-{release}-py3-none-any.whl"
    info = f"{module}-{release}.dist-info"
    content = dict(files) | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in content.items():
            archive.writestr(each, data)
        archive.writestr(f"{info}/RECORD", "")
    return path


ENGINE_FILES = {
    "transformer_engine/__init__.py": b"here = True\n",
    "transformer_engine/jax/__init__.py": b"",
    "transformer_engine/wheel_lib/libtransformer_engine.so": library(CODES),
}


def test_pip_installs_the_smaller_wheel(tmp_path: Path) -> None:
    original = make_wheel(tmp_path, make.LIBRARY, "2.17.1", ENGINE_FILES)
    (tmp_path / "slim").mkdir()
    smaller = tmp_path / "slim" / original.name
    slim(original, smaller, [90])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target"]
    subprocess.run([*pip, str(tmp_path / "site"), str(smaller)], check=True)
    installed = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site/transformer_engine").rglob("*.*")}
    assert {path.name for path in installed if path.suffix != ".pyc"} == {"__init__.py", "libtransformer_engine.so"}
    cut = bytearray(library(CODES))
    keep_architectures(cut, [90])
    assert (tmp_path / "site/transformer_engine/wheel_lib/libtransformer_engine.so").read_bytes() == cut
    with zipfile.ZipFile(smaller) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("RECORD")]
        rows = [line.split(",") for line in archive.read(record).decode().splitlines()]
    assert {name for name, *_ in rows} == set(zipfile.ZipFile(smaller).namelist())
    assert [size for name, _, size in rows if name.endswith(".so")] == [str(len(cut))]


SETUP = """
import os, pathlib, subprocess, torch
from torch.utils.cpp_extension import BuildExtension, CppExtension
import setuptools
assert torch.version.cuda == "13.0", torch.version.cuda
assert "release 13.0" in subprocess.run([os.environ["CUDA_HOME"] + "/bin/nvcc", "-V"], stdout=-1, text=True).stdout
setuptools.setup(name="transformer_engine_torch", version="2.17.1", cmdclass={"build_ext": BuildExtension},
    ext_modules=[CppExtension(name="transformer_engine_torch", sources=["a.cpp"], include_dirs=[])])
"""
"""Asks what Transformer Engine's own asks."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the package index, with packages of the kit's names and releases."""
    folder = tmp_path / "index"
    folder.mkdir()
    releases = pins(make.REPOSITORY / "constraints-gpu.txt", "3.12")
    for name in (*carried(), make.ENGINE):
        make_wheel(folder, name, releases[name], {f"{name.replace('-', '_')}.py": b""})
    make_wheel(folder, make.LIBRARY, "2.17.1", ENGINE_FILES)
    root = f"transformer_engine_torch-{releases[make.EXTENSION]}"
    with tarfile.open(folder / f"{root}.tar.gz", "w:gz") as archive:
        for name, text in {"setup.py": SETUP, "a.cpp": "", "PKG-INFO": "Metadata-Version: 2.1\n"}.items():
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    return folder


def test_packages_of_packages_are_carried_and_those_of_torch_are_not() -> None:
    assert set(IMPORTED) <= set(carried())
    assert {"pydantic-core", "annotated-types", "wadler-lindig"} <= set(carried())
    assert not {"numpy", "pyyaml", "typing-extensions", "torch", "packaging"} & set(carried())


def test_a_kit_is_made(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ".gpu"
    (folder / "old").mkdir(parents=True)
    assert make.main(["--output", str(folder)]) == 0, capsys.readouterr().err
    assert json.loads((folder / "kit.json").read_text()) == {
        "python": "3.12",
        "architectures": [90],
        "transformer_engine": "2.17.1",
    }
    wheels = sorted(path.name.partition("-")[0] for path in (folder / "wheels").iterdir())
    assert wheels == sorted(name.replace("-", "_") for name in (*carried(), make.ENGINE, make.LIBRARY))
    others = {path.name for path in folder.iterdir()}
    assert others == {"wheels", "kit.json", "build_te.sh", "transformer_engine_torch-2.17.1.tar.gz"}
    assert {path.name for path in tmp_path.iterdir()} == {".gpu", "index"}
    assert "0 of 0 MB of device code are kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lost", "arguments", "problem"),
    [
        ("omegaconf", [], "pip download: No matching distribution found for omegaconf=="),
        pytest.param(
            "transformer_engine_torch",
            [],
            "pip download: No matching distribution found for transformer-engine-torch==2.17.1",
            marks=pytest.mark.full,
        ),
        pytest.param(
            None,
            ["--architectures", "90", "75"],
            "transformer_engine_cu13-2.17.1-py3-none-any.whl: has no device code for 75; it has: 80, 90, 100",
            marks=pytest.mark.full,
        ),
        pytest.param(
            None,
            ["--also", "nowhere==1"],
            "pip download: No matching distribution found for nowhere==1",
            marks=pytest.mark.full,
        ),
    ],
    ids=["a wheel", "the sources", "an architecture", "another package"],
)
def test_what_cannot_be_had_leaves_the_old_kit(
    index: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lost: str | None,
    arguments: list[str],
    problem: str,
) -> None:
    for path in index.glob(f"{lost}*"):
        path.unlink()
    folder = tmp_path / ".gpu"
    folder.mkdir()
    (folder / "kit.json").write_text("old")
    assert make.main(["--output", str(folder), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {problem}")
    assert [path.name for path in folder.iterdir()] == ["kit.json"]
    assert {path.name for path in tmp_path.iterdir()} == {".gpu", "index"}


@pytest.mark.full
def test_a_kit_that_cannot_be_carried_is_refused(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make, "LARGEST_MB", 0.001)
    assert make.main(["--output", str(tmp_path / ".gpu")]) == 2
    assert "more than 0.001; name fewer architectures" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


@pytest.mark.full
def test_the_extension_is_compiled_for_the_torch_of_one_python(tmp_path: Path) -> None:
    """With sources that ask for a compiler as the real ones do, and an nvcc that answers."""
    shutil.copy(make.BUILD_SCRIPT, tmp_path)
    root = "transformer_engine_torch-2.17.1"
    setup = (
        "import os, setuptools\n"
        "for name in ('CUDA_HOME', 'CPATH', 'NVTE_PYTORCH_FORCE_BUILD'):\n"
        "    open(os.path.join(os.environ['SEEN'], name), 'w').write(os.environ.get(name, ''))\n"
        "setuptools.setup(name='transformer_engine_torch', version='2.17.1', py_modules=['transformer_engine_torch'])\n"
    )
    with tarfile.open(tmp_path / f"{root}.tar.gz", "w:gz") as archive:
        for name, text in {"setup.py": setup, "transformer_engine_torch.py": "", "PKG-INFO": ""}.items():
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "cuda/bin/nvcc").write_text("#!/bin/sh\n")
    (tmp_path / "cuda/bin/nvcc").chmod(0o755)
    (tmp_path / "seen").mkdir()
    environment = os.environ | {"PATH": f"{tmp_path}/cuda/bin:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen")}
    environment.pop("CUDA_HOME", None)
    subprocess.run(["sh", "build_te.sh", sys.executable], cwd=tmp_path, env=environment, check=True)
    import torch

    tag = f"{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}"
    (wheel,) = (tmp_path / "extension" / tag).iterdir()
    assert wheel.name.startswith("transformer_engine_torch-2.17.1-")
    assert [path.name for path in (tmp_path / "extension").iterdir()] == [tag]
    assert (tmp_path / "seen/CUDA_HOME").read_text() == str(tmp_path / "cuda")
    assert (tmp_path / "seen/NVTE_PYTORCH_FORCE_BUILD").read_text() == "TRUE"
    purelib = sysconfig.get_path("purelib")
    assert (tmp_path / "seen/CPATH").read_text().startswith(f"{purelib}/nvidia/")
