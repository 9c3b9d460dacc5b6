# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversion of a model's folder between the formats of Hugging Face and Megatron-Core, on the host."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.config.loading import load_config
from nemo_rl_moe.config.schema_lora import LoraConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig
from nemo_rl_moe.errors import CheckpointError, ConfigurationError, UserError
from nemo_rl_moe.launch.output_folder import require_free, staged
from nemo_rl_moe.models.classifiers import as_classifier, classifier_problem
from nemo_rl_moe.models.families import vision_family_of
from nemo_rl_moe.models.hf_files import (
    MEGATRON_WEIGHTS_FOLDER,
    check_small_files,
    holds_megatron_weights,
    load_config_json,
    load_hf_config,
)
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.model_files import (
    NUMBER_FORMATS,
    NumberFormat,
    TargetFormat,
    WeightsFormat,
    copied_model_files,
    left_out_line,
    missing_code_line,
    write_model_files,
)
from nemo_rl_moe.models.peft_files import ExpertForm, is_merged_into, lora_of_folder, scores_sequences
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder, one_line, shown
from nemo_rl_moe.runs.loggers.console import ConsoleLogger

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

# Used only for its settings that fit every model: one worker on the host, no parallelism, Megatron-Core's modules.
_BASE_CONFIG = "sft_tiny_moe.yaml"
_FORMAT_OF_TYPE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
"""Name of a type in safetensors files -> number format."""

MOST_TIMES = 4
"""Maximum ratio of the parameters by `config.json` to the numbers in the files. Up to this ratio, missing tensors are
reported by name. A model above it is refused."""


@dataclass(frozen=True)
class Conversion:
    """A conversion of one folder into another.

    Attributes:
        target: Folder of the output. It must be empty or not exist.
        dtype: Number format of the output's weights. None: the input's format.
        adapter: Folder of an adapter for the input. None: no adapter.
        experts: How the output stores an adapter's experts. None: fused.
    """

    source_format: WeightsFormat
    target_format: TargetFormat
    source: Path
    target: Path
    dtype: NumberFormat | None
    adapter: Path | None = None
    experts: ExpertForm | None = None


@dataclass(frozen=True)
class _Model:
    hf_config: Any
    config: "TransformerConfig"
    chunks: "list[GPTModel]"
    kept: SafetensorsFolder | None
    lora: LoraConfig | None = None


def convert(conversion: Conversion) -> None:
    """Read the input into a model on the host and write the output, completely or not at all."""
    _check_folders(conversion)
    # Set before torch looks for an accelerator, because a conversion needs none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    console = ConsoleLogger(total_steps=0, live="auto")
    try:
        _convert(conversion, console)
    except UserError as error:
        # The checks name keys of a run's configuration.
        raise ConfigurationError([_as_options(line) for line in error.problems]) from error


def _as_options(line: str) -> str:
    return line.replace("policy.model_name:", "--input:").replace("policy.lora.path:", "--adapter:")


@contextmanager
def _reported_of(option: str, folder: Path, consequence: str = "") -> Iterator[None]:
    """In this context, errors of the operating system, such as a full disk, become `ConfigurationError`s about an
    option's folder."""
    try:
        yield
    except OSError as error:
        name = "" if error.filename is None else f"{error.filename}: "
        reason = f"{name}{error.strerror or one_line(error)}"
        raise ConfigurationError(f"{option}: {folder}: {reason}{consequence}") from error


def _check_folders(conversion: Conversion) -> None:
    source, target = conversion.source, conversion.target
    if not source.is_dir():
        raise ConfigurationError(f"--input: got {str(source)!r}, which is no folder")
    found: WeightsFormat = "megatron" if holds_megatron_weights(source) else "hf"
    if found != conversion.source_format:
        what = {"hf": f"no folder '{MEGATRON_WEIGHTS_FOLDER}'", "megatron": "Megatron-Core's weights"}[found]
        raise ConfigurationError(
            f"--from: got {conversion.source_format}, but {source} holds {what}{_hint(source, found)}"
        )
    if conversion.adapter is None and conversion.target_format == "adapter":
        raise ConfigurationError("--to adapter needs --adapter DIR; without --adapter, --to is hf or megatron")
    if conversion.experts is not None and conversion.target_format != "adapter":
        raise ConfigurationError(f"--experts: got {conversion.experts}, but only --to adapter uses --experts")
    if conversion.adapter is not None and not conversion.adapter.is_dir():
        raise ConfigurationError(f"--adapter: got {str(conversion.adapter)!r}, which is no folder")
    if conversion.adapter is not None and is_merged_into(conversion.adapter, source):
        raise ConfigurationError(
            f"--adapter: {conversion.adapter} is merged into --input {source} already; expected the base that it adapts"
        )
    require_free(target)
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(f"--output: {target} lies in the input's folder; choose another place")


