"use strict";
// The page: reads the data, draws the chosen tab, and asks a server for news if there is one.

const DATA = JSON.parse(document.getElementById("data").textContent);
const OPTIONS = { axis: "steps", smoothing: 0.6, log: false, seeds: true, text: "", legend: false };
const MAIN_CURVES = ["train/reward", "validation/accuracy", "train/loss", "validation/loss", "train/grad_norm",
  "train/approx_entropy", "train/token_mult_prob_error", "train/mean_gen_tokens_per_sample", "train/truncation_rate",
  "train/critic/explained_var", "train/lr", "train/accuracy", "timing/train/total_step_time"];
const TABS = [["overview", "Overview", overview], ["curves", "Curves", curves], ["time", "Time", timeView],
  ["rollouts", "Rollouts", rollouts], ["config", "Configuration", configuration]];
let tab = "overview", chosen = 0;

function chartWidth() {
  const room = document.getElementById("panel").clientWidth;
  const columns = Math.max(1, Math.floor((room + 14) / 414));
  return Math.max(200, Math.floor((room - 14 * (columns - 1)) / columns) - 28);
}

function charts(names) {
  const drawn = names.map((name) => chart(name, DATA.runs, OPTIONS, chartWidth())).filter((one) => one);
  return make("div", { class: "cards" }, drawn.length ? drawn : make("p", { class: "soft" }, "No such metric."));
}

function runLegend() {
  if (DATA.runs.length < 2) return null;
  return make("div", { class: "legend" }, DATA.runs.map((run, index) => make("span", {}, swatch(index), run.name)));
}

function endOf(run) {
  const status = run.status, texts = {
    finished: "finished", failed: "failed", interrupted: "was interrupted", killed: "was killed", running: "is running",
    unknown: "left no record of its end",
  };
  const kind = status.status;
  const least = status.max_steps && status.step < status.max_steps ? `; max_num_steps is ${status.max_steps}` : "";
  return make("p", {}, make("span", { class: `ended ${kind}` }, texts[kind] || kind),
    ` after ${status.step} steps${least}`, status.error ? make("div", { class: "body" }, status.error) : null);
}

function findingView(run, finding) {
  return make("div", { class: `card finding ${finding.level}`, "data-finding": finding.title },
    make("span", { class: "level" }, finding.level), ` ${finding.title}`,
    make("p", {}, finding.text),
    make("p", { class: "soft" }, `Steps ${finding.steps[0]} to ${finding.steps[1]} of ${run.name}; ${finding.metric}. See ${finding.guide}.`));
}

function overview() {
  const cards = DATA.runs.map((run) => {
    const facts = Object.entries(run.facts).filter(([, value]) => value !== null && value !== undefined);
    const status = run.status;
    const took = status.started ? duration((status.ended || (status.status === "running" ? DATA.written : status.last_time) || status.started) - status.started) : null;
    const more = [["started", moment(status.started)], ["took", took], ["on", status.host], ["version", status.version],
      ["command", status.command.join(" ")], ["folder", run.folder]].filter(([, value]) => value);
    return make("section", { class: "card" }, make("h3", {}, run.name), endOf(run),
      make("dl", { class: "facts" }, [...facts, ...more].map(([name, value]) => [make("dt", {}, name), make("dd", {}, shown(value))])));
  });
  const findings = DATA.runs.flatMap((run) => run.findings.map((finding) => findingView(run, finding)));
  return [make("h2", {}, DATA.runs.length > 1 ? "Runs" : "Run"), make("div", { class: "cards" }, cards),
    make("h2", {}, "Findings"), findings.length ? findings : make("p", {}, "No rule found anything wrong."),
    make("h2", {}, "Main curves"), runLegend(), charts(MAIN_CURVES)];
}

function curves() {
  const area = make("div", {});
  const names = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const draw = () => {
    const text = OPTIONS.text.toLowerCase();
    const kept = names.filter((name) => name.toLowerCase().includes(text));
    area.replaceChildren(make("p", { class: "soft", "aria-live": "polite" }, `${kept.length} of ${names.length} metrics`),
      charts(kept.slice(0, 60)), kept.length > 60 ? make("p", { class: "soft" }, "The first 60 are shown; filter for others.") : "");
  };
  const change = (name) => (value) => { OPTIONS[name] = value; draw(); };
  const controls = make("div", { class: "controls" },
    field("name has", "search", OPTIONS.text, change("text")),
    choice("axis", [["steps", "steps"], ["time", "seconds"]], OPTIONS.axis, change("axis")),
    field("smoothing", "range", OPTIONS.smoothing, (value) => change("smoothing")(Number(value)), { min: 0, max: 0.98, step: 0.02 }),
    make("label", {}, make("input", { type: "checkbox", checked: OPTIONS.log, onchange: (event) => change("log")(event.target.checked) }), "logarithmic"),
    DATA.runs.length > 1 ? make("label", {}, make("input", { type: "checkbox", checked: OPTIONS.seeds,
      onchange: (event) => change("seeds")(event.target.checked) }), "join runs that differ in their seed only") : null);
  draw();
  return [make("h2", {}, "Curves"), controls, runLegend(), area];
}

