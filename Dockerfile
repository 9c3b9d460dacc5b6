# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
# A machine with GPUs: torch and vLLM for CUDA from PyPI, this project and Transformer Engine, all pinned. It has not been
# built yet: no machine with Docker was at hand.
#   docker build --tag nemo-rl-moe .
#   docker run --gpus all --ipc=host --rm nemo-rl-moe make test-gpu
# The base has no CUDA: its libraries, compiler and headers come from pip, and Transformer Engine would load a cuDNN of the
# system's before torch's. The host needs NVIDIA's driver 580 or newer and its container toolkit.
ARG BASE=ubuntu:24.04
FROM ${BASE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/nemo_rl_moe
COPY . .
# Jobs of the compiler take gigabytes each.
ARG MAX_JOBS=4
RUN MAX_JOBS=${MAX_JOBS} make gpu
ENV PATH=/opt/nemo_rl_moe/.venv/bin:${PATH}
CMD ["nemo-rl-moe", "--help"]
