"use strict";
// The first tab: how the runs ended, a table to compare them, the main curves, and findings.

const ENDS = { finished: "finished", failed: "failed", interrupted: "was interrupted", killed: "was killed", running: "is running",
  unknown: "left no record of its end" };
const COMPARED = [["validation/accuracy", Math.max], ["train/reward", Math.max], ["validation/loss", Math.min], ["train/loss", Math.min],
  ["train/accuracy", Math.max]]; // metrics of the table, and which of two values is better
const MOST_COMPARED = 2, MOST_KEYS = 5;
const ORDER = { column: null, descending: false };

function endOf(run) {
  const status = run.status, kind = status.status;
  const least = status.max_steps && status.step < status.max_steps ? `; max_num_steps is ${status.max_steps}` : "";
  const when = status.step ? ` after ${status.step} steps${least}` : kind === "running" ? ", before the end of its first step" : " before the end of its first step";
  const first = firstStep(run), since = first > 1 ? `; it began with step ${first}` : "";
  const earlier = status.earlier.map((part) => `${part.name} (${part.status || "unknown"})`).join(", ");
  return [make("p", {}, make("span", { class: `ended ${kind}` }, ENDS[kind] || kind), when, since, earlier ? `; went on from ${earlier}` : ""), whyItFailed(status)];
}

function firstStep(run) {
  const curves = Object.entries(run.curves).filter(([name]) => name.startsWith("train/")).map(([, curve]) => curve.steps[0]);
  return curves.length ? Math.min(...curves) : 0;
}

function whyItFailed(status) {
  if (!status.error) return null;
  const where = status.where || {};
  const place = [where.worker ? `in worker ${where.worker}` : null, where.phase ? `during ${where.phase}` : null].filter((text) => text).join(", ");
  return make("div", { class: "failure" }, place ? make("p", {}, `It failed ${place}.`) : null,
    where.place ? make("p", {}, "Last line of your own code: ", make("code", {}, where.place), where.source ? make("pre", { class: "body", tabindex: "0" }, where.source) : null) : null,
    make("div", { class: "body", tabindex: "0" }, status.error));
}

function tookOf(run) {
  const status = run.status;
  const end = status.ended || (status.status === "running" ? DATA.written : status.last_time);
  const parts = status.earlier.map((part) => (part.started && part.ended ? part.ended - part.started : 0));
  return status.started ? parts.reduce((a, b) => a + b, 0) + Math.max((end || status.started) - status.started, 0) : null;
}

function factsOf(run) {
  const status = run.status;
  return [...Object.entries(run.facts), ["started", status.started ? moment(status.started) : null], ["took", duration(tookOf(run))],
    ["on", status.host], ["version", status.version], ["folder", run.folder], ["command", status.command.join(" ")]]
    .filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "–");
}

function spread(values) {
  // Mean, and the standard deviation between seeds.
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return known.length ? shown(known[0]) : "–";
  const middle = mean(known), variance = known.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (known.length - 1);
  return `${shown(middle)} ± ${shown(Math.sqrt(variance), 2)}`;
}

function bestOf(run, name, better) {
  const values = run.curves[name] ? run.curves[name].values.filter((value) => value !== null) : [];
  return values.length ? values.reduce((a, b) => better(a, b)) : null;
}

function differingKeys(groups, isJoined) {
  // Lists of keys; those of a list divide the groups in the same way, so one column shows them all.
  const configs = groups.map((group) => group.runs[0].config), alike = new Map();
  for (const key of new Set(configs.flatMap((config) => Object.keys(config)))) {
    if (IS_FOLDER.test(key) || (isJoined && IS_SEED.test(key))) continue;
    const values = configs.map((config) => config[key] ?? null), division = values.map((value) => values.indexOf(value)).join();
    if (values.every((value) => value === values[0])) continue;
    const known = alike.get(division) || [];
    alike.set(division, values.some((value) => typeof value === "number") ? [key, ...known] : [...known, key]);
  }
  return [...alike.values()];
}

function columnsOfRuns(groups) {
  // Each with a name, a value to sort by, and a text to show.
  const keys = differingKeys(groups, OPTIONS.seeds && OPTIONS.axis === "steps");
  const metrics = COMPARED.filter(([name]) => DATA.runs.some((run) => run.curves[name])).slice(0, MOST_COMPARED);
  const each = (group, of) => group.runs.map(of);
  const columns = [];
  for (const [key, ...others] of keys.slice(0, MOST_KEYS)) {
    const value = (group) => group.runs[0].config[key], more = others.length ? ` (+${others.length})` : "";
    columns.push({ name: key.split(".").slice(-2).join(".") + more, title: [key, ...others].join("\n"), value, isKey: true, text: (group) => shown(value(group)) });
  }
  for (const [name, better] of metrics) {
    for (const [kind, of] of [["last", (run) => lastOf(run, name)], ["best", (run) => bestOf(run, name, better)]]) {
      const value = (group) => mean(each(group, of).filter((one) => one !== null));
      columns.push({ name: `${name}, ${kind}`, number: true, value, text: (group) => spread(each(group, of)) });
    }
  }
  const steps = (group) => mean(each(group, (run) => run.status.step)), took = (group) => mean(each(group, tookOf).filter((one) => one !== null));
  columns.push({ name: "steps", number: true, value: steps, text: (group) => shown(steps(group)) });
  columns.push({ name: "took", number: true, value: took, text: (group) => duration(took(group)) });
  return { columns, numKeys: keys.length };
}

