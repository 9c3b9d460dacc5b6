// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Findings, settings and responses, in words.

function findingText(finding) {
  let text = finding.text;
  if (finding.is_over) {
    text += `; over after step ${finding.last_step}`;
  }
  if (finding.number > 1) {
    text += `; ${finding.number} times since step ${finding.began_first}`;
  }
  return text;
}

function thresholdText({
  dead_expert_steps: dead,
  excess_cv: cv,
  overload_factor: overload,
  sustained_steps: steps,
  missing_routes_share: missing,
  missing_routes_steps: missingSteps,
  sudden_steps: sudden,
}) {
  const parts = [];
  const soon = sudden === null ? "" : ` (${sudden} if this happens suddenly)`;
  if (dead !== null) {
    parts.push(`experts dead for ${dead} steps in a row${soon}`);
  }
  if (cv !== null) {
    parts.push(`a spread of a layer's loads beyond chance above ${cv} for ${steps} steps`);
  }
  if (overload !== null) {
    parts.push(`an overload factor above ${overload} for ${steps} steps${soon}`);
  }
  if (missing !== null) {
    parts.push(`more than ${100 * missing}% of the routes of rollouts missing for ${missingSteps} steps`);
  }
  const always = "and at once: skipped updates, routes that cannot be right, forced routing";
  return parts.length ? `Reported as findings: ${parts.join(", ")}; ${always}.` : "";
}

const FINDINGS_SHOWN = 4;

function findingList(findings) {
  const items = findings.map((finding) =>
    element("li", finding.is_over ? { class: "over" } : {}, findingText(finding)),
  );
  return element("ul", { class: "findings" }, ...items);
}

// The first few findings of each kind, since there may be one of a kind in every layer.
function findingsByKind(findings) {
  return [...new Set(findings.map((finding) => finding.kind))].flatMap((kind) => {
    const ofKind = findings.filter((finding) => finding.kind === kind);
    const rest = ofKind.slice(FINDINGS_SHOWN);
    const more = element("details", {}, element("summary", {}, `${rest.length} more`), findingList(rest));
    return [findingList(ofKind.slice(0, FINDINGS_SHOWN)), ...(rest.length ? [more] : [])];
  });
}

function runSummary(run, runNumber, withoutLoad) {
  const steps =
    run.planned_steps && run.planned_steps >= run.last_step
      ? `step ${run.last_step} of ${run.planned_steps}`
      : `step ${run.last_step}`;
  const made = element(
    "section",
    { class: "card", "data-run": runNumber },
    element("h3", {}, chip(colorOf(runNumber)), run.name),
    element("p", { class: "caption" }, `${run.algorithm || "run"} · ${steps} · ${run.folder}`),
  );
  if (run.findings.length === 0) {
    made.append(element("ul", { class: "findings" }, element("li", { class: "none" }, "No findings.")));
  } else {
    made.append(...findingsByKind(run.findings));
  }
  const latest = run.latest.map(({ label, value }) => `${label} ${value}`);
  made.append(element("p", { class: "latest" }, latest.join(" · ")));
  if (run.load === null) {
    made.append(element("p", { class: "muted" }, withoutLoad));
  }
  run.notes.forEach((note) => made.append(element("p", { class: "notes" }, note)));
  made.append(element("p", { class: "caption" }, thresholdText(run.thresholds)));
  return made;
}

function table(heads, rows) {
  const head = element("tr", {}, ...heads.map(([text, kind]) => element("th", kind ? { class: kind } : {}, text)));
  return element(
    "div",
    { class: "scroll" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)),
  );
}

