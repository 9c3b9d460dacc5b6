# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows must work: its code, its commands, its links, and its lists of metrics."""

import asyncio
import json
import re
import runpy
import shlex
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from examples.second_try import second_try
from nemo_rl_moe import cli
from nemo_rl_moe.config.algorithm import ALGORITHMS
from nemo_rl_moe.config.loading import load_any_config, load_config, load_dpo_config, load_grpo_config
from nemo_rl_moe.distributed.accelerators import parse_target
from nemo_rl_moe.distributed.batch import Axis, Column
from nemo_rl_moe.errors import ConfigurationError
from nemo_rl_moe.generation.interface import GenerationRequest, SamplingParameters
from nemo_rl_moe.launch import generate_command
from nemo_rl_moe.metrics import Reduction
from nemo_rl_moe.models.interfaces import LossInputs
from nemo_rl_moe.rewards.interface import Score, ScoringItem
from nemo_rl_moe.rl.objectives import ObjectiveInputs
from nemo_rl_moe.routing.metrics.load_statistics import ExpertLoad
from nemo_rl_moe.runs.folder.expert_load import ExpertLoadWriter
from nemo_rl_moe.runs.folder.metrics import StepRecord
from nemo_rl_moe.runs.loggers.console import Notices
from nemo_rl_moe.runs.loggers.isolated import IsolatedLogger
from nemo_rl_moe.weight_sync.transport import WeightTransport
from tests.conftest import REPOSITORY_ROOT
from tests.support.conversations import ALL, ended, play, scripted_session
from tests.support.gloo_ranks import run_ranks
from tests.support.grpo_inputs import inputs_of_rewards
from tests.support.tiny_model import layout, tiny_policy
from tests.support.training_run import RunSettings, train_run

DOCS = REPOSITORY_ROOT / "docs"
PAGES = [
    *(REPOSITORY_ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "DECISIONS")),
    *sorted(DOCS.rglob("*.md")),
]
METRICS_PAGE = DOCS / "moe-metrics.md"
GRPO_PAGE = DOCS / "grpo.md"
EXAMPLE_AGENT = REPOSITORY_ROOT / "examples/agents/add_with_a_tool.yaml"
DEMO_RUN = Path("logs/sft_tiny_moe/exp_001")
DEMO_WEIGHTS = Path(str(load_config("sft_tiny_moe.yaml", check_paths=False).checkpointing.checkpoint_dir)) / "final"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language; "" for those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


LAUNCHERS = {f"examples/run_{name}.py": name for name in ("sft", "dpo", "rm", "grpo")}
COMMAND = re.compile(rf"(?:\$ )?(?:[A-Z_]+=\S+ )*(?:nemo-rl-moe|python (?={'|'.join(LAUNCHERS)})) ?(.+)")
# The script for Slurm adds the number of machines, which Slurm says.
BATCH_JOB = re.compile(r"sbatch --nodes=(\d+) (?:--\S+ )*examples/slurm/train\.sbatch (.+)")


def commands(page: Path) -> list[list[str]]:
    """Words of each call of the command, from `sft`, `grpo`, ... on.

    In the text, and in plain blocks, where a backslash continues a line; of `examples/run_*.py` and of batch jobs too.
    """
    in_text = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    in_blocks = "\n".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    calls = [match[1] for line in [*in_text, *in_blocks] if (match := COMMAND.fullmatch(line))]
    calls += [f"{match[2]} cluster.num_nodes={match[1]}" for line in in_blocks if (match := BATCH_JOB.fullmatch(line))]
    return [[LAUNCHERS.get(name, name), *rest] for name, *rest in (shlex.split(call, comments=True) for call in calls)]


