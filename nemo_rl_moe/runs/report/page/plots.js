// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Shared by all charts: colours for light and dark, and one range of steps.

const IS_DARK = window.matchMedia("(prefers-color-scheme: dark)");
// Colours by Okabe and Ito, which colour-blind readers can distinguish.
const LIGHT_COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195"];
const DARK_COLORS = ["#4FA8E8", "#FF8A4C", "#2FC79A", "#E59AC4", "#F5BE4A", "#8FD3FF", "#B08CD0"];
const DASHES = ["solid", "dot", "dash", "dashdot", "longdash"];
const drawings = [];
let numFailed = 0;
const overSteps = new Set();
let isOverTime = false;

// A chart that cannot be drawn has a note instead, and does not affect other charts.
function sayFailed(place, error) {
  console.error(error);
  numFailed += 1;
  place.querySelectorAll(":scope > .error").forEach((before) => before.remove());
  place.append(element("p", { class: "error" }, `This cannot be drawn: ${error}.`));
}

// `draw` is called when all elements exist, and again when the colours change. Returns a function that draws immediately.
function drawWhenReady(place, draw) {
  const guarded = async () => {
    try {
      await draw();
    } catch (error) {
      sayFailed(place, error);
    }
  };
  drawings.push(guarded);
  return guarded;
}

function colorOf(number) {
  const colors = IS_DARK.matches ? DARK_COLORS : LIGHT_COLORS;
  return colors[number % colors.length];
}

function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function axis(more) {
  const line = themeColor("line");
  return { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, minexponent: 5, ...more };
}

// The horizontal axis of a chart over the steps: steps, or minutes since the run's first record.
function stepAxis(more) {
  return axis({ title: { text: isOverTime ? "minutes" : "step", standoff: 2 }, hoverformat: isOverTime ? ".1f" : "", ...more });
}

function positionsOf(run, steps) {
  if (!isOverTime) {
    return steps;
  }
  const known = numbers(run.minutes.steps);
  const minutes = numbers(run.minutes.values);
  const byStep = new Map(Array.from(known, (step, number) => [step, minutes[number]]));
  return Array.from(steps, (step) => byStep.get(step) ?? null);
}

// A choice between steps and minutes for all charts over the steps.
function addChoiceOfAxis(parent, runs) {
  if (!runs.every((run) => run.minutes !== null)) {
    return;
  }
  const options = [
    ["step", "steps"],
    ["minutes", "minutes"],
  ].map(([value, text]) => element("option", { value }, text));
  const choice = element("select", { "aria-label": "horizontal axis" }, ...options);
  choice.addEventListener("change", () => {
    isOverTime = choice.value === "minutes";
    drawAll();
  });
  parent.append(element("label", { class: "controls" }, "charts over ", choice));
}

function layoutOf(more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: themeColor("text"), size: 12, family: "system-ui, sans-serif" },
    margin: { l: 48, r: 14, t: 8, b: 36 },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 },
    hoverlabel: { bgcolor: themeColor("card"), bordercolor: themeColor("line"), font: { color: themeColor("text") } },
    ...more,
  };
}

// Draws all charts: first when all their elements have widths, and again when the colours change.
async function drawAll() {
  for (const draw of drawings) {
    await draw();
  }
}

IS_DARK.addEventListener("change", drawAll);

// The text of a chart for screen readers: first and last value of each line, or the range of a heat map.
function spokenChart(heading, traces, unit) {
  const parts = traces
    .filter(({ hoverinfo }) => hoverinfo !== "skip")
    .map(({ name, x, y, z }) => {
      if (z) {
        const values = z.flatMap((row) => Array.from(row)).filter(Number.isFinite);
        const [low, high] = values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
        return `from ${low.toPrecision(3)} to ${high.toPrecision(3)}`;
      }
      const ends = Array.from(y.keys()).filter((number) => Number.isFinite(y[number]));
      const texts = [ends[0], ends[ends.length - 1]].map((end) => `${Number(y[end]?.toPrecision(4))} at ${unit} ${x[end]}`);
      return `${name || "value"} ${ends.length ? texts.join(", ") : "has no number"}`;
    });
  return `${heading}: ${parts.join("; ")}`;
}

function drawPlot(place, traces, layout) {
  const heading = place.closest(".card").querySelector("h3").textContent;
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", spokenChart(heading, traces, layout.xaxis.title?.text ?? ""));
  return Plotly.react(place, traces, layoutOf(layout), { responsive: true, displaylogo: false, displayModeBar: false });
}

// A range of steps that is selected in one chart applies to all charts. A double click shows all steps again.
function shareSteps(place) {
  if (overSteps.has(place)) {
    return;
  }
  overSteps.add(place);
  place.on("plotly_relayout", (change) => {
    const range = change["xaxis.range[0]"] === undefined ? null : [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range === null && !change["xaxis.autorange"]) {
      return;
    }
    const update = range === null ? { "xaxis.autorange": true } : { "xaxis.range": range };
    for (const other of overSteps) {
      const own = other.layout.xaxis;
      const isSame = range === null ? own.autorange : own.range[0] === range[0] && own.range[1] === range[1];
      if (other !== place && !isSame) {
        Plotly.relayout(other, update);
      }
    }
  });
}
