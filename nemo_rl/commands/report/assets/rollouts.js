"use strict";
// A table of all samples with filters, and the conversation of a chosen one with coloured tokens.

const PAGE_ROWS = 25, MOST_SIDE = 32, MOST_TOKENS = 8000, CHARS_AT_ONCE = 10000, WAIT_FOR_TEXT_MS = 250;
const COLORINGS = [
  ["none", "no colour"], ["logprob", "log-probability"], ["advantage", "advantage"], ["value", "value of the critic"],
  ["difference", "trainer minus engine log-probability"], ["version", "weight version"],
];

const ARE_NUMBERS = new Set(["step", "group", "sample", "branch", "idx", "reward", "length", "turns"]);

function rolloutsView(source, isLive) {
  const filter = { stored: isLive ? "" : "1", sort: "", descending: "0" };
  const state = { page: 0, coloring: "logprob", asked: 0, opened: 0, waiting: 0, known: 0, choices: "" };
  const count = make("p", { class: "soft", "aria-live": "polite" }, "Reading the samples …");
  const table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Samples" });
  const detail = make("div", {}), choices = make("span", { class: "controls" }), news = make("p", { role: "status" });
  const change = (name) => (value) => { filter[name] = value; state.page = 0; draw(); };
  const changeText = (value) => {
    filter.text = value;
    state.page = 0;
    clearTimeout(state.waiting); // a search reads all samples, so it waits for the next letter
    state.waiting = setTimeout(draw, WAIT_FOR_TEXT_MS);
  };
  const number = (name) => (value) => change(name)(value === "" || Number.isNaN(Number(value)) ? "" : value);
  const range = (name, label) => [
    field(`${label} from`, "number", "", number(`${name}_from`), { step: "any", style: "width:90px" }),
    field("to", "number", "", number(`${name}_to`), { step: "any", style: "width:90px", "aria-label": `${label} to` }),
  ];
  const controls = make("div", { class: "controls" }, choices,
    range("step", "step"), range("reward", "reward"), range("length", "tokens"),
    field("end of the answer has", "search", "", changeText),
    isLive ? null : make("label", {}, make("input", { type: "checkbox", checked: true, onchange: (event) => {
      change("stored")(event.target.checked ? "1" : "");
    } }), "only samples with their conversation in this file"));

  function drawChoices(known) {
    if (state.choices === JSON.stringify(known)) return;
    state.choices = JSON.stringify(known);
    const one = (name, label) => choice(label, [["", "all"], ...known[name].map((value) => [value, value])], filter[name] || "", change(name));
    choices.replaceChildren(one("phase", "phase"), one("outcome", "outcome"), one("task", "environment"));
  }

  function sortBy(name) {
    filter.descending = filter.sort === name && filter.descending === "0" ? "1" : "0";
    filter.sort = name;
    draw();
  }

  function query(wanted) {
    return Object.fromEntries(Object.entries(wanted).filter(([, value]) => value !== "" && value !== null));
  }

  async function draw() {
    const asked = state.asked += 1;
    let found;
    try {
      found = await source.select(query({ ...filter, offset: state.page * PAGE_ROWS, limit: PAGE_ROWS }));
    } catch (problem) {
      if (asked === state.asked) count.textContent = problem.message;
      return;
    }
    if (asked !== state.asked) return; // a later question was faster
    state.known = found.known;
    news.replaceChildren();
    const pages = Math.max(1, Math.ceil(found.total / PAGE_ROWS));
    if (state.page >= pages) {
      state.page = pages - 1;
      draw();
      return;
    }
    drawChoices(found.choices);
    const listed = found.listed === undefined || found.listed === found.known ? "" : `; this file lists ${found.listed} of the run's ${found.known}`;
    count.textContent = found.known === 0 ? "This run has stored no samples (logger.save_trajectories)." :
      `${found.total} of ${found.listed || found.known} samples${listed}` +
      (found.num_damaged ? `; ${found.num_damaged} lines could not be read` : "");
    drawTable(found, pages);
  }

  function drawTable(found, pages) {
    const at = columnsOf(found.columns), names = found.columns.slice(1);
    const head = names.map((name) => make("th", { scope: "col", class: ARE_NUMBERS.has(name) ? "number" : null,
      "aria-sort": filter.sort === name ? (filter.descending === "1" ? "descending" : "ascending") : "none" },
      make("button", { onclick: () => sortBy(name) }, name === "preview" ? "end of the answer" : name)));
    const cell = (row, name) => {
      const value = shown(row[at[name]]);
      if (name !== "step") return make("td", { class: ARE_NUMBERS.has(name) ? "number" : name === "preview" ? "text" : null }, value);
      const press = (event) => { event.stopPropagation(); open([row], 1, at); };
      return make("td", { class: "number" }, make("button", { onclick: press, title: "Open this sample" }, value));
    };
    const rows = found.rows.map((row) => make("tr", { class: "choice", "data-number": row[at.number], onclick: () => open([row], 1, at) },
      names.map((name) => cell(row, name))));
    table.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)));
    if (pages === 1) return;
    const go = (by) => () => { state.page = Math.min(Math.max(state.page + by, 0), pages - 1); draw(); };
    table.append(make("div", { class: "controls" }, make("button", { onclick: go(-1) }, "Previous"),
      make("span", { class: "soft" }, `page ${state.page + 1} of ${pages}`), make("button", { onclick: go(1) }, "Next")));
  }

  function tell(known) {
    // Another number of samples than in the list: offer to read it again, and leave it until then.
    if (known === state.known) return news.replaceChildren();
    const more = known - state.known;
    const text = more > 0 ? `${more} new sample${more > 1 ? "s" : ""}` : "The samples have changed";
    const read = () => { draw(); table.focus(); };
    news.replaceChildren(make("button", { onclick: read, title: "Read the list again" }, text));
  }

  async function openAll(wanted, at) {
    const opened = state.opened += 1;
    try {
      const found = await source.select(query({ stored: filter.stored, ...wanted, limit: MOST_SIDE }));
      if (opened === state.opened) await open(found.rows, found.total, at);
    } catch (problem) {
      if (opened === state.opened) detail.replaceChildren(make("p", { class: "soft" }, problem.message));
    }
  }

  async function open(rows, total, at, details = new Map()) {
    if (!rows.length) return;
    const opened = state.opened += 1;
    const first = rows[0], side = make("div", { class: "side" });
    const value = (name) => first[at[name]];
    const group = { phase: value("phase"), step: value("step"), group: value("group") };
    const prompt = { phase: value("phase"), idx: value("idx"), first_of_step: "1" };
    detail.replaceChildren(
      make("h2", { tabindex: "-1" }, total > rows.length ? `The first ${rows.length} of ${total} samples` :
        rows.length > 1 ? `${rows.length} samples side by side` : "Sample"),
      make("div", { class: "controls" },
        group.group === null ? null : make("button", { onclick: () => openAll(group, at) }, "Its whole group"),
        prompt.idx === null ? null : make("button", { onclick: () => openAll(prompt, at) }, "The same prompt over time"),
        choice("colour tokens by", COLORINGS, state.coloring, (name) => { state.coloring = name; open(rows, total, at, details); })),
      side);
    for (const row of rows) {
      const number = row[at.number];
      let content;
      try {
        if (!details.has(number)) details.set(number, await source.detail(number));
        content = sampleView(details.get(number), state.coloring);
      } catch (problem) {
        content = [make("p", { class: "soft" }, problem.message)];
      }
      if (opened !== state.opened) return; // another one was opened meanwhile
      const about = ["phase", "step", "group", "sample", "branch", "reward", "outcome", "length"].filter((name) => row[at[name]] !== null);
      side.append(make("article", { class: "card" },
        make("p", { class: "soft" }, about.map((name) => `${name} ${shown(row[at[name]])}`).join(" · ")), content));
    }
    detail.querySelector("h2").focus();
  }

  source.tell = tell;
  draw();
  return [controls, news, count, table, detail];
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
      messageBody(message)));
  }
  if (detail.tokens && detail.tokens.ids) parts.push(...tokensView(detail.tokens, coloring));
  return parts;
}

function messageBody(message) {
  // A long text takes seconds to lay out, so its rest waits for a press.
  const end = message.is_cut ? " … (cut off)" : "", last = message.content.charCodeAt(CHARS_AT_ONCE - 1);
  const shownChars = CHARS_AT_ONCE - (last >= 0xd800 && last < 0xdc00 ? 1 : 0); // no half of a character
  const rest = message.content.length - shownChars;
  const body = make("div", { class: "body", tabindex: "0" }, message.content.slice(0, shownChars), rest > 0 ? " … " : end);
  if (rest > 0) body.append(make("button", { onclick: () => body.replaceChildren(message.content, end) }, `Show ${rest} more characters`));
  return body;
}

function tokenNumbers(tokens, coloring) {
  const minus = (a, b) => a.map((value, index) => (value === null || b[index] === null ? null : value - b[index]));
  if (coloring === "logprob") return tokens.generation_logprobs || null;
  if (coloring === "advantage") return tokens.advantages || null;
  if (coloring === "value") return tokens.values || null;
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
    for (const [name, label] of [["generation_logprobs", "engine"], ["prev_logprobs", "trainer"], ["advantages", "advantage"],
      ["values", "value"], ["returns", "return"]]) {
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
