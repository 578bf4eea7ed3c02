// The explorer: one query, two rankings, a slider between them.

import { get, keepToken } from "./api.js";
import { draw, mark } from "./histogram.js";
import { clip, make, show } from "./ranking.js";

const at = (id) => document.getElementById(id);
const LISTS = ["trained", "cosine"];
const number = new Intl.NumberFormat("en");

let index = null; // what /index says
let asked = { query: "", gamma: 0, k: 10 }; // what the page shows, or is about to
let waiting = null; // the newest request that has not been sent yet
let busy = false;
let spoken = 0;

// Start, and the token

async function start() {
  trouble(null);
  try {
    index = await get("index");
  } catch (error) {
    at("token-form").hidden = error.status !== 401;
    if (error.status === 401) {
      at("about").textContent = "This server wants a token.";
      if (sessionStorage.length) trouble(new Error("The server refused this token."), null);
      at("token").focus();
    } else {
      at("about").textContent = "";
      trouble(error, start);
    }
    return;
  }
  at("token-form").hidden = true;
  at("main").hidden = false;
  describe();
  if (index.documents) draw(at("histogram"), index.lengths);
  fromAddress();
}

function describe() {
  const count = index.documents === 1 ? "1 document" : `${number.format(index.documents)} documents`;
  at("about").textContent = `${count} · ${index.dimension} dimensions · ${index.model} · made for ${index.similarity}`;
  at("reset").textContent = `trained: ${index.gamma_d.toFixed(2)}`;
  for (const element of at("search").elements) element.disabled = !index.documents;
  at("gamma").disabled = !index.documents;
  at("lengths").hidden = !index.documents;
  if (!index.documents) at("summary").textContent = "This index holds no documents yet. Add some with offsphere index, and start the server again.";
}

// The address carries query and exponent, so that a view can be shared

function fromAddress() {
  const values = new URLSearchParams(location.search);
  const gamma = Number.parseFloat(values.get("gamma"));
  const { min, max } = at("gamma");
  asked = {
    query: values.get("q") ?? "",
    gamma: Math.min(Math.max(Number.isFinite(gamma) ? gamma : index.gamma_d, min), max),
    k: [20, 50].includes(Number(values.get("k"))) ? Number(values.get("k")) : 10,
  };
  at("query").value = asked.query;
  at("k").value = asked.k;
  at("gamma").value = asked.gamma;
  showGamma();
  if (index.documents && asked.query.trim()) request();
  else at("answer").hidden = true;
}

function toAddress(how) {
  const values = new URLSearchParams();
  if (asked.query) values.set("q", asked.query);
  values.set("gamma", asked.gamma.toFixed(2));
  if (asked.k !== 10) values.set("k", asked.k);
  history[how](null, "", `?${values}`);
  document.title = asked.query ? `${asked.query} · offsphere explorer` : "offsphere explorer";
}

// Asking: one request at a time, and then the newest; while the slider moves, those between are dropped

async function request() {
  waiting = { ...asked };
  if (busy) return;
  busy = true;
  document.body.setAttribute("aria-busy", "true");
  while (waiting) {
    const now = waiting;
    waiting = null;
    try {
      const answer = await get("explore", { query: now.query, gamma_d: now.gamma, k: now.k });
      trouble(null);
      answered(now, answer);
    } catch (error) {
      if (!waiting) trouble(error, request);
    }
  }
  busy = false;
  document.body.removeAttribute("aria-busy");
}

function answered(now, answer) {
  const first = at("answer").hidden || now.query !== at("answer").dataset.query;
  at("answer").hidden = false;
  at("answer").dataset.query = now.query;
  at("answer").dataset.gamma = now.gamma;
  const longest = index.lengths.edges.at(-1);
  for (const list of LISTS) show(at(list), answer[list], { list, longest, first });
  mark(at("histogram"), index.lengths, answer);
  at("legend").hidden = false;
  say(now, answer);
}

