# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Setup of a run before its loop: checks the model, starts Ray and workers, and shows the effective settings."""

import copy
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from nemo_rl_moe.algorithms.step_recorder import RunSummary
from nemo_rl_moe.config.algorithm import algorithm_of
from nemo_rl_moe.config.schema import MasterConfig, PairMasterConfig, SFTMasterConfig
from nemo_rl_moe.config.schema_policy import PolicyConfig, TokenizerConfig
from nemo_rl_moe.config.schema_run import DataConfig, DataSourceConfig
from nemo_rl_moe.data.corrected_templates import correct_template
from nemo_rl_moe.data.image_files import ImageReader, image_folder
from nemo_rl_moe.data.image_tokens import ImageTokenizer, RecordImages, image_tokenizer
from nemo_rl_moe.data.preferences import PreferenceDataset
from nemo_rl_moe.data.sft import TokenizedDataset
from nemo_rl_moe.data.sources import load_limit
from nemo_rl_moe.data.speech import Speech, describe_speech, load_published
from nemo_rl_moe.data.template_inputs import run_wide_inputs
from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.distributed.cluster import RayCluster
from nemo_rl_moe.errors import ConfigurationError, UserError, counted, report_problems
from nemo_rl_moe.launch.early_start import EarlyCluster
from nemo_rl_moe.models.classifiers import (
    as_classifier,
    classifier_problem,
    is_classifier_config,
    require_token_predictor,
    scored_pad_token_id,
)
from nemo_rl_moe.models.hf_files import (
    HubModel,
    ModelSource,
    check_weights,
    fetching_problem,
    find_model,
    holds_megatron_weights,
    load_config_json,
    load_hf_config,
)
from nemo_rl_moe.models.image_rules import ImageRule, load_image_rule
from nemo_rl_moe.models.interfaces import Head
from nemo_rl_moe.models.model_files import CONFIG_FILE, collect_model_files, config_file
from nemo_rl_moe.models.peft_checks import adapter_problems
from nemo_rl_moe.models.peft_files import scores_sequences
from nemo_rl_moe.models.position_limit import too_long_sequences
from nemo_rl_moe.models.safetensors_folder import SafetensorsFolder
from nemo_rl_moe.runs.folder.expert_load import FOLDER_NAME
from nemo_rl_moe.runs.folder.saved_samples import SAMPLES_FILE_NAME
from nemo_rl_moe.runs.loggers.console import ConsoleLogger
from nemo_rl_moe.runs.loggers.factory import mlflow_tracking_uri
from nemo_rl_moe.tools.detection import calls_line

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from transformers import PreTrainedTokenizerBase

    from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy


Samples = TypeVar("Samples", TokenizedDataset, PreferenceDataset)
Opened = TypeVar("Opened")


@dataclass(frozen=True)
class PreparedModel:
    """The model of a run as the driver knows it.

    Attributes:
        files: Name of a file next to exported weights -> its content.
        policy: The model's settings as a `policy` section, also for a role.
        speech: The model's chat format, from the model's files.
        image_rule: Rule by which the model reads images. None: a text-only model.
        kept: Tensors of the model's folder that are not loaded, and that exported folders contain unchanged.
    """

    source: ModelSource
    hf_config: Any
    tokenizer: "PreTrainedTokenizerBase"
    files: Mapping[str, bytes]
    policy: PolicyConfig
    speech: Speech
    image_rule: ImageRule | None = None
    kept: SafetensorsFolder | None = None