def anchor(heading: str) -> str:
    """The anchor that a heading of Markdown gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    """Relative links of a page whose file or heading does not exist."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
        if not file.exists() or (heading and heading not in map(anchor, headings)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What is it?\n[a](#what-is-it) [b](#what) [c](none.md) [d](page.md#what-is-it) [e](https://x.org)\n"
    )
    assert broken_links(page) == ["#what", "none.md"]


NAMED_FILE = re.compile(r"`((?:[\w-]+/)+[\w*-]+\.(?:py|yaml|sbatch))(?:::\w+)?`")


def missing_files(page: Path) -> list[str]:
    """Files of the repository that a page names in its text, and that are not there."""
    places = [REPOSITORY_ROOT, *(REPOSITORY_ROOT / "nemo_rl_moe" / folder for folder in (".", "models/megatron"))]
    named = NAMED_FILE.findall(page.read_text(encoding="utf-8"))
    return [
        name for name in named if "/NAME." not in name and not any(next(place.glob(name), None) for place in places)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    assert missing_files(page) == []


def test_missing_files_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`examples/run_sft.py` `routing/metrics/none.py` `routing/metrics/expert_load_recorder.py`"
        " `docs/make_*.py` `families/NAME.py`\n"
    )
    assert missing_files(page) == ["routing/metrics/none.py"]


COMMANDS = [(page, words) for page in PAGES for words in commands(page) if "--config" in words]
# Shown together with the messages that it ends with.
MEANT_TO_FAIL = "sft.max_num_step=10"
EXAMPLE_ALGORITHM = REPOSITORY_ROOT / "examples" / "algorithms"
OF_ANY_ALGORITHM = ("run", "rm", "ppo", "distillation", "config", "data", "evaluate", "plan")
LOADERS = dict.fromkeys(OF_ANY_ALGORITHM, load_any_config)
LOADERS |= {"sft": load_config, "dpo": load_dpo_config, "grpo": load_grpo_config}


def configurations(page: Path) -> dict[str, str]:
    """Every configuration that a page shows, by the name in its first line."""
    named = [(re.match(r"# (\S+\.yaml)\n", text), text) for text in blocks(page, "yaml")]
    return {match[1]: text for match, text in named if match}


def files_of_commands(page: Path, command: str) -> dict[str, str]:
    """The files that a page's commands mean: its own, and those of the algorithm's page."""
    of_algorithm = DOCS / (f"{command}.md" if command in ALGORITHMS else "grpo.md")
    return configurations(of_algorithm) | configurations(page)


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page.name}-{words[0]}" for page, words in COMMANDS])
def test_commands_are_valid(page: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0] == "run":
        monkeypatch.syspath_prepend(EXAMPLE_ALGORITHM)
        Path("opd.yaml").write_text((EXAMPLE_ALGORITHM / "opd.yaml").read_text())
    if page.name == "agents.md":  # which enters the folder of the example
        Path(EXAMPLE_AGENT.name).write_text(EXAMPLE_AGENT.read_text())
    for name, text in files_of_commands(page, words[0]).items():
        Path(name).write_text(text, encoding="utf-8")
    load = LOADERS[words[0]]
    config, *overrides = words[words.index("--config") + 1 :]
    overrides = [word for word in overrides if word != "[overrides]"]
    if "--target" in overrides:
        index = overrides.index("--target")
        overrides[index : index + 2] = parse_target(overrides[index + 1]).overrides
    if MEANT_TO_FAIL in overrides:
        with pytest.raises(ConfigurationError) as error:
            load(config, overrides, check_paths=False)
        shown = "".join(blocks(page, ""))
        assert all(f"error: {problem}\n" in shown for problem in error.value.problems)
    else:
        load(config, overrides, check_paths=False)
    ALGORITHMS.pop("opd", None)  # the example's registers itself where it is imported


# An engine's section is known once its module is imported, which the engine's own test does.
WITH_AN_ENGINE = "adding-a-generation-engine.md"
CONFIGURATIONS = [(page, name) for page in PAGES if page.name != WITH_AN_ENGINE for name in configurations(page)]


