// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// Activity of trainer and engines of asynchronous rollouts over the seconds of the last steps.

const STATE_COLORS = {
  trainer: ["#2166ac", "#e6ab02", "#b3b3b3", "#7A5195"],
  engines: ["#1b7837", "#d6604d", "#b3b3b3", "#92c5de", "#7A5195"],
};

function stateScale(colors) {
  return colors.flatMap((color, number) => [
    [number / colors.length, color],
    [(number + 1) / colors.length, color],
  ]);
}

// The edges of the bins in seconds. All bins of a step have the same length.
function edgesOf({ seconds, num_bins: numBins }) {
  const edges = [0];
  for (const length of seconds) {
    for (let bin = 0; bin < numBins; bin += 1) {
      edges.push(edges[edges.length - 1] + length / numBins);
    }
  }
  return edges;
}

function addTimeLines(parent, runs) {
  for (const [runNumber, run] of runs.entries()) {
    const view = run.time_line;
    if (!view) {
      continue;
    }
    const place = element("div", { class: "plot", "data-chart": "time line" });
    place.style.height = "200px";
    const legend = element("p", { class: "caption" });
    for (const [who, states] of Object.entries(view.states)) {
      legend.append(element("b", {}, `${who}: `));
      states.forEach((state, number) => legend.append(chip(STATE_COLORS[who][number]), `${state}  `));
      legend.append(element("br"));
    }
    const [first, last] = [view.steps[0], view.steps[view.steps.length - 1]];
    const caption =
      `Trainer and engines in steps ${first} to ${last}. A line marks the end of a step, when training has its rollouts. ` +
      "Healthy: both work all the time.";
    const made = card("Time line of the last steps", caption, legend, place);
    made.querySelector("h3").prepend(chip(colorOf(runNumber)), `${run.name}: `);
    parent.append(made);
    const edges = edgesOf(view);
    drawWhenReady(place, () => {
      const traces = Object.entries(view.states).map(([who, states], row) => ({
        type: "heatmap",
        x: edges,
        y: [row - 0.4, row + 0.4],
        z: [Array.from(numbers(view[who]))],
        zmin: -0.5,
        zmax: states.length - 0.5,
        colorscale: stateScale(STATE_COLORS[who]),
        showscale: false,
        text: [Array.from(numbers(view[who]), (state) => states[state])],
        hovertemplate: `${who}: %{text}<extra></extra>`,
      }));
      const ends = edges.filter((_, number) => number % view.num_bins === 0);
      const layout = {
        margin: { l: 60, r: 10, t: 4, b: 36 },
        xaxis: axis({ title: { text: "seconds", standoff: 2 }, showgrid: false }),
        yaxis: axis({ range: [1.5, -0.5], tickvals: [0, 1], ticktext: Object.keys(view.states), showgrid: false }),
        shapes: ends.map((x) => ({
          type: "line",
          x0: x,
          x1: x,
          y0: 0,
          y1: 1,
          yref: "paper",
          line: { color: themeColor("text"), width: 1 },
        })),
      };
      return drawPlot(place, traces, layout);
    });
  }
}
