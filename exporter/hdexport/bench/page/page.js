// Draws the charts of the page, and shows in all of them the series that are ticked.
"use strict";

const specs = JSON.parse(document.getElementById("specs").textContent);
const boxes = [...document.querySelectorAll("input[data-series]")];
const options = { actions: false, renderer: "svg", tooltip: { theme: "page" } };

function shown() {
  // Browsers keep ticks over a reload: what counts is what the boxes say.
  const series = [];
  for (const box of boxes) series[Number(box.dataset.series)] = box.checked;
  return Array.from(series, Boolean);
}

async function draw() {
  const drawn = Object.entries(specs).map(([id, spec]) => vegaEmbed(`#chart-${id}`, spec, options));
  const views = (await Promise.all(drawn)).map((result) => result.view);
  const update = () => Promise.all(views.map((view) => view.signal("shown", shown()).runAsync()));
  for (const box of boxes) box.addEventListener("change", update);
  await update();
  document.documentElement.dataset.drawn = "true";
}

draw();
