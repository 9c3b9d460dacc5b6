// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Agreement of training with the routes of the rollouts, and statistics of the captures.

const LEAST_DISAGREEMENT_SHOWN = 0.01;
const BOTH_SIDES_LIGHT = [
  [0, "#2166ac"],
  [0.25, "#7fb5d8"],
  [0.5, "#f4f4f4"],
  [0.75, "#e8825f"],
  [1, "#8e0b23"],
];
const BOTH_SIDES_DARK = [
  [0, "#5aa9f0"],
  [0.25, "#3a6a99"],
  [0.5, "#2a303a"],
  [0.75, "#a8452f"],
  [1, "#ff7f45"],
];
const MOST_LAYERS_WITH_TEXT = 12;

function addDisagreement(parent, runs) {
  addLayersOverTime(parent, runs, {
    title: "rows that differ, by layer",
    caption: () =>
      "Share of the rows of each layer for which the router would choose other experts than the rollout: 0 is full " +
      "agreement. Healthy: all cells are pale. A layer that stands out has near ties or wrong routes.",
    viewOf: ({ routing }) =>
      routing && { layers: routing.layers, byLayer: routing.by_layer, values: routing.by_layer.differing },
    leastHighest: LEAST_DISAGREEMENT_SHOWN,
    hover: "%{y}, step %{x}<br>differ: %{z:.3%}<extra></extra>",
  });
}

// Numbers of all rows and of differing rows in each class, of one step or of all steps together.
function marginsOf({ margins }, step) {
  if (step === null) {
    return margins.of_all;
  }
  const frame = frameAt(numbers(margins.steps), step);
  const values = numbers(margins.of_steps);
  return margins.classes.map((_, number) => {
    const place = (frame * margins.classes.length + number) * 2;
    return [values[place], values[place + 1]];
  });
}

function marginTraces({ run, runNumber }, step, numRuns) {
  const { classes } = run.routing.margins;
  const rows = marginsOf(run.routing, step);
  const total = rows.reduce((sum, [all]) => sum + all, 0);
  const name = (what) => plain(numRuns > 1 ? `${run.name} · ${what}` : what);
  const color = colorOf(runNumber);
  return [
    {
      type: "bar",
      name: name("rows of the class that differ"),
      x: classes,
      y: rows.map(([all, differing]) => (all ? differing / all : null)),
      customdata: rows,
      marker: { color },
      hovertemplate: "%{y:.3%}: %{customdata[1]} of %{customdata[0]} rows",
    },
    {
      type: "scatter",
      mode: "lines+markers",
      name: name("share of all rows"),
      x: classes,
      y: rows.map(([all]) => (total ? all / total : null)),
      line: { color: numRuns > 1 ? color : themeColor("muted"), width: 1.4, dash: "dot" },
      marker: { color: numRuns > 1 ? color : themeColor("muted"), size: 5 },
      hovertemplate: "%{y:.3%}",
    },
  ];
}

function addMargins(parent, all) {
  const steps = [...new Set(all.flatMap(({ run }) => Array.from(numbers(run.routing.margins.steps))))].sort(
    (a, b) => a - b,
  );
  const place = element("div", { class: "plot", "data-chart": "margins" });
  const together = element("input", { type: "checkbox" });
  together.checked = true;
  const controls = stepControls(steps, () => {
    together.checked = false;
    draw();
  });
  controls.place.append(element("label", {}, together, " all steps together"));
  parent.append(
    card(
      "Rows that differ, by router margin",
      "The margin is the distance between the last chosen and the first unchosen expert, in the router's scores. Bars: share " +
        "of the rows of a class in which the router would choose other experts than the rollout. Dotted: share of the class " +
        "in all rows. Healthy: only near ties differ, so bars fall to 0 from left to right. Bars at wide margins do not come " +
        "from rounding: weights or routes differ.",
      controls.place,
      place,
    ),
  );
  const draw = drawWhenReady(place, () => {
    const step = together.checked ? null : controls.step();
    const traces = all.flatMap((one) => marginTraces(one, step, all.length));
    const layout = {
      xaxis: axis({ title: { text: "router margin", standoff: 2 }, type: "category", showgrid: false }),
      yaxis: axis({ rangemode: "tozero", tickformat: ".3~%" }),
      hovermode: "x unified",
      barmode: "group",
      showlegend: true,
    };
    place.style.height = `${PLOT_HEIGHT + LEGEND_LINE * Math.max(0, traces.length - 2)}px`;
    return drawPlot(place, traces, layout);
  });
  together.addEventListener("change", draw);
}

