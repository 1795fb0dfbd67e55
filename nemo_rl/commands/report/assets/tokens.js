"use strict";
// One sample: its turns, and its tokens coloured by a number.

const MOST_TOKENS = 8000, CHARS_AT_ONCE = 10000, PICTURE_PIXELS = 160;
const COLORINGS = [
  ["none", "no colour"], ["logprob", "log-probability"], ["advantage", "advantage"], ["value", "value of the critic"],
  ["difference", "trainer minus engine log-probability"], ["version", "weight version"],
];

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
      messageBody(message), picturesOf(message.images || [], detail)));
  }
  const images = detail.images || [];
  if (!detail.messages.some((message) => message.images)) parts.push(picturesOf(images.keys(), detail));
  if (detail.tokens && detail.tokens.ids) parts.push(...tokensView(detail.tokens, coloring, images));
  return parts;
}

function picturesOf(numbers, detail) {
  const figures = [...numbers].map((number) => {
    const image = detail.images[number], [width, height] = image.size || [0, 0];
    const about = [`image ${number + 1}`, image.size ? `${width} x ${height} pixels` : null, tokensOf(image),
      image.source === "data" ? "from the row itself" : image.source];
    const address = (detail.addresses || DATA.images || {})[image.digest];
    // Small pictures are drawn larger by a whole factor, so that their pixels can be seen.
    const scale = PICTURE_PIXELS / Math.max(width, height, 1), factor = scale >= 1 ? Math.min(Math.floor(scale), 4) : scale;
    const side = (pixels) => (image.size ? Math.max(1, Math.round(pixels * factor)) : null);
    return make("figure", {},
      address ? make("img", { src: address, alt: `Image ${number + 1}`, width: side(width), height: side(height) }) : null,
      make("figcaption", { class: "soft" }, about.filter((text) => text).join(" · "), address ? "" : `. ${image.note || ""}`));
  });
  return figures.length ? make("div", { class: "pictures" }, figures) : null;
}

function tokensOf(image) {
  if (!image.tokens) return null;
  const [first, last] = [image.tokens[0], image.tokens[1] - 1];
  return first === last ? `token ${first}` : `tokens ${first} to ${last}`;
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

function tokensView(tokens, coloring, images) {
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
  const imageOf = {};
  images.forEach((image, number) => {
    const [start, stop] = image.tokens || [0, 0];
    for (let index = start; index < Math.min(stop, MOST_TOKENS); index += 1) imageOf[index] = number + 1;
  });
  const text = make("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens" });
  tokens.ids.slice(0, MOST_TOKENS).forEach((id, index) => {
    const number = numbers && written(index) ? numbers[index] : null;
    const piece = tokens.texts ? tokens.texts[id] : `[${id}]`;
    const image = imageOf[index];
    const about = image ? [`${index}`, `token ${id}`, `image ${image}`] : [`token ${id}`];
    for (const [name, label] of [["generation_logprobs", "engine"], ["prev_logprobs", "trainer"], ["advantages", "advantage"],
      ["values", "value"], ["returns", "return"]]) {
      if (tokens[name] && written(index)) about.push(`${label} ${shown(tokens[name][index])}`);
    }
    text.append(make("span", { class: image ? "image" : written(index) ? null : "unwritten", title: about.join(", "),
      style: number === null || number === undefined ? null : `background:${color(number)}` }, piece));
  });
  const note = coloring === "none" ? "" : known.length ?
    `From ${shown(least)} to ${shown(largest)}; tokens that are not trained are pale.` : "This run has not stored these numbers.";
  if (tokens.ids.length > MOST_TOKENS) text.append(` … (${tokens.ids.length - MOST_TOKENS} more)`);
  return [make("h3", {}, "Tokens"), make("p", { class: "soft" }, note), text];
}
