# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""Other frameworks' files: one small run in every format, healthy and with planted faults, must read the same.

The files of `examples/audit` were written by the frameworks' own code, from the tokens and router logits of a random
Qwen3-MoE of transformers 5.19: verl 0.9.1 (`DataProto.save_to_disk`), slime 0.3.1 (`save_debug_rollout_data`, and
`_build_dump_payload` for training), miles of August 2026 (`save_debug_rollout_data`, `save_debug_train_data_for_rank`),
SkyRL of August 2026 (`convert_prompts_responses_to_batch_tensors`, `TrainingInputBatch.save`), prime-rl 0.8.1
(`prepare_batch`, `FileSystemMicroBatchSender`), NeMo-RL of August 2026 (`BatchedDataDict` with `torch.save`, and
`Logger.log_batched_dict_as_jsonl`), verl of August 2026 (`list_of_dict_to_tensordict`, and `torch.save` as in
`RolloutTqSkip.prepare_data`), AReaL with its pull requests 1496 and 1407 (`RLVRWorkflow.arun_episode`,
`_save_trajectory`). Those of vLLM and SGLang follow their documentation alone.
"""

import base64
import io
import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from nemo_rl_moe.cli import main
from nemo_rl_moe.errors import DataError
from nemo_rl_moe.routing.audit.adapters.registry import ADAPTERS, files_by_step, load, recognised
from nemo_rl_moe.routing.audit.adapters.router_shape import read_router_shape
from nemo_rl_moe.routing.audit.sources import open_source
from nemo_rl_moe.runs.folder.capture_folder import read_description, read_step, steps_of
from nemo_rl_moe.runs.folder.captured_sequences import CapturedSequence
from tests.conftest import REPOSITORY_ROOT

EXAMPLES = REPOSITORY_ROOT / "examples" / "audit"
DOCS = REPOSITORY_ROOT / "docs"
MODEL, TRAINING = EXAMPLES / "model", EXAMPLES / "transformers"
FOLDERS = {
    "verl": "verl",
    "verl_queue": "verl",
    "areal": "areal",
    "slime": "slime",
    "miles": "slime",
    "skyrl": "skyrl",
    "nemo_rl": "nemo-rl",
    "prime_rl": "prime-rl",
    "vllm": "vllm",
    "sglang": "sglang",
}
"""Format of each folder."""


def sequences_of(path: Path, *, model: bool = True, training: Path | None = None) -> dict[bytes, CapturedSequence]:
    shape = read_router_shape(MODEL) if model else None
    source = open_source(path, "auto", shape, training, None)
    assert source.sequences is not None
    found = [sequence for part in source.sequences[3]() for sequence in part]
    return {np.asarray(sequence.columns["token_ids"], np.int64).tobytes(): sequence for sequence in found}


def routers() -> dict[bytes, np.ndarray]:
    """Experts of each sequence by the logits of the model, sorted."""
    content = load(TRAINING / "3.safetensors")
    logits = np.stack([content[f"router_logits.{n}"].float().numpy().reshape(6, -1, 8) for n in range(3)], 2)
    best = np.sort(np.argsort(-logits, -1)[..., :2], -1)
    lengths = content["attention_mask"].sum(1).tolist()
    ids = content["input_ids"].numpy().astype(np.int64)
    return {ids[n, :length].tobytes(): best[n, :length] for n, length in enumerate(lengths)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_format_reads_as_the_same_run(folder: str) -> None:
    found, routes = sequences_of(EXAMPLES / folder / "healthy"), routers()
    expected = sequences_of(EXAMPLES / "slime" / "healthy")
    assert found.keys() == expected.keys() == routes.keys()
    for key, sequence in found.items():
        other = expected[key].columns
        for name in ("rollout_experts", "loss_mask"):
            if name == "rollout_experts":  # the last token has none, or zeros
                np.testing.assert_array_equal(sequence.columns[name][:-1], other[name][:-1])
            else:
                np.testing.assert_array_equal(sequence.columns[name], other[name])
        mask = other["loss_mask"]
        logprobs = sequence.columns["rollout_logprobs"][mask]
        np.testing.assert_allclose(logprobs, other["rollout_logprobs"][mask], atol=1e-5)
        same = (np.sort(sequence.columns["rollout_experts"][:-1], -1) == routes[key][:-1]).all(-1)
        assert same.mean() > 0.9
        assert set(np.unique(sequence.columns["rollout_experts"][-1])) <= {-1, 0}


@pytest.mark.parametrize(("folder", "name"), [*FOLDERS.items(), ("transformers_torch", "transformers")])
def test_content_reports_the_format(folder: str, name: str) -> None:
    (files,) = files_by_step(EXAMPLES / folder / ("" if "transf" in folder else "healthy")).values()
    assert [recognised(load(file)) for file in files] == [name] * len(files)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_healthy_run_has_no_finding(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(EXAMPLES / folder / "healthy")
    assert main(["audit", path, "--model", str(MODEL), "--training", str(TRAINING), "--json", "-"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["layers"] == [1, 2, 3]
    assert found["notices"] == []
    (step,) = found["steps"]
    assert (step["step"], step["num_sequences"], step["num_tokens"]) == (3, 6, 140)
    expected = sequences_of(EXAMPLES / "slime" / "healthy")
    pairs = [(np.sort(expected[key].columns["rollout_experts"][:-1], -1), best[:-1]) for key, best in routers().items()]
    agree = np.concatenate([(capture == live).all(-1).reshape(-1) for capture, live in pairs]).mean()
    assert step["metrics"]["moe/routing/live_agreement"] == pytest.approx(agree)
    assert step["metrics"]["moe/routing/rows_usable_share"] == 1


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize(
    ("fault", "text"),
    [("one_token_late", "routes are one token late"), ("layer_swapped", "layer 1 carries layer 2's routes")],
)
def test_a_planted_fault_is_named(folder: str, fault: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(EXAMPLES / folder / fault)
    assert main(["audit", path, "--model", str(MODEL), "--training", str(TRAINING)]) == 1
    assert f"{path}: step 3: {text}" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["verl", "skyrl", "nemo_rl"])
def test_trainers_log_probabilities_come_along(folder: str) -> None:
    training = sequences_of(EXAMPLES / "slime" / "training")
    for key, sequence in sequences_of(EXAMPLES / folder / "healthy").items():
        other, mask = training[key].columns, training[key].columns["loss_mask"]
        for name in ("training_logprobs", "advantages"):
            np.testing.assert_allclose(sequence.columns[name][mask], other[name][mask], atol=1e-6)
        if folder == "verl":
            assert sequence.reward == sequences_of(EXAMPLES / "slime" / "healthy")[key].reward


@pytest.mark.parametrize("folder", ["slime", "miles"])
def test_dumps_of_training_are_joined_by_token_ids(folder: str) -> None:
    found = sequences_of(EXAMPLES / folder / "healthy", training=EXAMPLES / folder / "training")
    for key, sequence in sequences_of(EXAMPLES / "verl" / "healthy").items():
        np.testing.assert_array_equal(found[key].columns["training_logprobs"], sequence.columns["training_logprobs"])


def test_both_files_of_transformers_are_the_same() -> None:
    found = sequences_of(EXAMPLES / "transformers_torch")
    for key, sequence in sequences_of(TRAINING).items():
        for name in ("training_experts", "margins"):
            np.testing.assert_array_equal(found[key].columns[name], sequence.columns[name])
        np.testing.assert_array_equal(np.sort(sequence.columns["training_experts"], -1), routers()[key])
        assert (sequence.columns["margins"] >= 0).all()


def test_transformers_records_the_trainings_side_of_any_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`examples/record_router_logits.py` with random weights of the examples' model: not theirs, but joined."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)).eval()
    network.save_pretrained(tmp_path / "model")
    tokens, output = EXAMPLES / "miles" / "healthy", tmp_path / "logits"
    arguments = ["--model", str(tmp_path / "model"), "--tokens", str(tokens), "--output", str(output)]
    monkeypatch.setattr("sys.argv", ["record_router_logits.py", *arguments, "--sequences-at-a-time", "4"])
    runpy.run_path(str(REPOSITORY_ROOT / "examples" / "record_router_logits.py"), run_name="__main__")
    assert [file.name for file in sorted(output.iterdir())] == ["step_3-0.safetensors", "step_3-4.safetensors"]
    capsys.readouterr()
    model = ["--model", str(tmp_path / "model")]
    assert main(["audit", str(tokens), *model, "--training", str(output), "--json", "-"]) == 1
    printed = capsys.readouterr()
    assert "are not their own" in printed.err
    (found,) = json.loads(printed.out)
    (step,) = found["steps"]
    assert found["notices"] == []
    assert {"training_experts", "training_logprobs", "margins"} <= set(step["columns"])
    assert step["metrics"]["moe/routing/slot_kappa"] < 0.5
    for sequence in sequences_of(output).values():
        ids = torch.as_tensor(sequence.columns["token_ids"]).long()[None]
        with torch.no_grad():
            alone = network(ids, output_router_logits=True)
        experts = torch.stack([logits.topk(2).indices.sort().values for logits in alone.router_logits], 1)
        np.testing.assert_array_equal(np.sort(sequence.columns["training_experts"], -1), experts.numpy())
        logprobs = alone.logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(sequence.columns["training_logprobs"][1:], logprobs.numpy(), atol=1e-4)


def test_the_jsonl_of_nemo_rl_has_no_routes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(EXAMPLES / "nemo_rl" / "log")]) == 0
    printed = capsys.readouterr().out
    assert "note: no sequence has routed experts" in printed
    assert "divergence (k3)" in printed


def test_routes_that_were_added_to_the_jsonl_of_nemo_rl_are_read(tmp_path: Path) -> None:
    """By the page: `log_data["routed_experts"]`, a batch of one on each line, -1 where there is no route."""
    routes = load(EXAMPLES / "nemo_rl" / "healthy" / "train_data_step3.pt").state["data"]["routed_experts"]
    lines = [
        json.loads(line) for line in (EXAMPLES / "nemo_rl" / "log" / "train_data_step3.jsonl").read_text().splitlines()
    ]
    for line, of_sequence in zip(lines, routes, strict=True):
        line["routed_experts"] = [of_sequence.tolist()]
    (tmp_path / "train_data_step3.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = sequences_of(tmp_path)
    for key, sequence in sequences_of(EXAMPLES / "nemo_rl" / "healthy").items():
        assert found[key].columns.keys() == sequence.columns.keys()
        for name, values in sequence.columns.items():
            np.testing.assert_allclose(found[key].columns[name], values, atol=1e-6)


def test_without_a_model_what_is_assumed_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(EXAMPLES / "slime" / "healthy")]) == 1
    printed = capsys.readouterr()
    assert "note: num_experts: 8, the highest expert id plus 1; --model DIR gives the exact number" in printed.out
    assert "note: layers 0 hold expert 0 alone everywhere: --model DIR shows whether they are dense" in printed.out
    assert "134 of 536 rows hold expert 0 alone, in layers 0" in printed.err


def test_a_capture_is_written_of_what_was_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(MODEL), "--training", str(TRAINING), "--json", "-"]
    assert (
        main(["audit", str(EXAMPLES / "prime_rl" / "healthy"), *arguments, "--write-capture", str(tmp_path / "t")]) == 0
    )
    (read,) = json.loads(capsys.readouterr().out)
    assert main(["audit", str(tmp_path / "t"), "--json", "-"]) == 0
    (written,) = json.loads(capsys.readouterr().out)
    assert written["steps"] == read["steps"]
    description = read_description(tmp_path / "t")
    assert (description.layers, description.num_experts, description.made_by) == ((1, 2, 3), 8, "prime-rl")
    assert sum(len(rows.names) for rows in read_step(description, 3, steps_of(tmp_path / "t")[3])) == 6


def test_a_capture_is_not_written_into_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", str(EXAMPLES / "slime" / "healthy"), "--model", str(MODEL), "--write-capture", str(tmp_path)]
    assert main(command) == 0
    files = sorted(tmp_path.iterdir())
    assert main(command) == 2
    assert "is a capture already, and its sequences would be duplicated" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == files


def test_routes_recorded_by_verls_trainer_are_the_trainings_side(capsys: pytest.CaptureFixture[str]) -> None:
    """verl's replay mode R2 saves under `routed_experts` what the pass for `old_log_probs` chose."""
    training = EXAMPLES / "verl" / "one_token_late"
    assert main(["audit", str(EXAMPLES / "verl" / "healthy"), "--model", str(MODEL), "--training", str(training)]) == 1
    assert "routes are one token early" in capsys.readouterr().err


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_vllms_other_forms(tmp_path: Path) -> None:
    """By its documentation: 0.21 has the prompt's routes apart; offline outputs have lists and objects."""
    routes = np.arange(24).reshape(6, 2, 2) % 8
    apart = {
        "prompt_token_ids": [1, 2, 3],
        "prompt_routed_experts": routes[:3].tolist(),
        "choices": [{"token_ids": [4, 5, 6, 7], "routed_experts": routes[3:].tolist(), "logprobs": None}],
    }
    logprobs = [{"4": {"logprob": -0.5}}, {"5": {"logprob": -1.0}}, {"6": {"logprob": -2.0}}, {"7": {"logprob": -3.0}}]
    offline = {
        "prompt_token_ids": [1, 2, 3],
        "outputs": [{"token_ids": [4, 5, 6, 7], "routed_experts": routes.tolist(), "logprobs": logprobs}],
    }
    chat = {"content": [{"token": "x", "logprob": value} for value in (-0.5, -1.0, -2.0, -3.0)]}
    generate = {**apart, "choices": [{**apart["choices"][0], "logprobs": chat}]}  # type: ignore[dict-item,index]
    for form in (apart, offline, generate):
        path = write(tmp_path / "responses.json", form)
        source = open_source(path, "auto", None, None, None)
        assert source.sequences is not None
        ((sequence,),) = source.sequences[0]()
        np.testing.assert_array_equal(sequence.columns["rollout_experts"][:6], routes)
        assert (sequence.columns["rollout_experts"][6] == -1).all()
        assert sequence.columns["loss_mask"].tolist() == [False] * 3 + [True] * 4
        if form is not apart:
            assert sequence.columns["rollout_logprobs"][3:].tolist() == [-0.5, -1.0, -2.0, -3.0]
            assert np.isnan(sequence.columns["rollout_logprobs"][:3]).all()


