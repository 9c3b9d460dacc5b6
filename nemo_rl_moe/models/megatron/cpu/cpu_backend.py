# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes Megatron-Core run on a machine without an accelerator. Import this module before `megatron.core`.

Megatron-Core names the CUDA device in about thirty lines, and uses collectives that gloo lacks. If
`torch.cuda.is_available()` is False, this module changes three things:

1. `torch.cuda`'s current device, streams, events and random state are replaced by the CPU's.
2. When a Megatron module is imported, `_source_edits` are applied to its source text. Each edit has an expected number
   of matches. Any other number means an untried version of Megatron-Core, and raises an ImportError.
3. Transformer Engine is hidden, because its kernels and its optimizer need GPUs.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SUPPORTED_VERSIONS = ("0.16.1", "0.19.2")


@dataclass(frozen=True)
class SourceEdit:
    """A regular expression, its replacement, and the number of matches that it must have."""

    pattern: str
    replacement: str
    expected_matches: int


def _on_cpu(matches: int) -> SourceEdit:
    # The current device is the CPU, unless a test pretends that there is a GPU.
    return SourceEdit(r"""device=(['"])cuda\1""", "device=torch.cuda.current_device()", matches)


def _cpu_tensor_types(matches: int) -> SourceEdit:
    return SourceEdit(r"'torch\.cuda\.(Float|Half|BFloat16)Tensor'", r"'torch.\1Tensor'", matches)


def _source_edits(version: str) -> dict[str, tuple[SourceEdit, ...]]:
    """Return the edits of each module, by its name, for a supported version of megatron-core."""
    old = version == "0.16.1"
    # The host copy of a count must be numpy, even if the count is already on the host: callers use it as split sizes.
    numpy_copy = SourceEdit(
        r"^    if torch\.is_tensor\(tensor\) and tensor\.is_cuda:",
        "    if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:\n"
        "        return tensor.numpy()\n"
        "    if torch.is_tensor(tensor) and tensor.is_cuda:",
        1,
    )
    # 0.16.1 reads a name that it binds only with Transformer Engine.
    no_te_gemm = SourceEdit(r"^    HAVE_TE = False$", "    HAVE_TE = False\n    te_general_gemm = None", 1)
    return {
        # torch.compile takes 19 s for its first function, and gains nothing on a CPU.
        "megatron.core.jit": (SourceEdit(r"^enable_jit_fuser\(\)$", "disable_jit_fuser()", 1),),
        "megatron.core.optimizer.clip_grads": (_on_cpu(5), _cpu_tensor_types(1)),
        "megatron.core.optimizer.optimizer": (_on_cpu(4 if old else 5), _cpu_tensor_types(3)),
        "megatron.core.optimizer.distrib_optimizer": (
            _cpu_tensor_types(5),
            SourceEdit(r"send_tensor = send_tensor\.cuda\(\)", "pass", 1),
            # The state of torch's AdamW has a "step" for each parameter, which a checkpoint lacks.
            SourceEdit(r"for key in dst_tensors:", "for key in dst_tensors.keys() & tensors.keys():", 1),
        ),
        # All parameters are on the host. The same parameters are offloaded as on a GPU. The others count as parameters
        # on the device.
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": (
            SourceEdit(r" if param\.is_cuda\]\)", "])", 1),
            SourceEdit(r"(offload_params_numel < offload_threshold) and param\.is_cuda:", r"\1:", 1),
            SourceEdit(r"\.cpu\(\)\.pin_memory\(\)", "", 1),
            SourceEdit(r"if param\.is_cuda:", "if not cpu_copy:", 1),
            SourceEdit(r"""v\.to\("cuda"\)""", "v", 1),
        ),
        "megatron.core.pipeline_parallel.schedules": (_on_cpu(3),),
        "megatron.core.transformer.moe.moe_utils": (*((_on_cpu(1), no_te_gemm) if old else ()), numpy_copy),
        "megatron.core.tensor_parallel.random": (
            SourceEdit(r"\n    _lazy_call\(cb\)", "\n    torch.set_rng_state(new_state)", 1),
        ),
        # gloo refuses different sizes in all_gather and reduce_scatter (experts with tensor parallelism).
        "megatron.core.tensor_parallel.mappings": (
            SourceEdit(
                r"torch\.distributed\.all_gather\(output_tensor_list, input_, group=group\)",
                "torch.distributed.all_to_all_single(output, torch.cat([input_] * world_size), output_split_sizes, "
                "[input_.shape[0]] * world_size, group=group)",
                1,
            ),
            SourceEdit(
                r"torch\.distributed\.reduce_scatter\(output, input_tensor_list, group=group\)",
                "summed = input_.clone(memory_format=torch.contiguous_format); "
                "torch.distributed.all_reduce(summed, group=group); "
                "output.copy_(summed.split(input_split_sizes)[rank])",
                1,
            ),
        ),
        "megatron.core.utils": (
            SourceEdit(
                r"""dtype=torch\.float, device="cuda"\)\n    return l2_cuda""",
                """dtype=torch.float, device=torch.cuda.current_device())\n    return l2_cuda""",
                1,
            ),
            # Without Transformer Engine the version is None, which cannot be compared.
            SourceEdit(r"return get_te_version\(\) >=", "return (get_te_version() or PkgVersion('0')) >=", 1),
        ),
        "megatron.core.transformer.utils": (_on_cpu(2),),
        # On one rank, an autograd function returns the expert's output unchanged, and torch refuses an in-place change.
        "megatron.core.transformer.mlp": (
            SourceEdit(
                r"output \+= (output_bias\.unsqueeze\(0\) \* per_token_scale\.unsqueeze\(-1\))",
                r"output = (output + \1).to(output.dtype)",
                1,
            ),
        ),
        # The last pipeline stage's copy of tied embeddings.
        "megatron.core.models.common.language_module.language_module": (
            SourceEdit(r"weight\.data = weight\.data\.cuda\(\)", "pass", 1),
        ),
    }