function whatIfTable(withLoad, sizes) {
  const rows = sizes.flatMap((size) =>
    withLoad.flatMap(({ run, runNumber }) => {
      const found = run.load.what_if.sizes.find((one) => one.size === size);
      return found
        ? [
            element(
              "tr",
              {},
              element("td", { class: "number" }, size),
              element(
                "td",
                {},
                chip(colorOf(runNumber)),
                run.name + (size === run.load.what_if.own_size ? " (as it ran)" : ""),
              ),
              element("td", { class: "number" }, found.late_mean.toFixed(3)),
              element(
                "td",
                { class: "number" },
                `${found.late_worst_layer.toFixed(3)} (layer ${found.late_worst_layer_index})`,
              ),
            ),
          ]
        : [];
    }),
  );
  const heads = [
    ["EP size", "number"],
    ["run", ""],
    ["overload", "number"],
    ["worst layer", "number"],
  ];
  return card(
    "What if, in numbers",
    "Mean over the last tenth of the steps. 1.25: the busiest rank has a quarter more work than the mean rank.",
    table(heads, rows),
  );
}

function settingRow(row, isMarked) {
  const values = row.values.map((value) => element("td", {}, element("code", {}, value === null ? "—" : value)));
  return element(
    "tr",
    isMarked && row.differ ? { class: "differs" } : {},
    element("td", {}, element("code", {}, row.key)),
    ...values,
  );
}

function addConfiguration(parent, runs, rows) {
  const heads = [["setting", ""], ...runs.map((run) => [run.name, ""])];
  if (runs.length > 1) {
    const differing = rows.filter((row) => row.differ);
    const what = differing.length ? "Settings in which the runs differ." : "The runs do not differ in any setting.";
    parent.append(
      card(
        "What differs",
        what,
        table(
          heads,
          differing.map((row) => settingRow(row, false)),
        ),
      ),
    );
  }
  const search = element("input", { type: "search", placeholder: "find a setting", "aria-label": "find a setting" });
  const whole = table(
    heads,
    rows.map((row) => settingRow(row, runs.length > 1)),
  );
  const tableRows = Array.from(whole.querySelectorAll("tbody tr"));
  search.addEventListener("input", () => {
    tableRows.forEach((row) => {
      row.hidden = !row.textContent.toLowerCase().includes(search.value.toLowerCase());
    });
  });
  const caption = 'The resolved configuration. Under "in force": the settings with which the routers really ran.';
  parent.append(
    card(
      "All settings",
      caption,
      element("details", {}, element("summary", {}, `${rows.length} settings`), search, whole),
    ),
  );
}

// An image of a prompt, from the page's data.
function imageOf(name, thumbnails) {
  return Object.hasOwn(thumbnails, name)
    ? element("img", { class: "thumbnail", alt: "image", src: `data:image/png;base64,${thumbnails[name]}` })
    : element("span", { class: "muted" }, "not shown ");
}

function imageCell(sample, thumbnails) {
  return element("td", {}, ...(sample.thumbnails || []).map((name) => imageOf(name, thumbnails)));
}

function addSamples(parent, runs) {
  for (const [runNumber, run] of runs.entries()) {
    const samples = run.samples.filter((sample) => !sample.conversation);
    if (samples.length === 0) {
      continue;
    }
    const hasImages = samples.some((sample) => sample.thumbnails);
    const rows = samples.map((sample) =>
      element(
        "tr",
        {},
        element("td", { class: "number" }, sample.step),
        element("td", {}, sample.split === "val" ? "validation" : sample.split),
        ...(hasImages ? [imageCell(sample, run.thumbnails)] : []),
        element("td", {}, element("pre", {}, sample.prompt)),
        element("td", {}, element("pre", {}, sample.response)),
        element("td", { class: "number" }, sample.reward),
        element("td", {}, sample.left_out ? `left out: ${sample.left_out}` : sample.verdict),
      ),
    );
    const heads = [
      ["step", "number"],
      ["split", ""],
      ...(hasImages ? [["image", ""]] : []),
      ["prompt", ""],
      ["response", ""],
      ["reward", "number"],
      ["verdict", ""],
    ];
    const made = card(
      "Responses",
      "One response each to the first prompts of some steps. Healthy: later responses are right more often." +
        (hasImages ? " Images are shown as the model got them, shrunk to at most 96 pixels." : ""),
      table(heads, rows),
    );
    if (hasImages) {
      made.classList.add("with_images");
    }
    made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
    parent.append(made);
  }
}
