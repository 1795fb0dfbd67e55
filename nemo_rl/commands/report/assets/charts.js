"use strict";
// Charts of metrics. A chart is drawn when it gets a width, and again when its width changes.

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];
const DRAWN = new Map(); // holder of a chart -> its uPlot, or null before it has a width

const SIZES = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const width = Math.floor(contentRect.width), height = Math.floor(contentRect.height);
    if (width < 1 || !DRAWN.has(target)) continue; // inside a closed group
    const plot = DRAWN.get(target);
    if (plot === null) DRAWN.set(target, target.draw(width, height));
    else plot.setSize({ width, height });
  }
});

function forgetCharts() {
  // uPlot keeps every chart until it is told that it is gone.
  for (const [holder, plot] of DRAWN) {
    if (holder.isConnected) continue;
    SIZES.unobserve(holder);
    if (plot) plot.destroy();
    DRAWN.delete(holder);
  }
}

function around(_, least, most) {
  // A constant gets room on both sides.
  if (least === null) return [0, 1];
  const room = Math.max(Math.abs(least), Math.abs(most), 1e-3) * 0.1;
  return most - least > 1e-6 * room ? uPlot.rangeNum(least, most, 0.1, true) : [least - room, most + room];
}

function within(options) {
  return (_, least, most) => {
    if (least === null) return [0, 1];
    const from = Math.max(least, options.from === "" ? least : Number(options.from));
    const to = Math.min(most, options.to === "" ? most : Number(options.to));
    return to > from ? [from, to] : [from - 1, from + 1];
  };
}

function valuesOf(groups, several, valueOf, place) {
  // One number for each group, with its colour if there are several.
  return [place, ...groups.map((group) => make("span", { class: "value", title: group.label },
    several ? swatch(group.color) : null, shown(valueOf(group))))];
}

function seriesOf(lines, numPoints) {
  return lines.map(({ group, bound, faint }) => ({
    label: group.label, stroke: colorOf(group.color) + (faint || bound ? "55" : ""), width: bound ? 0.5 : 1.8, spanGaps: true,
    dash: isDashed(group.color) && !bound ? [7, 4] : undefined,
    points: { show: numPoints < 40 && !bound && !faint, size: 5 },
  }));
}

function bandsOf(lines) {
  const bands = [];
  lines.forEach((line, index) => {
    const next = lines[index + 1];
    if (line.bound && next && next.bound && next.group === line.group) {
      bands.push({ series: [index + 2, index + 1], fill: `${colorOf(line.group.color)}33` });
    }
  });
  return bands;
}

function zoomKept(name, xs, options) {
  // A function that keeps the part of the axis that is drawn, unless it is all of it.
  const [first, last] = within(options)(null, xs[0], xs[xs.length - 1]);
  return (plot, scale) => {
    if (scale !== "x") return;
    const { min, max } = plot.scales.x;
    if (min > first || max < last) ZOOMS.set(name, [min, max]);
    else ZOOMS.delete(name);
    remember(false);
  };
}

function drawChart(name, holder, lines, options, hovered) {
  const [xs, columns] = aligned(lines);
  const style = getComputedStyle(document.body), line = style.getPropertyValue("--line");
  const axis = { stroke: style.color, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui, sans-serif" };
  const values = (_, ticks) => ticks.map((tick) => shown(tick, 3));
  const settings = (width, height) => ({
    width, height, bands: bandsOf(lines), legend: { show: false },
    series: [{}, ...seriesOf(lines, xs.length)],
    scales: { x: { time: false, range: within(options) }, y: options.log ? { distr: 3 } : { range: around } },
    axes: [{ ...axis, values, incrs: WHOLE, size: 34 }, { ...axis, values, size: 62 }], // room for -1.00e-4
    cursor: { drag: { x: true, y: false } },
    hooks: { setCursor: [(plot) => hovered(plot.cursor.idx === undefined ? null : plot.cursor.idx, xs, columns)],
      setScale: [zoomKept(name, xs, options)] },
  });
  return (width, height) => {
    const plot = new uPlot(settings(width, height), [xs, ...columns], holder), zoom = ZOOMS.get(name);
    if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
    return plot;
  };
}

function chart(name, groups, options) {
  const lines = linesOf(groups, name, options);
  if (!lines.length) return null;
  const holder = make("div", { class: "plot", role: "img", "aria-label": `Chart of ${name}` });
  const drawn = groups.filter((group) => lines.some((line) => line.group === group));
  const numbers = make("p", { class: "values soft" });
  const hovered = (index, xs, columns) => {
    const exact = new Map(lines.map((line, place) => [line.exact ? line.group : null, place]));
    numbers.replaceChildren(...(index === null ? valuesOf(drawn, groups.length > 1, (group) => lastOfGroup(group, name), "last ") :
      valuesOf(drawn, groups.length > 1, (group) => columns[exact.get(group)][index], `${options.axis === "steps" ? "step" : "second"} ${shown(xs[index])} `)));
  };
  hovered(null);
  holder.draw = drawChart(name, holder, lines, options, hovered);
  DRAWN.set(holder, null);
  SIZES.observe(holder);
  const card = make("section", { class: ENLARGED.has(name) ? "card wide" : "card", "data-metric": name });
  const enlarge = make("button", { class: "plain", "aria-pressed": String(ENLARGED.has(name)), title: "Larger, or small again", "aria-label": `Enlarge ${name}`,
    onclick: () => {
      const isWide = card.classList.toggle("wide");
      enlarge.setAttribute("aria-pressed", String(isWide));
      ENLARGED[isWide ? "add" : "delete"](name);
      remember(true);
    } }, "⤢");
  card.append(make("div", { class: "head" }, make("h3", {}, name), enlarge), numbers, holder);
  return card;
}

function charts(names, groups, options) {
  const drawn = names.map((name) => chart(name, groups, options)).filter((one) => one);
  return drawn.length ? make("div", { class: "cards" }, drawn) : null;
}

function numbersTable(names, groups) {
  // Metrics with one value only.
  const shownGroups = groups.filter((group) => group.shown);
  const head = ["metric", ...shownGroups.map((group) => group.label)].map((text, index) => make("th", { scope: "col", class: index ? "number" : null }, text));
  const rows = names.map((name) => make("tr", { "data-metric": name }, make("td", {}, name),
    shownGroups.map((group) => make("td", { class: "number" }, shown(lastOfGroup(group, name))))));
  return names.length ? scrollable("Metrics with one value", make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows))) : null;
}

function runLegend(groups) {
  if (groups.length < 2) return null;
  return make("div", { class: "legend" }, groups.filter((group) => group.shown).map((group) => (
    make("span", { "data-run": group.label }, swatch(group.color), group.label))));
}