function runChoice(redraw) {
  if (DATA.runs.length < 2) return null;
  return make("div", { class: "controls" }, choice("run", DATA.runs.map((run, index) => [String(index), run.name]), String(chosen),
    (value) => { chosen = Number(value); redraw(); }));
}

function timeView() {
  const run = DATA.runs[chosen], phases = run.phases.phases;
  if (!phases) return [runChoice(show), make("p", {}, "This run has logged no times.")];
  const bar = make("div", { class: "bar", role: "img", "aria-label": "Shares of the phases" }, phases.map((phase, index) => (
    make("span", { style: `background:${colorOf(index)};width:${100 * phase.share}%`, title: `${phase.name} ${shown(100 * phase.share, 3)} %` }))));
  const rows = phases.map((phase, index) => make("tr", {}, make("td", {}, swatch(index), phase.name),
    make("td", { class: "number" }, duration(phase.sum)), make("td", { class: "number" }, `${shown(100 * phase.share, 3)} %`),
    make("td", { class: "number" }, shown(phase.median, 3))));
  const head = ["phase", "in all", "share", "seconds a step, median"].map((text, index) => make("th", { scope: "col", class: index ? "number" : null }, text));
  const timing = Object.keys(run.curves).filter((name) => name.startsWith("timing/") || name.startsWith("idle/"));
  return [runChoice(show), make("h2", {}, "Where the time of the steps went"), bar,
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Phases" },
      make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows))),
    make("h2", {}, "By step"), charts(timing)];
}

function rollouts() {
  const source = DATA.live ? servedSamples : storedSamples(DATA.runs[chosen].samples);
  return [runChoice(show), ...rolloutsView(source, DATA.live)];
}

function configuration() {
  const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.config)))];
  const area = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Configuration" });
  let text = "", different = false;
  const draw = () => {
    const rows = keys.map((key) => [key, DATA.runs.map((run) => run.config[key])])
      .map(([key, values]) => [key, values, values.some((value) => value !== values[0])])
      .filter(([key, , differs]) => key.toLowerCase().includes(text) && (!different || differs))
      .map(([key, values, differs]) => make("tr", { class: differs ? "differs" : null }, make("td", {}, key),
        values.map((value) => make("td", { class: "text" }, value === undefined ? "–" : String(value)))));
    area.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ["key", ...DATA.runs.map((run) => run.name)].map((name) => (
      make("th", { scope: "col" }, name))))), make("tbody", {}, rows)));
  };
  draw();
  return [make("div", { class: "controls" }, field("key has", "search", "", (value) => { text = value.toLowerCase(); draw(); }),
    DATA.runs.length > 1 ? make("label", {}, make("input", { type: "checkbox", onchange: (event) => { different = event.target.checked; draw(); } }),
      "only keys that differ") : null), area];
}

async function follow() {
  let failures = 0;
  for (;;) {
    try {
      const news = await ask(`news?after=${DATA.news}`);
      failures = 0;
      if (news.version !== DATA.news) {
        DATA.news = news.version;
        DATA.written = news.written;
        DATA.error = news.error;
        DATA.runs = [news.run];
        if (tab !== "rollouts" && tab !== "config" && !["INPUT", "SELECT"].includes(document.activeElement.tagName)) show();
        servedSamples.tell(news.run.num_samples);
        footer();
      }
    } catch (problem) {
      failures += 1;
      document.getElementById("footer").textContent = "The server does not answer; the page shows what it had read.";
      await new Promise((done) => setTimeout(done, Math.min(1000 * failures, 30000)));
    }
  }
}

function footer() {
  document.getElementById("footer").textContent = `nemo_rl ${DATA.version}, ${DATA.live ? "read" : "written"} ${moment(DATA.written)}` +
    (DATA.error ? `. A part of the run cannot be read: ${DATA.error}` : "");
}

function choose(name) {
  tab = name;
  show();
}

function makeTabs() {
  const move = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const names = TABS.map(([name]) => name);
    choose(names[(names.indexOf(tab) + by + names.length) % names.length]);
    document.getElementById(`tab-${tab}`).focus();
  };
  document.getElementById("tabs").replaceChildren(...TABS.map(([name, text]) => make("button", { role: "tab", id: `tab-${name}`,
    "aria-controls": "panel", onclick: () => choose(name), onkeydown: move }, text)));
}

function show() {
  document.getElementById("title").textContent = DATA.runs.map((run) => run.name).join(", ");
  for (const [name] of TABS) {
    const button = document.getElementById(`tab-${name}`);
    button.setAttribute("aria-selected", String(name === tab));
    button.tabIndex = name === tab ? 0 : -1;
  }
  const panel = document.getElementById("panel");
  panel.setAttribute("aria-labelledby", `tab-${tab}`);
  panel.replaceChildren(...TABS.find(([name]) => name === tab)[2]().filter((part) => part !== null).flat(Infinity));
  forgetCharts();
}

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  show();
});
makeTabs();
show();
footer();
if (DATA.live) follow();