@pytest.mark.parametrize("folder", ["verl_queue", "areal"])
def test_versions_of_the_weights_come_along(folder: str) -> None:
    for sequence in sequences_of(EXAMPLES / folder / "healthy").values():
        assert set(sequence.columns["weight_versions"][sequence.columns["loss_mask"]]) == {2}


def test_vllms_routes_may_begin_later(tmp_path: Path) -> None:
    """`routed_experts_prompt_start` of a request leaves out the rows before it."""
    (line, *_) = (EXAMPLES / "vllm" / "healthy" / "3.jsonl").read_text(encoding="utf-8").splitlines()
    response = json.loads(line)
    (choice,) = response["choices"]
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    choice["routed_experts"] = _npy(rows[5:])
    (tmp_path / "3.jsonl").write_text(json.dumps(response), encoding="utf-8")
    (found,) = sequences_of(tmp_path, model=False).values()
    routes = found.columns["rollout_experts"]
    assert (routes[[0, 1, 2, 3, 4, -1]] == -1).all()
    np.testing.assert_array_equal(routes[5:-1], rows[5:])


def test_rows_that_vllm_lacks_behind_the_prompts_are_the_last_ones(tmp_path: Path) -> None:
    routes = np.arange(24).reshape(6, 2, 2) % 8
    response = {
        "prompt_token_ids": [1, 2, 3],
        "prompt_routed_experts": routes[:3].tolist(),
        "choices": [{"token_ids": [4, 5, 6, 7], "routed_experts": routes[3:4].tolist(), "logprobs": None}],
    }
    path = write(tmp_path / "3.json", response)
    (found,) = sequences_of(path, model=False).values()
    np.testing.assert_array_equal(found.columns["rollout_experts"][:4], routes[:4])
    assert (found.columns["rollout_experts"][4:] == -1).all()