def prepare_model(
    policy: PolicyConfig,
    console: ConsoleLogger,
    role: str | None = None,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> PreparedModel:
    """Fetch and check the model, so that its problems are reported before Ray starts. Load the tokenizer, and return
    both.

    Args:
        role: Role of the model. None: the policy. Only the policy gets warnings about router settings, since roles use
            their own.
        template_kwargs: The run's variables for the chat template.
    """
    source, folder = _fetched(policy, console)
    with console.phase("checking the model" if role is None else f"checking the model of the {role}"):
        hf_config, config_json = load_hf_config(str(folder)), load_config_json(str(folder))
        if problems := too_long_sequences(policy, config_json):
            raise ConfigurationError(problems)
        image_rule = load_image_rule(str(folder), hf_config)
        check_weights(policy, folder)
        base = None if policy.init == "random" else folder
        if policy.lora is not None and (problems := adapter_problems(policy.lora, base)):
            raise ConfigurationError(problems)
        # Imported here, so that the phase reports the seconds that importing Megatron-Core takes.
        from nemo_rl_moe.models.kept_tensors import find_kept
        from nemo_rl_moe.models.megatron.model.router_settings import exported_config
        from nemo_rl_moe.models.megatron.model.transformer_config import (
            build_transformer_config,
            num_trained_mtp_layers,
        )

        transformer = build_transformer_config(policy, hf_config)
        kept, is_trained = find_kept(base, hf_config), num_trained_mtp_layers(policy, hf_config) > 0
        if is_trained and kept is None and base is not None and not holds_megatron_weights(base):
            raise ConfigurationError(
                f"policy.megatron_cfg.mtp_num_layers: got {policy.megatron_cfg.mtp_num_layers}, but {base} has no"
                " tensors of multi-token prediction; expected null, or a folder with them"
            )
        has_layers = is_trained or kept is not None
        exported = exported_config(policy, hf_config, config_json, transformer, has_kept_tensors=has_layers)
    if role is None:
        for line in model_warnings(policy, hf_config, config_json, transformer):
            console.warn(line)
    tokenizer = load_tokenizer(policy.tokenizer.name, policy.tokenizer.chat_template)
    files = collect_model_files(exported.content, hf_config, folder, tokenizer)
    use_corrected_template(tokenizer, policy.tokenizer, console)  # `files` keep the model's template
    speech = describe_speech(tokenizer, load_published(str(folder)), template_kwargs)
    if role is None:
        announce_speech(speech, tokenizer, console)
    return PreparedModel(source, hf_config, tokenizer, files, policy, speech, image_rule, None if is_trained else kept)


def announce_speech(speech: Speech, tokenizer: "PreTrainedTokenizerBase", console: ConsoleLogger) -> None:
    """Show the model's chat format and its format of tool calls."""
    for line in (*speech.lines(), calls_line(tokenizer)):
        if line is not None:
            console.message(line)
    for line in speech.warnings():
        console.warn(line)


def use_corrected_template(
    tokenizer: "PreTrainedTokenizerBase", settings: TokenizerConfig, console: ConsoleLogger
) -> None:
    """Use this package's corrected chat template, and report it, if the model's template loses parts of conversations.

    A template that the user has set is not replaced.
    """
    if settings.chat_template is None and (line := correct_template(tokenizer, settings.corrected_template)):
        console.message(line)


def model_warnings(
    policy: PolicyConfig, hf_config: Any, config_json: Mapping[str, Any], transformer: "TransformerConfig"
) -> list[str]:
    """Return a line for each warning about the model's settings."""
    from nemo_rl_moe.models.megatron.model.router_settings import (
        SIZES_OF_THE_MODEL,
        exported_config,
        setting_warnings,
    )

    exported = exported_config(policy, hf_config, config_json, transformer)
    lines = setting_warnings(policy, hf_config, config_json, transformer)
    for name in exported.not_expressed:
        value = getattr(transformer, name)
        if name in SIZES_OF_THE_MODEL:
            lines.append(
                f"{name}: {value} is not what the model's config.json says: exported weights do not load; change it in"
                " config.json"
            )
        else:
            lines.append(
                f"{name}: {value} has no place in a {hf_config.model_type} config.json: exported weights compute "
                "something else in transformers"
            )
    return lines


def _fetched(policy: PolicyConfig, console: ConsoleLogger) -> tuple[ModelSource, Path]:
    if Path(policy.model_name).is_dir():
        source = find_model(policy)
    else:
        with console.phase(f"fetching {policy.model_name}") as progress:
            source = find_model(policy, progress)
    return source, source.folder()


_LONGEST_LIST_SHOWN = 4
EFFECTIVE_MOE_FILE = "effective_moe_configuration"
MOE_SOURCES_FILE = "effective_moe_configuration_sources"


def read_samples(
    load: Callable[..., Samples],
    config: SFTMasterConfig | PairMasterConfig,
    source: DataSourceConfig,
    tokenizer: Any,
    console: ConsoleLogger,
    image_rule: ImageRule | None,
    speech: Speech,
) -> Samples:
    """Read, tokenise and return one set of samples, and report truncated, dropped and skipped samples.

    Args:
        load: `load_sft_dataset` or `load_preferences`.
        image_rule: Rule by which the model reads images. None: a text-only model.
    """
    longest = config.policy.max_total_sequence_length
    with console.phase(f"reading {source.path}"), load_limit(config.data.load_timeout_s, source.path):
        samples = load(
            source.path,
            source.split,
            tokenizer,
            longest,
            config.data.on_bad_line,
            run_wide=run_wide_inputs(config.data.tools, config.data.chat_template_kwargs),
            images=RecordImages(config.data.image_key, images_of_data(config.data, source.path, tokenizer, image_rule)),
            speech=speech,
            keys=config.data.keys,
        )
    console.message(samples.report.summary())
    for line in samples.report.warnings():
        console.warn(line)
    return samples


def images_of_data(
    data: DataConfig, path: str | None, tokenizer: Any, image_rule: ImageRule | None
) -> ImageTokenizer | None:
    """Return the object that tokenises a data set's images, or None for a text-only model."""
    if image_rule is None:
        return None
    reader = ImageReader(image_folder(path, data.image_root), data.max_image_pixels)
    return image_tokenizer(image_rule, tokenizer, reader)


def fetch_on_machines(cluster: RayCluster, model: HubModel) -> None:
    """Fetch a model from the hub on every machine of the run that does not find it in its cache (HF_HOME)."""
    if problems := [problem for problem in cluster.call_on_each_machine(fetching_problem, model) if problem]:
        raise ConfigurationError(list(dict.fromkeys(problems)))


class ModelRun:
    """A command that runs a model without training it. The command calls `prepare_model`, then `start_policy`.

    The run is a context manager. At its end, everything that these methods and `use` opened is closed in reverse order.
    """

    def __init__(self, config: MasterConfig, console: ConsoleLogger):
        self.config = config
        self.console = console
        self._opened = ExitStack()
        self._model: PreparedModel | None = None
        self._early_cluster: EarlyCluster | None = None
        self._cluster: RayCluster | None = None
        self._policy: MegatronPolicy | None = None
        self._scores_sequences = algorithm_of(config).scores_sequences

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, UserError) and self._early_cluster is not None and self._early_cluster.is_starting:
            report_problems(error)  # now, because Ray cannot be stopped before it has started
        self._opened.__exit__(kind, error, traceback)

    def use(self, context: AbstractContextManager[Opened]) -> Opened:
        """Enter a context for the rest of the run, and return its value."""
        return self._opened.enter_context(context)

    def prepare_model(self) -> PreparedModel:
        """Fetch and check the model, load the tokenizer, and return both. Begin to start Ray in the background.

        If the algorithm scores sequences, the files of saved weights describe a sequence classifier.
        """
        kwargs = self.config.data.chat_template_kwargs
        self._model = prepare_model(self.config.policy, self.console, template_kwargs=kwargs)
        if self._scores_sequences:
            self._model = model_as_classifier(self._model)
        else:
            _require_token_predictors(self._model)
        # Ray starts while data is read. It does not start earlier, so that problems of a model are reported without
        # waiting for it.
        self._early_cluster = EarlyCluster(self.config)
        self._opened.callback(self._early_cluster.close)
        return self._model

    def stop_reason(self) -> str | None:
        """Return a request to stop that has to wait for the end of a step, or None. Without training, requests never
        wait."""
        return None

    @property
    def cluster(self) -> RayCluster:
        """The Ray cluster, known after `start_policy`."""
        assert self._cluster is not None
        return self._cluster

    def start_policy(self) -> "MegatronPolicy":
        """Start Ray and the policy's workers, for forward passes only. Return the policy."""
        return self._start_workers(seed=0, num_steps=None, keep_reference=False)

    def start_places(self, role: str) -> RayCluster:
        """Reserve the machines of a role for the rest of the run, and return them as a cluster."""
        place = RayCluster(self.config.cluster.place_of(role), beside=self.cluster)
        self._opened.callback(place.shutdown)
        return place

    def _start_workers(self, *, seed: int, num_steps: int | None, keep_reference: bool) -> "MegatronPolicy":
        from nemo_rl_moe.models.policy.lm_policy import MegatronPolicy  # imports Megatron-Core, which takes seconds

        model = self._model
        assert model is not None  # `prepare_model` has been called
        assert self._early_cluster is not None
        with self.console.phase("starting Ray"):
            self._cluster = self._early_cluster.get()
        if model.source.hub is not None and not self.cluster.is_local:
            with self.console.phase(f"fetching {model.source.hub.name} on every machine that lacks it"):
                fetch_on_machines(self.cluster, model.source.hub)
        with self.console.phase(f"starting {counted(self.config.cluster.world_size, 'worker')}"):
            self._policy = MegatronPolicy(
                self.config,
                self.cluster,
                seed=seed,
                num_steps=num_steps,
                source=model.source,
                model_files=model.files,
                kept=model.kept,
                keep_reference=keep_reference,
                heads=[Head.SCORE if self._scores_sequences else Head.LOGPROBS],
            )
        self._opened.callback(self._policy.shutdown)
        for line in self._policy.notices:
            self.console.message(line)
        return self._policy