function say(now, answer) {
  const shown = new Set(answer.cosine.map((hit) => hit.id));
  const same = answer.trained.filter((hit) => shown.has(hit.id)).length;
  const total = answer.trained.length;
  const both = same === total ? "All" : same || "None";
  let text = `${both} of the ${total} best documents ${same === 1 ? "is" : "are"} the same in both rankings.`;
  if (total === 0) text = "No documents with text.";
  if (answer.query_length === 0) text = "This query has no vector: the model knows none of its words, so every document scores 0.";
  at("summary").textContent = text;
  clearTimeout(spoken); // a screen reader hears where the slider stopped, not every step
  const best = answer.trained[0];
  spoken = setTimeout(() => {
    at("live").textContent = `γ d ${now.gamma.toFixed(2)}. ${text}${best ? ` First: ${best.title || best.excerpt || best.id}.` : ""}`;
  }, 400);
}

function trouble(error, again) {
  at("trouble").hidden = !error;
  if (!error) return;
  at("trouble-text").textContent = error.message;
  at("retry").hidden = !again;
  at("retry").onclick = again;
}

function showGamma() {
  const gamma = asked.gamma.toFixed(2);
  at("gamma-out").textContent = gamma;
  at("gamma").setAttribute("aria-valuetext", `${gamma}${gamma === index.gamma_d.toFixed(2) ? ", as trained" : ""}`);
  at("reset").disabled = gamma === index.gamma_d.toFixed(2);
  const trained = index.gamma_d.toFixed(2);
  at("head-trained").replaceChildren(
    "By ", make("i", {}, "γ"), make("sub", {}, "d"), ` = ${gamma} `,
    make("small", {}, gamma === trained ? `as trained, ${index.similarity}` : `trained with ${trained}`),
  );
}

function choose(list) {
  document.body.dataset.list = list;
  for (const name of LISTS) at(`tab-${name}`).setAttribute("aria-pressed", String(name === list));
  clip(at(list));
}

// Mouse, touch and keyboard

at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken(at("token").value.trim());
  start();
});

at("search").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!at("query").value.trim()) return;
  asked = { ...asked, query: at("query").value };
  toAddress("pushState");
  request();
});

at("k").addEventListener("change", () => {
  asked = { ...asked, k: Number(at("k").value) };
  toAddress("replaceState");
  if (asked.query) request();
});

function moveTo(gamma) {
  asked = { ...asked, gamma };
  showGamma();
  toAddress("replaceState");
  if (asked.query.trim()) request();
}

at("gamma").addEventListener("input", () => moveTo(Number(at("gamma").value)));
at("reset").addEventListener("click", () => {
  at("gamma").value = index.gamma_d;
  moveTo(index.gamma_d);
  at("gamma").focus();
});

for (const list of LISTS) at(`tab-${list}`).addEventListener("click", () => choose(list));
window.addEventListener("resize", () => LISTS.forEach((list) => clip(at(list))));
window.addEventListener("popstate", () => index && fromAddress());

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const writing = event.target.closest?.("input, select, textarea");
  if (event.key === "/" && !writing) {
    event.preventDefault();
    at("query").focus();
    at("query").select();
    return;
  }
  const hit = event.target.closest?.(".hit");
  const down = event.key === "ArrowDown";
  if (!hit) {
    if (down && event.target === at("query")) {
      const first = at(document.body.dataset.list).querySelector(".hit");
      if (first) event.preventDefault();
      first?.focus();
    }
    return;
  }
  const list = hit.parentElement;
  const place = [...list.children].indexOf(hit);
  let next = null;
  if (down) next = hit.nextElementSibling;
  else if (event.key === "ArrowUp") next = hit.previousElementSibling ?? at("query");
  else if (event.key === "Home") next = list.firstElementChild;
  else if (event.key === "End") next = list.lastElementChild;
  else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
    const name = event.key === "ArrowLeft" ? "trained" : "cosine";
    if (list.id === name) return;
    choose(name);
    // The same document if it is there, or else the same place.
    next = [...at(name).children].find((other) => other.dataset.id === hit.dataset.id) ?? at(name).children[place];
  } else if (event.key === "Enter" && event.target === hit) next = hit.querySelector(".more:not([hidden])");
  else return;
  event.preventDefault();
  if (event.key === "Enter") next?.click();
  else next?.focus();
});

// The same document lights up in both rankings and in the histogram

function light(event) {
  const id = event.target.closest?.(".hit")?.dataset.id;
  for (const element of document.querySelectorAll("[data-id]")) {
    element.classList.toggle("lit", id !== undefined && element.dataset.id === id);
  }
}
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, light);

start();
