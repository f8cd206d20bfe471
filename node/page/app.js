// The page of one node: a snapshot, then what changed, over server-sent events; the browser reconnects by itself.
import { drawCurves, drawGraph, drawStages, short } from "/charts.js";

const MEETING_S = 300, MAX_POINTS = 400, MAX_EVENTS = 300, ROWS_EVERY_MS = 2000;
const WELL = new Set(["training", "seeking", "exchanging", "serving", "done"]);
const find = (id) => document.getElementById(id);

const swarm = { nodes: new Map(), curves: new Map(), met: new Map(), events: [], totals: null, offset: 0, own: "" };
const chosen = { sort: "name", reverse: false, filter: "", marked: "" };

const age = (node) => Math.max(0, now() - node.issued_at);
const now = () => Date.now() / 1000 + swarm.offset;
function duration(seconds) {
  if (seconds < 59.5) return `${seconds.toFixed(0)} s`;
  if (seconds < 3570) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 86400 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} d`;
}
const trains = (node, text) => (node.role === "trainer" ? text : "");
const partner = (node) => {
  if (!node.last_partner) return "";
  const known = swarm.nodes.get(node.last_partner);
  return known ? known.name : node.last_partner.slice(-8);
};

const COLUMNS = [
  { key: "name", title: "Node", text: (n) => `${n.name} ${n.peer_id.slice(-8)}`, value: (n) => n.name },
  { key: "state", title: "State", text: (n) => (n.silent ? "silent" : n.state) },
  { key: "role", title: "Role", text: (n) => n.role },
  { key: "stage", title: "Stage", number: true, text: (n) => (n.stage === null ? "" : `${n.stage} ${n.stage_role}`.trim()), value: (n) => n.stage, only: "stage" },
  { key: "round", title: "Round", number: true, text: (n) => trains(n, n.round), value: (n) => n.round },
  { key: "loss", title: "Loss", number: true, text: (n) => n.loss?.toFixed(3) ?? "", value: (n) => n.loss },
  { key: "accuracy", title: "Accuracy", number: true, text: (n) => n.accuracy?.toFixed(3) ?? "",
    value: (n) => n.accuracy, only: "accuracy" },
  { key: "speed", title: "Tokens/s", number: true, text: (n) => trains(n, short(n.tokens_per_s)),
    value: (n) => n.tokens_per_s },
  { key: "up", title: "Up B/s", number: true, text: (n) => short(n.up_bytes_per_s), value: (n) => n.up_bytes_per_s },
  { key: "down", title: "Down B/s", number: true, text: (n) => short(n.down_bytes_per_s),
    value: (n) => n.down_bytes_per_s },
  { key: "partner", title: "Last partner", text: partner },
  { key: "age", title: "Heard", number: true, text: (n) => duration(age(n)), value: age },
  { key: "link", title: "Link", text: (n) => (n.via.length ? `via ${n.via[0].slice(-8)}` : "direct") },
  { key: "where", title: "Where", text: (n) => n.where },
  { key: "version", title: "Version", text: (n) => n.version },
  { key: "state_hash", title: "State hash", text: (n) => n.state_hash.slice(0, 8), only: "state_hash" },
  { key: "reason", title: "Reason", text: (n) => n.reason, kind: "reason" },
];
const columns = () => COLUMNS.filter((column) => !column.only
  || [...swarm.nodes.values()].some((node) => node[column.only] !== null && node[column.only] !== ""));

function take(node) {
  node.ill = !node.silent && !WELL.has(node.state);
  swarm.nodes.set(node.peer_id, node);
}

function takeHead(news) {
  swarm.offset = news.at - Date.now() / 1000;
  swarm.totals = news.totals;
  for (const meeting of news.met) swarm.met.set(`${meeting[0]} ${meeting[1]}`, meeting);
  for (const [key, meeting] of swarm.met) if (news.at - meeting[2] > MEETING_S) swarm.met.delete(key);
  swarm.events.push(...news.events);
  swarm.events.splice(0, Math.max(0, swarm.events.length - MAX_EVENTS));
  const health = find("health");
  health.textContent = news.health;
  health.className = `badge ${news.health}`;
  find("problems").replaceChildren(...news.problems.map((problem) => element("li", problem)));
}

function onSnapshot(news) {
  swarm.nodes.clear(); swarm.met.clear(); swarm.events = [];
  swarm.curves = new Map(Object.entries(news.curves));
  swarm.own = news.this;
  find("name").textContent = news.run.name;
  find("run").textContent = `run ${news.run.id} ${news.run.method}`;
  document.title = `${news.run.name} – Peerloom`;
  news.changed.forEach(take);
  takeHead(news);
  find("link").textContent = "";
  draw();
}

function onUpdate(news) {
  news.changed.forEach(take);
  for (const peer of news.gone) { swarm.nodes.delete(peer); swarm.curves.delete(peer); }
  for (const [peer, point] of Object.entries(news.points)) {
    const points = swarm.curves.get(peer) || [];
    points.push(point);
    if (points.length > MAX_POINTS) points.splice(0, points.length - MAX_POINTS);
    swarm.curves.set(peer, points);
  }
  takeHead(news);
  draw();
}

function element(name, text = "", kind = "") {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function drawTotals() {
  const t = swarm.totals, shown = [
    ["training", `${t.training} of ${t.trainers}`], ["nodes", t.nodes], ["silent", t.silent],
    ["tokens/s", short(t.tokens_per_s)],
    ["tokens", t.token_budget ? `${short(t.tokens)} of ${short(t.token_budget)}` : short(t.tokens)],
  ];
  if (t.left_s !== null) shown.push(["left", duration(t.left_s)]);
  if (t.loss_min !== null) shown.push(["loss", `${t.loss_min.toFixed(3)} to ${t.loss_max.toFixed(3)}`]);
  if (t.consensus_distance !== null) shown.push(["consensus distance", t.consensus_distance.toPrecision(2)]);
  if (t.states_differ !== null) shown.push(["states", t.states_differ ? `${t.states_differ} differ` : "equal"]);
  find("totals").replaceChildren(...shown.map(([title, value]) => {
    const box = element("div");
    box.append(element("dt", title), element("dd", String(value)));
    return box;
  }));
}

function shownNodes() {
  const wanted = chosen.filter.toLowerCase();
  const searched = (n) => `${n.name} ${n.peer_id} ${n.silent ? "silent" : n.state} ${n.role} ${n.where}`.toLowerCase();
  const column = COLUMNS.find((each) => each.key === chosen.sort);
  const value = column.value || column.text, way = chosen.reverse ? -1 : 1;
  const rank = (v) => (v === null || v === undefined || v === "" ? 1 : 0);
  return [...swarm.nodes.values()].filter((node) => !wanted || searched(node).includes(wanted)).sort((a, b) => {
    const x = value(a), y = value(b);
    if (rank(x) !== rank(y)) return rank(x) - rank(y);
    const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
    return way * order || a.peer_id.localeCompare(b.peer_id);
  });
}

function drawHeadings(used) {
  const row = find("nodes").tHead.rows[0];
  const layout = used.map((column) => column.key).join();
  if (row.dataset.layout !== layout) {
    row.dataset.layout = layout;
    row.replaceChildren(...used.map((column) => {
      const cell = element("th", "", column.number ? "number" : "");
      cell.scope = "col";
      const button = element("button", column.title);
      button.type = "button";
      button.addEventListener("click", () => {
        chosen.reverse = chosen.sort === column.key && !chosen.reverse;
        chosen.sort = column.key;
        drawTable();
      });
      cell.append(button);
      return cell;
    }));
  }
  used.forEach((column, index) => {
    const sorted = column.key === chosen.sort;
    const way = sorted ? (chosen.reverse ? "descending" : "ascending") : "none";
    row.cells[index].setAttribute("aria-sort", way);
    row.cells[index].firstChild.textContent = column.title + (sorted ? (chosen.reverse ? " ▾" : " ▴") : "");
  });
}

const rowOf = new Map();
function drawRow(node, used) {
  let row = rowOf.get(node.peer_id);
  if (!row) {
    row = element("tr");
    row.tabIndex = 0;
    row.dataset.peer = node.peer_id;
    row.addEventListener("click", () => mark(node.peer_id));
    row.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); mark(node.peer_id); }
      const next = { ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling }[event.key];
      if (next) { event.preventDefault(); next.focus(); }
    });
    rowOf.set(node.peer_id, row);
  }
  while (row.cells.length < used.length) row.insertCell();
  while (row.cells.length > used.length) row.deleteCell(-1);
  used.forEach((column, index) => {
    const cell = row.cells[index], text = String(column.text(node));
    if (cell.textContent !== text) cell.textContent = text;
    const kind = column.kind || (column.number ? "number" : "");
    if (cell.className !== kind) cell.className = kind;
  });
  row.className = node.silent ? "silent" : node.ill ? "ill" : "";
  row.setAttribute("aria-selected", String(node.peer_id === chosen.marked));
  return row;
}

function drawTable() {
  const nodes = shownNodes(), used = columns(), body = find("nodes").tBodies[0];
  drawHeadings(used);
  for (const peer of rowOf.keys()) if (!swarm.nodes.has(peer)) rowOf.delete(peer);
  const rows = nodes.map((node) => drawRow(node, used));
  const focused = document.activeElement;
  const same = rows.length === body.rows.length && rows.every((row, index) => body.rows[index] === row);
  if (!same) {
    body.replaceChildren(...rows);
    if (focused && focused.dataset && focused.dataset.peer && focused.isConnected) focused.focus();
  }
  find("count").textContent = `${nodes.length} of ${swarm.nodes.size}`;
}

function drawEvents() {
  find("events").replaceChildren(...swarm.events.slice().reverse().map((event) => {
    const item = element("li"), time = element("time", new Date(event.at * 1000).toLocaleTimeString());
    time.dateTime = new Date(event.at * 1000).toISOString();
    item.append(time, `${event.name} ${event.what}`);
    return item;
  }));
}

let eventsDrawn = "";
function draw() {
  if (!swarm.totals || document.hidden) return;
  drawTotals();
  drawTable();
  drawCurves(find("loss"), swarm.curves, 1, chosen.marked);
  drawCurves(find("speed"), swarm.curves, 2, chosen.marked);
  drawGraph(find("graph"), swarm.nodes, swarm.met.values(), now(), MEETING_S, chosen.marked, mark);
  find("graph-text").textContent = `${swarm.met.size} pairs met; ` + (chosen.marked
    ? `marked: ${swarm.nodes.get(chosen.marked)?.name ?? "a node that has left"}` : "no node is marked");
  find("stages-box").hidden = drawStages(find("stages"), swarm.totals) === 0;
  const newest = `${swarm.events.length} ${swarm.events.at(-1)?.number}`;
  if (newest !== eventsDrawn) { eventsDrawn = newest; drawEvents(); }
}

function mark(peer) {
  chosen.marked = chosen.marked === peer ? "" : peer;
  draw();
}

find("filter").addEventListener("input", (event) => { chosen.filter = event.target.value; drawTable(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== find("filter")) { event.preventDefault(); find("filter").focus(); }
  if (event.key === "Escape" && document.activeElement === find("filter")) {
    chosen.filter = find("filter").value = "";
    drawTable();
  }
});
document.addEventListener("visibilitychange", draw);
window.addEventListener("resize", draw);
setInterval(() => { if (swarm.totals && !document.hidden) drawTable(); }, ROWS_EVERY_MS);

function connect() {
  const source = new EventSource("/events");
  source.addEventListener("snapshot", (event) => onSnapshot(JSON.parse(event.data)));
  source.addEventListener("update", (event) => onUpdate(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    find("link").textContent = "This node does not answer; trying again.";
    find("health").textContent = "unknown";
    find("health").className = "badge";
    if (source.readyState === EventSource.CLOSED) { source.close(); setTimeout(connect, 3000); }
  });
}
connect();
