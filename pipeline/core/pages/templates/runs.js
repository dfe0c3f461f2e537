"use strict";
const data = JSON.parse(document.getElementById("runs").textContent);
const COLOURS = ["blue", "orange", "green", "pink", "purple", "teal", "amber", "red", "slate", "sand"]
  .map((name) => `var(--${name})`);
const MOST_PICKED = 20;
const byId = (id) => document.getElementById(id);
const picked = new Map();
const brushes = new Map();
let sorting = { column: data.sort, down: data.down };
let shown = data.runs;

/* Only these two functions make elements, so that no text of a run is read as markup. */
function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}
function mark(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function words(value) {
  if (value === undefined || value === null) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(3) : String(Number(value.toPrecision(5)));
}

/* Long texts lose their beginning, since names and paths differ at their end. */
function cutStart(text, most) {
  const letters = [...text];
  return letters.length > most ? `…${letters.slice(1 - most).join("")}` : text;
}
/* As wide as the style allows: text that overflows to the left is read from left to right. */
function makeTail(text) { return element("span", { class: "tail" }, element("bdi", { dir: "ltr" }, text)); }

function valueOf(run, column) {
  if (column === "run") return run.name;
  if (column === "status") return run.status;
  const index = data.columns.indexOf(column);
  return index < 0 ? undefined : run.values[index];
}

/* Filter: words that the name or a value holds, and conditions such as lr>0.01 or status=done. */
const RULES = [[">=", (a, b) => a >= b], ["<=", (a, b) => a <= b], ["!=", (a, b) => a !== b],
  [">", (a, b) => a > b], ["<", (a, b) => a < b], ["=", (a, b) => a === b]];
/* Returns whether a run fits a word, as a function; null for a condition on an unknown column. */
function parseCondition(word) {
  for (const [sign, holds] of RULES) {
    const at = word.indexOf(sign);
    if (at < 1) continue;
    const name = word.slice(0, at), text = word.slice(at + sign.length);
    const column = ["run", "status", ...data.columns].find((key) => key === name) ??
      data.columns.find((key) => key.endsWith("." + name));
    if (column === undefined) return null;
    const number = text === "" ? NaN : Number(text);
    return (run) => {
      const value = valueOf(run, column);
      if (value === undefined || value === null) return false;
      if (typeof value === "number") return holds(value, number);
      return holds(String(value), text);
    };
  }
  return (run) => run.search.includes(word.toLowerCase());
}
for (const run of data.runs)
  run.search = [run.name, run.status, ...run.values.map((v) => (v === null ? "" : String(v)))]
    .join(" ").toLowerCase();

function compare(first, second) {
  const isMissing = (value) => value === undefined || value === null;
  if (isMissing(first) || isMissing(second)) return isMissing(first) - isMissing(second);
  const order = typeof first === "number" && typeof second === "number" ? first - second
    : String(first).localeCompare(String(second), "en", { numeric: true });
  return sorting.down ? -order : order;
}

function refresh() {
  const filterWords = byId("filter").value.trim().split(/\s+/).filter(Boolean);
  const rules = filterWords.map(parseCondition);
  byId("unknown").textContent = rules.includes(null)
    ? `no column of this name: ${filterWords[rules.indexOf(null)]}` : "";
  shown = data.runs.filter((run) => rules.every((rule) => rule === null || rule(run)));
  const inBrush = shown.filter((run) => [...brushes].every(([column, range]) => {
    const value = place(axisOf(column), valueOf(run, column));
    return value !== null && value >= range[0] && value <= range[1];
  }));
  drawTable(inBrush);
  drawCurves();
  drawAxes(inBrush);
  drawScatter(inBrush);
}

function drawTable(runs) {
  const by = sorting.column;
  const rows = [...runs].sort((a, b) => compare(valueOf(a, by), valueOf(b, by)));
  const heads = ["run", "status", ...data.columns].map((column) => {
    const arrow = sorting.column === column ? (sorting.down ? " ↓" : " ↑") : "";
    const sort = () => {
      sorting = { column, down: sorting.column === column ? !sorting.down : false };
      refresh();
    };
    const order = sorting.column === column ? (sorting.down ? "descending" : "ascending") : "none";
    return element("th", { scope: "col", "aria-sort": order },
      element("button", { onclick: sort, title: column }, short(column) + arrow));
  });
  const body = rows.map((run) => {
    const colour = picked.get(run);
    const box = element("input", { type: "checkbox", "aria-label": `curves of ${run.name}`,
      onchange: () => { pick(run); refresh(); } });
    box.checked = colour !== undefined;
    const swatch = colour ? element("span", { class: "swatch", style: `background:${colour}` }) : null;
    return element("tr", {},
      element("td", { title: run.problem || run.name }, box, " ", makeTail(run.name), run.problem ? " (!)" : "", swatch),
      element("td", { class: run.status }, run.status,
        run.estimate ? element("small", { class: "estimate" }, run.estimate) : null),
      ...run.values.map((value) => element("td", { title: words(value) },
        typeof value === "string" ? makeTail(value) : words(value))));
  });
  byId("table").replaceChildren(element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...body));
  byId("count").textContent = `${rows.length} of ${data.runs.length} runs`;
}

