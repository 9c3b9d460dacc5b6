// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// The page from top to bottom, texts first, since they need no plotting library.

// A section whose data cannot be shown has a note instead. Later sections are still shown.
function addSection(title, kind, build) {
  const place = element("div", { class: kind });
  const id = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  document.getElementById("report").append(element("h2", { id }, title), place);
  document.getElementById("contents").append(element("a", { href: `#${id}` }, title));
  addGuarded(place, build);
}

function addGuarded(place, build) {
  try {
    build(place);
  } catch (error) {
    sayFailed(place, error);
  }
}

function addLoadOverTime(grid, runs, title, caption, which) {
  const viewOf = ({ load }) => load && { layers: load.layers, byLayer: load.by_layer, values: load.by_layer[which] };
  const hover = "%{y}, step %{x}<br>%{z:.3~f}<extra></extra>";
  addLayersOverTime(grid, runs, { title, caption, viewOf, leastHighest: 1, hover });
}

function addLoads(runs) {
  addSection("Layers and experts", "stack", (place) => addHeatmaps(place, runs));
  addSection("Where and when", "grid", (grid) => {
    const spread = (byLayer) =>
      byLayer.is_beyond_chance
        ? "Spread of the loads of each layer's experts beyond chance. Healthy: it falls to 0."
        : "Spread of the loads of each layer's experts. It includes chance, since the routers' top-k is not known.";
    const dead = () => "Number of experts without any token. Healthy: 0 after the first steps.";
    addGuarded(grid, () => addLoadOverTime(grid, runs, "spread of each layer", spread, "spread"));
    addGuarded(grid, () => addLoadOverTime(grid, runs, "dead experts of each layer", dead, "dead"));
    addGuarded(grid, () => addOutliers(grid, runs));
  });
  addSection("Other layouts", "grid", (place) => addWhatIf(place, runs));
}

async function buildReport() {
  const report = JSON.parse(textOfBlock("document"));
  const { runs } = report;
  document.getElementById("report").append(element("h1", {}, report.heading));
  const top = element("div", { class: "grid top" });
  document.getElementById("report").append(top);
  runs.forEach((run, runNumber) => addGuarded(top, () => top.append(runSummary(run, runNumber, report.without_load))));
  addChoiceOfAxis(document.getElementById("contents"), runs);
  await loadBlobs();
  await runPlotly();
  if (runs.some((run) => run.samples.length > 0)) {
    addSection("Responses", "stack", (place) => {
      addSamples(place, runs);
      addConversations(place, runs);
    });
  }
  const [routing, mismatch] = report.routing_sections;
  const sections = new Set(report.charts.map((chart) => chart.section));
  if (runs.some((run) => run.routing !== null)) {
    sections.add(routing);
  }
  if (runs.some((run) => run.advantages !== null)) {
    sections.add(mismatch);
  }
  if (runs.some((run) => run.time_line !== null)) {
    sections.add(report.staleness_section);
  }
  if (runs.some((run) => run.modalities !== null)) {
    sections.add(report.modality_section);
  }
  for (const section of sections) {
    addSection(section, "grid", (grid) => {
      const addCharts = () => {
        for (const chart of report.charts.filter((chart) => chart.section === section)) {
          addGuarded(grid, () => addChart(grid, runs, chart));
        }
      };
      if (section === report.modality_section) {
        addModalities(grid, runs, addCharts);
        return;
      }
      if (section === report.staleness_section) {
        addTimeLines(grid, runs);
      }
      addCharts();
      if (section === routing) {
        addRouting(grid, runs);
      } else if (section === mismatch) {
        addAllExpertsByAdvantage(grid, runs);
        addLayerTables(grid, runs);
      }
    });
  }
  if (runs.some((run) => run.load !== null)) {
    addLoads(runs);
  }
  if (report.keys.length > 0) {
    addSection("Everything else", "stack", (place) => addAnyMetric(place, runs, report.keys));
  }
  if (report.configuration.length > 0) {
    addSection("Configuration", "stack", (place) => addConfiguration(place, runs, report.configuration));
  }
  await drawAll();
  document.documentElement.dataset.state = numFailed ? "incomplete" : "ready";
}

buildReport().catch((error) => {
  console.error(error);
  document.documentElement.dataset.state = "failed";
  const hint = "DecompressionStream" in window ? "" : " This browser is too old: it needs DecompressionStream (2023).";
  document
    .getElementById("report")
    .append(element("p", { class: "error" }, `The report cannot be drawn: ${error}.${hint}`));
});
