# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""A configuration of NeMo-RL as one of this package, with a line for each of its keys that has no counterpart.

Single keys follow the table in `nemo_rl_keys.py`; what several keys decide together is here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_moe.config.files import read_with_defaults, yaml_problem
from nemo_rl_moe.config.nemo_rl_keys import DATASETS, KnownDataset, row_of
from nemo_rl_moe.config.suggestions import shortened
from nemo_rl_moe.errors import ConfigurationError

BASES = {"sft": "sft.yaml", "dpo": "dpo.yaml", "grpo": "grpo_math_1B.yaml"}
"""Shipped configuration that the translation of each algorithm inherits from."""
MEGATRON = "policy.megatron_cfg"
NO_BOUND = 1.0e9
"""Bound that no importance-sampling ratio reaches: they end at e^20."""


@dataclass
class Translation:
    """A translated configuration.

    Attributes:
        algorithm: Its algorithm.
        values: Full key here to its value.
        changed: A line for each value that means something else here, or was read otherwise.
        without: A line for each key that asks for something and has no counterpart.
        idle: Keys without a counterpart that ask for nothing, and sections that are switched off.
    """

    algorithm: str
    values: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)

    def nested(self) -> dict[str, Any]:
        """The values as sections, over the shipped configuration that they inherit from."""
        tree: dict[str, Any] = {"defaults": BASES[self.algorithm]}
        for key, value in self.values.items():
            *sections, name = key.split(".")
            reduce(lambda section, part: section.setdefault(part, {}), sections, tree)[name] = value
        return tree

    def text(self, source: str) -> str:
        """The whole as YAML, what is to be known in comments below.

        Args:
            source: Name of the file that was translated.
        """
        # In a folder of NeMo-RL's, `defaults` would be a file of theirs.
        head = f"# From NeMo-RL's {source}; to be kept in a folder that has no {BASES[self.algorithm]} of NeMo-RL's."
        parts = [head, yaml.safe_dump(self.nested(), sort_keys=False, width=10_000).rstrip()]
        for title, lines in (
            ("Read otherwise:", self.changed),
            ("Without a counterpart:", self.without),
            ("Without a counterpart, and asking for nothing:", self.idle),
        ):
            if lines:
                parts += ["", f"# {title}", *(f"#   {line}" for line in lines)]
        return "\n".join(parts) + "\n"


def translate(path: Path) -> Translation:
    """Translates a file and what it inherits from.

    Raises:
        ConfigurationError: The file cannot be read, is no configuration of NeMo-RL, or none of SFT, DPO or GRPO.
    """
    theirs = _read(path)
    translation = Translation(_algorithm_of(theirs, path))
    off = [*_sections_off(theirs), *_sections_of_others(Theirs(theirs))]
    try:
        for key, value in _leaves(theirs):
            _translate_key(translation, key, value, off)
        for rule in _RULES:
            rule(Theirs(theirs), translation)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ConfigurationError(f"{path}: a value is not what NeMo-RL has in its place: {error}") from error
    return translation


@dataclass(frozen=True)
class Theirs:
    """Their configuration, read by full keys."""

    tree: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a key; the default where it is not there or null."""
        value: Any = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file")
    merged = read_with_defaults(path, shipped=False)
    for key, _ in _leaves(merged):
        if key.rpartition(".")[2] == "_override_":
            raise ConfigurationError(f"{path}: {key}: not supported: write the section as it is to be, in one file")
    try:
        with _their_resolvers():
            resolved = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{path}: {yaml_problem(error)}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


@contextmanager
def _their_resolvers() -> Iterator[None]:
    """While open, `${mul:...}` and the other functions of NeMo-RL's configurations are known."""
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "max": lambda a, b: max(a, b),
    }
    # OmegaConf 2.4 warns of the name that 2.3 has.
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    for name, function in functions.items():
        register(name, function, replace=True)
    try:
        yield
    finally:
        for name in functions:
            OmegaConf.clear_resolver(name)


