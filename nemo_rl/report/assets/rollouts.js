"use strict";
// A table of all samples with filters, and the conversation of a chosen one with coloured tokens.

const PAGE_ROWS = 25, MOST_SIDE = 32, MOST_TOKENS = 8000;
const COLORINGS = [
  ["none", "no colour"], ["logprob", "log-probability"], ["advantage", "advantage"],
  ["difference", "trainer minus engine log-probability"], ["version", "weight version"],
];

function columnsOf(samples) {
  return Object.fromEntries(samples.columns.map((name, index) => [name, index]));
}

function keptSamples(samples, filter) {
  const at = columnsOf(samples), text = filter.text.toLowerCase();
  const bound = (value) => (value === "" || Number.isNaN(Number(value)) ? null : Number(value));
  const bounds = ["step", "reward", "length"].map((name) => [at[name], bound(filter[`${name}From`]), bound(filter[`${name}To`])]);
  const kept = [];
  samples.rows.forEach((row, number) => {
    if (filter.phase && row[at.phase] !== filter.phase) return;
    if (filter.outcome && row[at.outcome] !== filter.outcome) return;
    if (filter.task && row[at.task] !== filter.task) return;
    if (filter.shown && !filter.live && !(number in samples.details)) return;
    for (const [column, least, most] of bounds) {
      const value = row[column];
      if (least !== null && (value === null || value < least)) return;
      if (most !== null && (value === null || value > most)) return;
    }
    if (text && !String(row[at.preview]).toLowerCase().includes(text)) return;
    kept.push(number);
  });
  if (filter.sort) {
    const column = at[filter.sort], sign = filter.descending ? -1 : 1;
    kept.sort((a, b) => {
      const one = samples.rows[a][column], other = samples.rows[b][column];
      if (one === other) return a - b;
      if (one === null) return 1;
      if (other === null) return -1;
      return (one < other ? -1 : 1) * sign;
    });
  }
  return kept;
}

