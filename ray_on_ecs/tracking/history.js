"use strict";
// The page of all runs. Names and values are other people's: they become text nodes and attributes, never markup.
const MOST = 24, COLOURS = 8, DASHES = ["", "7 4", "2 3"];
const get = (id) => document.getElementById(id);
const { runs, metrics, reports, chosen: names } = JSON.parse(get("data").textContent);
for (const run of runs) {
  for (const key of ["last", "settings", "curves"]) run[key] = new Map(Object.entries(run[key]));
  run.words = [run.name, run.owner, run.command, run.state, run.gpu, run.pool].join(" ").toLowerCase();
}
let shown, chosen; // runs: in the table, and in the pictures

function make(namespace, tag, attributes, ...children) {
  const element = document.createElementNS(namespace, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const html = (...given) => make("http://www.w3.org/1999/xhtml", ...given);
const svg = (...given) => make("http://www.w3.org/2000/svg", ...given);
const cells = (tag, attributes, values) => values.map((value) => html(tag, attributes, value));
const distinct = (values) => [...new Set(values)];
const total = (values) => values.reduce((sum, value) => sum + value, 0);
const whole = (value) => value.toLocaleString("en-US");
const known = (value, show) => (value === null || value === undefined ? "" : show(value));

function short(value) {
  if (value === null) return "NaN";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}
function usd(value) {
  if (Math.abs(value) >= 1e9) return value.toExponential(2);
  return value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}
const unitOf = (seconds) => (seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : [3600, "h"]);
function duration(seconds) {
  const [unit, name] = unitOf(seconds);
  return `${(seconds / unit).toFixed(unit === 3600 ? 1 : 0)} ${name}`;
}

// The table: each column's heading, the value by which it sorts, and the content of its cells.
const metric = () => get("metric").value;
const COLUMNS = [
  ["run", (run) => run.name, nameOf],
  ["owner", (run) => run.owner, (run) => [run.owner]],
  ["script", (run) => run.script, (run) => [run.script]],
  ["state", (run) => run.state, (run) => [html("span", { class: `state ${run.state}` }, run.state)]],
  ["begin (UTC)", (run) => run.started, (run) => [known(run.started, (text) => text.slice(0, 16).replace("T", " "))]],
  ["duration", (run) => run.seconds, (run) => [known(run.seconds, duration)]],
  ["workers", (run) => run.workers, workersOf],
  ["USD", (run) => run.cost, (run) => [known(run.cost, usd)]],
  ["last metrics", (run) => run.last.get(metric()), lastOf],
];

function nameOf(run) {
  run.box = html("input", { type: "checkbox", "aria-label": `Choose ${run.name}` });
  run.box.onchange = () => choose(run.box.checked ? [...chosen, run] : chosen.filter((other) => other !== run));
  const name = Object.hasOwn(reports, run.name) ? html("a", { href: reports[run.name] }, run.name) : run.name;
  const tracker = run.url ? [html("small", {}, html("a", { href: run.url, rel: "noreferrer" }, "its tracker"))] : [];
  return [run.box, " ", name, ...tracker];
}
function workersOf(run) {
  return [known(run.workers, (count) => (run.gpu ? `${count} × ${run.gpu}` : count)), html("small", {}, run.pool)];
}
function lastOf(run) {
  const names = [...run.last.keys()].sort((one, other) => (other === metric()) - (one === metric()));
  const texts = names.map((name, place) => (place < 3 ? `${name} ${short(run.last.get(name))}` : "…"));
  return [texts.slice(0, 4).join(", ")];
}
function sort(cell, key) {
  const isDown = cell.getAttribute("aria-sort") === "ascending";
  for (const other of cell.parentNode.cells) other.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", isDown ? "descending" : "ascending");
  const [unknown, sorted] = [true, false].map((is) => runs.filter((run) => ((key(run) ?? "") === "") === is));
  sorted.sort((one, other) => (key(one) < key(other) ? -1 : Number(key(one) > key(other))));
  if (isDown) sorted.reverse();
  get("runs").tBodies[0].append(...[...sorted, ...unknown].map((run) => run.row));
}
function filter() {
  const words = get("words").value.toLowerCase().split(/\s+/);
  const wanted = ["owner", "script", "month", "state"].filter((id) => get(id).value);
  for (const run of runs) {
    const isWanted = wanted.every((id) => run[id] === get(id).value);
    run.row.hidden = !(isWanted && words.every((word) => run.words.includes(word)));
  }
  shown = runs.filter((run) => !run.row.hidden);
  get("count").textContent = `${whole(shown.length)} of ${whole(runs.length)} runs, ${whole(chosen.length)} chosen`;
  showCost();
}
function choose(list) {
  chosen = list;
  for (const run of runs) run.box.checked = chosen.includes(run);
  filter();
  showCurves();
  showDifferences();
}

// Pictures: a scale places values between two edges, and has marks at round values.
function ticks(low, high) {
  const raw = high / 6 - low / 6;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((each) => each >= raw);
  return [0, 1, 2, 3, 4, 5, 6].map((number) => (Math.ceil(low / step) + number) * step).filter((tick) => tick <= high);
}
function scale(values, from, to, isLog) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  const room = isLog ? low / 2 : Math.abs(low) / 20 || 1;
  if (high - low < Math.abs(low) * 1e-9 || low === high) [low, high] = [low - room, high + room];
  const place = isLog ? Math.log10 : (value) => value;
  const [first, last] = [place(low) / 2, place(high) / 2]; // halves: the largest numbers have no difference
  const powers = isLog && last - first > 0.75 ? distinct(ticks(first * 2, last * 2).map(Math.round)) : [];
  const marks = powers.length ? powers.map((power) => 10 ** power) : ticks(low, high);
  const at = (value) => from + (to - from) * ((place(value) / 2 - first) / (last - first));
  return { at, marks: marks.filter((mark) => mark >= low && mark <= high) };
}
function picture(id, height, title, values, isLog) {
  const width = Math.max(get(id).clientWidth, 260), left = 76, right = width - 14, bottom = height - 34;
  const image = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title });
  const up = scale(values, bottom, 10, isLog);
  for (const mark of up.marks) {
    image.append(svg("line", { x1: left, x2: right, y1: up.at(mark), y2: up.at(mark) }));
    image.append(svg("text", { x: left - 8, y: up.at(mark) + 4, "text-anchor": "end" }, short(mark)));
  }
  get(id).replaceChildren(image);
  const label = (x, text) => image.append(svg("text", { x, y: bottom + 20, "text-anchor": "middle" }, text));
  return { image, left, right, up, label };
}
const stroke = (number) => ({
  style: `stroke: var(--c${number % COLOURS}); fill: none; stroke-width: 2`,
  "stroke-dasharray": DASHES[Math.floor(number / COLOURS) % DASHES.length],
});
const sample = (number) =>
  svg("svg", { width: 26, height: 12, "aria-hidden": true }, svg("path", { ...stroke(number), d: "M0 6H26" }));