@pytest.mark.parametrize(("page", "name"), CONFIGURATIONS, ids=[f"{page.name}-{name}" for page, name in CONFIGURATIONS])
def test_configurations_are_valid(page: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a page, beside the file with model and data that grpo.md shows."""
    monkeypatch.chdir(tmp_path)
    for file, text in {**configurations(GRPO_PAGE), **configurations(page)}.items():
        Path(file).write_text(text, encoding="utf-8")
    assert not any(text.startswith("defaults: grpo_math_1B") for text in Path(name).read_text().splitlines())
    load_any_config(name, check_paths=False)


GENERATE_COMMANDS = [
    words for page in PAGES for words in commands(page) if words[0] == "generate" and "--prompts" in words
]


def test_generate_commands_are_valid() -> None:
    assert len(GENERATE_COMMANDS) >= 4
    parser = ArgumentParser(exit_on_error=False)
    generate_command.add_arguments(parser)
    for command in GENERATE_COMMANDS:
        options, overrides = parser.parse_known_args(command[1:])
        assert not [word for word in overrides if word.startswith("-")], command
        options.adapter = None  # its folder, which has the settings, is not there
        load_grpo_config(
            generate_command.BASE_CONFIG,
            generate_command.overrides_of(generate_command.OPTIONS, options) + overrides,
            check_paths=False,
        )


def test_excerpts_of_the_algorithm_are_its_code() -> None:
    page = DOCS / "adding-an-algorithm.md"
    for language, file in (("py", "on_policy_distillation.py"), ("yaml", "opd.yaml")):
        text = (EXAMPLE_ALGORITHM / file).read_text(encoding="utf-8")
        excerpts = blocks(page, language)
        assert len(excerpts) >= 2
        assert [excerpt for excerpt in excerpts if excerpt not in text] == []


def test_excerpts_of_the_metric_are_tested_code() -> None:
    text = (REPOSITORY_ROOT / "tests/unit/models/megatron/test_new_artifact.py").read_text(encoding="utf-8")
    excerpts = blocks(DOCS / "adding-a-metric.md", "py")
    assert len(excerpts) == 2
    assert [excerpt for excerpt in excerpts if excerpt not in text] == []


def test_there_are_commands_and_code_to_test() -> None:
    found = {(page.name, words[0]) for page, words in COMMANDS}
    assert {("README.md", "grpo"), ("quickstart.md", "sft"), ("grpo.md", "plan"), ("faq.md", "evaluate")} <= found
    # `commands` finds each of them.
    assert len(COMMANDS) == sum(page.read_text(encoding="utf-8").count("--config ") for page in PAGES)
    assert len(PYTHON_BLOCKS) > 20


def write_demo_run() -> None:
    """Write what the pages' code reads of a run: the load of every expert, and the final weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    DEMO_RUN.mkdir(parents=True)
    ExpertLoadWriter(DEMO_RUN, pytest.fail).write(1, ExpertLoad((0, 2), torch.tensor([[3, 1], [0, 4]])))
    tiny = REPOSITORY_ROOT / "examples" / "assets" / "tiny_qwen3_moe"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny)).save_pretrained(DEMO_WEIGHTS)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(DEMO_WEIGHTS)


@pytest.fixture
def in_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_demo_run()
    return tmp_path


def run_block(text: str, folder: Path) -> dict[str, object]:
    script = folder / "example.py"
    script.write_text(text, encoding="utf-8")
    return runpy.run_path(str(script))


PYTHON_BLOCKS = {f"{page.name}-{number}": text for page in PAGES for number, text in enumerate(blocks(page, "python"))}


# Begins with its name; a test of its own imports or runs it.
MODULES = {
    match[1]: name for name, text in PYTHON_BLOCKS.items() if (match := re.match(r"# (\w+)\.py\n", text)) is not None
}


def test_environment_of_ones_own_scores(tmp_path: Path) -> None:
    score = run_block(PYTHON_BLOCKS[MODULES["my_module"]], tmp_path)["score"]
    assert callable(score)
    for response, reward in ((" 606\n", 1.0), ("607", 0.0)):
        assert score(ScoringItem("a", "228+378=", response, False, {"answer": "606"})) == reward


def test_data_and_reward_of_opposites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_block(PYTHON_BLOCKS[MODULES["prompts"]], tmp_path)
    score = run_block(PYTHON_BLOCKS[MODULES["opposites"]], tmp_path)["score"]
    assert callable(score)
    Path("opposites.yaml").write_text(configurations(DOCS / "real-model.md")["opposites.yaml"])
    model = REPOSITORY_ROOT / "examples/assets/tiny_qwen3_moe_tools"
    config = load_grpo_config("opposites.yaml", [f"policy.model_name={model}", "policy.init=random"])
    questions = {}
    for part, number in (("train", 48), ("validation", 16)):
        records = [json.loads(line) for line in Path(getattr(config.data, part).path).read_text().splitlines()]
        assert len(records) == number
        questions |= {record["prompt"][-1]["content"]: record for record in records}
    assert len(questions) == 64
    record = questions["What is the opposite of rich?"]
    responses = {"The opposite of rich is Poor.": 1.0, "Poorly": 0.0, "": 0.0}
    assert [score(ScoringItem("a", "p", text, False, record)) for text in responses] == list(responses.values())


