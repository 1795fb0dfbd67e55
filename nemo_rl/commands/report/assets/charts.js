"use strict";
// Curves of one metric over steps or time, of several runs, smoothed, and with bands over seeds.

function smoothed(values, weight) {
  // Exponential moving average with the correction for its start.
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function startOf(run) {
  if (run.status.started) return run.status.started;
  const times = Object.values(run.curves).map((curve) => curve.times[0]).filter((time) => time);
  return times.length ? Math.min(...times) : null;
}

function pointsOf(run, name, axis) {
  const curve = run.curves[name];
  if (!curve) return null;
  if (axis === "steps") return { x: curve.steps, y: curve.values };
  const start = startOf(run), x = [], y = [];
  curve.times.forEach((time, index) => {
    if (time === null || start === null) return;
    x.push(time - start);
    y.push(curve.values[index]);
  });
  return { x, y };
}

function aligned(lines) {
  const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  const columns = lines.map((line) => {
    const column = new Array(xs.length).fill(null);
    line.x.forEach((x, index) => { column[place.get(x)] = line.y[index]; });
    return column;
  });
  return [xs, columns];
}

const IS_SEED = /(^|[._])seed$/;

function seedGroups(runs) {
  // Runs whose configurations differ in seeds and folders only.
  const groups = new Map();
  for (const run of runs) {
    const entries = Object.entries(run.config), seeds = entries.filter(([key]) => IS_SEED.test(key));
    const same = entries.filter(([key]) => !IS_SEED.test(key) && !/^(logger|checkpointing)\./.test(key));
    const key = entries.length ? JSON.stringify(same) : run.folder;
    const known = groups.get(key) || new Map();
    // A second run with the same seed, such as one that was resumed, is not another seed.
    const seed = known.has(JSON.stringify(seeds)) ? run.folder : JSON.stringify(seeds);
    groups.set(seed === run.folder ? run.folder : key, seed === run.folder ? new Map([[seed, run]]) : known.set(seed, run));
  }
  return [...groups.values()].map((group) => [...group.values()]);
}

function linesOf(runs, name, options) {
  const drawn = [];
  const groups = options.seeds && options.axis === "steps" ? seedGroups(runs) : runs.map((run) => [run]);
  groups.forEach((group, color) => {
    const lines = group.map((run) => pointsOf(run, name, options.axis)).filter((points) => points && points.x.length);
    if (!lines.length) return;
    const smooth = lines.map((line) => ({ x: line.x, y: smoothed(line.y, options.smoothing) }));
    const label = group.length > 1 ? `${group[0].name} and ${group.length - 1} more seeds` : group[0].name;
    if (group.length === 1) {
      if (options.smoothing) drawn.push({ ...lines[0], label: `${label}, raw`, color, faint: true });
      drawn.push({ ...smooth[0], label, color });
      return;
    }
    const [xs, columns] = aligned(smooth);
    const at = (combine) => xs.map((_, index) => {
      const known = columns.map((column) => column[index]).filter((value) => value !== null);
      return known.length ? combine(known) : null;
    });
    drawn.push({ x: xs, y: at((known) => Math.min(...known)), label: `${label}, least`, color, bound: true });
    drawn.push({ x: xs, y: at((known) => Math.max(...known)), label: `${label}, most`, color, bound: true });
    drawn.push({ x: xs, y: at((known) => known.reduce((a, b) => a + b) / known.length), label, color });
  });
  return drawn;
}

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];

function around(_, least, most) {
  // A constant gets room on both sides.
  if (least === null) return [0, 1];
  const room = Math.max(Math.abs(least), Math.abs(most), 1e-3) * 0.1;
  return most - least > 1e-6 * room ? uPlot.rangeNum(least, most, 0.1, true) : [least - room, most + room];
}

function aroundSteps(_, least, most) {
  if (least === null) return [0, 1];
  return most > least ? [least, most] : [least - 1, most + 1];
}

const PLOTS = [];

function forgetCharts() {
  // uPlot keeps every chart until it is told that it is gone.
  for (const plot of PLOTS.splice(0)) {
    if (plot.root.isConnected) PLOTS.push(plot);
    else plot.destroy();
  }
}

function chart(name, runs, options, width) {
  const lines = linesOf(runs, name, options);
  if (!lines.length) return null;
  const [xs, columns] = aligned(lines);
  const style = getComputedStyle(document.body);
  const axisStyle = { stroke: style.color, grid: { stroke: style.getPropertyValue("--line"), width: 1 },
    ticks: { stroke: style.getPropertyValue("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const bands = [];
  lines.forEach((line, index) => {
    if (line.bound && lines[index + 1] && lines[index + 1].bound && lines[index + 1].color === line.color) {
      bands.push({ series: [index + 2, index + 1], fill: `${colorOf(line.color)}33` });
    }
  });
  const series = [{ label: options.axis === "steps" ? "step" : "seconds", value: (_, value) => shown(value) }];
  for (const line of lines) {
    const color = colorOf(line.color) + (line.faint || line.bound ? "55" : "");
    series.push({ label: line.label, stroke: color, width: line.bound ? 0.5 : 1.6, spanGaps: true,
      points: { show: xs.length < 40 && !line.bound && !line.faint, size: 4 }, value: (_, value) => shown(value) });
  }
  const size = 66; // room for -1.00e-4
  const plot = make("div", { role: "img", "aria-label": `Chart of ${name}` });
  const values = (_, ticks) => ticks.map((tick) => shown(tick, 3));
  PLOTS.push(new uPlot({
    width, height: 190, series, bands, legend: { live: true, show: runs.length > 1 || options.legend },
    scales: { x: { time: false, range: aroundSteps }, y: options.log ? { distr: 3 } : { range: around } },
    axes: [{ ...axisStyle, values, incrs: WHOLE }, { ...axisStyle, values, size }],
    cursor: { drag: { x: true, y: false } },
  }, [xs, ...columns], plot));
  const last = runs.map((run) => pointsOf(run, name, options.axis)).filter((line) => line).map((line) => {
    const known = line.y.filter((value) => value !== null);
    return shown(known[known.length - 1]);
  });
  return make("section", { class: "card", "data-metric": name },
    make("h3", {}, name, " ", make("span", { class: "soft" }, last.join(", "))), plot);
}