function rolloutsView(run, detailOf, live) {
  const samples = run.samples, at = columnsOf(samples);
  const filter = { phase: "", outcome: "", task: "", text: "", stepFrom: "", stepTo: "", rewardFrom: "", rewardTo: "",
    lengthFrom: "", lengthTo: "", sort: "", descending: false, shown: !live, live };
  const state = { page: 0, coloring: "logprob" };
  const count = make("p", { class: "soft", "aria-live": "polite" });
  const table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Samples" });
  const detail = make("div", {});
  const values = (name) => [["", "all"], ...[...new Set(samples.rows.map((row) => row[at[name]]))].sort().map((v) => [v, v])];
  const change = (name) => (value) => { filter[name] = value; state.page = 0; draw(); };
  const range = (name, label) => [
    field(`${label} from`, "number", "", change(`${name}From`), { step: "any", style: "width:90px" }),
    field("to", "number", "", change(`${name}To`), { step: "any", style: "width:90px", "aria-label": `${label} to` }),
  ];
  const controls = make("div", { class: "controls" },
    choice("phase", values("phase"), "", change("phase")),
    choice("outcome", values("outcome"), "", change("outcome")),
    choice("environment", values("task"), "", change("task")),
    range("step", "step"), range("reward", "reward"), range("length", "tokens"),
    field("end of the answer has", "search", "", change("text")),
    live ? null : make("label", {}, make("input", { type: "checkbox", checked: true, onchange: (event) => {
      filter.shown = event.target.checked; state.page = 0; draw();
    } }), "only samples with their conversation in this file"));

  function sortBy(name) {
    filter.descending = filter.sort === name ? !filter.descending : false;
    filter.sort = name;
    draw();
  }

  function draw() {
    const kept = keptSamples(samples, filter), pages = Math.max(1, Math.ceil(kept.length / PAGE_ROWS));
    state.page = Math.min(state.page, pages - 1);
    const known = samples.rows.length;
    count.textContent = `${kept.length} of ${known} samples` +
      (samples.num_damaged ? `; ${samples.num_damaged} lines could not be read` : "");
    const numeric = new Set(["step", "group", "sample", "branch", "idx", "reward", "length", "turns"]);
    const head = samples.columns.map((name) => make("th", { scope: "col", class: numeric.has(name) ? "number" : null,
      "aria-sort": filter.sort === name ? (filter.descending ? "descending" : "ascending") : "none" },
      make("button", { onclick: () => sortBy(name) }, name === "preview" ? "end of the answer" : name)));
    const rows = kept.slice(state.page * PAGE_ROWS, (state.page + 1) * PAGE_ROWS).map((number) => make("tr",
      { class: "choice", "data-number": number, onclick: () => open([number]) },
      samples.columns.map((name) => {
        const value = samples.rows[number][at[name]];
        if (name === "step") {
          return make("td", { class: "number" }, make("button", { onclick: (event) => { event.stopPropagation(); open([number]); },
            title: "Open this sample" }, shown(value)));
        }
        return make("td", { class: numeric.has(name) ? "number" : name === "preview" ? "text" : null }, shown(value));
      })));
    table.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)));
    if (pages > 1) {
      const go = (by) => () => { state.page = Math.min(Math.max(state.page + by, 0), pages - 1); draw(); };
      table.append(make("div", { class: "controls" }, make("button", { onclick: go(-1) }, "Previous"),
        make("span", { class: "soft" }, `page ${state.page + 1} of ${pages}`), make("button", { onclick: go(1) }, "Next")));
    }
  }

  function same(number, names) {
    const wanted = names.map((name) => samples.rows[number][at[name]]);
    return samples.rows.map((_, other) => other).filter((other) => (
      names.every((name, index) => samples.rows[other][at[name]] === wanted[index])));
  }

  function overTime(number) {
    // The first sample of each step.
    const steps = new Map();
    for (const other of same(number, ["phase", "idx"])) {
      const step = samples.rows[other][at.step];
      if (!steps.has(step) && (live || other in samples.details)) steps.set(step, other);
    }
    return [...steps.values()];
  }

  async function open(numbers) {
    const first = numbers[0];
    const side = make("div", { class: "side" });
    detail.replaceChildren(
      make("h2", { tabindex: "-1" }, numbers.length > MOST_SIDE ? `The first ${MOST_SIDE} of ${numbers.length} samples` :
        numbers.length > 1 ? `${numbers.length} samples side by side` : "Sample"),
      make("div", { class: "controls" },
        make("button", { onclick: () => open(same(first, ["phase", "step", "group"])) }, "Its whole group"),
        make("button", { onclick: () => open(overTime(first)) }, "The same prompt over time"),
        choice("colour tokens by", COLORINGS, state.coloring, (value) => { state.coloring = value; open(numbers); })),
      side);
    for (const number of numbers.slice(0, MOST_SIDE)) {
      let content;
      try {
        content = sampleView(await detailOf(number), state.coloring);
      } catch (problem) {
        content = [make("p", { class: "soft" }, problem.message)];
      }
      const row = samples.rows[number], about = ["phase", "step", "group", "sample", "branch", "reward", "outcome", "length"].filter((name) => (
        row[at[name]] !== null));
      side.append(make("article", { class: "card" },
        make("p", { class: "soft" }, about.map((name) => `${name} ${shown(row[at[name]])}`).join(" · ")), content));
    }
    detail.querySelector("h2").focus();
  }

  draw();
  return [controls, count, table, detail];
}