def require_adapter_of_token_predictor(key: str, path: str) -> None:
    """Raise a `ConfigurationError` if an adapter is that of a reward model."""
    if scores_sequences(Path(path)):
        raise ConfigurationError(
            f"{key}: got {path}, an adapter of a reward model with its head, expected one of a model that predicts"
            " tokens"
        )


def _require_token_predictors(model: PreparedModel) -> None:
    """Raise a `ConfigurationError` if a model or its initial adapter, a run's checkpoint, is of a reward model."""
    policy = model.policy
    require_token_predictor(json.loads(model.files[CONFIG_FILE]), "policy.model_name", policy.model_name)
    path = None if policy.lora is None else policy.lora.path
    if path is not None:
        require_adapter_of_token_predictor("policy.lora.path", path)


def model_as_classifier(model: PreparedModel) -> PreparedModel:
    """Return the model with the files of a sequence classifier, and with the tokenizer's padding token if it has
    none.

    Raises:
        ConfigurationError: The model is a classifier with several labels, or transformers has no classifier of it.
    """
    hf_config, before = copy.deepcopy(model.hf_config), json.loads(model.files[CONFIG_FILE])
    if is_classifier_config(before) and (problem := classifier_problem(before, hf_config)):
        raise ConfigurationError(f"policy.model_name: got {model.policy.model_name}, {problem}")
    hf_config.pad_token_id = scored_pad_token_id(hf_config, model.tokenizer)
    content = as_classifier(before, model.policy.model_name, hf_config.pad_token_id)
    return replace(model, hf_config=hf_config, files={**model.files, CONFIG_FILE: config_file(content)})


