"use strict";
// The page: reads the data, draws the chosen tab, and asks a server for news if there is one.

const DATA = JSON.parse(document.getElementById("data").textContent);
const OPTIONS = { axis: "steps", smoothing: 0.6, log: false, seeds: true, text: "", from: "", to: "" };
const TABS = [["overview", "Overview", overview], ["curves", "Curves", curves], ["time", "Time", timeView],
  ["rollouts", "Rollouts", rollouts], ["config", "Configuration", configuration]];
const MOST_NAMED = 4;
let tab = "overview", chosen = 0;

function runChoice(redraw) {
  if (DATA.runs.length < 2) return null;
  return make("div", { class: "controls" }, choice("run", DATA.runs.map((run, index) => [String(index), run.name]), String(chosen),
    (value) => { chosen = Number(value); redraw(); remember(true); }));
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
    scrollable("Phases", make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows))),
    make("h2", {}, "By step"), runLegend(groupsOf(DATA.runs, OPTIONS)), chartsAndNumbers(timing, groupsOf(DATA.runs, OPTIONS))];
}

function rollouts() {
  const source = DATA.live ? servedSamples : storedSamples(DATA.runs[chosen].samples);
  return [runChoice(show), ...rolloutsView(source, DATA.live, DATA.runs[chosen].status)];
}

function configuration() {
  const facts = DATA.runs.map((run) => Object.fromEntries(factsOf(run).map(([name, value]) => [`(${name})`, value])));
  const all = DATA.runs.map((run, index) => ({ ...facts[index], ...run.config }));
  const keys = [...new Set(all.flatMap((values) => Object.keys(values)))], area = scrollable("Configuration");
  let text = "", different = DATA.runs.length > 1;
  const draw = () => {
    const rows = keys.map((key) => [key, all.map((values) => values[key])])
      .map(([key, values]) => [key, values, values.some((value) => value !== values[0])])
      .filter(([key, , differs]) => key.toLowerCase().includes(text) && (!different || differs))
      .map(([key, values, differs]) => make("tr", { class: differs ? "differs" : null }, make("th", { scope: "row" }, key),
        values.map((value) => make("td", { class: "text" }, value === undefined ? "–" : String(value)))));
    area.replaceChildren(make("table", { class: "runs" }, make("thead", {}, make("tr", {}, ["key", ...DATA.runs.map((run) => run.name)].map((name) => (
      make("th", { scope: "col" }, name))))), make("tbody", {}, rows)));
  };
  draw();
  return [make("div", { class: "controls" }, field("key has", "search", "", (value) => { text = value.toLowerCase(); draw(); }),
    DATA.runs.length > 1 ? checkbox("only keys that differ", different, (value) => { different = value; draw(); }) : null), area];
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
  remember(true);
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
  const names = DATA.runs.map((run) => run.name), more = names.length - MOST_NAMED;
  document.getElementById("title").textContent = names.slice(0, MOST_NAMED).join(", ") + (more > 0 ? ` and ${more} more runs` : "");
  for (const [name] of TABS) {
    const button = document.getElementById(`tab-${name}`);
    button.setAttribute("aria-selected", String(name === tab));
    button.tabIndex = name === tab ? 0 : -1;
  }
  const panel = document.getElementById("panel");
  panel.setAttribute("aria-labelledby", `tab-${tab}`);
  panel.replaceChildren(...TABS.find(([name]) => name === tab)[2]().flat(Infinity).filter((part) => part !== null));
  forgetCharts();
}

makeTabs();
restore();
footer();
if (DATA.live) follow();