def test_agent_of_the_page(tmp_path: Path) -> None:
    guess = run_block(PYTHON_BLOCKS[MODULES["guesser"]], tmp_path)["guess"]
    assert callable(guess)
    family = ALL["Qwen3, Qwen3-MoE"]
    for answers, reward in ((["3"], 1.0), (["4", "3"], 0.5), (["4", "5"], 0.0)):
        responses = [ended(family, answer) for answer in answers]
        _, found = play(lambda task: asyncio.run(guess(task)), responses, family, record={"answer": "3"})
        assert (found.reward, found.num_turns, found.num_sequences) == (reward, len(answers), 1)


def test_several_rewards_by_name(tmp_path: Path) -> None:
    score = run_block(PYTHON_BLOCKS[MODULES["my_rewards"]], tmp_path)["score"]
    assert callable(score)
    found = score(ScoringItem("a", "228+378=", " 607", False, {"answer": "606"}))
    assert found == {"accuracy": 0.0, "format": 1.0, "length": 4.0}
    page = (DOCS / "rewards.md").read_text()
    assert (
        f"reward_weights: {{{', '.join(f'{name}: {w}' for name, w in zip(found, (1.0, 0.2, 0.0), strict=True))}}}"
        in page
    )


def test_own_estimator_and_objective(tmp_path: Path) -> None:
    found = run_block(PYTHON_BLOCKS[MODULES["my_parts"]], tmp_path)
    estimator, objective = found["from_median"], found["soft_clip"]
    assert callable(estimator)
    assert callable(objective)
    config = load_grpo_config("grpo_tiny_moe.yaml", check_paths=False)
    rewards = torch.tensor([[1.0, 0.0, 0.0]])
    assert estimator(inputs_of_rewards(rewards, config.grpo.adv_estimator)).tolist() == [[1.0, 0.0, 0.0]]
    logprobs = torch.zeros(1, 2, requires_grad=True)
    ratio = torch.exp(logprobs - torch.tensor([[0.0, -5.0]]))
    ones, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    tokens = ObjectiveInputs(logprobs, ones, ones, None, ratio, ratio.log(), ones, ones, mask, 2, 1, config.loss_fn)
    loss = objective(tokens)
    assert loss.tolist() == [[-1.0, pytest.approx(-1 - config.loss_fn.ratio_clip_max)]]
    gradient = torch.autograd.grad(loss.sum(), logprobs)[0]
    assert gradient.tolist() == [[-1.0, pytest.approx(0.0, abs=1e-4)]]


def test_own_loss(tmp_path: Path) -> None:
    loss = run_block(PYTHON_BLOCKS[MODULES["my_loss"]], tmp_path)["weighted_likelihood"]
    assert callable(loss)
    logprobs = torch.tensor([[-1.0, -3.0, -9.0]])
    mask = torch.tensor([[True, True, False]])
    columns = {"advantages": Column(torch.tensor([2.0]), Axis.SEQUENCE)}
    found = loss(LossInputs(logprobs, mask, 4, 1, None, columns))
    assert float(found.loss) == 2.0  # (1 + 3) * 2 / 4
    assert found.metrics == {"lowest_logprob": (torch.tensor(-3.0), Reduction.MIN)}


def test_environment_that_is_added_scores(tmp_path: Path) -> None:
    make = run_block(PYTHON_BLOCKS[MODULES["pattern"]], tmp_path)["PatternReward"]
    assert callable(make)
    environment = make("6+")
    for response, is_correct in ((" 66\n", True), ("67", False), ("66 7", False)):
        score = environment.score(ScoringItem("a", "33+33=", response, False, {}))
        assert score == Score(float(is_correct), is_correct)
    with pytest.raises(ConfigurationError, match=r"pattern: got '\('"):
        make("(")


def rollout_of_page(name: str, function: str, folder: Path, responses: list[str]) -> list[tuple[str, str]]:
    """Roles and contents of a conversation under a page's rollout function."""
    rollout = run_block(PYTHON_BLOCKS[MODULES[name]], folder)[function]
    assert callable(rollout)
    family = ALL["Qwen2.5, Qwen2-MoE"]
    session = scripted_session(family, [{"role": "user", "content": "12*30+1="}], responses, reward=1.0)
    found = asyncio.run(rollout(session))
    assert (found.reward, found.fault, found.num_turns) == (1.0, None, len(responses))
    return [(message["role"], message["content"]) for message in session.messages[1:]]


