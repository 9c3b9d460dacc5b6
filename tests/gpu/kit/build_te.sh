#!/bin/sh
# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
# Compile Transformer Engine's extension for the torch of one Python: sh build_te.sh [PYTHON [FOLDER]]
#
# Run it on the machine with the GPU, or beforehand where the same releases of Python and torch are; no GPU is needed.
# Needs a C++ compiler, nvcc, and in that Python: torch for CUDA 13, setuptools, wheel, packaging, pybind11, ninja.
# The wheel goes to FOLDER/TORCH-PYTHON/. Without arguments: python3, and the folder extension beside this script.
# MAX_JOBS limits the compiler's processes.
set -eu
kit=$(cd "$(dirname "$0")" && pwd)
python=${1:-python3}
folder=${2:-$kit/extension}
name=$("$python" -c 'import sys, torch; print(f"{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}")')
# The headers of torch's own CUDA packages come before a toolkit's, whose cuDNN may be another.
nvidia=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1] / "nvidia")')
for headers in "$nvidia"/*/include; do CPATH="${CPATH:+$CPATH:}$headers"; done
[ -n "${CUDA_HOME:-}" ] || {
  compiler=$(command -v nvcc) || { echo "build_te.sh: there is no nvcc on the path; or set CUDA_HOME" >&2; exit 2; }
  CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$compiler")")")
}
export CPATH CUDA_HOME NVTE_PYTORCH_FORCE_BUILD=TRUE
partial="$folder/.$name.$$"
trap 'rm -rf "$partial"' EXIT
mkdir -p "$partial"
echo "build_te.sh: compiling for torch and Python $name"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation --no-cache-dir \
  --wheel-dir "$partial" "$kit"/transformer_engine_torch-*.tar.gz
rm -rf "${folder:?}/$name"
mv "$partial" "$folder/$name"
echo "build_te.sh: $folder/$name"
