// The lengths of all documents, with those of the two rankings marked.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 640;
const HEIGHT = 140;
const BASE = 84; // the foot of the bars; below it the marks of the rankings and the axis
const ROWS = { trained: 92, cosine: 104 };

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const place = (length, edges) => {
  const [low, high] = [edges[0], edges.at(-1)];
  return high > low ? WIDTH * Math.min(Math.max((length - low) / (high - low), 0), 1) : WIDTH / 2;
};

export function draw(box, { counts, edges }) {
  const svg = make("svg", { viewBox: `-30 0 ${WIDTH + 60} ${HEIGHT}`, role: "img", "aria-labelledby": "histogram-title histogram-text" });
  const [low, high] = [edges[0], edges.at(-1)].map((edge) => edge.toPrecision(3));
  svg.append(make("title", { id: "histogram-title" }, "Lengths of all documents"));
  svg.append(make("desc", { id: "histogram-text" }, `From ${low} to ${high}.`));
  const most = Math.max(...counts);
  const width = WIDTH / counts.length;
  counts.forEach((count, bin) => {
    const height = most ? (count / most) * (BASE - 6) : 0;
    svg.append(make("rect", { class: "bin", x: bin * width, y: BASE - height, width: width - 1, height }));
  });
  svg.append(make("line", { class: "axis", x1: 0, x2: WIDTH, y1: BASE, y2: BASE }));
  svg.append(make("g", { id: "marks" }));
  for (const share of [0, 0.5, 1]) {
    const value = edges[0] + share * (edges.at(-1) - edges[0]);
    svg.append(make("text", { x: share * WIDTH, y: HEIGHT - 6, "text-anchor": "middle" }, value.toPrecision(3)));
  }
  box.replaceChildren(svg);
}

export function mark(box, { edges }, answer) {
  const marks = box.querySelector("#marks");
  marks.replaceChildren();
  const said = [];
  for (const [list, y] of Object.entries(ROWS)) {
    for (const hit of answer[list]) {
      const dot = make("circle", { class: `mark ${list}`, cx: place(hit.length, edges), cy: y, r: 5 });
      dot.dataset.id = hit.id;
      dot.append(make("title", {}, `${hit.rank}. ${hit.title || hit.id}: ${hit.length.toPrecision(3)}`));
      marks.append(dot);
    }
    const lengths = answer[list].map((hit) => hit.length);
    if (lengths.length) said.push(`${list}: ${Math.min(...lengths).toPrecision(3)} to ${Math.max(...lengths).toPrecision(3)}`);
  }
  const [low, high] = [edges[0], edges.at(-1)].map((edge) => edge.toPrecision(3));
  box.querySelector("#histogram-text").textContent = `From ${low} to ${high}. Documents shown, ${said.join("; ")}.`;
}
