"use strict";
// What is drawn of a metric: runs that differ in their seed only joined to groups, smoothed lines, and bands.

const HIDDEN = new Set(); // folders of the runs that are not drawn
const IS_SEED = /(^|[._])seed$/, IS_FOLDER = /^(logger|checkpointing)\./;
const FEWEST_SMOOTHED = 20; // with fewer points, a smoothed line ends far from the last value

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

function isValidation(name) {
  return name.split("/").some((part) => part.startsWith("val"));
}

function weightOf(name, values, smoothing) {
  const known = values.filter((value) => value !== null).length;
  return isValidation(name) || known < FEWEST_SMOOTHED ? 0 : smoothing;
}

function startOf(run) {
  const first = run.status.earlier.length ? run.status.earlier[0] : run.status;
  if (first.started) return first.started;
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

function seedGroups(runs) {
  // Runs whose configurations differ in seeds and folders only.
  const groups = new Map();
  for (const run of runs) {
    const entries = Object.entries(run.config), seeds = entries.filter(([key]) => IS_SEED.test(key));
    const same = entries.filter(([key]) => !IS_SEED.test(key) && !IS_FOLDER.test(key));
    const key = entries.length ? JSON.stringify(same) : run.folder;
    const known = groups.get(key) || new Map();
    // A second run with the same seed is not another seed.
    const seed = known.has(JSON.stringify(seeds)) ? run.folder : JSON.stringify(seeds);
    groups.set(seed === run.folder ? run.folder : key, seed === run.folder ? new Map([[seed, run]]) : known.set(seed, run));
  }
  return [...groups.values()].map((group) => [...group.values()]);
}

function groupsOf(runs, options) {
  // Groups with their colour, which is that of the first run and does not depend on what is hidden.
  const joined = options.seeds && options.axis === "steps";
  const lists = joined ? seedGroups(runs) : runs.map((run) => [run]);
  const folders = lists.map((list) => list[0].name.split("/")[0]);
  return lists.map((list, place) => {
    const isAlone = list.every((run) => run.name.split("/")[0] === folders[place]) && folders.filter((name) => name === folders[place]).length === 1;
    const name = runs.length > 1 && isAlone ? folders[place] : list[0].name;
    const label = list.length > 1 ? `${name} (${list.length} seeds)` : name;
    return { runs: list, color: runs.indexOf(list[0]), label, shown: !HIDDEN.has(list[0].folder) };
  });
}

function mean(values) {
  return values.length ? values.reduce((a, b) => a + b) / values.length : null;
}

function lastOf(run, name) {
  const values = run.curves[name] ? run.curves[name].values.filter((value) => value !== null) : [];
  return values.length ? values[values.length - 1] : null;
}

function lastOfGroup(group, name) {
  return mean(group.runs.map((run) => lastOf(run, name)).filter((value) => value !== null));
}

function linesOf(groups, name, options) {
  // Lines to draw; `exact` is the values to show in numbers.
  const drawn = [];
  for (const group of groups) {
    if (!group.shown) continue;
    const lines = group.runs.map((run) => pointsOf(run, name, options.axis)).filter((points) => points && points.x.length);
    if (!lines.length) continue;
    const smooth = lines.map((line) => ({ x: line.x, y: smoothed(line.y, weightOf(name, line.y, options.smoothing)) }));
    if (group.runs.length === 1) {
      const isSmoothed = smooth[0].y !== lines[0].y;
      if (isSmoothed) drawn.push({ ...lines[0], group, faint: true, exact: true });
      drawn.push({ ...smooth[0], group, exact: !isSmoothed, main: true });
      continue;
    }
    const [xs, columns] = aligned(smooth);
    const at = (combine) => xs.map((_, index) => {
      const known = columns.map((column) => column[index]).filter((value) => value !== null);
      return known.length ? combine(known) : null;
    });
    drawn.push({ x: xs, y: at((known) => Math.min(...known)), group, bound: true });
    drawn.push({ x: xs, y: at((known) => Math.max(...known)), group, bound: true });
    drawn.push({ x: xs, y: at(mean), group, exact: true, main: true });
  }
  return drawn;
}

function isOnePoint(runs, name) {
  return runs.every((run) => !run.curves[name] || run.curves[name].steps.length < 2);
}