function percent(share) {
  return `${(100 * share).toPrecision(share && share < 0.0001 ? 2 : 4).replace(/\.?0+$/, "")}%`;
}

function numberCell(text) {
  return element("td", { class: "number" }, text === null ? "—" : text);
}

function statisticsRow(kind) {
  const isBad = kind.is_wrong && kind.rows > 0;
  return element(
    "tr",
    isBad ? { class: "differs" } : {},
    element("td", {}, kind.label),
    numberCell(kind.rows.toLocaleString("en")),
    numberCell(percent(kind.share)),
    numberCell(kind.is_wrong ? kind.num_steps : null),
    numberCell(kind.first_step),
    numberCell(kind.worst_step === null ? null : `${percent(kind.worst_share)} (step ${kind.worst_step})`),
  );
}

function addStatistics(parent, run, runNumber) {
  const { statistics } = run.routing;
  const heads = [
    ["rows", ""],
    ["number", "number"],
    ["share", "number"],
    ["steps with any", "number"],
    ["first step", "number"],
    ["worst step", "number"],
  ];
  const made = card(
    "Statistics of the capture",
    `Rows of the capture by kind, for all tokens that were fed to the rollout's model: ` +
      `${statistics.expected.toLocaleString("en")} rows in ${statistics.num_steps} steps. Healthy: all are usable.`,
    table(heads, statistics.kinds.map(statisticsRow)),
  );
  if (statistics.layers.length > 0) {
    const ofLayers = [["layer", "number"], ["expected", "number"], ...statistics.columns.map((label) => [label, "number"])];
    const rows = statistics.layers.map((row) =>
      element("tr", {}, ...row.map((value) => numberCell(value.toLocaleString("en")))),
    );
    made.append(element("p", { class: "caption" }, "The layers that have wrong rows:"), table(ofLayers, rows));
  }
  made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
  parent.append(made);
}

function addIdentity(parent, run, runNumber) {
  const { layers, identity } = run.routing;
  const place = element("div", { class: "plot", "data-chart": "identity" });
  place.style.height = `${Math.min(620, Math.max(260, 120 + 16 * layers.length))}px`;
  const made = card(
    "Layer identity",
    `Share of the rollout's experts in the row's layer that routers of training would choose in the column's layer, for ` +
      `sampled tokens of step ${identity.step}, at which a layer is most like another one. Healthy: only the diagonal is ` +
      "dark. Another dark cell: the row's layer has the routes of the column's layer.",
    place,
  );
  made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
  parent.append(made);
  const names = layers.map((layer) => `layer ${layer}`);
  const values = numbers(identity.overlap);
  const matrix = layers.map((_, row) => Array.from(values.subarray(row * layers.length, (row + 1) * layers.length)));
  drawWhenReady(place, () => {
    const trace = {
      type: "heatmap",
      x: names,
      y: names,
      z: matrix,
      zmin: 0,
      zmax: 1,
      colorscale: IS_DARK.matches ? RISING_SCALE_DARK : RISING_SCALE_LIGHT,
      colorbar: { thickness: 12, outlinewidth: 0 },
      texttemplate: layers.length <= MOST_LAYERS_WITH_TEXT ? "%{z:.2f}" : "",
      hovertemplate: "rollout's %{y}, routers of %{x}<br>%{z:.3f}<extra></extra>",
    };
    const layout = {
      margin: { l: 90, r: 10, t: 4, b: 36 },
      xaxis: axis({ title: { text: "routers of training", standoff: 2 }, type: "category", showgrid: false }),
      yaxis: axis({
        title: { text: "rollout", standoff: 14 },
        autorange: "reversed",
        type: "category",
        showgrid: false,
      }),
    };
    return drawPlot(place, [trace], layout);
  });
}

function addLayerTable(parent, run, runNumber, { title, step, columns, rows }) {
  const heads = [["layer", "number"], ...columns.map((name) => [name, "number"])];
  const body = rows.map((row) => element("tr", {}, ...row.map(numberCell)));
  const made = card(title, `At step ${step}, the last one that was measured.`, table(heads, body));
  made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
  parent.append(made);
}