function statusCell(group) {
  const kinds = new Map();
  for (const run of group.runs) kinds.set(run.status.status, (kinds.get(run.status.status) || 0) + 1);
  return make("td", {}, [...kinds].map(([kind, number]) => make("span", { class: `ended ${kind}` }, group.runs.length > 1 ? `${number} ${kind} ` : kind)));
}

function runTable(groups) {
  const { columns, numKeys } = columnsOfRuns(groups), table = make("table", { class: "runs" });
  const all = [{ name: "run", value: (group) => group.label }, { name: "state", value: (group) => group.runs[0].status.status }, ...columns];
  const sorted = () => {
    const column = all.find((one) => one.name === ORDER.column), sign = ORDER.descending ? -1 : 1;
    if (!column) return groups;
    return [...groups].sort((a, b) => {
      const [left, right] = [column.value(a), column.value(b)];
      if (left === right) return 0;
      if (left === null || left === undefined) return 1;
      if (right === null || right === undefined) return -1;
      return (left < right ? -1 : 1) * sign;
    });
  };
  const sortBy = (name) => () => {
    ORDER.descending = ORDER.column === name && !ORDER.descending;
    ORDER.column = name;
    draw();
  };
  const hide = (group) => (event) => {
    for (const run of group.runs) HIDDEN[event.target.checked ? "delete" : "add"](run.folder);
    show();
  };
  function draw() {
    const head = all.map((column) => make("th", { scope: "col", class: column.number ? "number" : null, title: column.title,
      "aria-sort": ORDER.column === column.name ? (ORDER.descending ? "descending" : "ascending") : "none" },
    make("button", { onclick: sortBy(column.name) }, column.name)));
    const rows = sorted().map((group) => make("tr", { "data-run": group.label, "data-color": colorOf(group.color) },
      make("th", { scope: "row" }, make("label", { title: group.runs.map((run) => run.folder).join("\n") },
        make("input", { type: "checkbox", checked: group.shown, "aria-label": `Draw ${group.label}`, onchange: hide(group) }), swatch(group.color), group.label)),
      statusCell(group), columns.map((column) => make("td", column.isKey ? { class: "key", title: column.text(group) } : { class: column.number ? "number" : null }, column.text(group)))));
    table.replaceChildren(make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows));
  }
  draw();
  return [scrollable("Runs", table), make("p", { class: "soft" }, numKeys > MOST_KEYS ? `More keys differ than fit here; all are in Configuration. ` : "",
    groups.length < DATA.runs.length ? "Runs that differ in their seed only are joined: mean ± standard deviation." : "")];
}

function mergedFindings() {
  // The same finding of several runs is one.
  const merged = new Map();
  for (const run of DATA.runs) {
    for (const finding of run.findings) {
      const key = `${finding.level} ${finding.title}`;
      if (!merged.has(key)) merged.set(key, { ...finding, runs: [] });
      merged.get(key).runs.push([run, finding]);
    }
  }
  const levels = ["problem", "warning", "note"];
  return [...merged.values()].sort((a, b) => levels.indexOf(a.level) - levels.indexOf(b.level));
}

function findingView(finding) {
  const texts = finding.runs.map(([run, own]) => make("div", {}, make("p", {}, own.text),
    make("p", { class: "soft" }, `Steps ${own.steps[0]} to ${own.steps[1]} of ${run.name}; ${own.metric}. See ${own.guide}.`)));
  const rest = texts.length > 1 ? make("details", {}, make("summary", {}, `${texts.length - 1} more runs`), texts.slice(1)) : null;
  return make("div", { class: `card finding ${finding.level}`, "data-finding": finding.title },
    make("span", { class: "level" }, finding.level), ` ${finding.title}`, texts[0], rest);
}

function findingSummary(findings) {
  if (!findings.length) return make("p", {}, "No rule found anything wrong.");
  const press = () => document.getElementById("findings").scrollIntoView();
  return make("p", { class: "summary" }, findings.map((finding) => make("button", { class: `finding ${finding.level}`, onclick: press },
    make("span", { class: "level" }, finding.level), ` ${finding.title}`, finding.runs.length > 1 ? ` (${finding.runs.length} runs)` : "")));
}

function oneRun(run) {
  const facts = make("dl", { class: "facts" }, factsOf(run).map(([name, value]) => make("div", { class: name === "command" || name === "folder" ? "long" : null },
    make("dt", {}, name), make("dd", {}, shown(value)))));
  return make("section", { class: "card" }, endOf(run), facts);
}

function severalRuns(groups) {
  const failed = DATA.runs.filter((run) => run.status.error || run.status.earlier.length);
  const join = DATA.runs.length > seedGroups(DATA.runs).length ? make("div", { class: "controls" },
    checkbox("join runs that differ in their seed only", OPTIONS.seeds, (value) => { OPTIONS.seeds = value; show(); })) : null;
  return [join, runTable(groups), failed.map((run) => make("details", { class: "card" },
    make("summary", {}, make("strong", {}, run.name), " ", make("span", { class: `ended ${run.status.status}` }, ENDS[run.status.status] || "")), endOf(run)))];
}

function overview() {
  const groups = groupsOf(DATA.runs, OPTIONS), findings = mergedFindings(), names = namesOf(DATA.runs);
  return [make("h2", { class: "unseen" }, DATA.runs.length > 1 ? "Runs" : "Run"), DATA.runs.length > 1 ? severalRuns(groups) : oneRun(DATA.runs[0]),
    findingSummary(findings), make("h2", { class: "unseen" }, "Main curves"),
    chartsAndNumbers(MAIN_CURVES.filter((name) => names.includes(name)), groups),
    findings.length ? make("h2", { id: "findings" }, "Findings") : null, findings.map(findingView)];
}
