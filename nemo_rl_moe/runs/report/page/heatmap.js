// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Layers x experts: the load of every expert at the step of a slider.

const HIGHEST_SHOWN = 4;
// Colours from 0 through 1 (the fair share) to 4. The range from 0 to 1 takes as much of the scale as that from 1 to 2.
const LIGHT_SCALE = [
  [0, "#2166ac"],
  [0.125, "#7fb5d8"],
  [0.25, "#f4f4f4"],
  [0.5, "#e8825f"],
  [1, "#8e0b23"],
];
const DARK_SCALE = [
  [0, "#5aa9f0"],
  [0.125, "#3a6a99"],
  [0.25, "#2a303a"],
  [0.5, "#a8452f"],
  [1, "#ff7f45"],
];
const MOST_CELLS_WITH_TEXT = 200;
const MOST_RANKS_SHOWN = 16;

function framesOf(run) {
  const { frames } = run.load;
  return { steps: numbers(frames.steps), counts: numbers(frames.counts) };
}

// The last frame up to a step. If there is none, the first frame.
function frameAt(steps, step) {
  let found = 0;
  while (found + 1 < steps.length && steps[found + 1] <= step) {
    found += 1;
  }
  return found;
}

function cellsOf(run, frames, frame, isSorted) {
  const { layers, num_experts: numExperts } = run.load;
  const rows = layers.map((_, row) => {
    const start = (frame * layers.length + row) * numExperts;
    const counts = Array.from(frames.counts.subarray(start, start + numExperts));
    const total = counts.reduce((sum, count) => sum + count, 0);
    const cells = counts.map((count, expert) => ({
      count,
      expert,
      total,
      share: total ? (count * numExperts) / total : 0,
    }));
    return isSorted ? cells.sort((a, b) => b.count - a.count || a.expert - b.expert) : cells;
  });
  return {
    shares: rows.map((row) => row.map((cell) => cell.share)),
    details: rows.map((row) => row.map((cell) => [cell.count, cell.expert])),
    dead: rows.map((row) => row.map((cell) => (cell.count === 0 && cell.total > 0 ? 1 : null))),
  };
}

function tracesOf(run, cells) {
  const y = run.load.layers.map((layer) => `layer ${layer}`);
  const dead = IS_DARK.matches ? "#ffffff" : "#000000";
  const isSmall = y.length * run.load.num_experts <= MOST_CELLS_WITH_TEXT;
  return [
    {
      type: "heatmap",
      name: "utilization",
      y,
      z: cells.shares,
      customdata: cells.details,
      zmin: 0,
      zmax: HIGHEST_SHOWN,
      colorscale: IS_DARK.matches ? DARK_SCALE : LIGHT_SCALE,
      xgap: isSmall ? 1 : 0,
      ygap: isSmall ? 1 : 0,
      texttemplate: isSmall ? "%{z:.2f}" : "",
      colorbar: {
        thickness: 12,
        outlinewidth: 0,
        tickvals: [0, 0.5, 1, 2, 3, 4],
        ticktext: ["0", "0.5", "1 fair", "2", "3", "4 and more"],
      },
      hovertemplate:
        "%{y}, expert %{customdata[1]}<br>%{customdata[0]} assignments<br>utilization %{z:.3f}<extra></extra>",
    },
    {
      type: "heatmap",
      name: "dead",
      y,
      z: cells.dead,
      zmin: 0,
      zmax: 1,
      colorscale: [
        [0, dead],
        [1, dead],
      ],
      showscale: false,
      hoverinfo: "skip",
      xgap: isSmall ? 1 : 0,
      ygap: isSmall ? 1 : 0,
    },
  ];
}