function pointsOf(run) {
  const places = get("axis").value === "time" ? run.times : run.steps;
  return (run.curves.get(metric()) ?? []).map((value, row) => [places[row], value])
    .filter(([x, y]) => x !== null && y !== null && Math.abs(y) < 1e300 && (y > 0 || !get("log").checked));
}
function showCurves() {
  const all = chosen.slice(0, MOST).map((run, number) => ({ run, number, points: pointsOf(run) }));
  const curves = all.filter((curve) => curve.points.length);
  const rest = chosen.length > MOST ? ` of the first ${MOST} of ${whole(chosen.length)} chosen runs` : "";
  get("about-curves").textContent = curves.length ? `${metric()}${rest}` : "Choose runs with this metric in the table.";
  get("legend").replaceChildren(...curves.map(({ run, number }) =>
    html("li", {}, sample(number), run.name, " ", known(run.last.get(metric()), short))));
  if (!curves.length) return get("curves").replaceChildren();
  const by = get("axis").value;
  const [xs, ys] = [0, 1].map((axis) => curves.flatMap((curve) => curve.points.map((point) => point[axis])));
  const frame = picture("curves", 360, `${metric()} by ${by}; last values are listed below`, ys, get("log").checked);
  const [unit, name] = by === "time" ? unitOf(Math.max(...xs)) : [1, ""];
  const across = scale(xs.map((x) => x / unit), frame.left, frame.right);
  for (const mark of across.marks) frame.label(across.at(mark), `${short(mark)} ${name}`);
  for (const { run, number, points } of curves) {
    const path = points.map(([x, y]) => `${across.at(x / unit).toFixed(1)} ${frame.up.at(y).toFixed(1)}`).join("L");
    const line = { ...stroke(number), "stroke-linecap": "round", d: `M${path}${points.length > 1 ? "" : "h4"}` };
    frame.image.append(svg("path", line, svg("title", {}, run.name)));
  }
}

