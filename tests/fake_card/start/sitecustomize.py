# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Gives every Python process that sees a fake card its kernels, once it has imported torch.

Python imports this module when it starts, if its folder is on PYTHONPATH. So processes have kernels that a test has not
started itself.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _WithKernels(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_enter(module: ModuleType) -> None:
            sys.meta_path.remove(self)
            execute(module)
            from tests.fake_card import host_kernels

            host_kernels.enter()

        spec.loader.exec_module = execute_and_enter  # type: ignore[method-assign]
        return spec


if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.meta_path.insert(0, _WithKernels())
