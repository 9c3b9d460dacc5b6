# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Choice of CUDA's libraries for Transformer Engine: torch's own, if the machine has others.

Transformer Engine loads cuDNN, NVRTC and cuRAND from an installed CUDA toolkit, such as `/usr/local/cuda`, even if its
release differs from that of torch. Images for GPUs often have such a toolkit.
"""

import ctypes
import os
import sysconfig
from pathlib import Path

_LIBRARIES = ("cudnn", "nvrtc", "curand")
_VARIABLE = "{}_HOME"
"""Variable that Transformer Engine reads before it looks for a toolkit, for the name of a library in capitals."""


def prefer_libraries_of_torch(site_packages: Path | None = None) -> None:
    """Let Transformer Engine load the libraries in torch's packages, unless the user has named other folders.

    Requires that Transformer Engine is not imported yet. Does nothing for libraries that torch's packages lack.
    """
    nvidia = (site_packages or Path(sysconfig.get_path("purelib"))) / "nvidia"
    for name in _LIBRARIES:
        folders = (*nvidia.glob("cu[0-9]*/lib"), nvidia / name / "lib", nvidia / f"cuda_{name}" / "lib")
        folder = next((each for each in folders if any(each.glob(f"lib{name}.so*"))), None)
        variable = _VARIABLE.format(name.upper())
        if folder is None or variable in os.environ:
            continue
        os.environ[variable] = str(folder)
        if name == "cudnn":
            # Transformer Engine's library needs the parts of cuDNN, which it loads itself only without a toolkit.
            for path in sorted(folder.glob("libcudnn*.so.*")):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
