# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds the libraries of the fake card for the torch of this Python, where torch looks for NVIDIA's packages.

Each library has the name of the real one. It has every symbol that the libraries of torch, and of Transformer Engine
where it was compiled, ask of it, as `nm` lists them:
those that `libraries/` defines, and for all others a function that answers 0. With FAKE_CARD_LOG=1 such a function says
its name when it is called first.

python -m tests.fake_card.build --headers FOLDER
"""

import argparse
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.fake_card.environment import LIBRARY_FOLDER, transformer_engine_folder

TRIED = ("2.13.0",)
"""Releases of torch, whose CUDA build ran on the fake card."""
SOURCES = Path(__file__).resolve().parent / "libraries"


@dataclass(frozen=True)
class Library:
    """One library of NVIDIA's.

    Attributes:
        prefix: Regular expression for the names of its symbols.
        sources: Files of `libraries/`.
    """

    prefix: str
    sources: tuple[str, ...] = ()


_PARTS_OF_CUDNN = (*("adv", "cnn", "engines_precompiled", "engines_runtime_compiled", "graph", "heuristic", "ops"),)
# By the beginning of the file's name. A symbol belongs to the first whose expression it fits.
LIBRARIES = {
    "libcudart": Library(r"(__)?cuda[A-Z]", ("cudart.cpp", "memory.cpp", "ledger.cpp", "late.cpp")),
    "libcublasLt": Library("cublasLt", ("cublaslt.cpp",)),
    "libcublas": Library("cublas"),
    "libcudnn": Library("cudnn", ("cudnn.cpp",)),
    # Transformer Engine's library names those that cuDNN opens itself. It finds the symbols in the first one.
    **dict.fromkeys((f"libcudnn_{part}" for part in _PARTS_OF_CUDNN), Library("(?!)")),
    "libcufft": Library("cufft"),
    "libcufile": Library("cuFile"),
    "libcupti": Library("cupti"),
    "libcurand": Library("curand"),
    "libcusolver": Library("cusolver"),
    "libcusparseLt": Library("cusparseLt"),
    "libcusparse": Library("cusparse"),
    "libnvrtc": Library("nvrtc"),
    "libnvshmem_host": Library("nvshmem"),
    "libnccl": Library("p?nccl[A-Z]", ("nccl.cpp", "nccl_job.cpp", "nccl_reduce.cpp", "nccl_collectives.cpp")),
    "libcuda": Library("cu[A-Z]", ("driver.cpp", "virtual.cpp")),
    "libnvidia-ml": Library("nvml", ("nvml.cpp",)),
}
_BY_NAME_ALONE = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Libraries of the driver, which torch opens when it needs them."""


def torch_folder() -> Path:
    """Return the folder of this Python's torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed")
    return Path(spec.origin).parent


def require_tried_torch() -> str:
    """Return torch's release.

    Raises:
        SystemExit: The fake card was not tried with it, or it is no build for CUDA.
    """
    release = importlib.metadata.version("torch").partition("+")[0]
    if release not in TRIED:
        raise SystemExit(f"torch {release} was not tried on the fake card (tried: {', '.join(TRIED)})")
    if not (torch_folder() / "lib" / "libtorch_cuda.so").is_file():
        raise SystemExit("this torch is not a build for CUDA, which the fake card is for")
    return release


def library_of(symbol: str) -> str | None:
    """Return the beginning of the name of the library that a symbol is of, or None for none of NVIDIA's."""
    return next((name for name, library in LIBRARIES.items() if re.match(library.prefix, symbol)), None)


