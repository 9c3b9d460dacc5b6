// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Asks the served model, and draws which experts each layer chose for the selected tokens.
"use strict";

const at = (id) => document.getElementById(id);
const LEAST_WIDTH = 760;
const LEFT = 64;
const TOP = 68;
// Colours of shares from 0 to the largest one, dark to light: colour-blind safe and readable in grey.
const SCALE = [[72, 40, 120], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const NAMED_AT_MOST = 6;

let model = null;
let answer = null;
let selected = [];

const key = new URLSearchParams(location.hash.slice(1)).get("key");
if (key) {
  at("key").value = key;
  at("key-label").hidden = true;
  history.replaceState(null, "", location.pathname); // so that the key is in no bookmark
}

async function request(path, body) {
  const headers = { Authorization: `Bearer ${at("key").value}`, "Content-Type": "application/json" };
  const how = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) };
  const reply = await fetch(path, how);
  const found = await reply.json();
  if (!reply.ok) throw new Error(found.error ? found.error.message : `HTTP ${reply.status}`);
  return found;
}

function say(text, isError = false) {
  at("status").textContent = text;
  at("status").classList.toggle("error", isError);
}

async function loadModel() {
  [model] = (await request("v1/models")).data;
  at("model").textContent = model.id;
  if (!model.moe) throw new Error("the engine captures no routed experts (policy.megatron_cfg.capture_routing)");
}

async function ask(event) {
  event.preventDefault();
  const button = at("ask").querySelector("button");
  button.disabled = true;
  try {
    if (!model) await loadModel();
    say("waiting for the model ...");
    const began = performance.now();
    const isChat = at("kind").value === "chat";
    const body = {
      model: model.id,
      max_tokens: Number(at("tokens").value),
      temperature: Number(at("temperature").value),
      return_routed_experts: true,
      ...(isChat ? { messages: [{ role: "user", content: at("prompt").value }] } : { prompt: at("prompt").value }),
    };
    const [choice] = (await request(isChat ? "v1/chat/completions" : "v1/completions", body)).choices;
    answer = choice.routed_experts;
    say(`${answer.tokens.length} tokens in ${((performance.now() - began) / 1000).toFixed(1)} s`);
    showTokens();
    at("answer").hidden = false;
    select(positions(true));
  } catch (error) {
    say(error.message, true);
  } finally {
    button.disabled = false;
  }
}

// Positions of the response or of the prompt. The last token was no input of the model, so it has no experts.
function positions(ofResponse) {
  return answer.tokens
    .map((_, index) => index)
    .filter((index) => answer.experts[index] && index >= answer.num_prompt_tokens === ofResponse);
}

function showTokens() {
  at("strip").replaceChildren(
    ...answer.tokens.map((text, index) => {
      const token = document.createElement("button");
      token.type = "button";
      token.textContent = text.replaceAll("\n", "⏎\n") || "·";
      token.title = answer.experts[index] ? `token ${index}` : `token ${index}: no input of the model, no experts`;
      token.className = index < answer.num_prompt_tokens ? "given" : "sampled";
      token.disabled = !answer.experts[index];
      token.tabIndex = -1;
      token.onclick = () => select([index]);
      return token;
    }),
  );
}

function select(chosen) {
  selected = chosen;
  const isOne = chosen.length === 1;
  [...at("strip").children].forEach((token, index) => {
    token.setAttribute("aria-pressed", String(chosen.includes(index)));
    token.tabIndex = index === chosen[0] ? 0 : -1;
  });
  const isResponse = chosen.length > 0 && chosen[0] >= answer.num_prompt_tokens;
  const part = isResponse ? "response" : "prompt";
  at("caption").textContent = !chosen.length
    ? "no token with experts: let the model answer with two tokens or more"
    : isOne
      ? `Experts of token ${chosen[0]} of the ${part}: ${JSON.stringify(answer.tokens[chosen[0]])}`
      : `Experts of the ${chosen.length} tokens of the ${part}`;
  draw();
}

// The share of the selected tokens for which each layer chose each expert: `[layer][expert]`.
function shares() {
  const found = answer.layers.map(() => new Array(answer.num_experts).fill(0));
  for (const index of selected) {
    answer.experts[index].forEach((experts, layer) => {
      for (const expert of experts) if (expert >= 0) found[layer][expert] += 1 / selected.length;
    });
  }
  return found;
}

function colour(part) {
  const place = Math.min(Math.max(part, 0), 1) * (SCALE.length - 1);
  const low = Math.min(Math.floor(place), SCALE.length - 2);
  const mixed = SCALE[low].map((value, index) => Math.round(value + (SCALE[low + 1][index] - value) * (place - low)));
  return `rgb(${mixed.join(",")})`;
}