def test_sglangs_routes_may_begin_later(tmp_path: Path) -> None:
    """By its documentation: `routed_experts_start_len` rows were not asked for."""
    line = json.loads((EXAMPLES / "sglang" / "healthy" / "3.jsonl").read_text().splitlines()[0])
    content = np.frombuffer(base64.b64decode(line["meta_info"]["routed_experts"]), np.int32).reshape(-1, 4, 2)
    line["meta_info"] |= {
        "routed_experts_start_len": 3,
        "routed_experts": base64.b64encode(content[3:].tobytes()).decode(),
    }
    (sequence,) = sequences_of(write(tmp_path / "3.json", line)).values()
    assert (sequence.columns["rollout_experts"][:3] == -1).all()
    np.testing.assert_array_equal(sequence.columns["rollout_experts"][3:-1], content[3:, 1:])


def test_padding_of_prime_rl_is_left_out() -> None:
    batches = [batch for file in files_by_step(EXAMPLES / "prime_rl" / "healthy")[3] for batch in load(file)]
    assert sum(len(batch[0]) for batch in batches) > 140
    found = sequences_of(EXAMPLES / "prime_rl" / "healthy").values()
    assert sum(sequence.num_tokens for sequence in found) == 140


def test_tokens_without_routes_in_skyrl_are_unknown() -> None:
    for sequence in sequences_of(EXAMPLES / "skyrl" / "healthy").values():
        assert (sequence.columns["rollout_experts"][-1] == -1).all()