function sampleView(detail, coloring) {
  const parts = [];
  for (const name of ["error", "answer", "effort", "ended_by"]) {
    if (detail[name]) parts.push(make("p", {}, make("strong", {}, `${name}: `), detail[name]));
  }
  const rewards = Object.entries(detail.reward_components || {});
  if (rewards.length) parts.push(make("p", {}, rewards.map(([name, value]) => `${name} ${shown(value)}`).join(" · ")));
  const penalties = Object.entries(detail.penalties || {}).filter(([, turns]) => turns.length);
  if (penalties.length) parts.push(make("p", {}, `penalties: ${penalties.map(([name]) => name).join(", ")}`));
  const turnRewards = detail.turn_rewards || [];
  const answers = detail.messages.filter((message) => message.role === "assistant").length;
  const areOfTurns = detail.branch === null && answers === turnRewards.length;
  if (!areOfTurns && turnRewards.length) parts.push(make("p", {}, `rewards of the sample's turns: ${turnRewards.map((value) => shown(value)).join(", ")}`));
  let turn = 0;
  for (const message of detail.messages) {
    const isAnswer = message.role === "assistant";
    const reward = isAnswer && areOfTurns ? turnRewards[turn++] : undefined;
    parts.push(make("div", { class: `message ${isAnswer ? "assistant" : ""}` },
      make("div", { class: "role" }, message.role, reward === undefined ? "" : `, reward ${shown(reward)}`),
      make("div", { class: "body", tabindex: "0" }, message.content, message.is_cut ? " … (cut off)" : "")));
  }
  if (detail.tokens && detail.tokens.ids) parts.push(...tokensView(detail.tokens, coloring));
  return parts;
}

function tokenNumbers(tokens, coloring) {
  const minus = (a, b) => a.map((value, index) => (value === null || b[index] === null ? null : value - b[index]));
  if (coloring === "logprob") return tokens.generation_logprobs || null;
  if (coloring === "advantage") return tokens.advantages || null;
  if (coloring === "difference") {
    return tokens.prev_logprobs && tokens.generation_logprobs ? minus(tokens.prev_logprobs, tokens.generation_logprobs) : null;
  }
  if (coloring === "version" && tokens.versions.length) {
    const numbers = new Array(tokens.ids.length).fill(null);
    tokens.versions.forEach(([start, version], index) => {
      const end = index + 1 < tokens.versions.length ? tokens.versions[index + 1][0] : numbers.length;
      numbers.fill(version, start, end);
    });
    return numbers;
  }
  return null;
}

function tokensView(tokens, coloring) {
  const numbers = tokenNumbers(tokens, coloring), written = (index) => tokens.mask[index] === 1;
  const known = (numbers || []).filter((value, index) => value !== null && written(index));
  let least = Infinity, largest = -Infinity;
  for (const value of known) {
    least = Math.min(least, value);
    largest = Math.max(largest, value);
  }
  const most = Math.max(1e-6, Math.abs(least), Math.abs(largest));
  const color = (value) => {
    if (coloring === "version") {
      const place = largest > least ? (value - least) / (largest - least) : 0;
      return `hsl(${210 + 120 * place} 70% 60% / .35)`;
    }
    if (coloring === "logprob") return `rgb(210 70 40 / ${Math.min(Math.abs(value) / 5, 1) * 0.6})`;
    return `${value >= 0 ? "rgb(30 140 70 / " : "rgb(210 70 40 / "}${(Math.abs(value) / most) * 0.6})`;
  };
  const text = make("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens" });
  tokens.ids.slice(0, MOST_TOKENS).forEach((id, index) => {
    const number = numbers && written(index) ? numbers[index] : null;
    const piece = tokens.texts ? tokens.texts[id] : `[${id}]`;
    const about = [`token ${id}`];
    for (const [name, label] of [["generation_logprobs", "engine"], ["prev_logprobs", "trainer"], ["advantages", "advantage"]]) {
      if (tokens[name] && written(index)) about.push(`${label} ${shown(tokens[name][index])}`);
    }
    text.append(make("span", { class: written(index) ? null : "unwritten", title: about.join(", "),
      style: number === null || number === undefined ? null : `background:${color(number)}` }, piece));
  });
  const note = coloring === "none" ? "" : known.length ?
    `From ${shown(least)} to ${shown(largest)}; tokens that are not trained are pale.` : "This run has not stored these numbers.";
  if (tokens.ids.length > MOST_TOKENS) text.append(` … (${tokens.ids.length - MOST_TOKENS} more)`);
  return [make("h3", {}, "Tokens"), make("p", { class: "soft" }, note), text];
}