function showDifferences() {
  const list = chosen.slice(0, MOST);
  const row = (name, show) => [name, list.map(show)];
  const settings = distinct(list.flatMap((run) => [...run.settings.keys()]))
    .map((name) => row(name, (run) => run.settings.get(name) ?? "–"));
  const results = [
    row("state", (run) => run.state),
    row("step", (run) => known(run.step, whole)),
    row("duration", (run) => known(run.seconds, duration)),
    row("USD", (run) => known(run.cost, usd)),
    ...distinct(list.flatMap((run) => [...run.last.keys()]))
      .map((name) => row(`last ${name}`, (run) => known(run.last.get(name), short))),
  ];
  const rows = [...settings.filter(([, values]) => distinct(values).length > 1), ...results]
    .map(([name, values]) => html("tr", {}, html("th", { scope: "row" }, name), ...cells("td", {}, values)));
  const names = list.map((run, number) => html("th", { scope: "col" }, sample(number), run.name));
  const head = html("thead", {}, html("tr", {}, html("td", {}), ...names));
  get("about-differences").textContent = list.length < 2 ? "Choose two runs or more in the table." : "";
  get("differences").replaceChildren(...(list.length < 2 ? [] : [head, html("tbody", {}, ...rows)]));
}

function showCost() {
  const paid = shown.filter((run) => run.cost !== null);
  const sums = new Map(); // by owner and month, and for all of either, which is empty
  const sum = (owner, month) => sums.get(`${month} ${owner}`) ?? 0;
  for (const run of paid) {
    for (const owner of [run.owner, ""]) {
      for (const month of [run.month, ""]) sums.set(`${month} ${owner}`, sum(owner, month) + run.cost);
    }
  }
  const months = distinct(paid.map((run) => run.month)).sort();
  const owners = distinct(paid.map((run) => run.owner)).sort((one, other) => sum(other, "") - sum(one, ""));
  const unknown = shown.length > paid.length ? `; that of ${whole(shown.length - paid.length)} is not known` : "";
  get("about-cost").textContent = `${usd(sum("", ""))} USD for the workers of the runs in the table${unknown}`;
  const head = html("tr", {}, ...cells("th", { scope: "col" }, ["owner", ...months, "sum"]));
  const rows = [...owners, ""].map((owner) => html("tr", {}, html("th", { scope: "row" }, owner || "sum"),
    ...cells("td", {}, [...months, ""].map((month) => usd(sum(owner, month))))));
  get("cost").replaceChildren(...(paid.length ? [html("thead", {}, head), html("tbody", {}, ...rows)] : []));
  const drawn = owners.slice(0, owners.length > COLOURS ? COLOURS - 1 : COLOURS);
  const labels = owners.length > drawn.length ? [...drawn, "others"] : drawn;
  get("owners").replaceChildren(...labels.map((label, number) => html("li", {}, sample(number), label)));
  get("bars").replaceChildren();
  const partsOf = (month) => drawn.map((owner) => sum(owner, month));
  if (paid.length) showBars(months, labels, (month) => [...partsOf(month), sum("", month) - total(partsOf(month))]);
}
function showBars(months, labels, partsOf) {
  const heights = months.map((month) => total(partsOf(month)));
  const frame = picture("bars", 220, "USD by month and owner; the table below has the numbers", [0, ...heights]);
  const room = (frame.right - frame.left) / months.length;
  months.forEach((month, place) => {
    const x = frame.left + room * (place + 0.5);
    if (place % Math.ceil(60 / room) === 0) frame.label(x, month);
    let below = 0;
    partsOf(month).forEach((part, number) => {
      const style = `stroke: var(--c${number}); stroke-width: ${Math.min(room * 0.7, 56)}`;
      const path = { style, d: `M${x} ${frame.up.at(below)}V${frame.up.at((below += Math.max(part, 0)))}` };
      frame.image.append(svg("path", path, svg("title", {}, `${month} ${labels[number]}`)));
    });
  });
}

const options = (values) => values.map((value) => html("option", { value }, value));
get("metric").append(...options(metrics));
for (const [heading, key] of COLUMNS) {
  const cell = html("th", { scope: "col" }, html("button", { type: "button" }, heading));
  cell.firstChild.onclick = () => sort(cell, key);
  get("runs").tHead.rows[0].append(cell);
}
for (const run of runs) {
  const others = COLUMNS.slice(1).map(([, , content]) => html("td", {}, ...content(run)));
  run.row = html("tr", {}, html("th", { scope: "row" }, ...nameOf(run)), ...others);
}
get("runs").tBodies[0].append(...runs.map((run) => run.row));
for (const id of ["owner", "script", "month", "state"]) {
  const values = distinct(runs.map((run) => run[id])).sort();
  get(id).append(html("option", { value: "" }, "all"), ...options(id === "month" ? values.reverse() : values));
  get(id).onchange = filter;
}
get("words").oninput = filter;
get("all").onclick = () => choose(shown);
get("none").onclick = () => choose([]);
get("axis").onchange = get("log").onchange = showCurves;
get("metric").onchange = () => {
  for (const run of runs) run.row.lastChild.replaceChildren(...lastOf(run));
  showCurves();
};
addEventListener("resize", () => [showCurves(), showCost()]);
choose(names.map((name) => runs.find((run) => run.name === name)).filter(Boolean));
