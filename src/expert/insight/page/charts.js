// Line charts of the report and of the board, drawn by uPlot. All text is set as text.
"use strict";

const drawn = new Map(); // the uPlot of every place with a chart

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A value in words; `short` for an axis.
function worded(value, unit, short) {
  if (value == null) return "";
  if (unit === "si") {
    if (!short) return Math.round(value).toLocaleString("en");
    for (const [size, sign] of [[1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size * (sign === "k" ? 10 : 1)) return `${+(value / size).toPrecision(4)}${sign}`;
    }
    return (+value.toPrecision(4)).toLocaleString("en");
  }
  const [size, sign] = { percent: [0.01, " %"], watts: [1, " W"],
    bytes: [2 ** 30, " GiB"], number: [1, ""] }[unit];
  const text = Math.abs(value / size) < 0.001 && value ? (value / size).toExponential(1)
    : `${+(value / size).toPrecision(short ? 3 : 4)}`;
  return text.replace("e-0", "e-") + sign;
}

// Without a pointer the legend shows the last value.
function valueAt(values, at) {
  return at == null ? values.findLast((one) => one != null) : values[at];
}

function draw(place) {
  const chart = JSON.parse(place.dataset.chart);
  const tables = chart.series.map(({ x, y }) => [x, y]);
  const data = uPlot.join(tables);
  const lines = chart.series.map((line, number) => ({
    label: line.name,
    stroke: colour(`c${line.colour}`),
    width: { line: 1.9, faint: 0.6, dots: 1.4 }[line.look],
    points: line.look === "dots" ? { show: true, size: 6, fill: colour(`c${line.colour}`) }
      : line.x.length <= 30 ? { show: true, size: 5 } : {},
    value: (u, value, series, at) => worded(valueAt(data[number + 1], at), chart.unit),
  }));
  const axis = { stroke: colour("soft"), font: "12px system-ui, sans-serif",
    grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
  const labels = (name) => (u, ticks) => ticks.map((tick) => worded(tick, name, true));
  const binary = Array.from({ length: 24 }, (_, power) => 2 ** (power + 20));
  const range = (u, low, high) => {
    const [first, last] = uPlot.rangeNum(chart.from_zero ? Math.min(0, low) : low, high, 0.1, true);
    return [chart.from_zero && low >= 0 ? 0 : first, chart.unit === "percent" && high <= 1 ? Math.min(1, last) : last];
  };
  const made = new uPlot({
    width: Math.max(place.clientWidth, 100),
    height: place.closest("figure").classList.contains("wide") ? 280 : 230,
    scales: { x: { time: false }, y: chart.log ? { distr: 3 } : { range } },
    axes: [
      { ...axis, size: 32, values: labels("si"), incrs: [1, 2, 5, 10, 20, 50].concat(
        [2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((step) => step * 10 ** power))) },
      { ...axis, size: 62, values: labels(chart.unit), ...(chart.unit === "bytes" ? { incrs: binary } : {}) },
    ],
    series: [{ label: "step", value: (u, value, series, at) => worded(valueAt(data[0], at), "si") }, ...lines],
    cursor: { points: { size: 7 }, y: false },
  }, data, place);
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", chart.series.map((line) => line.name).join(", "));
  resized.observe(place);
  return made;
}

const resized = new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
  const chart = drawn.get(target);
  if (chart && contentRect.width) chart.setSize({ width: contentRect.width, height: chart.height });
}));

// Draw all charts that are not drawn yet, and forget those that left the page.
function drawCharts() {
  for (const [place, chart] of drawn) {
    if (place.isConnected) continue;
    chart.destroy();
    resized.unobserve(place);
    drawn.delete(place);
  }
  document.querySelectorAll(".chart").forEach((place) => {
    if (!drawn.has(place)) drawn.set(place, draw(place));
  });
}

// A link to a folded section opens it.
addEventListener("hashchange", () => {
  const folded = document.querySelector(`${location.hash || "#-"} > .folded`);
  if (folded) folded.open = true;
});

for (const query of ["(prefers-color-scheme: dark)", "print"]) {
  matchMedia(query).addEventListener("change", () => {
    for (const [place, chart] of drawn) {
      chart.destroy();
      drawn.set(place, draw(place));
    }
  });
}
