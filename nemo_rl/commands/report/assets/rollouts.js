"use strict";
// A table of all samples with filters, and the chosen ones next to it.

const PAGE_ROWS = 25, MOST_SIDE = 32, WAIT_FOR_TEXT_MS = 250;
const ARE_NUMBERS = new Set(["step", "group", "sample", "branch", "idx", "reward", "length", "turns"]);
const ARE_MINOR = new Set(["phase", "group", "sample", "branch", "idx", "task", "turns"]); // hidden while a sample is open next to the table

function rolloutsView(source, isLive, status) {
  const filter = { stored: isLive ? "" : "1", sort: "", descending: "0" };
  const state = { page: 0, coloring: "logprob", asked: 0, opened: 0, waiting: 0, known: 0, choices: "" };
  const count = make("p", { class: "soft", "aria-live": "polite" }, "Reading the samples …");
  const table = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Samples" });
  const detail = make("div", { class: "opened" }), choices = make("span", { class: "controls" }), news = make("p", { role: "status" });
  const change = (name) => (value) => { filter[name] = value; state.page = 0; draw(); };
  const changeText = (value) => {
    filter.text = value;
    state.page = 0;
    clearTimeout(state.waiting); // a search reads all samples, so it waits for the next letter
    state.waiting = setTimeout(draw, WAIT_FOR_TEXT_MS);
  };
  const number = (name) => (value) => change(name)(value === "" || Number.isNaN(Number(value)) ? "" : value);
  const range = (name, label) => [
    field(`${label} from`, "number", "", number(`${name}_from`), { step: "any", class: "short" }),
    field("to", "number", "", number(`${name}_to`), { step: "any", class: "short", "aria-label": `${label} to` }),
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
    count.textContent = found.known === 0 ? whyNoSamples(status) :
      `${found.total} of ${found.listed || found.known} samples${listed}` +
      (found.num_damaged ? `; ${found.num_damaged} lines could not be read` : "");
    drawTable(found, pages);
  }

  function drawTable(found, pages) {
    const at = columnsOf(found.columns), names = found.columns.slice(1);
    const head = names.map((name) => make("th", { scope: "col", class: classOf(name),
      "aria-sort": filter.sort === name ? (filter.descending === "1" ? "descending" : "ascending") : "none" },
      make("button", { onclick: () => sortBy(name) }, name === "preview" ? "end of the answer" : name)));
    const cell = (row, name) => {
      const value = shown(row[at[name]]);
      if (name !== "step") return make("td", { class: classOf(name) }, value);
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

  function close() {
    state.opened += 1;
    parts.className = "split";
    detail.replaceChildren();
    table.focus();
  }

  async function open(rows, total, at, details = new Map()) {
    if (!rows.length) return;
    parts.className = `split ${rows.length > 1 ? "several" : "one"}`;
    for (const row of table.querySelectorAll("tr.choice")) {
      row.setAttribute("aria-selected", String(rows.some((one) => String(one[at.number]) === row.dataset.number)));
    }
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
        choice("colour tokens by", COLORINGS, state.coloring, (name) => { state.coloring = name; open(rows, total, at, details); }),
        make("button", { onclick: close }, "Close")),
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
  const parts = make("div", { class: "split" }, make("div", { class: "listed" }, table), detail);
  return [controls, news, count, parts];
}

function classOf(name) {
  return [ARE_NUMBERS.has(name) ? "number" : name === "preview" ? "text" : "", ARE_MINOR.has(name) ? "minor" : ""].join(" ").trim() || null;
}

function whyNoSamples(status) {
  if (status.step) return "This run has stored no samples (logger.save_trajectories).";
  return status.status === "running" ? "The first step has not ended yet." : "The run ended before its first step, so there are no samples.";
}