// Lines between the experts of neighbouring expert-parallel ranks.
function rankBorders({ num_experts: numExperts, what_if: { own_size: ranks } }) {
  if (ranks > MOST_RANKS_SHOWN || numExperts % ranks !== 0) {
    return [];
  }
  const line = { color: themeColor("text"), width: 1.5, dash: "dot" };
  return Array.from({ length: ranks - 1 }, (_, rank) => {
    const x = ((rank + 1) * numExperts) / ranks - 0.5;
    return { type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line };
  });
}

function addHeatmapOf(parent, run, runNumber, frames) {
  const title = element("h3", {}, chip(colorOf(runNumber)), run.name);
  const caption = element("p", { class: "caption" });
  const place = element("div", { class: "plot", "data-heatmap": runNumber });
  place.style.height = `${Math.min(720, Math.max(250, 110 + 13 * run.load.layers.length))}px`;
  parent.append(element("section", { class: "card" }, title, caption, place));
  return (step, isSorted) => {
    const frame = frameAt(frames.steps, step);
    const cells = cellsOf(run, frames, frame, isSorted);
    const numDead = cells.dead.flat().filter((cell) => cell === 1).length;
    const numExperts = run.load.layers.length * run.load.num_experts;
    caption.textContent = `step ${frames.steps[frame]}: ${numDead} of ${numExperts} experts dead`;
    const layout = {
      margin: { l: 60, r: 10, t: 4, b: 36 },
      xaxis: axis({
        title: { text: isSorted ? "experts of the layer, most loaded first" : "expert", standoff: 2 },
        showgrid: false,
        zeroline: false,
      }),
      yaxis: axis({ autorange: "reversed", type: "category", showgrid: false }),
      shapes: isSorted ? [] : rankBorders(run.load),
    };
    return drawPlot(place, tracesOf(run, cells), layout);
  };
}

function heatmapCaption() {
  const [fair, dead] = IS_DARK.matches ? ["dark", "white"] : ["white", "black"];
  return (
    `The load of each expert over its fair share: ${fair} is fair, red too much, blue too little, ${dead} dead. ` +
    "A layer without any load is entirely blue, and none of its experts counts as dead. " +
    "Healthy: all cells are near the colour of 1, and patterns from the beginning of the run fade."
  );
}

function stepsShown(all) {
  const shown = all.map(({ run, frames }) => {
    const [number, total] = [frames.steps.length, run.load.num_steps];
    return `${run.name}: ${number === total ? `all ${total} steps` : `${number} of ${total} steps, evenly spaced`}`;
  });
  const hasBorders = all.some(({ run }) => rankBorders(run.load).length > 0);
  const borders = hasBorders ? " Dotted lines separate the experts of different expert-parallel ranks." : "";
  return `Steps to choose from: ${shown.join("; ")}. Hover for exact counts.${borders}`;
}

function addHeatmaps(parent, runs) {
  const withLoad = runs.map((run, runNumber) => ({ run, runNumber })).filter(({ run }) => run.load !== null);
  const all = withLoad.map(({ run, runNumber }) => ({ run, runNumber, frames: framesOf(run) }));
  const steps = [...new Set(all.flatMap(({ frames }) => Array.from(frames.steps)))].sort((a, b) => a - b);
  const sorted = element("input", { type: "checkbox" });
  const caption = element("p", { class: "caption" });
  const grid = element("div", { class: "grid" });
  const drawOne = all.map(({ run, runNumber, frames }) => addHeatmapOf(grid, run, runNumber, frames));
  const controls = stepControls(steps, () => draw());
  const draw = () => {
    caption.textContent = heatmapCaption();
    return Promise.all(drawOne.map((one) => one(controls.step(), sorted.checked)));
  };
  sorted.addEventListener("change", draw);
  controls.place.append(element("label", {}, sorted, " sort by load"));
  const title = element("h3", {}, "Load of every expert");
  const shown = element("p", { class: "caption" }, stepsShown(all));
  parent.append(element("section", { class: "card" }, title, caption, controls.place, shown), grid);
  drawWhenReady(grid, draw);
}