def _hint(source: Path, found: WeightsFormat) -> str:
    """Return the end of an error line that suggests the right option, or an empty text."""
    if found == "megatron":
        return "; did you mean --from megatron?"
    if holds_megatron_weights(source.parent) and source.name == MEGATRON_WEIGHTS_FOLDER:
        return f"; did you mean --input {source.parent}?"
    steps = sorted(path.name for path in source.glob("step_*") if holds_megatron_weights(path))
    if steps:
        return f"; its checkpoints are {', '.join(steps)}: name one, such as --input {source / steps[-1]}"
    return "; did you mean --from hf?" if any(source.glob("*.safetensors")) else ""


def _convert(conversion: Conversion, console: ConsoleLogger) -> None:
    source, target = conversion.source, conversion.target
    of_head = _config_of_head(conversion.adapter)
    with _reported_of("--input", source):
        check_small_files(source)
        config_json, hf_config = load_config_json(str(source)), load_hf_config(str(source))
        held = SafetensorsFolder(source) if conversion.source_format == "hf" else None
        is_classifier = classifier_problem(config_json, hf_config) is None
        if not is_classifier and of_head is not None:
            padding = of_head.get("pad_token_id", config_json.get("pad_token_id"))
            config_json = as_classifier(config_json, str(source), padding)
            is_classifier = True
    dtype = conversion.dtype or _dtype_of(config_json, held, console)
    with console.phase("importing Megatron-Core"):
        from nemo_rl_moe.launch.setup import announce_moe
        from nemo_rl_moe.models.kept_tensors import find_kept
        from nemo_rl_moe.models.megatron.checkpoint.index import holds_mtp
        from nemo_rl_moe.models.megatron.model.memory_estimate import whole_model_parameters
        from nemo_rl_moe.models.megatron.model.router_settings import exported_config, setting_sources
        from nemo_rl_moe.models.megatron.model.transformer_config import (
            build_transformer_config,
            effective_moe_configuration,
        )
        from nemo_rl_moe.models.megatron.weights.starting_weights import set_starting_weights
    with _reported_of("--input", source):
        kept = find_kept(source, hf_config)
        is_trained = held is None and holds_mtp(source / MEGATRON_WEIGHTS_FOLDER)
    policy = _policy(source, dtype, mtp_num_layers=1 if is_trained else None)
    config = build_transformer_config(policy, hf_config)
    if held is not None:
        _check_size(held, whole_model_parameters(config, hf_config))
    # Random weights are not needed, since all weights are read. Sampling them would take longer than reading.
    config.perform_initialization = False
    announce_moe(console, effective_moe_configuration(config), setting_sources(policy, hf_config, config_json, config))
    with _process_group_of_one(policy):
        from nemo_rl_moe.models.megatron.model.gpt_model import build_model_chunks

        with console.phase("building the model"):
            heads = [Head.SCORE if is_classifier else Head.LOGPROBS]
            model = _Model(hf_config, config, build_model_chunks(policy, config, hf_config, heads), kept)
        with _reported_of("--input", source):
            with console.phase(f"reading {source}") as progress:
                notices = set_starting_weights(model.chunks, config, hf_config, source, policy.init_seed, progress)
            for line in notices:
                console.message(line)
            if conversion.adapter is not None:
                model = _with_adapter(model, conversion.adapter, is_merged=conversion.target_format != "adapter")
            has_layers = is_trained or kept is not None
            exported = exported_config(policy, hf_config, config_json, config, has_kept_tensors=has_layers)
            files = copied_model_files(source, exported.content, hf_config)
        num_parameters = sum(parameter.numel() for chunk in model.chunks for parameter in chunk.parameters())
        with (
            _reported_of("--output", target, "; no output is written"),
            console.phase(f"writing {target}") as progress,
            _staged(target) as staging,
        ):
            left_out: Sequence[str] = ()
            if model.lora is not None and conversion.target_format == "adapter":
                num_parameters = _write_adapter(model, model.lora, staging, source, conversion.experts or "fused")
            else:
                write = {"hf": _write_hugging_face, "megatron": _write_megatron}[conversion.target_format]
                left_out = write(model, staging, files, progress)
        for name in left_out:
            console.warn(left_out_line(name))
    if warning := missing_code_line(files):
        console.warn(warning)
    console.message(f"{target}: {num_parameters:,} parameters in {policy.precision}")
    if conversion.target_format != "adapter":
        console.message(_next_step(conversion.target_format, target, _class_of(config_json, heads)))