def test_a_second_question(tmp_path: Path) -> None:
    assert rollout_of_page("ask_again", "ask_again", tmp_path, ["361<|im_end|>", "Yes.<|im_end|>"]) == [
        ("assistant", "361"),
        ("user", "You said 361. Are you sure?"),
        ("assistant", "Yes."),
    ]


def test_a_second_try() -> None:
    for score, turn_rewards in ((1.0, ()), (0.0, (-0.2, 0.0))):
        question = [{"role": "user", "content": "12*30+1="}]
        session = scripted_session(ALL["Qwen2.5, Qwen2-MoE"], question, ["360<|im_end|>"] * 2, reward=score)
        found = asyncio.run(second_try(session))
        assert (found.turn_rewards, found.reward) == (turn_rewards, score + sum(turn_rewards))


def test_a_calculator(tmp_path: Path) -> None:
    responses = ["<call>12*30</call><|im_end|>", "<call>360*1</call><|im_end|>", "361<|im_end|>"]
    assert rollout_of_page("calculator", "use_calculator", tmp_path, responses) == [
        ("assistant", "<call>12*30</call>"),
        ("tool", "360"),
        ("assistant", "<call>360*1</call>"),
        ("tool", "360"),
        ("assistant", "361"),
    ]


def test_logger_that_is_added_logs_and_resumes(tmp_path: Path) -> None:
    """Behind the thread that every backend gets, and once more as a run that goes on."""
    make = run_block(PYTHON_BLOCKS[MODULES["csv_table"]], tmp_path)["CsvLogger"]
    assert callable(make)
    steps = [StepRecord(step, 0.0, {"train/loss": step / 2, "val/loss": float("nan")}) for step in (1, 2, 3)]
    for earlier, step in (((), 1), (steps[:2], 3)):
        reported: list[str] = []
        notices = Notices(reported.append, reported.append)
        logger = IsolatedLogger("csv", partial(make, tmp_path), notices, earlier_steps=partial(tuple, earlier))
        logger.wait_until_open()
        logger.log_config({})
        logger.log_step(step, steps[step - 1].metrics)
        logger.close("finished")
        assert reported == []
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    assert rows == [[str(s), *row] for s in (1, 2, 3) for row in (["train/loss", str(s / 2)], ["val/loss", "nan"])]


def test_a_worker_of_an_engine_of_ones_own_takes_weights(tmp_path: Path) -> None:
    """The engine around it runs in `tests/functional/test_refit.py`."""
    make = run_block(PYTHON_BLOCKS[MODULES["my_engine"]], tmp_path)["Worker"]
    assert callable(make)
    worker = make(vocabulary_size=4)
    weights = [("lm_head.weight", torch.eye(4)[[2, 0, 1, 3]] * torch.arange(4.0)), ("other", torch.ones(2))]
    with WeightTransport(tmp_path / "transfers", 1, lambda spec: spec.send(weights, 0, 7)) as transport:
        spec = transport.open(num_receivers=1, version=7)
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(worker.receive, spec, 0)
            assert transport.send() == (16 + 2) * 4
            assert receiving.result() is None
    request = GenerationRequest((1, 2), 5, SamplingParameters(3, stop_token_ids=(0,)))
    found = worker.generate(request, 7)
    assert found.token_ids.tolist() == [3, 3, 3]
    assert found.logprobs[0] == pytest.approx(float(torch.tensor([2.0, 0.0, 1.0, 3.0]).log_softmax(0)[3]))