def test_steps_are_reported_by_names(tmp_path: Path) -> None:
    names = ["a/step_12/rank_0.bin", "a/step_12/rank_1.bin", "4_0.pt", "7/gen_batch.dp", "eval_4.pt", "x.json"]
    names += ["train_data_step5.jsonl", "global_step_9_training_input.pkl", "notes.txt", "val_data_step5.jsonl"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    steps = files_by_step(tmp_path)
    assert {step: [file.name for file in files] for step, files in steps.items() if step} == {
        4: ["4_0.pt"],
        5: ["train_data_step5.jsonl"],
        7: ["gen_batch.dp"],
        9: ["global_step_9_training_input.pkl"],
        12: ["rank_0.bin", "rank_1.bin"],
    }


def _npy(values: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


def slime(**fields: Any) -> dict[str, Any]:
    """A dump of one sample."""
    return {"rollout_id": 1, "samples": [{"tokens": [1, 2, 3], "response_length": 2, **fields}]}


def vllm(**fields: Any) -> dict[str, Any]:
    """A reply of one choice."""
    return {"choices": [{"token_ids": [3], "prompt_token_ids": [1, 2], **fields}]}


VERL: dict[str, Any] = {
    "input_ids": torch.ones(2, 5),
    "responses": torch.ones(2, 2),
    "attention_mask": torch.ones(2, 5),
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (slime(response_length=None, tokens=[1]), "sample 0: response_length: got None, expected a number up to 1"),
        ({"rollout_id": 1, "samples": [{}]}, "sample 0: tokens: missing"),
        (slime(loss_mask=[1]), "loss_mask: got 1 values, expected 3 or 2"),
        (
            slime(rollout_routed_experts=torch.zeros(4, 2, 2, dtype=torch.int)),
            "rollout_experts: got 4 rows from token 0 on, expected at most 3 tokens",
        ),
        (
            slime(rollout_routed_experts=torch.zeros(3, 4)),
            "got float32 [3, 4], expected integers [tokens, layers, topk]",
        ),
        (
            slime(rollout_routed_experts=torch.full((3, 1, 1), 70000)),
            "got the expert 70000, expected 0 to 32767, or -1 for none",
        ),
        ({"rollout_id": 1, "rollout_data": {}}, "rollout_data: tokens: missing"),
        ({**VERL, "attention_mask": torch.tensor([[1, 0, 1, 1, 1]] * 2)}, "one run of ones per row"),
        ({**VERL, "routed_experts": torch.ones(3, 5, 1, 1)}, "routed_experts: got [3, 5, 1, 1], expected 2 rows"),
        (
            {"sequences": torch.ones(2, 5), "attention_mask": torch.ones(2, 5), "loss_mask": torch.ones(2, 6)},
            "loss_mask: got [2, 6], expected 2 rows of at most 5 tokens",
        ),
        (
            {"input_ids": [[1, 2]], "input_lengths": [3], "token_mask": [[0, 1]], "generation_logprobs": [[0, 1]]},
            "input_lengths: got [3], expected one length per row of token ids [1, 2]",
        ),
        ({"input_ids": [[1, 2]], "router_logits": [[1]]}, "lacks the number of experts per token; add --model DIR"),
        ([{"input": "a", "output": "b", "gts": 1, "score": 0.0, "step": 1}], "has only texts, no routes"),
        ({"choices": [{"token_ids": [1]}]}, "prompt_token_ids: missing, expected numbers; ask for return_token_ids"),
        (vllm(routed_experts="AAAA"), "routed_experts: not base64 of a .npy file"),
        (
            vllm(routed_experts=_npy(np.zeros((9, 1, 1), np.uint8))),
            "got 9 rows from token 0 on, expected at most 3 tokens",
        ),
        (
            {"meta_info": {"prompt_tokens": 1, "completion_tokens": 1, "routed_experts": "AAAA"}},
            "has no shape; add --model",
        ),
        (
            {"meta_info": {"prompt_tokens": 10**9, "completion_tokens": 1}},
            "got 1000000000 prompt tokens and 1000000001 in all, expected 1 to 16777216 in all",
        ),
        (vllm(token_ids=3), "no file of vLLM: TypeError"),
        ({"something": 1}, "is of no format that is known; --format takes auto, capture, transformers"),
    ],
)
def test_what_does_not_fit_is_reported(
    content: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("3.jsonl" if isinstance(content, list) else "3.json")
    try:
        path.write_text("\n".join(map(json.dumps, content)) if isinstance(content, list) else json.dumps(content))
    except TypeError:  # tensors
        path = tmp_path / "3.pt"
        torch.save(content, path)
    assert main(["audit", str(path)]) == 2
    reported = capsys.readouterr().err
    assert message in reported
    assert reported.startswith(f"error: {path}")
    assert reported.count("\n") == 1


def test_micro_batches_whose_routes_do_not_fit_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = load(EXAMPLES / "prime_rl" / "healthy" / "rollouts" / "step_3" / "rank_0.bin")
    routes = next(field for field in content[0] if isinstance(field, list) and isinstance(field[0], bytes))
    routes[0] = routes[0][:-1]
    path = tmp_path / "rank_0.bin"
    path.write_bytes(msgpack.packb(content))
    assert main(["audit", str(path)]) == 2
    assert "micro batch 0: routed_experts: got [80, 4, 2], expected [80, layers, topk]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verl/healthy", "--format", "slimy"], "--format: got 'slimy', expected one of auto, capture"),
        (["verl/healthy", "--format", "slime"], "3.pkl: is no file of slime or miles"),
        (["verl/healthy", "--model", "transformers"], "--model transformers/config.json: no configuration of a model"),
        (["verl/healthy", "--training", "none"], "--training none: there is no such file or folder"),
        (["verl/none"], "verl/none: there is no such file or folder"),
        (["verl/healthy", "vllm/healthy", "--write-capture", "t"], "--write-capture t: got 2 paths, expected one"),
        (["verl/healthy", "--steps", "9"], "verl/healthy: holds none of the chosen steps"),
        (["model"], "model: holds neither capture.json nor files of a format that is read"),
    ],
)
def test_arguments_that_lead_nowhere_are_reported(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sequences_that_training_lacks_are_reported(tmp_path: Path) -> None:
    lines = (EXAMPLES / "vllm" / "healthy" / "3.jsonl").read_text().splitlines()
    (tmp_path / "3.jsonl").write_text("\n".join(lines[:4]))
    source = open_source(tmp_path, "auto", None, EXAMPLES / "verl" / "healthy", None)
    assert sum(len(rows.names) for rows in source.read[3]()) == 4
    assert not any("--training" in text for text in source.notices)
    source = open_source(EXAMPLES / "verl" / "healthy", "auto", None, tmp_path, None)
    list(source.read[3]())
    assert "step 3: --training has 4 of 6 sequences" in source.notices
    other = write(tmp_path / "5.json", vllm(routed_experts=[[[0, 0], [1, 2], [1, 2], [1, 2]]]))
    with pytest.raises(DataError, match="has the token ids of no sequence of step 3"):
        list(open_source(EXAMPLES / "skyrl" / "healthy", "auto", read_router_shape(MODEL), other, None).read[3]())


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "hash_moe"]}, (1, 2, 4, 5)),
        ({"num_dense_layers": 3}, (3, 4, 5)),
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, (1, 4)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 2}, (1, 3, 5)),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1}, (1, 2, 3)),
        ({"moe_layers": [1, 4], "interleave_moe_layer_step": 1}, (1, 4)),
        ({"moe_layers": None, "interleave_moe_layer_step": 2}, (1, 3, 5)),
        ({"hybrid_override_pattern": "ME*E-E"}, (1, 3, 5)),
        ({"layers_block_type": ["mamba", "moe", "attention", "moe"], "hybrid_override_pattern": "ME*E-E"}, (1, 3)),
        ({"layer_types": ["linear_attention", "moe", "full_attention", "moe"]}, (1, 3)),
        ({"layer_types": ["linear_attention", "full_attention"] * 3, "num_dense_layers": 3}, (3, 4, 5)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_layers_with_experts(tmp_path: Path, fields: dict[str, Any], layers: tuple[int, ...], nested: bool) -> None:
    config = {"num_hidden_layers": 6, "n_routed_experts": 16, "num_experts_per_tok": 4, **fields}
    shape = read_router_shape(write(tmp_path / "config.json", {"text_config": config} if nested else config))
    assert (shape.moe_layers, shape.num_experts, shape.topk) == (layers, 16, 4)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "dbrx", "n_layers": 6}, "ValueError: has none of num_experts, "),
        ({"model_type": "longcat_flash", "num_layers": 6}, "ValueError: some experts have no weights"),
        ({"model_type": "jetmoe"}, "ValueError: each layer has two routers"),
        ({"model_type": "llama4_text", "mlp_layer_types": ["sparse"]}, "IndexError: "),
    ],
)
def test_families_whose_routers_cannot_be_read_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], reason: str, nested: bool
) -> None:
    if config["model_type"] != "dbrx":
        config = {"num_hidden_layers": 6, "num_local_experts": 16, "num_experts_per_tok": 4, **config}
    path = write(tmp_path / "config.json", {"model_type": "llama4", "text_config": config} if nested else config)
    expected = rf"{config['model_type']}' \(.*\) is not supported, and its numbers of experts and layers.*: {reason}"
    with pytest.raises(DataError, match=expected):
        read_router_shape(path)


