"use strict";
// What the page's address says after its #: the open tab, the run, the filter, and charts that are large or zoomed.

const ENLARGED = new Set(), ZOOMS = new Map(); // names of metrics; name -> [least, most] of the axis

function address() {
  const parts = [["run", chosen && DATA.runs[chosen].name], ["has", OPTIONS.text], ...[...ENLARGED].map((name) => ["metric", name]),
    ...[...ZOOMS].map(([name, bounds]) => ["zoom", [name, ...bounds.map((bound) => +bound.toPrecision(6))].join(":")])];
  const text = (value) => encodeURIComponent(value).replaceAll("%2F", "/").replaceAll("%3A", ":");
  return `#${[tab, ...parts.filter(([, value]) => value).map(([name, value]) => `${name}=${text(value)}`)].join("&")}`;
}

function remember(isStep) {
  // Write the address; the browser's back button returns to the one before a step.
  if (address() === (location.hash || "#overview")) return;
  if (isStep) location.hash = address();
  else location.replace(address());
}

function restore() {
  const [name, ...parts] = location.hash.slice(1).split("&"), given = new URLSearchParams(parts.join("&"));
  tab = TABS.some(([known]) => known === name) ? name : "overview";
  chosen = Math.max(0, DATA.runs.findIndex((run) => run.name === given.get("run")));
  OPTIONS.text = given.get("has") || "";
  ENLARGED.clear();
  ZOOMS.clear();
  for (const metric of given.getAll("metric")) {
    ENLARGED.add(metric);
    if (!MAIN_CURVES.includes(metric)) OPENED.add(prefixOf(metric));
  }
  for (const zoom of given.getAll("zoom")) {
    const words = zoom.split(":"), bounds = words.splice(-2).map(Number);
    if (bounds.length === 2 && bounds[0] < bounds[1]) ZOOMS.set(words.join(":"), bounds);
  }
  show();
  const large = document.querySelector(".card.wide");
  if (large) large.scrollIntoView();
}

window.addEventListener("hashchange", () => { if (location.hash !== address()) restore(); });
