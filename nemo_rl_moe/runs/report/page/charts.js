// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Lines over the steps.

const PLOT_HEIGHT = 290;
const LEGEND_LINE = 19;

function lineTrace(run, runNumber, lineNumber, line, numRuns) {
  const metric = run.metrics[line.key];
  const values = numbers(metric.values);
  const isRare = values.length <= 30;
  const color = colorOf(numRuns > 1 ? runNumber : lineNumber);
  return {
    type: "scatter",
    mode: isRare ? "lines+markers" : "lines",
    x: positionsOf(run, numbers(metric.steps)),
    y: values,
    name: plain(numRuns > 1 ? `${run.name} · ${line.label}` : line.label),
    line: { color, width: 1.8, dash: numRuns > 1 ? DASHES[lineNumber % DASHES.length] : "solid" },
    marker: { color, size: 5 },
    hovertemplate: "%{y:.5~g}",
  };
}

const SMALL = 1e-3;
const PATTERNS = ["", "/", ".", "x", "-"];

// Bars of the parts of a sum at each measured step. Steps are categories, so other steps take no space.
function barTrace(run, runNumber, lineNumber, line, numRuns) {
  const metric = run.metrics[line.key];
  const shape = numRuns > 1 ? PATTERNS[lineNumber % PATTERNS.length] : "";
  return {
    type: "bar",
    x: Array.from(numbers(metric.steps), String),
    y: numbers(metric.values),
    name: plain(numRuns > 1 ? `${run.name} · ${line.label}` : line.label),
    marker: { color: colorOf(numRuns > 1 ? runNumber : lineNumber), pattern: { shape, solidity: 0.4 } },
    hovertemplate: "%{y:.5~g}",
  };
}

// A dashed line in the background at a reference value.
function referenceTrace(traces, reference) {
  if (!reference || traces.length === 0) {
    return [];
  }
  const [value, name] = reference;
  const first = traces.reduce((found, { x }) => Math.min(found, x[0]), Infinity);
  const last = traces.reduce((found, { x }) => Math.max(found, x[x.length - 1]), -Infinity);
  const line = { color: themeColor("muted"), width: 1, dash: "dash" };
  return [
    { type: "scatter", mode: "lines", x: [first, last], y: [value, value], name: plain(name), line, hoverinfo: "skip" },
  ];
}

// Notes about values that are not numbers and about omitted points. The lines of a chart cannot show these.
function remarksOn(runs, lines) {
  const remarks = [];
  for (const run of runs) {
    for (const line of lines.filter((line) => Object.hasOwn(run.metrics, line.key))) {
      const metric = run.metrics[line.key];
      const values = numbers(metric.values);
      const first = values.findIndex((value) => !Number.isFinite(value));
      if (first >= 0) {
        remarks.push(
          `${run.name}: ${line.key} is NaN or infinite at step ${numbers(metric.steps)[first]} for the first time.`,
        );
      }
      if (values.length < metric.number) {
        const shown = `${values.length} of ${metric.number} points: the lowest and highest of each stretch of steps`;
        remarks.push(`${run.name}: ${line.key} shows ${shown}.`);
      }
    }
  }
  return remarks;
}

function drawLines(place, runs, { lines, reference, from_zero: fromZero, least_span: leastSpan, bars }) {
  const traceOf = bars ? barTrace : lineTrace;
  const traces = runs.flatMap((run, runNumber) =>
    lines.flatMap((line, lineNumber) =>
      Object.hasOwn(run.metrics, line.key) ? [traceOf(run, runNumber, lineNumber, line, runs.length)] : [],
    ),
  );
  // A long legend must not squeeze the chart.
  place.style.height = `${PLOT_HEIGHT + LEGEND_LINE * Math.max(0, Math.ceil(traces.length / 2) - 2)}px`;
  const layout = {
    xaxis: stepAxis(),
    yaxis: axis({ rangemode: fromZero ? "tozero" : "normal", exponentformat: exponentsOf(traces), ...rangeOf(traces, leastSpan) }),
    hovermode: "x unified",
    showlegend: traces.length > 1,
  };
  if (bars) {
    layout.barmode = "group";
    layout.xaxis = { ...axis({ title: { text: "step", standoff: 2 } }), type: "category", categoryorder: "array", categoryarray: stepsInOrder(traces) };
    return drawPlot(place, traces, layout);
  }
  return drawPlot(place, [...referenceTrace(traces, reference), ...traces], layout).then(() => shareSteps(place));
}

// A share that is nearly constant must not look like a cliff.
function rangeOf(traces, leastSpan) {
  const values = traces.flatMap(({ y }) => Array.from(y).filter(Number.isFinite));
  const [low, high] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [1, 0]);
  if (!leastSpan || values.length === 0 || high - low >= leastSpan) {
    return {};
  }
  const bottom = Math.max(0, Math.min((low + high - leastSpan) / 2, 1 - leastSpan));
  return { range: [bottom, bottom + leastSpan * 1.05] };
}

// Numbers get prefixes for thousands, as in 20k, but no "m" and "n" for small divergences.
function exponentsOf(traces) {
  const isSmall = traces.every(({ y }) => y.every((value) => !(Math.abs(value) >= SMALL)));
  return isSmall ? "power" : "B";
}

function stepsInOrder(traces) {
  return [...new Set(traces.flatMap(({ x }) => x))].sort((a, b) => a - b);
}

function remarkElement(remarks) {
  const shown = remarks.slice(0, 3).concat(remarks.length > 3 ? [`... and ${remarks.length - 3} more.`] : []);
  return element("p", { class: "notes" }, shown.join(" "));
}

function addChart(parent, runs, chart) {
  const place = element("div", { class: "plot", "data-chart": chart.title });
  const remarks = remarksOn(runs, chart.lines);
  parent.append(card(chart.title, chart.caption, place, ...(remarks.length ? [remarkElement(remarks)] : [])));
  drawWhenReady(place, () => drawLines(place, runs, chart));
}

function addAnyMetric(parent, runs, keys) {
  const place = element("div", { class: "plot", "data-chart": "any metric" });
  const choice = element(
    "select",
    { "aria-label": "metric" },
    ...keys.map((key) => element("option", { value: key }, key)),
  );
  const remark = element("div", {});
  parent.append(
    card(
      "Any metric",
      "Any metric that the runs have logged, by its key.",
      element("div", { class: "controls" }, choice),
      place,
      remark,
    ),
  );
  const draw = () => {
    const lines = [{ key: choice.value, label: choice.value }];
    remark.replaceChildren(remarkElement(remarksOn(runs, lines)));
    return drawLines(place, runs, { lines });
  };
  choice.addEventListener("change", drawWhenReady(place, draw));
}
