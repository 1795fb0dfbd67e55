"use strict";
// Helpers that make elements. Texts of a run only ever become text nodes.

function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

function shown(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "true" : "false";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(digits));
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${shown(seconds, 3)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function moment(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString() : "–";
}

function choice(label, options, value, change) {
  const select = make("select", { onchange: (event) => change(event.target.value) },
    options.map(([name, text]) => make("option", { value: name, selected: name === value }, text)));
  return make("label", {}, label, select);
}

function field(label, type, value, change, properties = {}) {
  return make("label", {}, label, make("input", { type, value, oninput: (event) => change(event.target.value), ...properties }));
}

const COLORS = ["#1f77b4", "#d1601c", "#2c8a43", "#b5302c", "#7a54b0", "#7d5346", "#b8519d", "#5f6a72", "#8a8a1a",
  "#148ba0"];

function colorOf(index) {
  return COLORS[index % COLORS.length];
}

function swatch(index) {
  return make("span", { class: "swatch", style: `background:${colorOf(index)}`, "aria-hidden": "true" });
}
