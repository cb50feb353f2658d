// The chat: messages, the answer as it comes, stop and regenerate, sampling options that are remembered.
import { chat } from "./api.js";
import { watch } from "./panel.js";
import { render } from "./text.js";

const byId = (id) => document.getElementById(id);
const log = byId("log");
const input = byId("input");
const fields = [...document.querySelectorAll("[data-name]")];
const history = []; // {role, content}: what is sent; the reasoning of earlier turns is not
let running = null; // AbortController of the answer that comes in

function options() {
  const given = {};
  for (const field of fields) {
    const text = field.value.trim();
    if (!text) continue;
    if (field.dataset.name === "stop") given.stop = [field.value];
    else if (field.type === "number" && Number.isFinite(Number(text))) {
      given[field.dataset.name] = field.hasAttribute("data-whole") ? Math.trunc(Number(text)) : Number(text);
    }
  }
  return given;
}

function remember() {
  const kept = Object.fromEntries([...fields, byId("system")].map((field) => [field.dataset.name ?? "system", field.value]));
  localStorage.setItem("serried", JSON.stringify(kept));
}

function recall() {
  const kept = JSON.parse(localStorage.getItem("serried") ?? "{}");
  for (const field of [...fields, byId("system")]) field.value = kept[field.dataset.name ?? "system"] ?? "";
}

function add(kind) {
  byId("empty").hidden = true;
  const message = document.createElement("article");
  message.className = `message ${kind}`;
  const body = document.createElement("div");
  body.className = "body";
  const foot = document.createElement("div");
  foot.className = "foot";
  message.append(body, foot);
  log.append(message);
  return { message, body, foot };
}

function follow(change) {
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

function send(text) {
  // A question that got no answer is not asked again: many templates want the roles to take turns.
  if (history.at(-1)?.role === "user") history.pop();
  history.push({ role: "user", content: text });
  follow(() => (add("user").body.textContent = text));
  log.scrollTop = log.scrollHeight;
  answer();
}

async function answer() {
  const view = add("assistant busy");
  const told = { content: "", reasoning: "" };
  let first = null;
  const start = performance.now();
  const show = paint(view.body, told);
  const mine = (running = new AbortController());
  busy(true);
  const system = byId("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...history] : history;
  let note = "";
  try {
    const end = await chat({ messages, ...options() }, mine.signal, (delta) => {
      if (delta.content || delta.reasoning) first ??= performance.now();
      told.content += delta.content ?? "";
      told.reasoning += delta.reasoning ?? "";
      show();
    });
    const tokens = end.usage?.completion_tokens ?? 0;
    const seconds = (performance.now() - first) / 1000;
    note = `${tokens} tokens, first after ${((first ?? performance.now()) - start).toFixed(0)} ms`;
    if (tokens > 1 && seconds > 0) note += `, then ${((tokens - 1) / seconds).toFixed(1)} tokens/s`;
    if (end.reason === "length") note += ", cut off by its limit";
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : "";
    if (!note) {
      view.message.classList.add("error");
      told.content += `${told.content ? "\n\n" : ""}${error.message}`;
    }
  }
  if (!view.message.isConnected) return; // a new chat has been started meanwhile
  const failed = view.message.classList.contains("error") || !told.content;
  if (!failed) history.push({ role: "assistant", content: told.content });
  running = null;
  view.message.classList.remove("busy");
  show(true);
  follow(() => foot(view, note, failed));
  busy(false);
}

/** Shows what has come, at most once a frame. */
function paint(body, told) {
  let wanted = false;
  const draw = () => {
    wanted = false;
    follow(() => {
      const nodes = render(told.content);
      if (told.reasoning) {
        const open = body.querySelector("details")?.open ?? !told.content;
        const details = document.createElement("details");
        details.open = told.content && !body.dataset.answered ? false : open;
        const summary = document.createElement("summary");
        summary.textContent = "Reasoning";
        details.append(summary, told.reasoning);
        nodes.unshift(details);
      }
      if (told.content) body.dataset.answered = "yes";
      body.replaceChildren(...nodes);
    });
  };
  return (now) => {
    if (now) draw();
    else if (!wanted) {
      wanted = true;
      requestAnimationFrame(draw);
    }
  };
}

function foot(view, note, failed) {
  document.querySelectorAll(".again").forEach((each) => each.remove());
  const again = document.createElement("button");
  again.type = "button";
  again.className = "plain again";
  again.textContent = failed ? "Try again" : "Regenerate";
  again.addEventListener("click", () => {
    if (running) return;
    if (!failed) history.pop();
    view.message.remove();
    answer();
  });
  view.foot.replaceChildren(again, note);
}

function busy(yes) {
  byId("send").hidden = yes;
  byId("stop").hidden = !yes;
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = input.value.trim();
  if (!text || running) return;
  input.value = "";
  grow();
  send(text);
});
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
input.addEventListener("input", grow);
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  running = null;
  busy(false);
  history.length = 0;
  log.querySelectorAll(".message").forEach((each) => each.remove());
  byId("empty").hidden = false;
  input.focus();
});
byId("reset").addEventListener("click", () => {
  fields.forEach((field) => (field.value = ""));
  remember();
});
[...fields, byId("system")].forEach((field) => field.addEventListener("change", remember));
recall();
if (window.matchMedia("(max-width: 52rem)").matches) {
  document.querySelectorAll("aside > details").forEach((each) => (each.open = false));
}
watch();
