"use strict";
// Where samples come from: this file, or the server. Both answer the same queries, a page at a time.

async function ask(path, textOf404) {
  const answer = await fetch(path, { cache: "no-store" });
  if (answer.status === 404 && textOf404) throw new Error(textOf404);
  if (!answer.ok) throw new Error(`The server answered with status ${answer.status}.`);
  return answer.json();
}

const servedSamples = {
  select: (query) => ask(`samples?${new URLSearchParams(query)}`),
  detail: (number) => ask(`samples/${number}`, "This sample's file was written again. Change a filter to read the list anew."),
  tell: () => {},
};

function storedSamples(samples) {
  const at = columnsOf(samples.columns);
  const values = (name) => [...new Set(samples.rows.map((row) => row[at[name]]))].sort();
  const choices = { phase: values("phase"), outcome: values("outcome"), task: values("task") };
  return {
    select: async (query) => {
      const kept = fitting(samples, at, query), offset = query.offset || 0;
      return { columns: samples.columns, rows: kept.slice(offset, offset + query.limit), total: kept.length, choices,
        known: samples.known, listed: samples.rows.length, num_damaged: samples.num_damaged };
    },
    detail: async (number) => {
      if (number in samples.details) return samples.details[number];
      throw new Error("This file has the conversations of a selection of samples only. Write it with more (--samples), or use nemo_rl watch.");
    },
  };
}

function columnsOf(columns) {
  return Object.fromEntries(columns.map((name, index) => [name, index]));
}

function fitting(samples, at, query) {
  const text = (query.text || "").toLowerCase(), steps = new Set();
  const equal = ["phase", "outcome", "task", "step", "group", "idx"].filter((name) => name in query);
  const bounds = ["step", "reward", "length"].map((name) => [at[name], query[`${name}_from`], query[`${name}_to`]]);
  const kept = samples.rows.filter((row) => {
    if (query.stored && !(row[at.number] in samples.details)) return false;
    if (equal.some((name) => String(row[at[name]]) !== String(query[name]))) return false;
    for (const [column, least, most] of bounds) {
      if (least !== undefined && (row[column] === null || row[column] < Number(least))) return false;
      if (most !== undefined && (row[column] === null || row[column] > Number(most))) return false;
    }
    if (text && !String(row[at.preview]).toLowerCase().includes(text)) return false;
    if (query.first_of_step === "1" && steps.has(row[at.step])) return false;
    steps.add(row[at.step]);
    return true;
  });
  if (!query.sort) return kept;
  const column = at[query.sort], sign = query.descending === "1" ? -1 : 1;
  return kept.sort((a, b) => {
    if (a[column] === b[column]) return 0;
    if (a[column] === null) return 1;
    if (b[column] === null) return -1;
    return (a[column] < b[column] ? -1 : 1) * sign;
  });
}