def _config_of_head(adapter: Path | None) -> Mapping[str, Any] | None:
    """Return the `config.json` beside a reward model's adapter, which brings a head, or an empty one. None: no head."""
    if adapter is None or not scores_sequences(adapter):
        return None
    return load_config_json(str(adapter)) if (adapter / "config.json").is_file() else {}


def _with_adapter(model: _Model, folder: Path, *, is_merged: bool) -> _Model:
    """Return the model with an adapter attached to its layers, or merged into them."""
    from nemo_rl_moe.models.families.linear_targets import target_problems
    from nemo_rl_moe.models.megatron.lora.attach import add_adapters
    from nemo_rl_moe.models.megatron.lora.merge import merge_adapters
    from nemo_rl_moe.models.megatron.lora.peft_folder import load_adapter

    lora = lora_of_folder(folder)
    if problems := target_problems(lora, model.hf_config):
        raise ConfigurationError(problems)
    add_adapters(model.chunks, model.config, model.hf_config, lora, seed=0)
    load_adapter(model.chunks, folder, lora.rank, model.hf_config)
    if is_merged:
        merge_adapters(model.chunks, model.config)
    return replace(model, lora=lora)


def _write_adapter(model: _Model, lora: LoraConfig, staging: Path, base: Path, form: ExpertForm) -> int:
    """Write only the adapter, and return the number of its parameters."""
    from nemo_rl_moe.models.megatron.lora.peft_folder import factors_on_first_rank, write_adapter

    factors = factors_on_first_rank(model.chunks)
    write_adapter(staging, factors, lora, model.hf_config, str(base), form)
    return sum(factor.numel() for factor in factors.values())


def _check_size(held: SafetensorsFolder, num_parameters: int) -> None:
    """Refuse a model that is much larger than its files, before memory is allocated for it."""
    num_stored = sum(math.prod(tensor.shape) for tensor in held.tensors.values())
    if num_parameters > MOST_TIMES * num_stored:
        raise ConfigurationError(
            f"--input: config.json describes a model of {num_parameters:,} parameters, and the files hold "
            f"{num_stored:,} numbers"
        )


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Yield the folder in which the output is assembled (see `staged`). Errors in this context name the output."""
    with staged(target) as staging:
        try:
            yield staging
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{staging}: ")
            raise ConfigurationError(f"--output: {target}: {reason}; no output is written") from error


def _class_of(config_json: Mapping[str, Any], heads: Sequence[Head]) -> str:
    """Return transformers' class that loads the model."""
    if Head.SCORE in heads:
        return "AutoModelForSequenceClassification"
    return "AutoModelForCausalLM" if vision_family_of(config_json) is None else "AutoModelForImageTextToText"


def _next_step(target_format: TargetFormat, target: Path, loaded_by: str) -> str:
    train = f"to train it: policy.model_name={target} policy.init=pretrained"
    return train if target_format == "megatron" else f"{train}; to load it: {loaded_by}.from_pretrained"