def asked_for(libraries: Iterable[Path]) -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return what libraries ask of NVIDIA's.

    Returns:
        File name to symbols; file name to the version that its symbols carry, where they carry one.
    """
    files = dict.fromkeys(_BY_NAME_ALONE, "")
    symbols: dict[str, set[str]] = defaultdict(set)
    versions: dict[str, str] = {}
    for library in libraries:
        dynamic = _output("readelf", "--dynamic", library)
        files |= dict.fromkeys(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", dynamic), "")
        # Functions of NVML are found by name at run time, and torch ends where it does not find one of them.
        symbols["libnvidia-ml"] |= {name.decode() for name in re.findall(rb"\0(nvml[A-Z]\w+)\0", library.read_bytes())}
        for symbol, version in re.findall(r" [Uw] (\w+)(?:@+(\S+))?$", _output("nm", "-D", library), re.MULTILINE):
            name = library_of(symbol)
            if name is not None:
                symbols[name].add(symbol)
                if version:
                    versions[name] = version
    by_stem = {file.partition(".")[0]: file for file in files}
    if unknown := set(by_stem) - set(LIBRARIES):
        raise SystemExit(f"torch asks for libraries that the fake card does not know: {', '.join(sorted(unknown))}")
    return (
        {file: symbols[stem] for stem, file in by_stem.items()},
        {file: versions[stem] for stem, file in by_stem.items() if stem in versions},
    )


def declared_by_driver(header: Path) -> set[str]:
    """Return the functions of cuda.h, and their names with a number. Triton and others find them by name."""
    text = header.read_text(encoding="utf-8")
    return set(re.findall(r"CUresult CUDAAPI (cu[A-Z]\w+)\(", text)) | set(re.findall(r"\b(cu[A-Z]\w+_v\d)\b", text))


def opened_by_name(package: Path) -> set[str]:
    """Return the functions of the runtime that a package's Python code calls."""
    files = package.glob("distributed/device_communicators/cuda_wrapper.py")
    return {name for file in files for name in re.findall(r'"(cuda[A-Z]\w+)"', file.read_text(encoding="utf-8"))}


def _output(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def _defined(sources: Iterable[str]) -> set[str]:
    text = "".join((SOURCES / source).read_text() for source in sources)
    return set(re.findall(r"^EXPORT [^(]*?\b(\w+)\(", text, re.MULTILINE))


def _stubs(symbols: Iterable[str]) -> str:
    lines = [
        "#include <stdio.h>",
        "#include <stdlib.h>",
        "static long zero(const char *name, int *said) {",
        '  if (!*said && getenv("FAKE_CARD_LOG")) fprintf(stderr, "[fake card] %s answers 0\\n", name);',
        "  *said = 1;",
        "  return 0;",
        "}",
    ]
    lines += [f'long {name}() {{ static int said; return zero("{name}", &said); }}' for name in sorted(symbols)]
    return "\n".join(lines) + "\n"


def build(target: Path, headers: Path) -> None:
    """Build all libraries into a folder.

    Args:
        headers: Folder with cuda_runtime_api.h of the CUDA that torch is for.
    """
    target.mkdir(parents=True, exist_ok=True)
    asking = [
        (torch_folder() / "lib", "*.so"),
        (transformer_engine_folder(Path(sys.prefix)), "**/*transformer_engine*.so"),
        (torch_folder().parent / "vllm", "**/*.so"),
    ]
    wanted, versions = asked_for(sorted(file for folder, names in asking for file in folder.glob(names)))
    with tempfile.TemporaryDirectory(prefix="fake_card_") as scratch:
        wanted["libcuda.so.1"] |= declared_by_driver(headers / "cuda.h")
        wanted["libcudart.so.13"] |= opened_by_name(torch_folder().parent / "vllm")
        for file, symbols in wanted.items():
            sources = LIBRARIES[file.partition(".")[0]].sources
            stubs = symbols - _defined(sources)
            (stub_file := Path(scratch) / "stubs.c").write_text(_stubs(stubs))
            _run("gcc", "-O1", "-fPIC", "-w", "-fno-builtin", "-c", stub_file, "-o", f"{scratch}/stubs.o")
            options: list[str | Path] = [f"-Wl,-soname,{file}", "-Wl,-rpath,$ORIGIN", f"-I{headers}"]
            if file in versions:
                (map_file := Path(scratch) / "map").write_text(f"{versions[file]} {{ global: *; }};\n")
                options.append(f"-Wl,--version-script={map_file}")
            paths = [SOURCES / source for source in sources]
            flags = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-fvisibility=hidden", "-shared", "-pthread"]
            _run("g++", *flags, *options, *paths, f"{scratch}/stubs.o", "-o", target / file, "-ldl")
            print(f"{file}: {len(symbols)} symbols, {len(symbols - stubs)} of them made here")
    for copy in torch_folder().parent.glob("*.libs/libcudart.*.so.13"):  # of torchvision's
        copy.unlink()
        copy.symlink_to(target / "libcudart.so.13")


def _run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


def main() -> None:
    """Read the command line and build."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_card.build", description=__doc__)
    parser.add_argument("--headers", type=Path, required=True, metavar="FOLDER", help="with cuda_runtime_api.h")
    options = parser.parse_args()
    require_tried_torch()
    build(LIBRARY_FOLDER, options.headers)


if __name__ == "__main__":
    sys.exit(main())
