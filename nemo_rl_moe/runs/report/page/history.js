// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Loads over the steps: layers, outlier experts, and other expert-parallel sizes.

const RISING_SCALE_LIGHT = [
  [0, "#f7f7f7"],
  [0.5, "#f0a26b"],
  [1, "#8e0b23"],
];
const RISING_SCALE_DARK = [
  [0, "#222831"],
  [0.5, "#b3543a"],
  [1, "#ffd0a8"],
];

function rowsOf(reference) {
  const [numColumns, numRows] = reference.shape;
  const values = numbers(reference);
  return Array.from({ length: numRows }, (_, row) =>
    Array.from({ length: numColumns }, (_, column) => values[column * numRows + row]),
  );
}

// `viewOf` returns the layers of a run, its `by_layer` and the array to plot, or null or undefined.
function addLayersOverTime(parent, runs, { title, caption, viewOf, leastHighest, hover }) {
  const views = runs
    .map((run, runNumber) => ({ run, runNumber, view: viewOf(run) }))
    .filter(({ view }) => view)
    .map((one) => ({ ...one, matrix: rowsOf(one.view.values) }));
  // Math.max cannot take all values of a large run as arguments.
  const all = views.flatMap(({ matrix }) => matrix.flat());
  const highest = all.reduce((found, value) => (value > found ? value : found), 0);
  for (const { run, runNumber, view, matrix } of views) {
    const place = element("div", { class: "plot", "data-chart": title });
    const { layers, byLayer } = view;
    place.style.height = `${Math.min(560, Math.max(220, 100 + 10 * layers.length))}px`;
    const width = byLayer.steps_of_a_column;
    const made = card(
      title,
      caption(byLayer) + (width > 1 ? ` Each column has the highest values of up to ${width} steps.` : ""),
      place,
    );
    made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
    parent.append(made);
    drawWhenReady(place, () => {
      const trace = {
        type: "heatmap",
        x: numbers(byLayer.steps),
        y: layers.map((layer) => `layer ${layer}`),
        z: matrix,
        zmin: 0,
        zmax: Math.max(highest, leastHighest),
        colorscale: IS_DARK.matches ? RISING_SCALE_DARK : RISING_SCALE_LIGHT,
        colorbar: { thickness: 12, outlinewidth: 0 },
        hovertemplate: hover,
      };
      const layout = {
        margin: { l: 60, r: 10, t: 4, b: 36 },
        xaxis: axis({ title: { text: "step", standoff: 2 }, showgrid: false }),
        yaxis: axis({ autorange: "reversed", type: "category", showgrid: false }),
      };
      return drawPlot(place, [trace], layout);
    });
  }
}

function addOutliers(parent, runs) {
  for (const [runNumber, run] of runs.entries()) {
    if (run.load === null) {
      continue;
    }
    const place = element("div", { class: "plot", "data-chart": "outliers" });
    const made = card(
      "Outlier experts",
      "Utilization of the experts with the most (solid) and the least load (dotted) in the last tenth of the steps. " +
        "Healthy: they return to 1.",
      place,
    );
    made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
    parent.append(made);
    const { steps, experts } = run.load.outliers;
    drawWhenReady(place, () => {
      const traces = experts.map(({ which, layer, expert, values }, number) => ({
        type: "scatter",
        mode: "lines",
        x: positionsOf(run, numbers(steps)),
        y: numbers(values),
        name: `layer ${layer}, expert ${expert}`,
        line: { width: 1.6, color: colorOf(number % 5), dash: which === "most" ? "solid" : "dot" },
        hovertemplate: "%{y:.3f}",
      }));
      const layout = {
        xaxis: stepAxis(),
        yaxis: axis({ rangemode: "tozero" }),
        hovermode: "x unified",
        legend: { orientation: "v" },
      };
      return drawPlot(place, [...referenceTrace(traces, [1, "fair share"]), ...traces], layout).then(() =>
        shareSteps(place),
      );
    });
  }
}

function addWhatIf(parent, runs) {
  const withLoad = runs.map((run, runNumber) => ({ run, runNumber })).filter(({ run }) => run.load !== null);
  const sizes = [...new Set(withLoad.flatMap(({ run }) => run.load.what_if.sizes.map(({ size }) => size)))].sort(
    (a, b) => a - b,
  );
  if (sizes.length === 0) {
    return;
  }
  const own = withLoad[0].run.load.what_if.own_size;
  const choices = withLoad.length === 1 ? [element("option", { value: "all" }, "all sizes")] : [];
  choices.push(
    ...sizes.map((size) => element("option", { value: size }, `EP ${size}${size === own ? " (as it ran)" : ""}`)),
  );
  const choice = element("select", { "aria-label": "expert-parallel size" }, ...choices);
  if (withLoad.length > 1) {
    choice.value = String(sizes.includes(own) ? own : sizes[Math.min(2, sizes.length - 1)]);
  }
  const place = element("div", { class: "plot", "data-chart": "what-if" });
  const caption =
    "Work of the busiest rank over that of the mean rank, if the experts were spread over this number of ranks. All tokens " +
    "of a step count together, and the value is a mean over the layers. Healthy: near 1, and higher with more ranks.";
  parent.append(
    card("What if: other expert-parallel sizes", caption, element("div", { class: "controls" }, choice), place),
  );
  const draw = () => {
    const traces = withLoad.flatMap(({ run, runNumber }) =>
      run.load.what_if.sizes
        .filter(({ size }) => choice.value === "all" || String(size) === choice.value)
        .map(({ size, values }, number) => ({
          type: "scatter",
          mode: "lines",
          x: positionsOf(run, numbers(run.load.what_if.steps)),
          y: numbers(values),
          name: withLoad.length > 1 ? plain(run.name) : `EP ${size}`,
          line: { width: 1.8, color: colorOf(withLoad.length > 1 ? runNumber : number) },
          hovertemplate: "%{y:.3f}",
        })),
    );
    const layout = {
      xaxis: stepAxis(),
      yaxis: axis({}),
      hovermode: "x unified",
      showlegend: true,
    };
    return drawPlot(place, [...referenceTrace(traces, [1, "no waiting"]), ...traces], layout).then(() =>
      shareSteps(place),
    );
  };
  choice.addEventListener("change", drawWhenReady(place, draw));
  parent.append(whatIfTable(withLoad, sizes));
}
