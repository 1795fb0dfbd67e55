"use strict";
// The tab with all metrics: the main ones first, then the others in groups by their prefix.

const MAIN_CURVES = ["train/reward", "validation/accuracy", "train/loss", "validation/loss", "train/accuracy", "train/grad_norm",
  "train/approx_entropy", "train/token_mult_prob_error", "train/mean_gen_tokens_per_sample", "train/truncation_rate",
  "train/critic/explained_var", "train/lr", "timing/train/total_step_time"];
const OPENED = new Set(["main"]); // groups of metrics that are open

function namesOf(runs) {
  return [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].sort();
}

function prefixOf(name) {
  return name.includes("/") ? name.slice(0, name.lastIndexOf("/")) : "others";
}

function metricGroups(names) {
  const groups = new Map([["main", MAIN_CURVES.filter((name) => names.includes(name))]]);
  for (const name of names) {
    const prefix = prefixOf(name);
    if (!groups.has(prefix)) groups.set(prefix, []);
    groups.get(prefix).push(name);
  }
  return [...groups].filter(([, members]) => members.length);
}

function chartsAndNumbers(names, groups) {
  const single = names.filter((name) => isOnePoint(DATA.runs, name));
  return [charts(names.filter((name) => !single.includes(name)), groups, OPTIONS), numbersTable(single, groups)];
}

function curves() {
  const area = make("div", {}), legend = make("div", {}), names = namesOf(DATA.runs);
  const draw = () => {
    const groups = groupsOf(DATA.runs, OPTIONS), text = OPTIONS.text.toLowerCase();
    const kept = names.filter((name) => name.toLowerCase().includes(text));
    const parts = metricGroups(kept).filter(([prefix]) => prefix !== "main" || !text).map(([prefix, members]) => {
      const inside = make("div", {});
      const fill = () => { if (!inside.childNodes.length) inside.append(...chartsAndNumbers(members, groups).filter((part) => part)); };
      const isOpen = text !== "" || OPENED.has(prefix);
      if (isOpen) fill();
      return make("details", { open: isOpen, "data-prefix": prefix, ontoggle: (event) => {
        if (event.target.open) fill();
        if (!text) OPENED[event.target.open ? "add" : "delete"](prefix);
      } }, make("summary", {}, prefix === "main" ? "Main curves" : `${prefix}/`, make("span", { class: "soft" }, ` ${members.length}`)), inside);
    });
    legend.replaceChildren(...[runLegend(groups)].filter((part) => part));
    area.replaceChildren(make("p", { class: "soft", "aria-live": "polite" }, text ? `${kept.length} of ${names.length} metrics` : `${names.length} metrics`), ...parts);
    if (area.isConnected) forgetCharts();
  };
  const change = (name) => (value) => { OPTIONS[name] = value; draw(); remember(false); };
  const bound = (name) => (value) => { if (!Number.isNaN(Number(value))) { ZOOMS.clear(); change(name)(value); } };
  const controls = make("div", { class: "controls" },
    field("name has", "search", OPTIONS.text, change("text")),
    choice("axis", [["steps", "steps"], ["time", "seconds"]], OPTIONS.axis, (value) => { OPTIONS.from = OPTIONS.to = ""; ZOOMS.clear(); change("axis")(value); show(); }),
    field("from", "number", OPTIONS.from, bound("from"), { class: "short", step: "any" }),
    field("to", "number", OPTIONS.to, bound("to"), { class: "short", step: "any" }),
    field("smoothing", "range", OPTIONS.smoothing, (value) => change("smoothing")(Number(value)), { min: 0, max: 0.98, step: 0.02 }),
    checkbox("logarithmic", OPTIONS.log, change("log")),
    DATA.runs.length > 1 ? checkbox("join runs that differ in their seed only", OPTIONS.seeds, change("seeds")) : null);
  draw();
  return [make("h2", { class: "unseen" }, "Curves"), controls, make("p", { class: "soft" }, "Drag across a chart to zoom in, press it twice to zoom out. Validations and metrics with " +
    `fewer than ${FEWEST_SMOOTHED} points are never smoothed.`), legend, area];
}
