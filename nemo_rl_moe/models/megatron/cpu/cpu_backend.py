# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs Megatron-Core on a machine without an accelerator: import this module before `megatron.core`.

Megatron-Core names the CUDA device in about thirty places and uses collectives that gloo does not have. Three things
cure that, all only where `torch.cuda.is_available()` is False:

1. `torch.cuda`'s current device, streams, events and random state are answered by CPU stand-ins.
2. While a Megatron module is imported, the places in `_source_edits` are rewritten in its source text. Each edit says
   how many places it must find; any other number means an untried version of Megatron-Core and ends in an ImportError
   instead of a silently wrong number.
3. Transformer Engine, where it is installed, is hidden: its kernels and its optimizer exist on GPUs alone.
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
    """A regular expression, its replacement, and the number of places where it must match."""

    pattern: str
    replacement: str
    expected_matches: int


def _on_cpu(places: int) -> SourceEdit:
    # Which is the CPU, unless a test pretends that there is a GPU.
    return SourceEdit(r"""device=(['"])cuda\1""", "device=torch.cuda.current_device()", places)


def _cpu_tensor_types(places: int) -> SourceEdit:
    return SourceEdit(r"'torch\.cuda\.(Float|Half|BFloat16)Tensor'", r"'torch.\1Tensor'", places)


def _source_edits(version: str) -> dict[str, tuple[SourceEdit, ...]]:
    """Return the module name to the edits that it needs on a CPU, for one supported version of megatron-core."""
    old = version == "0.16.1"
    # The host copy of a count must be numpy (callers use it as split sizes), also when it already lies on the host.
    numpy_copy = SourceEdit(
        r"^    if torch\.is_tensor\(tensor\) and tensor\.is_cuda:",
        "    if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:\n"
        "        return tensor.numpy()\n"
        "    if torch.is_tensor(tensor) and tensor.is_cuda:",
        1,
    )
    # 0.16.1 tests a name that it only binds when Transformer Engine is there.
    no_te_gemm = SourceEdit(r"^    HAVE_TE = False$", "    HAVE_TE = False\n    te_general_gemm = None", 1)
    return {
        # torch.compile costs 19 s of start for its first function, seconds for its imports, and gains nothing on a CPU.
        "megatron.core.jit": (SourceEdit(r"^enable_jit_fuser\(\)$", "disable_jit_fuser()", 1),),
        "megatron.core.optimizer.clip_grads": (_on_cpu(5), _cpu_tensor_types(1)),
        "megatron.core.optimizer.optimizer": (_on_cpu(4 if old else 5), _cpu_tensor_types(3)),
        "megatron.core.optimizer.distrib_optimizer": (
            _cpu_tensor_types(5),
            SourceEdit(r"send_tensor = send_tensor\.cuda\(\)", "pass", 1),
            # torch's AdamW keeps "step" in its state, which a checkpoint does not carry for each parameter.
            SourceEdit(r"for key in dst_tensors:", "for key in dst_tensors.keys() & tensors.keys():", 1),
        ),
        # Everything lies on the host: what is offloaded is what would be, and the rest plays the device's part.
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
        # gloo refuses pieces of different sizes in all_gather and reduce_scatter (experts with tensor parallelism).
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
            # No release of Transformer Engine is no lowest one: None cannot be compared.
            SourceEdit(r"return get_te_version\(\) >=", "return (get_te_version() or PkgVersion('0')) >=", 1),
        ),
        "megatron.core.transformer.utils": (_on_cpu(2),),
        # torch refuses to change in place what a function of one rank handed on as it is: the output of an expert.
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


# Imports triton without a condition, in 0.19; a CPU never runs anything in it.
_TRITON_MODULE = "megatron.core.transformer.moe.ops.paged_stash"


class _EditingLoader(importlib.machinery.SourceFileLoader):
    """Loader of a module from its edited source, never from a cached bytecode file."""

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
    """Stand-in for a module that only an accelerator uses: every name in it is missing until used."""

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
    """A CUDA stream on a machine where everything runs in program order: nothing to wait for."""

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
    """A CUDA event that has always happened."""

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
    # The CPU's random generator plays the device's: dropout and recomputation draw from it.
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args, **kwargs: 0


def _hide_transformer_engine() -> None:
    """Make this process look as if Transformer Engine were not installed."""
    for name in ("transformer_engine", "transformer_engine_torch"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


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
    # Megatron warns of what a CPU cannot have, and of a default of its own, each time that it is imported or used.
    for message in (".*Apex (is|are) not installed", "full scope is deprecated"):
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
    _replace_torch_cuda()
    _hide_transformer_engine()
    sys.meta_path.insert(0, _Finder(_source_edits(version)))
    return True


ACTIVE: bool = _activate()
"""True where this process runs Megatron-Core on the CPU; False, and nothing changed, where there is an accelerator."""