function draw() {
  const found = shares();
  const canvas = at("map");
  const style = getComputedStyle(document.documentElement);
  const cell = Math.max(8, Math.min(34, Math.floor(1150 / answer.num_experts)));
  const height = Math.max(10, Math.min(26, Math.floor(900 / answer.layers.length)));
  const [width, bottom] = [Math.max(LEAST_WIDTH, LEFT + cell * answer.num_experts + 20), TOP + height * answer.layers.length + 34];
  const density = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * density, bottom * density];
  canvas.style.width = `${width}px`;
  canvas.style.height = `${bottom}px`;
  const pen = canvas.getContext("2d");
  pen.scale(density, density);
  pen.fillStyle = style.getPropertyValue("--page");
  pen.fillRect(0, 0, width, bottom);
  pen.fillStyle = style.getPropertyValue("--text");
  pen.font = "14px system-ui, sans-serif";
  pen.fillText(clipped(pen, `${model.id}: ${at("caption").textContent}`, width - 16), 8, 18);
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = style.getPropertyValue("--muted");
  const prompt = answer.tokens.slice(0, answer.num_prompt_tokens).join("");
  const response = answer.tokens.slice(answer.num_prompt_tokens).join("");
  pen.fillText(clipped(pen, prompt, width - 16, true), 8, 36);
  pen.fillText(clipped(pen, response, width - 16), 8, 52);
  const largest = Math.max(...found.flat(), 1e-9);
  found.forEach((row, layer) => {
    row.forEach((share, expert) => {
      pen.fillStyle = share ? colour(share / largest) : style.getPropertyValue("--none");
      pen.fillRect(LEFT + expert * cell, TOP + layer * height, cell - 1, height - 1);
    });
    if (height >= 12 || layer % 4 === 0) {
      pen.fillStyle = style.getPropertyValue("--muted");
      pen.fillText(`layer ${answer.layers[layer]}`, 8, TOP + layer * height + height / 2 + 4);
    }
  });
  pen.fillStyle = style.getPropertyValue("--muted");
  const every = Math.ceil(30 / cell);
  for (let expert = 0; expert < answer.num_experts; expert += every) {
    pen.fillText(String(expert), LEFT + expert * cell + 1, bottom - 18);
  }
  pen.fillText("expert", 8, bottom - 18);
  const even = answer.num_experts_per_token / answer.num_experts;
  at("legend").textContent = selected.length
    ? `Brighter: chosen for more of these tokens, up to ${percent(largest)}. Grey: for none. If all experts had the same` +
      ` load, each would get ${percent(even)}: ${answer.num_experts_per_token} of ${answer.num_experts} experts a token.`
    : "";
  canvas.setAttribute("aria-label", `${at("caption").textContent}. The table below has the numbers.`);
  fillTable(found);
}

// The text in one line of at most `width` pixels. Of a prompt, the end is kept.
function clipped(pen, text, width, keepsEnd = false) {
  const line = text.replaceAll("\n", "⏎");
  if (pen.measureText(line).width <= width) return line;
  const fits = (size) => pen.measureText(part(size)).width <= width;
  const part = (size) => (keepsEnd ? `…${line.slice(-size)}` : `${line.slice(0, size)}…`);
  let [low, high] = [1, line.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle - 1;
  }
  return part(low);
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;

function fillTable(found) {
  at("table").tBodies[0].replaceChildren(
    ...found.map((row, layer) => {
      const order = row.map((share, expert) => [share, expert]).sort((a, b) => b[0] - a[0] || a[1] - b[1]);
      const named = order.slice(0, NAMED_AT_MOST).filter(([share]) => share > 0);
      const cells = [
        String(answer.layers[layer]),
        named.map(([share, expert]) => `${expert} (${percent(share)})`).join(", "),
        `${row.filter((share) => !share).length} of ${row.length}`,
      ];
      const line = document.createElement("tr");
      line.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
      return line;
    }),
  );
}

at("ask").onsubmit = ask;
at("response").onclick = () => select(positions(true));
at("all-prompt").onclick = () => select(positions(false));
at("strip").onkeydown = (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!step || !selected.length) return;
  const next = (step < 0 ? selected[0] : selected[selected.length - 1]) + step;
  if (!answer.experts[next]) return;
  event.preventDefault();
  select([next]);
  at("strip").children[next].focus();
};
at("save").onclick = () => {
  at("map").toBlob((picture) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(picture);
    link.download = "experts.png";
    link.click();
    URL.revokeObjectURL(link.href);
  });
};
window.matchMedia("(prefers-color-scheme: dark)").onchange = () => answer && draw();
if (key) loadModel().catch((error) => say(error.message, true));
