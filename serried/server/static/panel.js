// The live panel: what the engine does, from the differences between two looks at its figures.
import { stats } from "./api.js";

const SECONDS = 1;
const KEPT = 120;
const byId = (id) => document.getElementById(id);
const percent = (part) => `${Math.round(100 * part)} %`;
let before = null;
const speeds = [];

export function watch() {
  look();
  setInterval(() => document.visibilityState === "visible" && look(), SECONDS * 1000);
}

async function look() {
  let now;
  try {
    now = await stats();
  } catch (error) {
    state("unreachable", "down");
    return;
  }
  if (now === null) {
    state("loading the model", "");
    return;
  }
  state("ready", "up");
  byId("model").textContent = now.model + (now.tensor_parallel_size > 1 ? `, tp ${now.tensor_parallel_size}` : "");
  show(now, before);
  before = now;
}

function state(text, kind) {
  const badge = byId("state");
  badge.textContent = text;
  badge.className = `badge ${kind}`;
}

function show(now, then) {
  const figures = now.stats;
  byId("running").textContent = figures.running;
  byId("waiting").textContent = figures.waiting;
  const used = figures.blocks_total ? figures.blocks_used / figures.blocks_total : 0;
  byId("kv-text").textContent = `${figures.blocks_used} of ${figures.blocks_total} blocks`;
  byId("kv").firstElementChild.style.width = `${100 * used}%`;
  byId("prefix").textContent = figures.prefix_queries ? percent(figures.prefix_hits / figures.prefix_queries) : "–";
  if (then && now.time > then.time) {
    const tokens = Math.max(0, figures.generated_tokens - then.stats.generated_tokens);
    speed(tokens / (now.time - then.time));
  }
  byId("brief").textContent = `${byId("speed").textContent} tokens/s, ${figures.running} running, ${figures.waiting} waiting`;
  ranks(figures.ranks, then ? then.stats.ranks : []);
}

function speed(value) {
  byId("speed").textContent = value < 10 ? value.toFixed(1) : Math.round(value);
  speeds.push(value);
  if (speeds.length > KEPT) speeds.shift();
  const top = Math.max(1, ...speeds);
  const points = speeds.map((each, number) => `${KEPT - speeds.length + number},${31 - (29 * each) / top}`);
  byId("spark").firstElementChild.setAttribute("points", points.join(" "));
}

/** A bar a rank: the shares of the time since the last look, or since the start where nothing has changed. */
function ranks(now, then) {
  const box = byId("ranks");
  if (!now.length) return;
  if (box.children.length !== now.length || !box.querySelector(".bar")) {
    box.replaceChildren(...now.map(emptyBar));
  }
  now.forEach((rank, number) => {
    const old = then[number] ?? { compute: 0, collective: 0, idle: 0 };
    let parts = ["compute", "collective", "idle"].map((name) => Math.max(0, rank[name] - old[name]));
    let sum = parts.reduce((a, b) => a + b, 0);
    if (sum < 1e-6) return;
    parts = parts.map((part) => part / sum);
    const row = box.children[number];
    const text = `compute ${percent(parts[0])}, collectives ${percent(parts[1])}, idle ${percent(parts[2])}`;
    row.querySelector(".shares").textContent = `${percent(parts[0])} · ${percent(parts[1])} · ${percent(parts[2])}`;
    const bar = row.querySelector(".bar");
    bar.setAttribute("aria-label", `rank ${rank.rank}: ${text}`);
    bar.title = text;
    [...bar.children].forEach((piece, at) => (piece.style.width = `${100 * parts[at]}%`));
  });
}

function emptyBar(rank) {
  const box = document.createElement("div");
  const row = document.createElement("div");
  row.className = "row";
  const name = document.createElement("span");
  name.textContent = `rank ${rank.rank}`;
  const shares = document.createElement("span");
  shares.className = "shares quiet";
  row.append(name, shares);
  const bar = document.createElement("div");
  bar.className = "bar";
  bar.setAttribute("role", "img");
  for (const kind of ["compute", "collective", "idle"]) {
    const piece = document.createElement("i");
    piece.className = kind;
    bar.append(piece);
  }
  box.append(row, bar);
  return box;
}