# In 0.19 this module imports triton unconditionally. A CPU runs nothing in it.
_TRITON_MODULE = "megatron.core.transformer.moe.ops.paged_stash"


class _EditingLoader(importlib.machinery.SourceFileLoader):
    """Loader of a module from its edited source, without cached bytecode."""

    def __init__(self, fullname: str, path: str, edits: Sequence[SourceEdit]):
        super().__init__(fullname, path)
        self._edits = edits

    def get_code(self, fullname: str) -> types.CodeType:
        source = self.get_data(self.path).decode()
        for edit in self._edits:
            source, matches = re.subn(edit.pattern, edit.replacement, source, flags=re.MULTILINE)
            if matches != edit.expected_matches:
                raise ImportError(
                    f"{fullname}: {edit.pattern!r} matches {matches} places, expected {edit.expected_matches}; this "
                    f"megatron-core was not tried on a CPU (tried: {', '.join(SUPPORTED_VERSIONS)})"
                )
        return compile(source, self.path, "exec", dont_inherit=True)


class _EmptyModuleLoader(importlib.abc.Loader):
    """Loader that replaces a module that only an accelerator uses. In the replacement every name is None."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        def missing(name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

        module.__getattr__ = missing  # type: ignore[method-assign]


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, edits: dict[str, tuple[SourceEdit, ...]]):
        self._edits = edits

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _TRITON_MODULE and importlib.util.find_spec("triton") is None:
            return importlib.machinery.ModuleSpec(fullname, _EmptyModuleLoader())
        if fullname not in self._edits:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _EditingLoader(fullname, spec.loader.path, self._edits[fullname])
        return spec


class _HostStream:
    """A CUDA stream on a machine where everything runs in program order."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> "_HostEvent":
        return _HostEvent()


class _HostEvent:
    """A CUDA event that has already happened."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _replace_torch_cuda() -> None:
    cuda: Any = torch.cuda
    cpu, the_stream = torch.device("cpu"), _HostStream()
    cuda.current_device = lambda: cpu
    cuda.Stream, cuda.Event = _HostStream, _HostEvent
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: the_stream
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    cuda.is_current_stream_capturing = lambda: False
    # Dropout and recomputation use the CPU's random generator as the device's.
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: 0


def _activate() -> bool:
    if torch.cuda.is_available():
        return False
    if any(name.startswith("megatron.core.") for name in sys.modules):
        raise ImportError("import nemo_rl_moe.models.megatron.cpu.cpu_backend before anything of megatron.core")
    version = importlib.metadata.version("megatron-core")
    if version not in SUPPORTED_VERSIONS:
        raise ImportError(
            f"megatron-core {version} was not tried on a CPU; install one of {', '.join(SUPPORTED_VERSIONS)}"
        )
    # Megatron would warn at each import that a library for GPUs is missing, and at each use of its own default.
    for message in (".*Apex (is|are) not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    _replace_torch_cuda()
    for name in ("transformer_engine", "transformer_engine_torch"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as if it were not installed
    sys.meta_path.insert(0, _Finder(_source_edits(version)))
    return True


ACTIVE: bool = _activate()
"""Whether this process runs Megatron-Core on the CPU. With an accelerator it is False, and nothing is changed."""
