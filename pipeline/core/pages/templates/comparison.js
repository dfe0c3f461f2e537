"use strict";
const data = JSON.parse(document.getElementById("rows").textContent);
const byId = (id) => document.getElementById(id);
const table = byId("table");
const onlyMarked = byId("marked");

function cell(name, text) {
  const node = document.createElement(name);
  node.textContent = text;
  return node;
}

/* Numbers are texts, since JSON has neither NaN nor Inf. NaN is beyond no limit. */
function number(text) {
  if (text === "Inf") return Infinity;
  return text === "NaN" ? NaN : Number(text);
}

function isBeyond(row) {
  return data.limits.some(({ column, below }, place) => {
    const limit = Number(byId(`limit-${place}`).value), value = number(row[column]);
    return below ? value < limit : value > limit;
  });
}

const lines = data.rows.map((row) => {
  const line = document.createElement("tr");
  for (const text of row) line.append(cell("td", text));
  return { row, line };
});
const head = document.createElement("tr");
for (const text of data.header) head.append(cell("th", text));
const heading = document.createElement("thead"), body = document.createElement("tbody");
heading.append(head);
body.append(...lines.map(({ line }) => line));
table.append(heading, body);

let shown = [];
function update() {
  shown = [];
  let count = 0;
  data.limits.forEach((limit, place) => {
    byId(`value-${place}`).textContent = byId(`limit-${place}`).value;
  });
  for (const { row, line } of lines) {
    const beyond = isBeyond(row);
    count += beyond;
    line.className = beyond ? "beyond" : "";
    line.hidden = onlyMarked.checked && !beyond;
    if (!line.hidden) shown.push([row, beyond]);
  }
  byId("count").textContent = `${count} of ${lines.length} rows are beyond a limit`;
}

/* A text that a spreadsheet would run as a formula gets an apostrophe. */
function quote(text) {
  const isNumber = /^-?[\d.,]+(e[+-]?\d+)?$/.test(text);
  const safe = !isNumber && /^\s*[=+\-@\t\r\n]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function save() {
  const rows = [[...data.header, "BeyondLimit"]];
  for (const [row, beyond] of shown) rows.push([...row, beyond ? "yes" : "no"]);
  const text = rows.map((row) => row.map(quote).join(",") + "\n").join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "comparison.csv";
  link.click();
  URL.revokeObjectURL(link.href);
}

data.limits.forEach((limit, place) => byId(`limit-${place}`).addEventListener("input", update));
onlyMarked.addEventListener("change", update);
byId("save").addEventListener("click", save);
update();
