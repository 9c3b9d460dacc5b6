# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""`nemo-rl-moe serve`: real clients, many at a time, against transformers; how it ends."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.functional.served import KEY, NAME, Served, make_model, serving

pytestmark = pytest.mark.timeout(900)

PROMPTS = ("7+8=", "1234+5678+90123+4567=", "9")
NUM_CLIENTS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(model, tmp_path_factory.mktemp("served"), "--max-model-len", "200") as served:
        yield served


def outputs(model: Path, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities `[tokens, vocabulary]` and chosen experts `[tokens, layers, topk]` by transformers."""
    by_transformers: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        found = by_transformers(torch.tensor([token_ids]), output_router_logits=True)
    routers = torch.stack(
        [logits.topk(by_transformers.config.num_experts_per_tok).indices for logits in found.router_logits], 1
    )
    return found.logits[0].log_softmax(-1), routers


def test_prompts_are_scored_as_by_transformers(model: Path, server: Served) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    reply = server.client().completions.create(
        model=NAME, prompt=list(PROMPTS), echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    for prompt, choice in zip(PROMPTS, reply.choices, strict=True):
        token_ids = tokenizer.encode(prompt)
        expected, _ = outputs(model, token_ids)
        assert choice.logprobs is not None
        first, *scores = choice.logprobs.token_logprobs or []
        assert first is None
        own = expected[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
        assert scores == pytest.approx([*own, float(expected[-1].max())], abs=2e-5)
        _, *likeliest = choice.logprobs.top_logprobs or []
        assert [max(each.values()) for each in likeliest] == pytest.approx(expected.max(-1).values.tolist(), abs=2e-5)


def test_an_adapter_answers_with_the_model(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, settings).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    token_ids = tokenizer.encode(PROMPTS[1])
    with torch.no_grad():
        logprobs = adapted(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    words = ("--adapter", str(tmp_path / "adapter"), "--max-model-len", "200")
    with serving(model, tmp_path, *words) as served:
        reply = served.client().completions.create(
            model=NAME, prompt=PROMPTS[1], echo=True, logprobs=1, max_tokens=1, temperature=0
        )
    [choice] = reply.choices
    assert choice.logprobs is not None
    _, *scores = choice.logprobs.token_logprobs or []
    own = logprobs[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
    assert scores == pytest.approx([*own, float(logprobs[-1].max())], abs=1e-4)
    without, _ = outputs(model, token_ids)
    assert (logprobs - without).abs().max() > 0.1


def test_a_chat_has_the_experts_that_transformers_chooses(model: Path, server: Served) -> None:
    reply = server.client().chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": PROMPTS[1]}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        extra_body={"return_routed_experts": True, "return_token_ids": True},
    )
    [choice] = reply.model_dump()["choices"]
    token_ids = [*reply.model_dump()["prompt_token_ids"], *choice["token_ids"]]
    logprobs, routers = outputs(model, token_ids)
    found = choice["routed_experts"]
    assert found["num_prompt_tokens"] == len(token_ids) - len(choice["token_ids"])
    *experts, last = found["experts"]
    assert last is None
    assert torch.tensor(experts).sort(-1).values.tolist() == routers[:-1].sort(-1).values.tolist()
    of_response = logprobs[found["num_prompt_tokens"] - 1 : -1]
    assert of_response.argmax(-1).tolist() == choice["token_ids"]
    own = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert own == pytest.approx(of_response.max(-1).values.tolist(), abs=2e-5)


def test_many_clients_get_what_each_gets_alone(server: Served) -> None:
    client = server.client()

    def ask(number: int) -> str | None:
        how: dict[str, Any] = {"model": NAME, "seed": number, "max_tokens": 4 + number % 3, "temperature": number % 2}
        if number % 4 == 3:
            return client.completions.create(prompt=PROMPTS[number % 3], **how).choices[0].text
        message: Any = {"role": "user", "content": PROMPTS[number % 3]}
        return client.chat.completions.create(messages=[message], **how).choices[0].message.content

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        together = list(clients.map(ask, range(2 * NUM_CLIENTS)))
    assert [ask(number) for number in range(8)] == together[:8]


def test_a_wrong_request_changes_nothing_for_the_next_one(server: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    wrong: list[dict[str, Any]] = [
        {"prompt": [5] * 200, "max_tokens": 0, "echo": True},
        {"prompt": "7", "stop": ["\ud800"]},
        {"prompt": [10**9]},
        {"prompt": "7", "temperature": 10**400},
        {"prompt": ["7" * 300] * 1000},
        {"prompt": ["7"] * 1024, "n": 128},
    ]
    contents = [b"{", b'{"model": "tiny"}', *(json.dumps({"model": NAME, **body}).encode() for body in wrong)]
    for content in contents:
        reply = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=300)
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), content
    cold = server.client().completions.create(model=NAME, prompt="7", temperature=1e-40, max_tokens=2)
    assert cold.choices[0].finish_reason
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert [each.id for each in server.client().models.list()] == [NAME]


def test_a_dead_engine_ends_the_server_with_the_reason(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        workers = [child for child in children if "start_rank" in " ".join(child.cmdline()) or "ray::" in child.name()]
        assert workers
        for worker in workers:
            worker.kill()
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"model": NAME, "prompt": "a"}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=300)
        assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
        assert server.process.wait(300) == 1
        assert "error: generation engine megatron_separate" in server.log.read_text()


def test_ctrl_c_ends_it_and_all_that_it_has_started(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path) as server:
        started = psutil.Process(server.process.pid).children(recursive=True)
        assert started
        assert server.stop() == 130
        _, alive = psutil.wait_procs(started, timeout=120)
        assert not alive
        assert [path.name for path in tmp_path.iterdir()] == ["serve.log"]