function addRouting(grid, runs) {
  const withCapture = runs.map((run, runNumber) => ({ run, runNumber })).filter(({ run }) => run.routing !== null);
  if (withCapture.length > 0) {
    addGuarded(grid, () => addDisagreement(grid, runs));
    addGuarded(grid, () => addMargins(grid, withCapture));
  }
  withCapture
    .filter(({ run }) => run.routing.identity !== null)
    .forEach(({ run, runNumber }) => addGuarded(grid, () => addIdentity(grid, run, runNumber)));
  withCapture.forEach(({ run, runNumber }) => addGuarded(grid, () => addStatistics(grid, run, runNumber)));
}

const LEAST_SCORE_SHOWN = 4;

// Scores of all experts, layer by layer, of one step or of all steps together.
function scoresOf({ steps, of_steps: ofSteps, of_all: ofAll, layers, num_experts: numExperts }, step) {
  const values = numbers(step === null ? ofAll : ofSteps);
  const first = step === null ? 0 : frameAt(numbers(steps), step) * layers.length;
  return layers.map((_, row) => Array.from(values.subarray((first + row) * numExperts, (first + row + 1) * numExperts)));
}

function addExpertsByAdvantage(parent, { run, runNumber }) {
  const view = run.advantages;
  const place = element("div", { class: "plot", "data-chart": "advantages" });
  place.style.height = `${Math.min(720, Math.max(220, 110 + 13 * view.layers.length))}px`;
  const together = element("input", { type: "checkbox" });
  together.checked = true;
  const controls = stepControls(Array.from(numbers(view.steps)), () => {
    together.checked = false;
    draw();
  });
  controls.place.append(element("label", {}, together, " all steps together"));
  const made = card(
    "Experts by advantage",
    "Red: the expert has a larger share of the tokens in responses with a high advantage. Blue: with a low advantage. The " +
      "unit is standard deviations from chance, which shuffles advantages among the responses to a prompt. Colours are " +
      "strong if good and bad responses have different content, since experts follow the text. So they are no sign of " +
      "health or illness. They fade as responses become similar, and are pale if rewards do not depend on the text. " +
      `All ${view.num_steps} steps together: the sum of scores over the square root of their number. It grows if an ` +
      "expert stays on one side. Among many experts, some reach 4 by chance.",
    controls.place,
    place,
  );
  made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
  parent.append(made);
  const draw = drawWhenReady(place, () => {
    const scores = scoresOf(view, together.checked ? null : controls.step());
    const span = scores.flat().reduce((found, value) => Math.max(found, Math.abs(value) || 0), LEAST_SCORE_SHOWN);
    const isSmall = view.layers.length * view.num_experts <= MOST_CELLS_WITH_TEXT;
    const trace = {
      type: "heatmap",
      y: view.layers.map((layer) => `layer ${layer}`),
      // null is a gap in the plot.
      z: scores.map((row) => row.map((value) => (Number.isNaN(value) ? null : value))),
      zmin: -span,
      zmax: span,
      colorscale: IS_DARK.matches ? BOTH_SIDES_DARK : BOTH_SIDES_LIGHT,
      xgap: isSmall ? 1 : 0,
      ygap: isSmall ? 1 : 0,
      texttemplate: isSmall ? "%{z:.1f}" : "",
      colorbar: { thickness: 12, outlinewidth: 0 },
      hovertemplate: "%{y}, expert %{x}<br>%{z:.2f} standard deviations<extra></extra>",
    };
    const layout = {
      margin: { l: 60, r: 10, t: 4, b: 36 },
      xaxis: axis({ title: { text: "expert", standoff: 2 }, showgrid: false, zeroline: false }),
      yaxis: axis({ autorange: "reversed", type: "category", showgrid: false }),
    };
    return drawPlot(place, [trace], layout);
  });
  together.addEventListener("change", draw);
}

function addAllExpertsByAdvantage(grid, runs) {
  const withScores = runs.map((run, runNumber) => ({ run, runNumber })).filter(({ run }) => run.advantages !== null);
  withScores.forEach((one) => addGuarded(grid, () => addExpertsByAdvantage(grid, one)));
}

function addLayerTables(grid, runs) {
  for (const [runNumber, run] of runs.entries()) {
    run.layer_tables.forEach((one) => addGuarded(grid, () => addLayerTable(grid, run, runNumber, one)));
  }
}