def test_router_logits_that_do_not_report_the_experts_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((MODEL / "config.json").read_text()) | {"model_type": "deepseek_v3"}
    path = write(tmp_path / "config.json", config)
    assert main(["audit", str(TRAINING), "--model", str(path)]) == 2
    assert (
        "router_logits: do not suffice, since routers of deepseek_v3 need not choose the experts with the"
        " largest logits" in capsys.readouterr().err
    )


def test_every_format_is_named_on_the_page_and_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "audit.md").read_text()
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    shown = capsys.readouterr().out
    for name in ADAPTERS:
        assert name in shown
        assert f"`{name}`" in page


def test_the_layout_of_the_json_stands(capsys: pytest.CaptureFixture[str]) -> None:
    """Version 1: scripts of others read these keys, and the page names each one."""
    main(["audit", str(EXAMPLES / "faults" / "pinned_engine"), "--json", "-"])
    (found,) = json.loads(capsys.readouterr().out)
    of_run = ["format", "version", "capture", "problems", "not_checked", "layers", "num_experts", "topk"]
    of_steps = ["step", "num_sequences", "num_tokens", "columns", "metrics", "findings"]
    of_findings = ["side", "kind", "layer", "first_step", "last_step", "is_over", "text"]
    assert (found["format"], found["version"]) == ("routing-audit", 1)
    assert list(found) == [*of_run, "notices", "findings", "steps"]
    assert list(found["steps"][0]) == of_steps
    assert list(found["findings"][0]) == of_findings
    page = (DOCS / "audit.md").read_text(encoding="utf-8")
    _, _, layout = page.partition("### The JSON")
    layout, _, _ = layout.partition("### ")
    for key in (*found, *of_steps, *of_findings):
        assert f"`{key}`" in layout, key


