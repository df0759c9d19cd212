"use strict";
// Tells the values under the pointer. The points of a line are drawn in their own units, so they
// are the values; `data-x` and `data-y` of a chart say where its ends lie.
const SVG = "http://www.w3.org/2000/svg";
for (const svg of document.querySelectorAll("svg.chart")) {
  const out = svg.parentElement.querySelector("output");
  const numbers = (text) => text.split(" ").map(Number);
  const [x0, x1, left, right] = numbers(svg.dataset.x);
  const [y0, y1, bottom, top] = numbers(svg.dataset.y);
  const isLog = "log" in svg.dataset, isStairs = "stairs" in svg.dataset;
  let lines = null;
  const read = () => [...svg.querySelectorAll("polyline")].map((line) => ({
    line,
    points: line.getAttribute("points").trim().split(" ").map((at) => at.split(",").map(Number)),
  }));
  const clear = () => svg.querySelectorAll(".hair,.at").forEach((mark) => mark.remove());
  const put = (name, attributes) => {
    const mark = document.createElementNS(SVG, name);
    for (const key in attributes) mark.setAttribute(key, attributes[key]);
    svg.append(mark);
  };
  // The nearest point; of stairs the one before.
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= x) low = middle; else high = middle;
    }
    const isHigh = isStairs ? points[high][0] <= x : points[high][0] - x < x - points[low][0];
    return points[isHigh ? high : low];
  };
  const show = (event) => {
    lines ??= read();
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    const x = Math.min(x1, Math.max(x0, x0 + (at - left) / (right - left) * (x1 - x0)));
    clear();
    const told = [];
    let first = null;
    for (const { line, points } of lines) {
      if (getComputedStyle(line).display === "none") continue;
      const point = nearest(points, x);
      if (!point) continue;
      first ??= point[0];
      const value = isLog ? 10 ** point[1] : point[1];
      const of = point[0] === first ? "" : ` at ${point[0].toLocaleString("en")}`;
      told.push(`${line.dataset.name} ${Number(value.toPrecision(5))}${of}`);
      put("circle", {
        class: `at ${line.classList[0]}`, r: 3,
        cx: left + (point[0] - x0) / (x1 - x0) * (right - left),
        cy: bottom + (point[1] - y0) / (y1 - y0) * (top - bottom),
      });
    }
    if (first === null) return;
    const middle = left + (first - x0) / (x1 - x0) * (right - left);
    put("path", { class: "hair", d: `M${middle} ${top}V${bottom}` });
    out.textContent = `${svg.dataset.axis} ${first.toLocaleString("en")}: ${told.join(", ")}`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => { clear(); out.textContent = ""; });
}
