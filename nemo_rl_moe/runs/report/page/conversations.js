// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Conversations of trajectories: turns, calls with their outcomes, trained turns, and times.

const ROLLOUT_PARTS = ["generation", "tools", "waiting"];

function secondsText(seconds) {
  return `${seconds.toFixed(seconds >= 100 ? 0 : seconds >= 10 ? 1 : 2)} s`;
}

// Spans of generation and tools, on a track as long as the longest trajectory. The remaining time is waiting.
function rolloutBar(times, longest) {
  const bar = element("div", { class: "rollout_bar" });
  const place = (part, start, end) => {
    const span = element("span", { class: part, title: `${part}, ${secondsText(start)} to ${secondsText(end)}` });
    span.style.left = `${(100 * start) / longest}%`;
    span.style.width = `${(100 * (end - start)) / longest}%`;
    bar.append(span);
  };
  place("waiting", 0, times.seconds);
  ["generation", "tools"].forEach((part) =>
    times[part].filter(([start, end]) => end > start).forEach(([start, end]) => place(part, start, end)),
  );
  return bar;
}

function partsText(times) {
  return ROLLOUT_PARTS.map((part, number) => `${part} ${secondsText(times.parts[number])}`).join(", ");
}

function sampleName(sample) {
  return `${sample.split === "val" ? "validation" : "training"}, step ${sample.step}, ${sample.sample_id}`;
}

function rolloutTimeLine(samples) {
  const timed = samples.filter((sample) => sample.conversation.times !== null);
  const longest = Math.max(...timed.map((sample) => sample.conversation.times.seconds), 1e-9);
  const rows = timed.flatMap((sample) => [
    element("span", { class: "name" }, sampleName(sample)),
    rolloutBar(sample.conversation.times, longest),
    element("span", { class: "number" }, secondsText(sample.conversation.times.seconds)),
  ]);
  const legend = ROLLOUT_PARTS.flatMap((part) => [element("span", { class: `key ${part}` }), `${part}  `]);
  const caption = element("p", { class: "caption" }, ...legend);
  return element("div", { class: "rollouts" }, caption, element("div", { class: "rollout_rows" }, ...rows));
}

function verdictBadge(sample) {
  const isKnown = ["right", "wrong", "truncated"].includes(sample.verdict);
  const kind = sample.verdict === "right" ? "good" : isKnown ? "plain" : "bad";
  return element("span", { class: `badge ${kind}` }, isKnown ? sample.verdict : "failed");
}

function callRow(call) {
  const text = `${call.name} ${call.arguments}`.trim() || "a call that cannot be read";
  return element(
    "div",
    { class: "call" },
    element("span", { class: "muted" }, "call "),
    element("code", {}, text),
    element("span", { class: `badge ${call.failed ? "bad" : "plain"}` }, call.outcome.replace("_", " ")),
    ...(call.seconds ? [element("span", { class: "muted" }, secondsText(call.seconds))] : []),
  );
}

function turnBadge(turn) {
  if (turn.sequence === null) {
    return [element("span", { class: "badge bad" }, "not read by the model")];
  }
  if (turn.trained) {
    return [element("span", { class: "badge good" }, `${turn.num_tokens} tokens trained on`)];
  }
  return turn.sampled ? [element("span", { class: "badge plain" }, `${turn.num_tokens} tokens, not trained on`)] : [];
}

function turnBlock(turn) {
  const kind = turn.trained ? "trained" : turn.sampled ? "sampled" : "given";
  const text = element("pre", {}, turn.text);
  if (turn.num_hidden) {
    text.append(element("span", { class: "muted" }, ` [${turn.num_hidden.toLocaleString("en")} more characters]`));
  }
  const seconds = turn.seconds === null ? [] : [element("span", { class: "muted" }, secondsText(turn.seconds))];
  return element(
    "div",
    { class: `turn ${kind}` },
    element("div", { class: "who" }, element("b", {}, `${turn.role} ${turn.name}`.trim()), ...turnBadge(turn), ...seconds),
    element("div", { class: "said" }, text, ...turn.calls.map(callRow)),
  );
}

function turnBlocks({ turns, num_hidden: numHidden, hidden_from: hiddenFrom }) {
  let sequence = 0;
  return turns.flatMap((turn, number) => {
    const before = [];
    if (numHidden && number === hiddenFrom) {
      before.push(element("p", { class: "between" }, `${numHidden} more turns`));
    }
    if (turn.sequence !== null && turn.sequence !== sequence) {
      sequence = turn.sequence;
      const what = `Sequence ${sequence + 1}, which does not continue the turns above.`;
      before.push(element("p", { class: "between" }, what));
    }
    return [...before, turnBlock(turn)];
  });
}

function conversationBlock(sample, thumbnails, isOpen) {
  const { conversation } = sample;
  const made = element(
    "details",
    { class: "conversation" },
    element(
      "summary",
      {},
      verdictBadge(sample),
      ...(sample.left_out ? [element("span", { class: "badge over" }, "left out")] : []),
      element("b", {}, sampleName(sample)),
      element("span", { class: "muted" }, ` · ${conversation.summary}`),
    ),
  );
  made.open = isOpen;
  if (sample.left_out) {
    made.append(element("p", { class: "notes" }, `Not trained on: ${sample.left_out}`));
  } else if (!["right", "wrong", "truncated"].includes(sample.verdict)) {
    made.append(element("p", { class: "notes" }, `Could not be scored: ${sample.verdict}`));
  }
  if (conversation.times !== null) {
    made.append(element("p", { class: "caption" }, `Time: ${partsText(conversation.times)}.`));
  }
  const images = (sample.thumbnails || []).map((name) => imageOf(name, thumbnails));
  made.append(...images, ...turnBlocks(conversation));
  return made;
}

function addConversations(parent, runs) {
  for (const [runNumber, run] of runs.entries()) {
    const found = run.samples.filter((sample) => sample.conversation);
    if (found.length === 0) {
      continue;
    }
    // Trained samples come first.
    const samples = [true, false].flatMap((first) => found.filter((sample) => (sample.split === "train") === first));
    const made = card(
      "Conversations",
      "One trajectory for each of the first prompts of some steps. Green: the model wrote it and was trained on it. Blue: " +
        "the model wrote it and was not trained on it, as in validations. Other text was given. Waiting is for other " +
        "trajectories, a free tool process, new weights, the score, or the environment's own code.",
      rolloutTimeLine(samples),
      ...samples.map((sample) => conversationBlock(sample, run.thumbnails, sample === samples[0])),
    );
    made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
    parent.append(made);
  }
}
