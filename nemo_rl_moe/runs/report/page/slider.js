// Copyright (c) 2026 The nemo_rl_moe authors.
// SPDX-License-Identifier: Apache-2.0
// A slider over steps, and a button that plays them.

const PAUSE_BETWEEN_STEPS = 300;

// `draw` is called whenever the selected step changes. `step()` returns the selected step.
function stepControls(steps, draw) {
  const last = steps.length - 1;
  const slider = element("input", { type: "range", min: 0, max: last, value: last, "aria-label": "step" });
  const play = element("button", { type: "button" }, "Play");
  const label = element("strong", {}, `step ${steps[last]}`);
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  const choose = (position) => {
    slider.value = String(position);
    label.textContent = `step ${steps[position]}`;
    draw();
  };
  const next = () => {
    choose(Math.min(last, Number(slider.value) + 1));
    if (Number(slider.value) === last) {
      stop();
    }
  };
  play.addEventListener("click", () => {
    if (timer !== null) {
      stop();
      return;
    }
    if (Number(slider.value) === last) {
      choose(0);
    }
    play.textContent = "Pause";
    timer = setInterval(next, PAUSE_BETWEEN_STEPS);
  });
  slider.addEventListener("input", () => {
    stop();
    choose(Number(slider.value));
  });
  return { place: element("div", { class: "controls" }, play, slider, label), step: () => steps[Number(slider.value)] };
}
