// SPDX-License-Identifier: Apache-2.0
// Draws the charts of a report page. Strings in the data are untrusted: pass them through plain().
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const narrow = () => window.innerWidth < 640;
  // Distinguishable with all common kinds of color vision, on white and on black.
  const SERIES = ["#2f8fc4", "#e08a00", "#12a07a", "#c2569b", "#d9503f", "#7b7fe0", "#9a7a3c", "#7f8790"];
  const SYMBOLS = { fp32: "circle", fp16: "square", bf16: "diamond", int8: "triangle-up" };
  const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };
  const chosen = { axis: 0, path: 0, load: 0, point: -1 };

  // plotly.js interprets a few tags and entities in its strings.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const digits = (value) => {
    if (value >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
    if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
    if (value >= 100) return Math.round(value).toLocaleString("en");
    return value.toPrecision(3);
  };

  function layout(more) {
    const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true,
      tickfont: { size: narrow() ? 10 : 12 }, ...(narrow() ? { nticks: 5 } : {}) };
    const { xaxis = {}, yaxis = {}, ...rest } = more;
    return {
      paper_bgcolor: colour("--page"), plot_bgcolor: colour("--page"), dragmode: false,
      font: { color: colour("--ink"), family: getComputedStyle(document.body).fontFamily, size: 13 },
      margin: { l: 12, r: 16, t: 16, b: 12 },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--accent"), align: "left",
        font: { color: colour("--ink"), size: 13 } },
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0, font: { size: narrow() ? 11 : 12 } },
      xaxis: { ...axis, fixedrange: true, ...xaxis }, yaxis: { ...axis, fixedrange: true, ...yaxis }, ...rest,
    };
  }

  // Ticks of a logarithmic axis at 1, 2 and 5; at fewer steps if these are too many.
  function logTicks(low, high) {
    const within = (steps) => {
      const values = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        for (const step of steps) values.push(step * 10 ** power);
      }
      return values.filter((value) => value >= low && value <= high);
    };
    const values = [[1, 2, 5], [1, 3], [1]].map(within).find((some) => some.length <= (narrow() ? 5 : 9)) || [];
    return { tickmode: "array", tickvals: values, ticktext: values.map((value) => digits(value).replace(/\.0+(?=\D|$)/, "")) };
  }

  // Variants and then policies have one numbering; a policy may lack the figure of an axis.
  const policies = data.policies || [];
  const isPolicy = (index) => index >= data.variants.length;
  const markOf = (index) => (isPolicy(index) ? policies[index - data.variants.length] : data.variants[index]);
  const pointOf = (axis, index) => (isPolicy(index) ? axis.policies[index - data.variants.length] : axis.points[index]);
  const drawnOn = (axis) => [...data.variants, ...policies].map((_, index) => index).filter((index) => pointOf(axis, index));

  function horizontal(axis) {
    const every = drawnOn(axis).map((index) => pointOf(axis, index));
    const low = Math.min(...every.map((point) => point.least));
    const high = Math.max(...every.map((point) => point.most));
    const title = { text: plain(axis.label) + (axis.more_is_better ? " →" : ""), standoff: 10, font: { size: narrow() ? 11 : 13 } };
    if (!axis.log) {
      const span = high - low || high || 1;
      return { title, range: [low - 0.12 * span, high + 0.12 * span] };
    }
    const [from, to] = [low / 1.35, high * 1.35];
    return { title, type: "log", range: [Math.log10(from), Math.log10(to)], ...logTicks(from, to) };
  }

  // For each cost, the best score of all variants that cost no more.
  function staircase(axis) {
    const better = data.higher_is_better ? Math.max : Math.min;
    const sign = axis.more_is_better ? -1 : 1;
    const order = data.variants.map((_, index) => index)
      .filter((index) => !axis.dominated_by[index])
      .sort((a, b) => sign * (axis.points[a].value - axis.points[b].value));
    const x = [], y = [];
    for (const index of order) {
      x.push(axis.points[index].value);
      y.push(y.length ? better(y[y.length - 1], data.variants[index].score) : data.variants[index].score);
    }
    return { x, y, mode: "lines", line: { shape: "hv", width: 2.5, color: colour("--accent") }, opacity: 0.4,
      hoverinfo: "skip", showlegend: false };
  }

  function words(axis, index) {
    const variant = markOf(index), point = pointOf(axis, index), rival = axis.dominated_by[index];
    const bars = axis.bars && point.least < point.most ? ` (${digits(point.least)} to ${digits(point.most)})` : "";
    if (isPolicy(index)) {
      return [
        `policy ${variant.name}`, variant.chain, `${data.score.replace(/ %$/, "")} ${variant.score_text} (95 %: ${variant.interval_text})`,
        `same answer as the full model: ${variant.same}; risk certified: at most ${variant.risk}`, `${digits(point.value)} ${axis.unit}${bars}`,
      ];
    }
    return [
      variant.name, `budget ${variant.budget}, ${variant.precision}: ${variant.kept}`,
      `${data.score.replace(/ %$/, "")} ${variant.score_text} (95 %: ${variant.interval_text})`,
      `${digits(point.value)} ${axis.unit}${bars}`, ...(rival ? [`dominated by ${rival}`] : []),
    ];
  }

  const label = (mark) => mark.budget || mark.name;

  // The side of each point on which its label covers the least of other points and labels.
  function labelSides(axis) {
    const shown = drawnOn(axis), marks = shown.map(markOf);
    const plot = at("frontier-plot"), scale = (value) => (axis.log ? Math.log(value) : value);
    const spread = (values, size) => {
      const low = Math.min(...values), high = Math.max(...values);
      return values.map((value) => (size * (value - low)) / (high - low || 1));
    };
    const x = spread(shown.map((index) => scale(pointOf(axis, index).value)), 0.75 * plot.clientWidth);
    const tall = 0.75 * plot.clientHeight, all = marks.flatMap((mark) => [mark.low, mark.high]);
    const y = spread([...marks.map((mark) => mark.score), ...all], tall).slice(0, x.length);
    const boxes = x.map((_, index) => [x[index] - 8, y[index] - 8, x[index] + 8, y[index] + 8]);
    const common = (a, b) => Math.max(0, Math.min(a[2], b[2]) - Math.max(a[0], b[0])) * Math.max(0, Math.min(a[3], b[3]) - Math.max(a[1], b[1]));
    return marks.map((mark, index) => {
      const wide = 8 * label(mark).length + 4;
      const tries = [["top left", -1, 1], ["top right", 1, 1], ["bottom left", -1, -1], ["bottom right", 1, -1]].map(([side, right, up]) => {
        const left = right > 0 ? x[index] + 6 : x[index] - 6 - wide, low = up > 0 ? y[index] + 5 : y[index] - 22;
        const box = [left, low, left + wide, low + 17];
        return { side, box, covered: boxes.reduce((sum, other, place) => sum + (place === index ? 0 : common(box, other)), 0) };
      });
      const best = tries.reduce((a, b) => (b.covered < a.covered ? b : a));
      boxes.push(best.box);
      return best.side;
    });
  }

  function frontierTraces(axis) {
    const sides = labelSides(axis);
    const precisions = [...new Set(data.variants.map((variant) => variant.precision))];
    const chains = drawnOn(axis).filter(isPolicy);
    const bar = { thickness: 1.2, width: 4, color: colour("--soft"), type: "data", symmetric: false };
    const bars = (own) => ({
      error_y: { ...bar, array: own.map((i) => markOf(i).high - markOf(i).score), arrayminus: own.map((i) => markOf(i).score - markOf(i).low) },
      error_x: { ...bar, visible: Boolean(axis.bars), array: own.map((i) => pointOf(axis, i).most - pointOf(axis, i).value),
        arrayminus: own.map((i) => pointOf(axis, i).value - pointOf(axis, i).least) },
    });
    const stars = {
      x: chains.map((i) => pointOf(axis, i).value), y: chains.map((i) => markOf(i).score), customdata: chains,
      mode: "markers+text", name: "policy", showlegend: true, cliponaxis: false,
      text: chains.map((i) => plain(markOf(i).name)), textposition: chains.map((_, place) => sides[data.variants.length + place]),
      textfont: { size: 12, color: colour("--star") }, hoverinfo: "text",
      hovertext: chains.map((i) => words(axis, i).map(plain).join("<br>")), ...bars(chains),
      marker: { size: 17, symbol: "star", color: colour("--star"), line: { width: 1, color: colour("--page") } },
    };
    return [staircase(axis), ...precisions.map((precision) => {
      const own = data.variants.map((_, index) => index).filter((index) => data.variants[index].precision === precision);
      const pick = (read) => own.map(read);
      const hollow = (index) => Boolean(axis.dominated_by[index]);
      const line = (index) => colour(hollow(index) ? "--soft" : "--accent");
      return {
        x: pick((i) => axis.points[i].value), y: pick((i) => data.variants[i].score), customdata: own,
        mode: "markers+text", name: precisions.length > 1 ? plain(precision) : "fixed budget",
        showlegend: precisions.length > 1 || chains.length > 0,
        text: pick((i) => plain(data.variants[i].budget)), textposition: pick((i) => sides[i]),
        textfont: { size: 12, color: colour("--soft") }, cliponaxis: false,
        hovertext: pick((i) => words(axis, i).map(plain).join("<br>")), hoverinfo: "text",
        ...bars(own),
        marker: { size: 12, symbol: SYMBOLS[precision] || "circle", color: pick((i) => (hollow(i) ? colour("--page") : colour("--accent"))),
          line: { width: 2, color: pick(line) } },
      };
    }), ...(chains.length ? [stars] : [])];
  }

  function drawFrontier() {
    const axis = data.axes[chosen.axis];
    chosen.point = -1;
    Plotly.react("frontier-plot", frontierTraces(axis), layout({
      hovermode: "closest", hoverdistance: 30, xaxis: horizontal(axis),
      yaxis: { title: { text: plain(data.score), standoff: 8, font: { size: 13 } } },
    }), CONFIG);
    const better = axis.more_is_better ? "further right" : "further left";
    at("frontier-note").textContent = [
      `Points ${better} are cheaper. The numbers at the points are budgets. Vertical bars are the scores' 95 % intervals`,
      axis.bars ? `, and horizontal bars are the ${axis.bars}. ` : ". ",
      drawnOn(axis).some(isPolicy) ? "Stars are policies: chains of variants in which easy samples stop early. " : "",
      axis.judged
        ? "Hollow points are dominated: another variant surely costs no more and scores better, both beyond their paired intervals."
        : "For this cost, no variant is marked as dominated. The line is the best score measured at up to that cost.",
    ].join("");
  }

  function show(index) {
    const plot = at("frontier-plot");
    const curve = plot.data.findIndex((trace) => trace.customdata && trace.customdata.includes(index));
    Plotly.Fx.hover(plot, [{ curveNumber: curve, pointNumber: plot.data[curve].customdata.indexOf(index) }]);
    at("live").textContent = words(data.axes[chosen.axis], index).join(". ");
  }

  function onKey(event) {
    const plot = at("frontier-plot");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") { Plotly.Fx.unhover(plot); chosen.point = -1; return; }
    if (!step) return;
    event.preventDefault();
    const axis = data.axes[chosen.axis];
    const order = drawnOn(axis).sort((a, b) => pointOf(axis, a).value - pointOf(axis, b).value);
    const from = chosen.point < 0 ? (step > 0 ? -1 : 0) : chosen.point;
    chosen.point = (from + step + order.length) % order.length;
    show(order[chosen.point]);
  }

  function drawLatency() {
    const path = data.latency[chosen.path];
    const labels = path.clients.map((count) => `${count} client${count > 1 ? "s" : ""}`);
    const traces = [];
    data.variants.forEach((variant, series) => {
      const boxes = path.boxes.map((row) => row[series]);
      const known = boxes.map((_, index) => index).filter((index) => boxes[index]);
      if (!known.length) return;
      const read = (name) => known.map((index) => boxes[index][name]);
      const tint = SERIES[series % SERIES.length];
      traces.push({
        type: "box", x: known.map((index) => labels[index]), name: plain(variant.short), offsetgroup: series,
        legendgroup: series, lowerfence: read("p5"), q1: read("p25"), median: read("p50"), q3: read("p75"),
        upperfence: read("p95"), marker: { color: tint }, line: { color: tint, width: 1.5 }, hoverinfo: "skip",
      });
      // A box with given quartiles has no hover text: an invisible bar of the same group has it.
      traces.push({
        type: "bar", x: known.map((index) => labels[index]), base: read("p5"), offsetgroup: series, legendgroup: series,
        y: known.map((index) => boxes[index].p99 - boxes[index].p5), marker: { color: "rgba(0,0,0,0)" }, showlegend: false,
        hoverinfo: "text", textposition: "none",
        hovertext: known.map((index) => [
          plain(variant.name), labels[index], ...["p5", "p25", "p50", "p75", "p95", "p99"].map((name) => `${name}: ${digits(boxes[index][name])} ms`),
          `${boxes[index].requests.toLocaleString("en")} requests`].join("<br>")),
        error_y: { type: "data", array: known.map(() => 0), thickness: 2.5, width: narrow() ? 3 : 5, color: tint },
      });
    });
    const all = path.boxes.flat().filter(Boolean);
    const [low, high] = [Math.min(...all.map((box) => box.p5)) / 1.3, Math.max(...all.map((box) => box.p99)) * 1.3];
    Plotly.react("latency-plot", traces, layout({
      boxmode: "group", barmode: "group", boxgap: 0.3, bargap: 0.3, boxgroupgap: 0.35, bargroupgap: 0.35, hovermode: "closest", xaxis: { type: "category" },
      yaxis: { title: { text: "milliseconds", standoff: 8, font: { size: 13 } }, type: "log", range: [Math.log10(low), Math.log10(high)], ...logTicks(low, high) },
    }), CONFIG);
  }

  function drawStages() {
    const load = data.stages.loads[chosen.load];
    const known = data.variants.map((_, index) => index).filter((index) => load.rows[index]).reverse();
    const names = known.map((index) => plain(data.variants[index].short));
    const traces = data.stages.names.map((name, part) => ({
      type: "bar", orientation: "h", y: names, x: known.map((index) => load.rows[index][part]), name: plain(name),
      marker: { color: SERIES[[0, 3, 1, 2, 7][part]] }, hoverinfo: "text", textposition: "none",
      hovertext: known.map((index) => {
        const row = load.rows[index], total = row.reduce((sum, value) => sum + value, 0);
        return `${plain(data.variants[index].name)}<br>${plain(name)}<br>${digits(row[part] || 0)} ms of ${digits(total)}`;
      }),
    }));
    const plot = at("stages-plot");
    plot.style.height = `${(narrow() ? 13 : 8) + 2.4 * Math.max(3, known.length)}rem`;
    Plotly.react(plot, traces, layout({
      barmode: "stack", bargap: 0.35, hovermode: "closest", legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0, traceorder: "normal", font: { size: narrow() ? 10 : 12 } },
      xaxis: { title: { text: "milliseconds of a request", standoff: 8, font: { size: 13 } }, rangemode: "tozero" }, yaxis: { type: "category" },
    }), CONFIG);
    fillStages(load, [...known].reverse());
  }

  function fillStages(load, known) {
    const table = at("stages-table");
    const row = (kind, cells) => {
      const line = document.createElement("tr");
      cells.forEach((cell, index) => {
        const element = document.createElement(index === 0 || kind === "th" ? "th" : "td");
        element.scope = kind === "th" ? "col" : "row";
        element.textContent = cell;
        line.append(element);
      });
      return line;
    };
    const head = document.createElement("thead"), body = document.createElement("tbody");
    head.append(row("th", ["variant", ...data.stages.names.map((name) => `${name}, ms`)]));
    for (const index of known) body.append(row("td", [data.variants[index].name, ...load.rows[index].map((value) => value.toFixed(3))]));
    table.replaceChildren(head, body);
  }

  // Exclusive buttons as radio inputs, which arrow keys and screen readers support.
  function choices(id, labels, key, draw) {
    const set = at(id);
    labels.forEach((text, index) => {
      const label = document.createElement("label"), input = document.createElement("input"), face = document.createElement("span");
      Object.assign(input, { type: "radio", name: id, value: String(index), checked: index === chosen[key] });
      input.addEventListener("change", () => { chosen[key] = index; draw(); });
      face.textContent = text;
      label.append(input, face);
      set.append(label);
    });
    set.hidden = labels.length < 2;
  }

  const drawn = [];
  function section(id, exists, draw, fieldset, labels, key) {
    if (!exists) return;
    at(id).hidden = false;
    choices(fieldset, labels, key, draw);
    drawn.push(draw);
  }

  section("frontier", data.axes.length, drawFrontier, "axes", data.axes.map((axis) => axis.title), "axis");
  section("latency", data.latency.length, drawLatency, "paths", data.latency.map((path) => path.title), "path");
  section("stages", data.stages.loads.length, drawStages, "loads", data.stages.loads.map((load) => String(load.clients)), "load");
  const drawAll = () => drawn.forEach((draw) => draw());
  drawAll();
  at("frontier-plot").addEventListener("keydown", onKey);
  at("frontier-plot").addEventListener("blur", () => Plotly.Fx.unhover(at("frontier-plot")));
  const theme = document.querySelector(".theme");
  theme.hidden = false;
  theme.addEventListener("change", (event) => { root.dataset.theme = event.target.value; drawAll(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) { width = window.innerWidth; drawAll(); }
  });
})();
