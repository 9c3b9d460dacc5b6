// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Image tokens and text tokens: preference of each expert, and separation in each layer.

const HEATMAP_TITLE = "Which experts see images, which see text";

function wholePercent(share) {
  return `${Math.round(100 * share)}%`;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

// Cells of one step, by layer: the numbers of an expert's tokens of both kinds, and its preference.
function modalityRows({ steps, counts, image_counts: images, specialization, layers, num_experts: numExperts }, step) {
  const first = frameAt(numbers(steps), step) * layers.length;
  const [all, ofImages, leaning] = [counts, images, specialization].map(numbers);
  return layers.map((layer, row) => {
    const [start, end] = [(first + row) * numExperts, (first + row + 1) * numExperts];
    const [total, image] = [all, ofImages].map((values) => Array.from(values.subarray(start, end)));
    return { layer, total, image, leaning: Array.from(leaning.subarray(start, end)), share: sum(image) / sum(total) };
  });
}

function modalityTrace(rows, isSmall) {
  return {
    type: "heatmap",
    y: rows.map(({ layer }) => `layer ${layer}`),
    // null is a gap in the plot.
    z: rows.map(({ leaning }) => leaning.map((value) => (Number.isNaN(value) ? null : value))),
    text: rows.map(({ total, image }) => total.map((count, expert) => (count ? wholePercent(image[expert] / count) : ""))),
    customdata: rows.map(({ layer, total, image, share }) =>
      total.map((count, expert) => [
        `layer ${layer}, expert ${expert}`,
        count ? `${image[expert]} of ${count} assignments are of image tokens: ${percent(image[expert] / count)}` : "",
        `overall in the layer: ${percent(share)}`,
      ]),
    ),
    zmin: -1,
    zmax: 1,
    colorscale: IS_DARK.matches ? BOTH_SIDES_DARK : BOTH_SIDES_LIGHT,
    xgap: isSmall ? 1 : 0,
    ygap: isSmall ? 1 : 0,
    texttemplate: isSmall ? "%{text}" : "",
    colorbar: {
      thickness: 12,
      outlinewidth: 0,
      tickvals: [-1, -0.5, 0, 0.5, 1],
      ticktext: ["text only", "", "as overall", "", "image only"],
    },
    hovertemplate:
      "%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}<br>leaning beyond chance: %{z:+.3f}<extra></extra>",
  };
}

function addModalityHeatmap(parent, { run, runNumber }) {
  const view = run.modalities;
  const place = element("div", { class: "plot", "data-chart": "modalities" });
  place.style.height = `${Math.min(720, Math.max(220, 110 + 13 * view.layers.length))}px`;
  const steps = Array.from(numbers(view.steps));
  const controls = stepControls(steps, () => draw());
  const isSmall = view.layers.length * view.num_experts <= MOST_CELLS_WITH_TEXT;
  const shown =
    steps.length === view.num_steps ? `all ${steps.length}` : `${steps.length} of ${view.num_steps}, evenly spaced`;
  const overall = element("p", { class: "caption" });
  const made = card(
    HEATMAP_TITLE,
    `${isSmall ? "The number in a cell" : "The number under the pointer"} is the share of the expert's tokens that are ` +
      "image tokens (pieces of an image). Red: the share is higher than overall, beyond chance. Blue: it is lower. Pale: as " +
      "overall. Empty: no token. None of this is sick. If all cells are pale, the routers do not distinguish image from " +
      "text. Deep colours that stay over the steps are experts that specialise.",
    controls.place,
    overall,
    place,
  );
  made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
  parent.append(made);
  const draw = drawWhenReady(place, () => {
    const rows = modalityRows(view, controls.step());
    const share = sum(rows.flatMap(({ image }) => image)) / sum(rows.flatMap(({ total }) => total));
    overall.textContent =
      `step ${controls.step()}: ${percent(share)} image tokens overall. ` +
      `Steps to choose from, those with tokens of both kinds: ${shown}.`;
    const layout = {
      margin: { l: 60, r: 10, t: 4, b: 36 },
      xaxis: axis({ title: { text: "expert", standoff: 2 }, showgrid: false, zeroline: false }),
      yaxis: axis({ autorange: "reversed", type: "category", showgrid: false }),
    };
    return drawPlot(place, [modalityTrace(rows, isSmall)], layout);
  });
}

function addNoModalities(parent, { run, runNumber }) {
  const made = card(
    HEATMAP_TITLE,
    "No step had tokens of both kinds, so there is nothing to compare. The data needs records with images and with text.",
  );
  made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
  parent.append(made);
}

function addSeparationOfLayers(parent, runs) {
  addLayersOverTime(parent, runs, {
    title: "separation of image and text, by layer",
    caption: () =>
      "How far the experts of each layer separate image tokens from text tokens, beyond chance: 0 not at all, 1 if no " +
      "expert gets both kinds. Healthy: steady. Layers may differ.",
    viewOf: ({ modalities }) =>
      modalities &&
      modalities.num_steps > 0 && {
        layers: modalities.layers,
        byLayer: modalities.by_layer,
        values: modalities.by_layer.separation,
      },
    leastHighest: 1,
    hover: "%{y}, step %{x}<br>separation %{z:.3f}<extra></extra>",
  });
}

// `addCharts` adds the section's lines over the steps.
function addModalities(grid, runs, addCharts) {
  const withKinds = runs.map((run, runNumber) => ({ run, runNumber })).filter(({ run }) => run.modalities !== null);
  const mixed = withKinds.filter(({ run }) => run.modalities.num_steps > 0);
  mixed.forEach((one) => addGuarded(grid, () => addModalityHeatmap(grid, one)));
  withKinds.filter((one) => !mixed.includes(one)).forEach((one) => addGuarded(grid, () => addNoModalities(grid, one)));
  // The heights of the heatmap and of this card depend on the number of layers.
  addGuarded(grid, () => addSeparationOfLayers(grid, runs));
  addCharts();
  mixed.forEach(({ run, runNumber }) =>
    addGuarded(grid, () => addLayerTable(grid, run, runNumber, run.modalities.table)),
  );
}