/* The last two words of a key; the whole key if two columns have the same two words. */
const SHORT = new Map(data.columns.map((column) => [column, column.split(".").slice(-2).join(".")]));
function short(column) {
  const name = SHORT.get(column);
  return name === undefined || [...SHORT.values()].filter((other) => other === name).length > 1
    ? column : name;
}

function pick(run) {
  if (picked.has(run)) { picked.delete(run); return; }
  if (picked.size >= MOST_PICKED) return;
  const used = [...picked.values()];
  const free = COLOURS.find((colour) => !used.includes(colour));
  picked.set(run, free ?? COLOURS[picked.size % COLOURS.length]);
}

function ticks(low, high, most = 5) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((nice) => nice * power).find((size) => size >= rough * 0.999);
  const values = [];
  // Counted: adding 1 to a number above 2^53 changes nothing.
  const first = Math.ceil(low / step - 1e-9), count = Math.floor(high / step + 1e-9) - first;
  for (let i = 0; i <= Math.min(count, 2 * most); i++)
    values.push(Number(((first + i) * step).toPrecision(12)));
  return values;
}

/* Marks of a logarithmic axis from 10^low to 10^high: powers of ten, and values between them if few fit. */
function powers(low, high) {
  if (high - low >= 2)
    return ticks(Math.ceil(low), Math.floor(high)).filter(Number.isInteger).map((power) => 10 ** power);
  if (high - low < 1) return ticks(10 ** low, 10 ** high).filter((value) => value > 0);
  const values = [];
  for (let power = Math.floor(low); power <= high; power++) values.push(...[1, 2, 5].map((nice) => nice * 10 ** power));
  return values.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9);
}

/* Drawings are as wide as the page leaves room, so that their text has its size on any screen. */
function room(where) { return Math.max(280, byId(where).clientWidth); }