def _algorithm_of(theirs: Mapping[str, Any], path: Path) -> str:
    policy = theirs.get("policy")
    engines = [policy.get(name) for name in ("megatron_cfg", "dtensor_cfg")] if isinstance(policy, Mapping) else []
    if not any(isinstance(engine, Mapping) and "enabled" in engine for engine in engines):
        raise ConfigurationError(
            f"{path}: not a configuration of NeMo-RL, which says policy.megatron_cfg.enabled or"
            " policy.dtensor_cfg.enabled; one of this package is checked with --config"
        )
    found = [name for name in BASES if isinstance(theirs.get(name), Mapping)]
    if len(found) != 1:
        others = [name for name in ("ppo", "rm", "distillation") if name in theirs]
        got = f"got {', '.join(found or others)}" if found or others else "none of them"
        raise ConfigurationError(f"{path}: expected one section of {', '.join(BASES)}: {got}")
    return found[0]


def _leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Full keys and values that are no sections; an empty section is one."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _sections_off(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Sections with `enabled: false`, the outermost ones, but for those whose values are kept here all the same."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if not isinstance(value, Mapping):
            continue
        if value.get("enabled") is False and key not in _KEPT_WHILE_OFF:
            yield key
        else:
            yield from _sections_off(value, f"{key}.")


_KEPT_WHILE_OFF = (
    "checkpointing",
    "policy.dynamic_batching",
    "policy.sequence_packing",
    "policy.generation.colocated",
    "grpo.reward_shaping",
)


def _sections_of_others(theirs: Theirs) -> Iterator[str]:
    """Sections of backends and loggers that another key does not choose."""
    backend = theirs.get("policy.generation.backend", "vllm")
    for section, is_read in (
        ("policy.generation.mcore_generation_config", backend == "megatron"),
        ("policy.generation.vllm_cfg", backend == "vllm"),
        ("policy.generation.vllm_kwargs", backend == "vllm"),
        ("policy.generation.refit_cfg", theirs.get("policy.generation.refit_transport") is not None),
        ("logger.swanlab", theirs.get("logger.swanlab_enabled", False)),
        ("logger.gpu_monitoring", theirs.get("logger.monitor_gpus", False)),
    ):
        if not is_read and theirs.get(section) is not None:
            yield section


def _translate_key(translation: Translation, key: str, value: Any, off: list[str]) -> None:
    """Carries one key over by its row, or says why not."""
    section = next((above for above in off if key.startswith(f"{above}.") or key == above), None)
    if section is not None:
        if (line := f"{section}.*: switched off, or not read") not in translation.idle:
            translation.idle.append(line)
        return
    row = row_of(key)
    if row is None:
        translation.without.append(f"{key}: {_shown(value)}: not a key that this translator knows")
    elif row.ours is not None:
        if row.convert is not None and row.ours.partition(".")[0] in _sections_here(translation.algorithm):
            translation.values[row.ours] = row.convert(value)
    elif value in (None, False, 0, "", row.off) or value in ({}, []):
        translation.idle.append(f"{key}: {_shown(value)}")
    else:
        translation.without.append(f"{key}: {_shown(value)}: {row.note}")


def _sections_here(algorithm: str) -> set[str]:
    common = {"policy", "checkpointing", "logger", "cluster", "data", algorithm}
    return common | ({"loss_fn", "env"} if algorithm == "grpo" else set())