def announce_moe(console: ConsoleLogger, moe_configuration: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Show the effective router settings with their sources. Defaults of a feature that is off are not shown."""
    if not moe_configuration:
        console.message("the model has no MoE layers: there is nothing to track")
        return
    in_force = {
        name: value
        for name, value in moe_configuration.items()
        if value is not None and value is not False and (name in sources or _has_effect(name, moe_configuration))
    }
    console.message("MoE configuration in force (null and false left out):")
    for name, value in in_force.items():
        console.message(f"  {name}: {_short(value)}" + (f"  ({sources[name]})" if name in sources else ""))
    for name in sorted(name for name in in_force if name.startswith("moe_router_force_")):
        console.warn(
            f"FORCED ROUTING: policy.megatron_cfg.{name} is {in_force[name]}. The router's own choices are overruled: "
            "this run is a benchmark or a drill, and what it trains is worthless."
        )


def _has_effect(name: str, moe_configuration: Mapping[str, Any]) -> bool:
    """Return whether a default has an effect. It has none if its feature is off."""
    if name.startswith(("moe_deepep_", "moe_flex_", "moe_hybridep_", "moe_ncclep_")):
        return bool(moe_configuration.get("moe_token_dispatcher_type") == "flex")
    if name == "moe_router_bias_update_rate":
        return bool(moe_configuration.get("moe_router_enable_expert_bias"))
    return name != "moe_token_drop_policy" or moe_configuration.get("moe_expert_capacity_factor") is not None


def _short(value: Any) -> Any:
    """Return a value unchanged, except a long list: return the runs of its equal entries, such as `3 x 0, 58 x 1`."""
    if not isinstance(value, list) or len(value) <= _LONGEST_LIST_SHOWN:
        return value
    return ", ".join(f"{len(list(run))} x {entry}" for entry, run in itertools.groupby(value))


def summarise(
    config: MasterConfig,
    summary: RunSummary,
    run_folder: Path,
    weights: Path | None,
    scoring: Sequence[str] = (),
    *,
    loggers: Collection[str],
) -> str:
    """Return a text of a few lines on the run's results, problems with rewards (`scoring`), and files."""
    lines = [f"\n{summary.num_steps} steps done."]
    for name in ("loss", "accuracy"):
        if f"val/{name}" in summary.last_validation:
            first, last = summary.first_validation[f"val/{name}"], summary.last_validation[f"val/{name}"]
            only_one = summary.first_validation == summary.last_validation
            lines.append(
                f"  validation {name}: {last:.4f}" if only_one else f"  validation {name}: {first:.4f} -> {last:.4f}"
            )
    if "train/moe/load_balancing_loss" in summary.last_training:
        balance = summary.last_training["train/moe/load_balancing_loss"]
        lines.append(f"  load balancing loss of the last step: {balance:.4f} (1 is perfect balance)")
    if "train/refit/logprob_gap" in summary.last_training:
        gap = summary.last_training["train/refit/logprob_gap"]
        lines.append(
            f"  refit check of the last step: log-probs of engine and trainer differ by {gap:.1e} nats at most"
        )
    lines += [
        *scoring,
        "Where to look:",
        f"  the run on one page           nemo-rl-moe report {run_folder}",
        f"  every metric, a line a step   {run_folder / 'metrics.jsonl'}",
    ]
    if (run_folder / FOLDER_NAME).is_dir():
        lines.append(f"  load of every expert          {run_folder / FOLDER_NAME}")
    samples = run_folder / SAMPLES_FILE_NAME
    if samples.is_file() and samples.stat().st_size:
        lines.append(f"  responses, a line each        {samples}")
    if "tensorboard" in loggers:
        lines.append(f"  TensorBoard                   tensorboard --logdir {config.logger.log_dir}")
    if "wandb" in loggers:
        lines.append(f"  Weights & Biases              {run_folder / 'wandb'} (offline runs: wandb sync FOLDER)")
    if "mlflow" in loggers:
        lines.append(
            f"  MLflow                        mlflow ui --backend-store-uri {mlflow_tracking_uri(config.logger)}"
        )
    if weights is not None:
        lines.append(f"  trained model                 {weights}")
    return "\n".join(lines)