/* Draws axes; returns the SVG and the functions from values to pixels. */
function frame(where, xs, ys, { logX = false, logY = false, label }) {
  const width = room(where), height = width < 640 ? 280 : 360;
  const [left, right, top, bottom] = [64, 16, 14, 34];
  const scale = (values, log, from, to) => {
    const used = (log ? values.filter((v) => v > 0).map(Math.log10) : values);
    let low = Math.min(...used), high = Math.max(...used);
    if (!(high > low)) { const half = Math.max(0.5, Math.abs(low) / 20); low -= half; high += half; }
    const at = (value) => from + ((log ? Math.log10(value) : value) - low) / (high - low) * (to - from);
    return [at, log ? powers(low, high) : ticks(low, high)];
  };
  const [x, xMarks] = scale(xs, logX, left, width - right);
  const [y, yMarks] = scale(ys, logY, height - bottom, top);
  const svg = mark("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of yMarks) svg.append(
    mark("line", { class: "rule", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
    mark("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, words(value)));
  for (const value of xMarks) svg.append(
    mark("line", { class: "axis", x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4 }),
    mark("text", { x: x(value), y: height - 12, "text-anchor": "middle" }, words(value)));
  return { svg, x, y };
}

function empty(where, text) { byId(where).replaceChildren(element("div", { class: "empty" }, text)); }

function drawCurves() {
  const name = byId("curve").value, logY = byId("log").checked;
  const legend = byId("legend");
  legend.replaceChildren();
  const drawn = [...picked].map(([run, colour]) => [run, colour, run.curves[name]])
    .filter(([, , curve]) => curve !== undefined);
  if (drawn.length === 0) {
    empty("curves", picked.size ? `none of the picked runs has ${name}` : "Tick runs in the table to lay their curves over each other.");
    return;
  }
  const listPoints = ([, , curve]) => curve[0].map((step, i) => [step, curve[1][i]])
    .filter(([, value]) => !logY || value > 0);
  const points = drawn.flatMap(listPoints);
  if (points.length === 0) { empty("curves", "no value above zero to draw by its logarithm"); return; }
  const { svg, x, y } = frame("curves", points.map((p) => p[0]), points.map((p) => p[1]),
    { logY, label: `${name} by step` });
  for (const entry of drawn) {
    const [run, colour] = entry;
    const path = listPoints(entry).map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    svg.append(mark("polyline", { points: path.join(" "), fill: "none", stroke: colour,
      "stroke-width": 1.8 }, mark("title", {}, run.name)));
    if (path.length < 2) svg.append(mark("circle", { cx: path[0]?.split(",")[0] ?? 0,
      cy: path[0]?.split(",")[1] ?? 0, r: 3.5, fill: colour }));
    const last = listPoints(entry).at(-1);
    legend.append(element("li", {}, element("i", { style: `background:${colour}` }),
      `${run.name}: ${last ? words(last[1]) : ""}`));
  }
  byId("curves").replaceChildren(svg);
}

/* An axis has numbers, on a logarithmic scale if `data.log` has the column, or choices. */
const axes = new Map();
function axisOf(column) {
  if (!axes.has(column)) {
    const values = data.runs.map((run) => valueOf(run, column)).filter((v) => v !== null && v !== undefined);
    const numbers = values.length > 0 && values.every((v) => typeof v === "number");
    if (numbers) {
      const low = Math.min(...values), high = Math.max(...values);
      axes.set(column, { low, high, log: data.log.includes(column) });
    } else axes.set(column, { choices: [...new Set(values.map(String))]
      .sort((a, b) => a.localeCompare(b, "en", { numeric: true })) });
  }
  return axes.get(column);
}
function place(axis, value) {
  if (value === null || value === undefined) return null;
  if (axis.choices) {
    const at = axis.choices.indexOf(String(value));
    return axis.choices.length < 2 ? 0.5 : at / (axis.choices.length - 1);
  }
  const of = axis.log ? Math.log10 : (v) => v;
  return axis.high > axis.low ? (of(value) - of(axis.low)) / (of(axis.high) - of(axis.low)) : 0.5;
}

function drawAxes(inBrush) {
  const columns = data.axes;
  if (columns.length < 2) { empty("axes", "Fewer than two keys or metrics differ."); return; }
  const width = Math.max(room("axes"), 110 * columns.length);
  const [height, top, bottom, side] = [342, 56, 30, width < 640 ? 50 : 70];
  const svg = mark("svg", { viewBox: `0 0 ${width} ${height}`, style: `min-width:${width}px`, role: "img",
    "aria-label": "keys and metrics of each run, one line a run" });
  const x = (i) => side + i * (width - 2 * side) / (columns.length - 1);
  const y = (part) => height - bottom - part * (height - top - bottom);
  const brushed = new Set(inBrush);
  const metric = columns.at(-1), axis = axisOf(metric);
  const lines = mark("g", { fill: "none" });
  for (const run of [...shown].sort((a, b) => brushed.has(a) - brushed.has(b))) {
    const places = columns.map((column, i) => {
      const part = place(axisOf(column), valueOf(run, column));
      return part === null ? null : `${x(i).toFixed(1)},${y(part).toFixed(1)}`;
    }).filter((point) => point !== null);
    const good = place(axis, valueOf(run, metric)) ?? (data.down ? 0 : 1);
    const share = Math.round(100 * (data.down ? good : 1 - good));
    lines.append(mark("polyline", { points: places.join(" "),
      stroke: brushed.has(run) ? picked.get(run) ?? `color-mix(in oklab, var(--blue) ${share}%, var(--amber))` : "var(--rule)",
      "stroke-width": picked.has(run) ? 2.4 : 1, opacity: brushed.has(run) ? 0.7 : 0.35 },
    mark("title", {}, run.name)));
  }
  svg.append(lines);
  columns.forEach((column, i) => {
    const of = axisOf(column);
    svg.append(mark("line", { class: "axis", x1: x(i), x2: x(i), y1: y(0), y2: y(1) }));
    const name = short(column);
    svg.append(mark("text", { class: "ink", x: x(i), y: i % 2 ? 14 : 30, "text-anchor": "middle" },
      cutStart(name, 21), mark("title", {}, column)));
    const labels = of.choices ? of.choices.slice(0, 12).map((c, n) =>
      [of.choices.length < 2 ? 0.5 : n / (of.choices.length - 1), c])
      : [[0, words(of.low)], [1, words(of.high)]];
    for (const [part, text] of labels) svg.append(mark("text", { x: x(i) + 5, y: y(part) + (part === 0 ? 14 : part === 1 ? -3 : 4) },
      cutStart(text, 13)));
    const brush = brushes.get(column);
    if (brush) svg.append(mark("rect", { class: "brush", x: x(i) - 9, width: 18,
      y: y(brush[1]), height: Math.max(2, y(brush[0]) - y(brush[1])) }));
    const handle = mark("rect", { x: x(i) - 16, y: y(1) - 4, width: 32, height: y(0) - y(1) + 8,
      fill: "transparent", style: "cursor:ns-resize;touch-action:none" },
    mark("title", {}, `drag to keep a range of ${column}; click to clear`));
    handle.addEventListener("pointerdown", (event) => brushFrom(event, column, svg, y));
    svg.append(handle);
  });
  byId("axes").replaceChildren(svg);
}

function brushFrom(event, column, svg, y) {
  const part = (moved) => {
    const at = svg.createSVGPoint();
    [at.x, at.y] = [moved.clientX, moved.clientY];
    const inside = at.matrixTransform(svg.getScreenCTM().inverse()).y;
    return Math.min(1, Math.max(0, (y(0) - inside) / (y(0) - y(1))));
  };
  const from = part(event);
  const end = (moved) => {
    window.removeEventListener("pointerup", end);
    const to = part(moved);
    if (Math.abs(to - from) < 0.02) brushes.delete(column);
    else brushes.set(column, [Math.min(from, to) - 1e-9, Math.max(from, to) + 1e-9]);
    refresh();
  };
  window.addEventListener("pointerup", end);
  event.preventDefault();
}

function drawScatter(runs) {
  const [across, up] = [byId("across").value, byId("up").value];
  const [xAxis, yAxis] = [axisOf(across), axisOf(up)];
  const number = (axis, value) => (axis.choices ? axis.choices.indexOf(String(value)) : value);
  const points = runs.map((run) => [run, valueOf(run, across), valueOf(run, up)])
    .filter(([, a, b]) => a !== null && a !== undefined && b !== null && b !== undefined)
    .map(([run, a, b]) => [run, number(xAxis, a), number(yAxis, b)]);
  if (points.length === 0) { empty("scatter", "no run has both"); return; }
  const { svg, x, y } = frame("scatter", points.map((p) => p[1]), points.map((p) => p[2]),
    { logX: xAxis.log ?? false, logY: yAxis.log ?? false, label: `${up} against ${across}` });
  for (const [run, a, b] of points) svg.append(mark("circle", { cx: x(a).toFixed(1), cy: y(b).toFixed(1),
    r: picked.has(run) ? 6 : 4, fill: picked.get(run) ?? "var(--blue)", opacity: 0.75,
    style: "cursor:pointer", onclick: () => { pick(run); refresh(); } },
  mark("title", {}, `${run.name}\n${across} ${words(valueOf(run, across))}\n${up} ${words(valueOf(run, up))}`)));
  byId("scatter").replaceChildren(svg);
}

function options(id, names, chosen) {
  byId(id).replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(chosen)) byId(id).value = chosen;
  byId(id).addEventListener("change", refresh);
}

const curveNames = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
options("curve", curveNames, data.curve);
options("across", data.columns, data.axes[0]);
options("up", data.columns, data.axes.at(-1));
byId("filter").addEventListener("input", refresh);
byId("log").addEventListener("change", refresh);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) { width = window.innerWidth; refresh(); }
});
byId("clear").addEventListener("click", () => { picked.clear(); brushes.clear(); byId("filter").value = ""; refresh(); });
for (const index of data.picked) pick(data.runs[index]);
refresh();
