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
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(digits));
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
  return make("label", {}, label, make("input", { type, ...properties, value, oninput: (event) => change(event.target.value) }));
}

// All have the same luminance, with enough contrast on the light and on the dark page.
const COLORS = ["#1f7dda", "#cc5917", "#238d47", "#d84955", "#9764cb", "#ca4aa0", "#108993", "#94790c", "#598922",
  "#747c88", "#b05cb0", "#a27057"];

function colorOf(index) {
  return COLORS[index % COLORS.length];
}

function isDashed(index) {
  // When all colours are in use, the next runs have them again, with dashed lines.
  return index % (2 * COLORS.length) >= COLORS.length;
}

function swatch(index) {
  return make("span", { class: `swatch ${isDashed(index) ? "dashed" : ""}`, style: `--color:${colorOf(index)}`, "aria-hidden": "true" });
}

function scrollable(label, ...children) {
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, children);
}

function checkbox(label, checked, change) {
  return make("label", {}, make("input", { type: "checkbox", checked, onchange: (event) => change(event.target.checked) }), label);
}