def _shown(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return shortened(" ".join(text.split()))


def _engine(theirs: Theirs, translation: Translation) -> None:
    """Layout, optimizer and learning rate of whichever engine is on."""
    values = translation.values
    uses_megatron = theirs.get(f"{MEGATRON}.enabled", False)
    engine = MEGATRON if uses_megatron else "policy.dtensor_cfg"
    context = theirs.get(f"{engine}.context_parallel_size", 1)
    if context > 1:
        translation.changed.append(f"{engine}.context_parallel_size: {context}: 1, as only that is supported")
    if not uses_megatron:
        for key in [key for key in values if key.startswith(f"{MEGATRON}.")]:
            del values[key]
        translation.changed.append("policy.dtensor_cfg: Megatron-Core trains here, in the same layout")
        values[f"{MEGATRON}.tensor_model_parallel_size"] = theirs.get("policy.dtensor_cfg.tensor_parallel_size", 1)
        values[f"{MEGATRON}.pipeline_model_parallel_size"] = 1
        values[f"{MEGATRON}.expert_model_parallel_size"] = theirs.get("policy.dtensor_cfg.expert_parallel_size", 1)
        values[f"{MEGATRON}.expert_tensor_parallel_size"] = 1
        _torch_optimizer(theirs, translation)
        _torch_scheduler(theirs, translation)
    else:
        if theirs.get(f"{MEGATRON}.optimizer.optimizer", "adam") != "adam":
            translation.changed.append(f"{MEGATRON}.optimizer.optimizer: Adam with decoupled weight decay")
        if theirs.get(f"{MEGATRON}.scheduler.lr_warmup_init"):
            translation.changed.append(f"{MEGATRON}.scheduler.lr_warmup_init: the warm-up begins at 0")
    if chunk_size := theirs.get("policy.logprob_chunk_size"):
        values["policy.logprob_chunk_size"] = chunk_size
    values[f"{MEGATRON}.context_parallel_size"] = 1
    values[f"{MEGATRON}.sequence_parallel"] = values.get(f"{MEGATRON}.tensor_model_parallel_size", 1) > 1
    values[f"{MEGATRON}.activation_checkpointing"] = _recomputed(theirs, engine)
    if values.get(f"{MEGATRON}.moe_router_load_balancing_type") == "none":
        values.setdefault(f"{MEGATRON}.moe_aux_loss_coeff", 0.0)


def _recomputed(theirs: Theirs, engine: str) -> str:
    if not theirs.get(f"{engine}.activation_checkpointing", False):
        return "none"
    is_selective = theirs.get(f"{engine}.recompute_granularity", "full") == "selective"
    return "moe" if is_selective and theirs.get(f"{engine}.recompute_modules", []) == ["moe"] else "full"


def _torch_optimizer(theirs: Theirs, translation: Translation) -> None:
    """AdamW of PyTorch and its kin."""
    name, section = theirs.get("policy.optimizer.name", "torch.optim.AdamW"), f"{MEGATRON}.optimizer"
    if not name.endswith("Adam") and not name.endswith("AdamW"):
        translation.changed.append(f"policy.optimizer.name: {name}: Adam with decoupled weight decay")
    for key, ours in (("lr", "lr"), ("weight_decay", "weight_decay"), ("eps", "adam_eps")):
        if (value := theirs.get(f"policy.optimizer.kwargs.{key}")) is not None:
            translation.values[f"{section}.{ours}"] = value
    betas = theirs.get("policy.optimizer.kwargs.betas", [0.9, 0.999])
    translation.values |= {f"{section}.adam_beta1": betas[0], f"{section}.adam_beta2": betas[1]}


def _torch_scheduler(theirs: Theirs, translation: Translation) -> None:
    """A chain of PyTorch's schedulers: a warm-up, and what follows it."""
    section, values = f"{MEGATRON}.scheduler", translation.values
    steps = theirs.get("policy.scheduler", [])
    steps = [step for step in (steps if isinstance(steps, list) else [steps]) if isinstance(step, Mapping)]
    values |= {f"{section}.lr_decay_style": "constant", f"{section}.lr_warmup_iters": 0}
    named = [(str(step["name"]).rpartition(".")[2], step.get("kwargs", {})) for step in steps if "name" in step]
    if named and named[0][0] == "LinearLR" and named[0][1].get("start_factor", 1 / 3) < 1.0:
        values[f"{section}.lr_warmup_iters"] = named.pop(0)[1].get("total_iters", 5)
    warmup = values[f"{section}.lr_warmup_iters"]
    for name, arguments in named:
        if name == "ConstantLR" and arguments.get("factor", 1.0) == 1.0:
            continue
        style, length = {"CosineAnnealingLR": ("cosine", "T_max"), "LinearLR": ("linear", "total_iters")}.get(
            name, ("", "")
        )
        if style and length in arguments:
            values |= {f"{section}.lr_decay_style": style, f"{section}.lr_decay_iters": warmup + arguments[length]}
            # PyTorch's own defaults: to 0 by the cosine, to the whole rate in a line.
            factor = arguments.get("end_factor", 1.0) if name == "LinearLR" else 0.0
            end = arguments.get("eta_min", factor * values.get(f"{MEGATRON}.optimizer.lr", 0))
            values[f"{MEGATRON}.optimizer.min_lr"] = end
        else:
            translation.without.append(f"policy.scheduler: {name}: {_shown(dict(arguments))}: no such schedule")
    if warmup:
        translation.changed.append("policy.scheduler: the warm-up begins at 0")


def _batches_of_validation(theirs: Theirs, translation: Translation) -> None:
    """As many samples of a validation as there, in batches of training."""
    name = translation.algorithm
    number = theirs.get(f"{name}.val_batches")
    if name == "grpo" or number is None:
        return
    if number <= 0:
        translation.values[f"{name}.val_batches"] = None
        return
    size, ours = theirs.get(f"{name}.val_global_batch_size"), theirs.get("policy.train_global_batch_size")
    batches = ceil(number * size / ours) if size and ours else number
    translation.values[f"{name}.val_batches"] = batches
    if size and size != ours:
        translation.changed.append(f"{name}.val_batches: {number} of {size} samples: {batches} of {ours}")


def _chat_template(theirs: Theirs, translation: Translation) -> None:
    template = theirs.get("policy.tokenizer.chat_template")
    if template is None:
        return
    if "{" in template:
        translation.without.append(
            f"policy.tokenizer.chat_template: {_shown(template)}: write it into a file, and name that"
        )
    else:
        translation.values["policy.tokenizer.chat_template"] = template


def _estimator(theirs: Theirs, translation: Translation) -> None:
    """Advantages; older configurations have the switches in the section of the loop."""
    section, values = "grpo.adv_estimator", translation.values
    name = theirs.get(f"{section}.name", "grpo")
    normalize = theirs.get(f"{section}.normalize_rewards", theirs.get("grpo.normalize_rewards", True))
    leave_one_out = theirs.get(
        f"{section}.use_leave_one_out_baseline", theirs.get("grpo.use_leave_one_out_baseline", True)
    )
    is_normalized = theirs.get(f"{section}.normalize_advantages", False)
    choice = {
        "grpo": ("grpo", normalize),
        "reinforce_plus_plus": (
            "reinforce_plus_plus_baseline" if theirs.get(f"{section}.minus_baseline", True) else "reinforce_plus_plus",
            True,
        ),
        "raw_reward": ("reinforce_plus_plus" if is_normalized else "reinforce", is_normalized),
    }.get(name)
    if choice is None:
        reason = "it is here too, but needs env.reward_weights, by name" if name == "gdpo" else "no such estimator"
        translation.without.append(f"{section}.name: {name}: {reason}; grpo stands there")
        choice = ("grpo", normalize)
    values[f"{section}.name"], values[f"{section}.normalize_rewards"] = choice
    values[f"{section}.use_leave_one_out_baseline"] = choice[0] == "grpo" and leave_one_out
    if choice[0] == "grpo" and leave_one_out and normalize:
        translation.changed.append(
            f"{section}: leaving one out, the advantage is divided by the whole group's standard deviation; theirs"
            " leaves the response out there too"
        )
    elif choice[0].startswith("reinforce_plus_plus"):
        translation.changed.append(f"{section}.name: {choice[0]} counts each response once, theirs each token")


def _lengths(theirs: Theirs, translation: Translation) -> None:
    """Room of the response beside the prompt, and the punishment of long ones."""
    values, shaping = translation.values, "grpo.reward_shaping"
    longest = theirs.get("policy.max_total_sequence_length")
    asked = theirs.get("policy.generation.max_new_tokens", longest)
    if longest is None or asked is None:
        return
    room = max(longest - theirs.get("data.max_input_seq_length", longest), longest // 2)
    values["policy.generation.max_new_tokens"] = number = min(asked, room)
    if number != asked:
        translation.changed.append(
            f"policy.generation.max_new_tokens: {asked}: {number}, which leaves {longest - number} of"
            f" policy.max_total_sequence_length {longest} to the prompt; longer prompts are left out"
        )
    for name in ("overlong_buffer_length", "overlong_buffer_penalty"):
        if (value := theirs.get(f"{shaping}.{name}")) is not None:
            values[f"{shaping}.{name}"] = value
    end = theirs.get(f"{shaping}.max_response_length")
    if theirs.get(f"{shaping}.enabled", False) and end != number:
        translation.changed.append(f"{shaping}.max_response_length: {end}: the buffer ends at {number}")


def _policy_loss(theirs: Theirs, translation: Translation) -> None:
    """Objective, divergence and importance-sampling correction."""
    values, loss = translation.values, "loss_fn"
    if theirs.get(f"{loss}.use_cispo", False):
        values[f"{loss}.objective"] = "cispo"
    elif theirs.get(f"{loss}.disable_ppo_ratio", False):
        values[f"{loss}.objective"] = "reinforce"
    in_reward = bool(
        theirs.get(f"{loss}.use_kl_in_reward", False) and theirs.get(f"{loss}.reference_policy_kl_penalty")
    )
    values[f"{loss}.use_kl_in_reward"] = in_reward
    kind = theirs.get(f"{loss}.reference_policy_kl_type", "k3")
    values[f"{loss}.reference_policy_kl_type"] = "k1" if in_reward else kind
    values[f"{loss}.reference_policy_kl_gradient"] = "estimate" if in_reward else "divergence"
    if in_reward:
        translation.changed.append(f"{loss}.use_kl_in_reward: of whole responses, by k1, before advantages")
    elif theirs.get(f"{loss}.use_on_policy_kl_approximation", False):
        translation.changed.append(
            f"{loss}.use_on_policy_kl_approximation: weighed by the policy over that before the step, not the engine's"
        )
    if not theirs.get(f"{loss}.use_importance_sampling_correction", False):
        values[f"{loss}.importance_sampling_correction"] = "none"
        return
    kind = theirs.get(f"{loss}.truncated_importance_sampling_type")
    corrections = {None: "truncated", "tis": "truncated", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}
    values[f"{loss}.importance_sampling_correction"] = corrections.get(kind, kind)
    upper = theirs.get(f"{loss}.truncated_importance_sampling_ratio")
    values[f"{loss}.importance_sampling_ratio_max"] = NO_BOUND if kind is None or upper is None else upper
    lower = theirs.get(f"{loss}.truncated_importance_sampling_ratio_min")
    values[f"{loss}.importance_sampling_ratio_min"] = None if kind is None else lower
    if theirs.get(f"{loss}.sequence_level_importance_ratios", False):
        values[f"{loss}.importance_sampling_level"] = "sequence"


def _generation(theirs: Theirs, translation: Translation) -> None:
    """Engines, and the GPUs that they have."""
    values, key = translation.values, "policy.generation.backend"
    backend = theirs.get(key, "vllm")
    values[key] = backend if backend in ("vllm", "megatron") else "vllm"
    if backend != values[key]:
        translation.changed.append(f"{key}: {backend}: vllm")
    dtype = theirs.get("policy.generation.vllm_cfg.precision")
    if dtype in ("float32", "bfloat16", "float16"):
        values["policy.generation.vllm.dtype"] = dtype
    elif dtype is not None:
        translation.without.append(f"policy.generation.vllm_cfg.precision: {dtype}: no such format of engines")


def _machines(theirs: Theirs, translation: Translation) -> None:
    """Machines of the policy, and of engines that have their own."""
    values = translation.values
    nodes, gpus = theirs.get("cluster.num_nodes", 1), theirs.get("cluster.gpus_per_node", 1)
    place = "policy.generation.colocated"
    if translation.algorithm == "grpo" and theirs.get(f"{place}.enabled", True) is False:
        own_gpus, own_nodes = theirs.get(f"{place}.resources.gpus_per_node"), theirs.get(f"{place}.resources.num_nodes")
        if nodes == 1:
            values["cluster.roles.generation"] = {"num_nodes": 1, "gpus_per_node": own_gpus}
            gpus -= own_gpus or 0
        else:
            values["cluster.roles.generation"] = {"num_nodes": own_nodes, "gpus_per_node": own_gpus or gpus}
            nodes -= own_nodes or 0
        translation.changed.append(f"{place}.enabled: the engines' GPUs are counted beside the policy's")
    values |= {"cluster.num_nodes": nodes, "cluster.gpus_per_node": gpus}


def _data(theirs: Theirs, translation: Translation) -> None:
    """Both sets of samples, and the names of their keys."""
    values = translation.values
    for part in ("train", "validation"):
        section = theirs.get(f"data.{part}")
        if isinstance(section, list):
            translation.without += [f"data.{part}: {_shown(other)}: one set of samples" for other in section[1:]]
            section = section[0]
        if not isinstance(section, Mapping):
            if part == "validation":
                values["data.validation"] = None
            continue
        section = {**theirs.get("data.default", {}), **section}
        name = section.get("dataset_name")
        path = section.get("data_path")
        known = KnownDataset(path or str(name)) if path or name not in DATASETS else DATASETS[name]
        values[f"data.{part}.path"] = known.path
        values[f"data.{part}.split"] = section.get("split") or known.split
        if known.to_do:
            translation.without.append(f"data.{part}.dataset_name: {name}: {known.path}; {known.to_do}")
        elif path is None and name not in DATASETS:
            translation.without.append(f"data.{part}.dataset_name: {name}: a data set of theirs; name its file")
        if translation.algorithm == "grpo":
            values[f"data.{part}.num_items"] = None
            keys = section.get("input_key", known.prompt_key), section.get("output_key", known.answer_key)
            if part == "train":
                values |= {"data.prompt_key": keys[0], "data.answer_key": keys[1]}
            elif keys != (values["data.prompt_key"], values["data.answer_key"]):
                translation.without.append(
                    f"data.{part}: keys {keys[0]} and {keys[1]}: those of the training data hold"
                )
    if translation.algorithm == "grpo":
        values["data.prompt_template"] = None
        if (file := theirs.get("data.default.prompt_file")) is not None:
            translation.without.append(
                f"data.default.prompt_file: {file}: put its text into data.prompt_template, {{prompt}} in place of {{}}"
            )


def _environment(theirs: Theirs, translation: Translation) -> None:
    """Scoring by math-verify, and lines shown."""
    if theirs.get("env.math") is not None:
        translation.values["env.name"] = "math"
        translation.values["env.num_workers"] = theirs.get("env.math.num_workers", 8)
    number = theirs.get("logger.num_val_samples_to_print")
    if number is not None:
        translation.values["logger.num_samples_to_print"] = number


def _of_grpo(rule: Callable[[Theirs, Translation], None]) -> Callable[[Theirs, Translation], None]:
    return lambda theirs, translation: rule(theirs, translation) if translation.algorithm == "grpo" else None


_RULES = (
    _engine,
    _batches_of_validation,
    _chat_template,
    _machines,
    _data,
    *(_of_grpo(rule) for rule in (_estimator, _lengths, _policy_loss, _generation, _environment)),
)
