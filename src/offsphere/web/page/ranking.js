// One ranking: a list of documents that move when the ranking changes.

import { get } from "./api.js";

export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children); // strings become text, never markup
  return element;
}

const whole = new Map(); // id to the text of a document that was opened
const still = matchMedia("(prefers-reduced-motion: reduce)");

export function show(list, hits, { list: name, longest, first }) {
  const focused = list.contains(document.activeElement) ? document.activeElement : null;
  const before = new Map([...list.children].map((item) => [item.dataset.id, [item, item.offsetTop]]));
  const items = hits.map((hit) => {
    const item = before.get(hit.id)?.[0] ?? create(hit);
    fill(item, hit, name, longest);
    return item;
  });
  list.replaceChildren(...items);
  clip(list);
  items.forEach((item, place) => item.setAttribute("tabindex", place ? "-1" : "0"));
  if (focused?.isConnected) focused.focus({ preventScroll: true });
  if (first || still.matches) return;
  for (const item of items) {
    const was = before.get(item.dataset.id)?.[1];
    const by = was === undefined ? 0 : was - item.offsetTop;
    if (was === undefined) item.animate([{ opacity: 0 }, { opacity: 1 }], 200);
    else if (by) item.animate([{ transform: `translateY(${by}px)` }, { transform: "none" }], { duration: 200, easing: "ease-out" });
  }
}

// Offers the whole text wherever some of it is hidden; a list that is not shown has no heights to compare.
export function clip(list) {
  for (const item of list.children) {
    const [text, more] = [item.querySelector(".text"), item.querySelector(".more")];
    const open = more.getAttribute("aria-expanded") === "true";
    more.hidden = !open && !item.dataset.cut && text.scrollHeight <= text.clientHeight + 1;
  }
}

function create(hit) {
  const item = make("li", { class: "hit" });
  item.dataset.id = hit.id;
  const more = make("button", { class: "more", type: "button", "aria-expanded": "false" }, "whole text");
  more.addEventListener("click", () => toggle(item, hit, more));
  item.append(
    make("div", { class: "place" }, make("span", { class: "rank" }), make("span", { class: "moved" })),
    make(
      "div", { class: "body" },
      make("h3"), make("p", { class: "text" }), more,
      make("dl", { class: "bars" }, ...bar("angle"), ...bar("length")),
      make("p", { class: "why" }),
    ),
  );
  return item;
}

function bar(name) {
  return [make("dt", {}, name), make("dd", { class: `bar ${name}` }, make("span", { class: "track" }, make("span", { class: "fill" })), make("span", { class: "value" }))];
}

function fill(item, hit, name, longest) {
  const part = (selector) => item.querySelector(selector);
  item.dataset.cut = hit.characters > hit.excerpt.length ? "yes" : "";
  part(".rank").textContent = hit.rank;
  part("h3").textContent = hit.title || hit.id;
  part("h3").title = `id ${hit.id}`;
  if (part(".more").getAttribute("aria-expanded") === "false") {
    part(".text").textContent = hit.excerpt + (hit.characters > hit.excerpt.length ? " …" : "");
    part(".text").classList.toggle("nothing", !hit.excerpt);
    if (!hit.excerpt) part(".text").textContent = "no text";
  }
  part(".more").setAttribute("aria-label", `Whole text of ${hit.title || hit.id}`);
  part(".angle .fill").style.width = `${100 * Math.min(hit.angle / 90, 1)}%`;
  part(".angle .value").textContent = `${hit.angle.toFixed(1)}°`;
  part(".length .fill").style.width = `${100 * Math.min(longest ? hit.length / longest : 0, 1)}%`;
  part(".length .value").textContent = hit.length.toPrecision(3);
  const up = name === "trained" ? hit.other_rank - hit.rank : hit.rank - hit.other_rank;
  const moved = part(".moved");
  moved.className = `moved ${up > 0 ? "up" : up < 0 ? "down" : "same"}`;
  moved.textContent = up ? `${up > 0 ? "▲" : "▼"} ${Math.abs(up)}` : "=";
  moved.setAttribute("aria-hidden", "true");
  part(".why").textContent = hit.why;
}

async function toggle(item, hit, more) {
  const open = more.getAttribute("aria-expanded") === "true";
  const text = item.querySelector(".text");
  if (open) {
    text.textContent = hit.excerpt + (item.dataset.cut && " …");
  } else {
    more.disabled = true;
    try {
      if (!whole.has(hit.id)) whole.set(hit.id, (await get("documents", { id: hit.id })).text);
      text.textContent = whole.get(hit.id);
    } catch (error) {
      text.textContent = error.message;
    }
    more.disabled = false;
  }
  more.setAttribute("aria-expanded", String(!open));
  more.textContent = open ? "whole text" : "less";
  item.classList.toggle("open", !open);
}