PAGE = (DOCS / "audit-frameworks.md").read_text()
SHOWN = sorted(set(re.findall(r"^error: (\w+/\w+): step 3: .+$", PAGE, re.MULTILINE)))


@pytest.mark.parametrize("path", SHOWN)
def test_the_page_shows_what_is_printed(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert f"\nnemo-rl-moe audit {path} --model model --training transformers\n" in PAGE
    assert main(["audit", path, "--model", "model", "--training", "transformers"]) == 1
    assert capsys.readouterr().err in PAGE


def test_each_framework_has_its_fault_on_a_page() -> None:
    folders = {folder.parent.name for folder in EXAMPLES.glob("*/healthy")} - {"faults"}
    assert {path.partition("/")[0] for path in SHOWN} == folders


COMMANDS = sorted(set(re.findall(r"^nemo-rl-moe audit (\w+(?:/healthy)? --model model.*)$", PAGE, re.MULTILINE)))


@pytest.mark.parametrize("command", COMMANDS)
def test_healthy_commands_of_the_pages_have_no_finding(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert main(["audit", *command.split()]) == 0
    assert "no findings" in capsys.readouterr().out


def test_files_of_another_kind_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(EXAMPLES / "slime" / "healthy", tmp_path / "dumps")
    shutil.copy(EXAMPLES / "nemo_rl" / "log" / "train_data_step3.jsonl", tmp_path / "dumps" / "rollout_9.jsonl")
    (tmp_path / "dumps" / "notes.json").write_text("{}")  # of another program
    main(["audit", str(tmp_path / "dumps")])
    note = "note: 1 file of another kind not read, such as rollout_9.jsonl: an audit reads one kind of file"
    assert note in capsys.readouterr().out
    main(["audit", str(EXAMPLES / "slime" / "healthy")])
    assert "another kind" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "rollout", "training"),
    [
        ([], ["1 file of another kind not read, such as rollout_9.jsonl"], "2 files"),
        (["--steps", "3"], [], "1 file"),
    ],
)
@pytest.mark.parametrize("stem", ["3", "routes"])  # training of a single step may have another number
def test_files_of_another_kind_are_those_of_chosen_steps_on_both_sides(
    steps: list[str],
    rollout: list[str],
    training: str,
    stem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dumps, routes, other = tmp_path / "dumps", tmp_path / "routes", EXAMPLES / "nemo_rl/log/train_data_step3.jsonl"
    shutil.copytree(EXAMPLES / "slime" / "healthy", dumps)
    shutil.copy(other, dumps / "rollout_9.jsonl")
    if steps:
        (dumps / "2.pt").write_bytes(b"")
    routes.mkdir()
    shutil.copy(EXAMPLES / "transformers" / "3.safetensors", routes / f"{stem}.safetensors")
    for name in (f"{stem}_other", "9"):
        shutil.copy(other, routes / f"{name}.jsonl")
    main(["audit", str(dumps), "--model", str(EXAMPLES / "model"), "--training", str(routes), *steps, "--json", "-"])
    (found,) = json.loads(capsys.readouterr().out)
    notices = [notice for notice in found["notices"] if "not read" in notice]
    expected = [*rollout, f"--training: {training} of another kind not read, such as {stem}_other.jsonl"]
    assert notices == [f"{text}: an audit reads one kind of file" for text in expected]
