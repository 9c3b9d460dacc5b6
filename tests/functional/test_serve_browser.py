# Copyright (c) 2026 The nemo_rl_moe authors.
# SPDX-License-Identifier: Apache-2.0
"""The page of a served model in a real browser: it draws the experts that the API returns."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.functional.served import KEY, NAME, Served, make_model, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT, NUM_TOKENS = "12+34=", 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(make_model(folder / "model"), folder, "--max-model-len", "200") as served:
        yield served


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, server: Served) -> Iterator[Any]:
    """The page after a question, in both colour schemes."""
    opened = browser.new_page(viewport={"width": 1300, "height": 1000}, color_scheme=request.param)
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.goto(f"{server.url}/#key={KEY}")
    opened.fill("#prompt", PROMPT)
    opened.fill("#tokens", str(NUM_TOKENS))
    opened.click("#ask button")
    opened.wait_for_selector("#answer:not([hidden])", timeout=120_000)
    yield opened
    assert problems == []
    opened.close()


def routes(server: Served) -> dict[str, Any]:
    reply = server.client().chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"return_routed_experts": True},
    )
    found: dict[str, Any] = reply.model_dump()["choices"][0]["routed_experts"]
    return found


def shown(page: Any) -> list[dict[int, str]]:
    """Shares of the most chosen experts of each layer, by expert, as the table has them."""
    page.evaluate("document.querySelector('details').open = true")
    cells = page.locator("#table tbody tr td:nth-child(2)").all_inner_texts()
    return [{int(each.split(" (")[0]): each.split(" (")[1][:-1] for each in cell.split(", ")} for cell in cells]


def expected(found: dict[str, Any], tokens: list[int], most: int = 6) -> list[dict[int, str]]:
    layers = []
    for layer in range(len(found["layers"])):
        counts = Counter(expert for token in tokens for expert in found["experts"][token][layer])
        chosen = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[:most]
        shares = {expert: count / len(tokens) for expert, count in chosen}
        layers.append({expert: f"{100 * share:.{1 if share < 0.1 else 0}f}%" for expert, share in shares.items()})
    return layers


def test_it_shows_the_experts_of_the_response_of_the_prompt_and_of_a_token(page: Any, server: Served) -> None:
    found = routes(server)
    first, number = found["num_prompt_tokens"], len(found["tokens"])
    assert page.locator("#strip button").count() == number
    assert shown(page) == expected(found, list(range(first, number - 1)))
    page.click("#all-prompt")
    assert shown(page) == expected(found, list(range(first)))
    page.locator("#strip button").nth(1).click()
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#caption").startswith("Experts of token 2 of the prompt: ")
    assert shown(page) == expected(found, [2])
    assert page.locator("#strip button").nth(number - 1).is_disabled(), "the last token was no input"


def test_its_map_has_a_colour_for_each_share_and_can_be_saved(page: Any, tmp_path: Path) -> None:
    page.locator("#strip button").nth(1).click()
    colours = page.evaluate(
        """() => {
            const canvas = document.getElementById("map"), pen = canvas.getContext("2d");
            const found = new Set();
            for (let x = 70; x < canvas.width; x += 4)
                found.add(pen.getImageData(x, 75, 1, 1).data.join());
            return found.size;
        }"""
    )
    assert colours >= 2, "chosen and not chosen"
    with page.expect_download() as download:
        page.click("#save")
    download.value.save_as(tmp_path / "experts.png")
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")


def test_the_key_leaves_the_address_and_a_wrong_one_is_reported(browser: Any, server: Served, page: Any) -> None:
    assert page.url == f"{server.url}/"
    other = browser.new_page()
    other.goto(server.url)
    assert other.is_visible("#key")
    other.fill("#key", "wrong")
    other.click("#ask button")
    other.wait_for_selector("#status.error")
    assert other.inner_text("#status") == "the key is not the server's"
    other.close()
