// Curves, graph and stage bar as plain SVG and lists. Names of peers are only ever set as text.
const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || rough;
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

export function short(amount) {
  for (const unit of ["", "k", "M", "G", "T"]) {
    if (Math.abs(amount) < 999.5) {
      return (unit && amount < 9.95 ? amount.toFixed(1) : String(Number(amount.toPrecision(3)))) + unit;
    }
    amount /= 1000;
  }
  return `${amount.toFixed(0)}P`;
}

// One curve a node: `curves` maps a peer to [[time, loss, speed], …], `column` says which figure.
export function drawCurves(chart, curves, column, marked) {
  const width = Math.max(chart.clientWidth, 200), height = Math.max(chart.clientHeight, 120);
  const left = 44, bottom = 18, top = 6, right = 6;
  let from = Infinity, to = -Infinity, low = Infinity, high = -Infinity;
  for (const points of curves.values()) {
    for (const point of points) {
      if (point[column] === null) continue;
      from = Math.min(from, point[0]); to = Math.max(to, point[0]);
      low = Math.min(low, point[column]); high = Math.max(high, point[column]);
    }
  }
  chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
  if (from === Infinity) {
    chart.replaceChildren(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing measured yet"));
    return;
  }
  if (column === 2) low = 0;
  if (high - low < 1e-9) { high += 0.5; low -= 0.5; }
  to = Math.max(to, from + 1);
  const x = (at) => left + ((at - from) / (to - from)) * (width - left - right);
  const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
  const drawn = [];
  for (const value of ticks(low, high, 4)) {
    drawn.push(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    drawn.push(svg("text", { x: left - 4, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  drawn.push(svg("text", { x: left, y: height - 4 }, clock(from)));
  drawn.push(svg("text", { x: width - right, y: height - 4, "text-anchor": "end" }, clock(to)));
  let last = null;
  for (const [peer, points] of curves) {
    const path = [];
    let pen = "M";
    for (const point of points) {
      if (point[column] === null) { pen = "M"; continue; }
      path.push(`${pen}${x(point[0]).toFixed(1)} ${y(point[column]).toFixed(1)}`);
      pen = "L";
    }
    if (path.length === 1) path.push(`${path[0].replace("M", "L")}h2`);
    const curve = svg("path", { class: peer === marked ? "curve marked" : "curve", d: path.join("") });
    if (peer === marked) last = curve; else drawn.push(curve);
  }
  if (last) drawn.push(last);
  chart.replaceChildren(...drawn);
}

// Nodes on a circle, a line for each pair that met; older meetings are fainter.
export function drawGraph(graph, nodes, meetings, now, lifetime, marked, onMark) {
  const radius = 180, drawn = [], places = new Map();
  const peers = [...nodes.keys()].sort();
  peers.forEach((peer, index) => {
    const angle = (index / peers.length) * 2 * Math.PI - Math.PI / 2;
    places.set(peer, [200 + radius * Math.cos(angle), 200 + radius * Math.sin(angle)]);
  });
  for (const [a, b, at] of meetings) {
    const from = places.get(a), to = places.get(b);
    if (!from || !to) continue;
    const opacity = Math.max(0.08, 0.8 * (1 - (now - at) / lifetime)).toFixed(2);
    const line = svg("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1], opacity });
    if (a === marked || b === marked) line.setAttribute("class", "marked");
    drawn.push(line);
  }
  const size = Math.max(2.5, Math.min(8, 300 / Math.max(1, peers.length)));
  for (const peer of peers) {
    const node = nodes.get(peer), [cx, cy] = places.get(peer);
    const kind = node.silent ? "silent" : node.role === "bootstrap" ? "bootstrap" : node.ill ? "ill" : "well";
    const circle = svg("circle", { cx, cy, r: size, class: kind + (peer === marked ? " marked" : "") });
    circle.append(svg("title", {}, `${node.name} (${node.silent ? "silent" : node.state})`));
    circle.addEventListener("click", () => onMark(peer));
    drawn.push(circle);
  }
  graph.replaceChildren(...drawn);
}

export function drawStages(list, totals) {
  const missing = new Set(totals.missing_stages.map(String));
  const stages = [...new Set([...Object.keys(totals.stages), ...missing])].sort((a, b) => a - b);
  list.replaceChildren(...stages.map((stage) => {
    const item = document.createElement("li");
    item.textContent = missing.has(stage) ? `${stage}: nobody` : `${stage}: ${totals.stages[stage]}`;
    if (missing.has(stage)) item.className = "missing";
    return item;
  }));
  return stages.length;
}