def _dtype_of(config_json: Mapping[str, Any], held: SafetensorsFolder | None, console: ConsoleLogger) -> NumberFormat:
    """Return the number format of most weights in the input's files, regardless of `config.json`, so that they are not
    rounded."""
    stated = config_json.get("dtype", config_json.get("torch_dtype"))
    if held is None:
        return _writable(stated or "float32", "config.json: dtype")
    formats = {
        name: _FORMAT_OF_TYPE[tensor.dtype] for name, tensor in held.tensors.items() if tensor.dtype in _FORMAT_OF_TYPE
    }
    sizes: Counter[str] = Counter()
    for name, number_format in formats.items():
        sizes[number_format] += math.prod(held.tensors[name].shape)
    # If no tensor has a readable type, reading the weights reports it.
    chosen = _writable(sizes.most_common(1)[0][0] if sizes else "float32", "most weights")
    if stated is not None and stated != chosen:
        console.message(
            f"config.json has {stated}, but most weights are {chosen}: the output is {chosen}; --dtype selects another"
            " format"
        )
    others = [name for name, number_format in formats.items() if number_format != chosen]
    if others and chosen != "float32":
        console.message(
            f"{len(others)} of {len(held.tensors)} tensors are not {chosen} but, for instance, "
            f"{formats[others[0]]} ({others[0]}): tensors that the model computes in {chosen} are rounded to it;"
            " --dtype float32 rounds nothing"
        )
    return chosen


def _writable(found: Any, what: str) -> NumberFormat:
    for number_format in NUMBER_FORMATS:
        if found == number_format:
            return number_format
    raise ConfigurationError(
        f"--input: {what}: got {shown(found)}, a format that convert cannot write; select the output's format with "
        f"--dtype: {' or '.join(NUMBER_FORMATS)}"
    )


def _policy(source: Path, dtype: NumberFormat, mtp_num_layers: int | None = None) -> PolicyConfig:
    """Return a `policy` section for one worker, in which all router settings are the model's own."""
    overrides = [
        "policy.init=pretrained",
        f"policy.precision={dtype}",
        "cluster.cpu_workers_per_node=1",
        "policy.train_global_batch_size=1",
        "policy.train_micro_batch_size=1",
        f"policy.megatron_cfg.mtp_num_layers={'null' if mtp_num_layers is None else mtp_num_layers}",
    ]
    chosen = load_config(_BASE_CONFIG, overrides, check_paths=False).policy.megatron_cfg.moe_transformer_fields
    overrides += [f"~policy.megatron_cfg.{name}" for name in chosen]
    # An override would be read as YAML, but a folder may be called `2024` or `[z]`.
    return load_config(_BASE_CONFIG, overrides, check_paths=False).policy.model_copy(update={"model_name": str(source)})


@contextmanager
def _process_group_of_one(policy: PolicyConfig) -> Iterator[None]:
    from nemo_rl_moe.models.megatron.model.parallel_state import destroy_parallel_state, initialize_parallel_state

    # No other process joins the group, so any free port works.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    initialize_parallel_state(policy.megatron_cfg, rank=0, world_size=1, local_rank=0, seed=0)
    try:
        yield
    finally:
        destroy_parallel_state()


def _write_hugging_face(
    model: _Model, staging: Path, files: Mapping[str, bytes], progress: Callable[[float], None]
) -> Sequence[str]:
    from nemo_rl_moe.models.megatron.weights.hf_export import save_weights

    write_beside = partial(write_model_files, files)
    return save_weights(
        model.chunks, model.config, model.hf_config, staging, write_beside, kept=model.kept, progress=progress
    )


def _write_megatron(
    model: _Model, staging: Path, files: Mapping[str, bytes], progress: Callable[[float], None]
) -> Sequence[str]:
    from nemo_rl_moe.models.kept_tensors import KEPT_FOLDER, write_kept
    from nemo_rl_moe.models.megatron.checkpoint.contents import sharded_model
    from nemo_rl_moe.models.megatron.checkpoint.save import start_write

    del progress  # Megatron-Core's writer reports no progress
    weights = staging / MEGATRON_WEIGHTS_FOLDER
    weights.mkdir(parents=True)
    write_model_files(files, staging)
    if model.kept is not None:
        write_kept(model.kept, staging / KEPT_FOLDER)
    write = start_write({"model": sharded_model(model.chunks)}, weights, snapshots=None)
    try:
        problem = write.finish()
    except BaseException:
        write.cancel()
        raise
    if problem is not None:
        raise CheckpointError(problem)
    return ()