@pytest.mark.parametrize("name", sorted(PYTHON_BLOCKS.keys() - set(MODULES.values())))
def test_code_runs(name: str, in_folder_of_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_block(PYTHON_BLOCKS[name], in_folder_of_runs)
    assert capsys.readouterr().out.strip()


def test_standalone_example_counts_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = (text for text in blocks(METRICS_PAGE, "python") if "enable_load_balance_tracking" in text)
    found = run_block(text, tmp_path)
    assert len(capsys.readouterr().out.splitlines()) == 3
    metrics = found["metrics"]
    assert isinstance(metrics, dict)
    # 2 microbatches of 4 x 32 tokens, 8 experts, 2 for each token: sqrt((1 - 1/4) * 8 / 512).
    assert metrics["cv_null_mean"] == pytest.approx((0.75 * 8 / 512) ** 0.5)
    assert {generic(key) for key in metrics} <= documented_keys(METRICS_PAGE)


def run_megatron_loop(text: str, folder: Path) -> dict[str, object]:
    """The block's last metrics on one rank."""
    found = run_block(text, folder)
    return {name: found[name] for name in ("metrics", "total_loss_dict")}


@pytest.mark.slow
def test_example_of_a_megatron_loop(tmp_path: Path) -> None:
    text = (REPOSITORY_ROOT / "examples" / "megatron_loop.py").read_text(encoding="utf-8")
    first, second = run_ranks(run_megatron_loop, 2, text, tmp_path)
    assert first == second
    metrics, totals = first["metrics"], first["total_loss_dict"]
    names = ("load_balancing_loss", "z_loss")
    assert metrics.keys() == {key for name in names for key in (name, f"{name}_layer_0", f"{name}_layer_2")}
    for name in names:
        assert metrics[name] == pytest.approx((metrics[f"{name}_layer_0"] + metrics[f"{name}_layer_2"]) / 2)
        # Three steps; tokens are random, so that steps are much alike.
        assert totals[name] == pytest.approx(3 * metrics[name], rel=0.05)
    # Routed at random, and before the coefficient.
    assert metrics["load_balancing_loss"] == pytest.approx(1.0, abs=0.1)


def documented_keys(page: Path) -> set[str]:
    """The keys in the first column of the tables that are headed `key`."""
    keys: set[str] = set()
    in_table = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| key |"):
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table:
            keys.update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return keys


def generic(key: str) -> str:
    """A key with placeholders for the numbers of layer, expert and size."""
    for word, placeholder in (("layer_", "{i}"), ("expert_", "{e}"), ("_ep_", "{n}")):
        key = re.sub(rf"{word}\d+", word + placeholder, key)
    return key


@pytest.mark.full
def test_documented_keys_are_those_of_a_real_report() -> None:
    """Two expert-parallel ranks train the tiny model one step with everything turned on, and image tokens."""
    policy = tiny_policy(
        2,
        **layout(ep=2),
        moe_router_load_balancing_type="[aux_loss, seq_aux_loss, global_aux_loss]",
        moe_aux_loss_coeff="[0.01, 0.01, 0.01]",
        moe_z_loss_coeff=0.001,
        moe_per_layer_logging=True,
        log_moe_overload_factor=True,
        moe_metrics__mode="detailed",
        moe_metrics__what_if_expert_parallel_sizes="[4]",
    )
    (metrics, other) = (
        run.moe_metrics[0] for run in run_ranks(train_run, 2, RunSettings(policy, num_steps=1, images=True))
    )
    assert metrics == other
    assert {generic(key) for key in metrics} == documented_keys(METRICS_PAGE)


@pytest.mark.full
def test_messages_that_come_first_are_as_their_page_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = (DOCS / "faq.md").read_text(encoding="utf-8").partition("## What goes wrong first")[2]
    messages = re.findall(r"^\| `(.+?)` \|", section.partition("\n## ")[0].replace("/home/me", str(tmp_path)), re.M)
    assert len(messages) == 9
    monkeypatch.chdir(tmp_path)
    Path("keys.jsonl").write_text('{"question": "1+1=", "solution": "2"}\n' * 2)
    Path("bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"\n')
    given = {
        0: ("config", ["grpo.num_prompt_per_step=4"]),
        1: ("data", ["data.train.path=none.jsonl"]),
        2: ("data", ["data.train.path=keys.jsonl"]),
        3: ("data", ["data.train.path=bad.jsonl"]),
        5: ("grpo", ["data.train.path=bad.jsonl", "env.reward={kind: callable, function: 'my_reward:score'}"]),
        6: ("grpo", ["data.train.path=bad.jsonl", "cluster.gpus_per_node=8"]),
    }
    model = f"policy.model_name={REPOSITORY_ROOT / 'examples/assets/tiny_qwen3_moe'}"
    for number, (command, overrides) in given.items():
        words = [command, "--config", "grpo_tiny_moe.yaml", model, "policy.init=random", "data.validation=null"]
        assert cli.main([*words, "checkpointing.enabled=false", *overrides]) == 2
        assert f"error: {messages[number]}" in capsys.readouterr().err
