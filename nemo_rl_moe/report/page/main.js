// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// The page from top to bottom: words first, for they need no plotting library.

function addSection(title, kind) {
  const place = element("div", { class: kind });
  document.getElementById("report").append(element("h2", {}, title), place);
  return place;
}

async function buildReport() {
  const report = JSON.parse(textOfBlock("document"));
  const { runs } = report;
  document.getElementById("report").append(element("h1", {}, runs.length > 1 ? "Runs compared" : "Report of a run"));
  const top = element("div", { class: "grid top" });
  document.getElementById("report").append(top);
  top.append(...runs.map(runSummary));
  await loadBlobs();
  await runPlotly();
  for (const section of [...new Set(report.charts.map((chart) => chart.section))]) {
    const grid = addSection(section, "grid");
    for (const chart of report.charts.filter((chart) => chart.section === section)) {
      addChart(grid, runs, chart);
    }
  }
  if (runs.some((run) => run.load !== null)) {
    addHeatmaps(addSection("Layers and experts", "stack"), runs);
    const grid = addSection("Where and when", "grid");
    const spread = (byLayer) =>
      byLayer.is_beyond_chance
        ? "How far the loads of each layer's experts spread beyond chance. Healthy: it fades to 0."
        : "How far the loads of each layer's experts spread, by chance too: the routers' top-k is not known.";
    addLayersOverTime(grid, runs, "spread of each layer", spread, (byLayer) => byLayer.spread);
    addLayersOverTime(
      grid,
      runs,
      "dead experts of each layer",
      () => "Experts without any token. Healthy: 0 after the first steps.",
      (byLayer) => byLayer.dead,
    );
    addOutliers(grid, runs);
    addWhatIf(addSection("Other layouts", "grid"), runs);
  }
  if (report.keys.length > 0) {
    addAnyMetric(addSection("Everything else", "stack"), runs, report.keys);
  }
  if (report.configuration.length > 0) {
    addConfiguration(addSection("Configuration", "stack"), runs, report.configuration);
  }
  if (runs.some((run) => run.samples.length > 0)) {
    addSamples(addSection("Responses", "stack"), runs);
  }
  await drawAll();
  document.documentElement.dataset.state = "ready";
}

buildReport().catch((error) => {
  console.error(error);
  document.documentElement.dataset.state = "failed";
  const hint = "DecompressionStream" in window ? "" : " This browser is too old: it needs DecompressionStream (2023).";
  document
    .getElementById("report")
    .append(element("p", { class: "error" }, `The report cannot be drawn: ${error}.${hint}`));
});
