
(() => {
  // Tables: the button in a header sorts, the second time the other way round; empty cells last.
  const value = (row, i) => row.cells[i].textContent.trim();
  const number = (text) => {
    const found = /^(-?[\d.,]+(?:e-?\d+)?)([kM]?)(?: \(|$)/.exec(text);
    return found ? Number(found[1].replaceAll(",", "")) * ({k: 1e3, M: 1e6}[found[2]] || 1) : NaN;
  };
  const compare = (a, b, down) => {
    if (!a || !b) return !a - !b;
    const [x, y] = [number(a), number(b)], way = down ? -1 : 1;
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? way : -way;
    return way * (isNaN(x) ? a.localeCompare(b, undefined, {numeric: true}) : x - y);
  };
  const order = (head, down) => {
    const i = head.cellIndex, body = head.closest("table").tBodies[0];
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows];
    rows.sort((a, b) => compare(value(a, i), value(b, i), down));
    body.append(...rows);
  };
  const heads = [...document.querySelectorAll("table.sortable th")];
  for (const head of heads) {
    const button = Object.assign(document.createElement("button"), {type: "button"});
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => order(head, head.getAttribute("aria-sort") === "ascending"));
  }

  // Curves: one crosshair shows the values in all charts, a drag zooms all, a double click resets.
  const short = (v) => {
    const size = Math.abs(v);
    if (size >= 1e6) return short(v / 1e6) + "M";
    if (size >= 1e4) return short(v / 1e3) + "k";
    return v && size < 1e-3 ? v.toExponential(2).replace(/\.?0+e/, "e") : String(Number(v.toPrecision(4)));
  };
  const plain = (text) => text.replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt()};`);
  const axis = ([lo, hi, start, stop], warp = Number) => Object.assign(
    (v) => start + (stop - start) * (warp(v) - warp(lo)) / (warp(hi) - warp(lo)), {lo, hi, start, stop});
  const text = (x, y, said, anchor, fill = "") =>
    `<text x="${x}" y="${y}" text-anchor="${anchor}"${fill && ` style="fill:${fill}"`}>${plain(said)}</text>`;
  const ticks = (lo, hi) => {  // as in chart.py
    if (hi - lo <= 1e-3 * Math.max(Math.abs(lo), Math.abs(hi))) [lo, hi] = lo ? [lo - Math.abs(lo) / 2, hi + Math.abs(hi) / 2] : [0, 1];
    const rough = (hi - lo) / 4, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((m) => rough <= m * power * 1.0001);
    const first = Math.floor(lo / step + 1e-9), last = Math.ceil(hi / step - 1e-9);
    return Array.from({length: last - first + 1}, (_, i) => Number(((first + i) * step).toPrecision(10)));
  };
  const decades = (lo, hi) => {
    const first = Math.floor(Math.log10(lo)), count = Math.max(Math.ceil(Math.log10(hi)) - first, 1);
    const step = Math.ceil(count / 5), powers = Array.from({length: Math.ceil(count / step) + 1}, (_, i) => first + i * step);
    return powers.flatMap((p) => (count > 1 || p > first ? [1] : [1, 2, 5]).map((m) => Number(`${m}e${p}`)));
  };
  let zoom = null, from = null;  // iterations: what all charts show, and where a drag began
  const draw = (plot) => {
    const {svg, log, curves} = plot, [lo, hi] = zoom || plot.x, [, , bottom, top] = plot.y;
    plot.along = axis(plot.x);
    plot.up = axis(plot.y);
    if (plot.button) plot.button.textContent = log ? "linear" : "log";
    if (!zoom && !log) return svg.querySelector(".plot").innerHTML = plot.whole;
    const seen = curves.flatMap(([, , , points]) => points)
      .filter(([x, y]) => x >= lo && x <= hi && (y > 0 || !log)).map(([, y]) => y);
    if (!seen.length) seen.push(...log ? [1, 10] : plot.y.slice(0, 2));
    const least = Math.min(...seen), most = Math.max(...seen);
    const ys = log ? decades(least, most) : ticks(least > 0 && least < 0.6 * most ? 0 : least, most);
    const left = Math.max(plot.x[2], 46), right = plot.x[3], frame = [left, top, right - left, bottom - top];
    const x = plot.along = axis([lo, hi, left, right]);
    const y = plot.up = axis([ys[0], ys.at(-1), bottom, top], log ? (v) => Math.log(Math.max(v, 1e-99)) : Number);
    const line = ([name, style, kind, points]) => {
      const spots = points.map((p) => [x(p[0]), y(p[1])]), inside = spots.filter(([px]) => px >= left && px <= right);
      const dots = /line|raw/.test(kind) && name && inside.length < 40 ? inside : [];
      return `<path class="${kind}" style="${style}" d="M${spots.join("L")}"/>`
        + dots.map(([px, py]) => `<circle cx="${px}" cy="${py}" r="2" fill="${/var\(.*?\)/.exec(style)[0]}"/>`).join("")
        + (kind === "bars" ? text(left + 4, spots[0][1] - 4, `${name} ${short(points[0][1])}`, "start") : "");
    };
    svg.querySelector(".plot").innerHTML = [
      ...ys.map((t) => `<path class="grid" d="M${left} ${y(t)}H${right}"/>` + text(left - 6, y(t) + 4, short(t), "end")),
      ...ticks(lo, hi).filter((t) => t >= lo && t <= hi && Number.isInteger(t))
        .map((t) => `<path class="grid" d="M${x(t)} ${bottom}v4"/>` + text(Math.min(x(t), right + 12 - 3.2 * short(t).length), bottom + 15, short(t), "middle")),
      text((left + right) / 2, bottom + 31, plot.label, "middle"),
      `<svg x="${left}" y="${top}" width="${frame[2]}" height="${frame[3]}" viewBox="${frame.join(" ")}">`,
      ...curves.map(line), "</svg>"].join("");
  };
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  const named = (plot) => plot.curves.filter(([name, , kind]) => name && kind !== "bars");
  const cross = (at) => plots.forEach((plot) => {
    const {svg, along, up} = plot, high = svg.viewBox.baseVal.height;
    svg.querySelector(".cross")?.remove();
    if (at === null || at < along.lo || at > along.hi) return;
    const x = along(at), begin = from === null ? x : along(from), right = x > (along.start + along.stop) / 2;
    const rows = named(plot).map(([name, style, , points]) => {
      const [px, y] = nearest(points, at), fill = /var\(.*?\)/.exec(style)[0];
      const dot = px >= along.lo && px <= along.hi
        && `<circle cx="${along(px)}" cy="${Math.min(Math.max(up(y), up.stop), up.start)}" r="3" fill="${fill}"/>`;
      return {said: `${name.length > 26 ? `${name.slice(0, 25)}\u2026` : name} ${short(y)}`, y, fill, dot: dot || ""};
    }).sort((a, b) => b.y - a.y);
    const lines = [{said: `${plot.label} ${at}`, fill: "var(--ink)"}, ...rows].slice(0, Math.floor(high / 13) - 1);
    const first = Math.max(12, Math.min(up.stop + 10, high - 13 * lines.length));
    svg.insertAdjacentHTML("beforeend", [
      `<g class="cross"><path d="M${begin} ${up.stop}H${x}V${up.start}H${begin}z"/>`, ...rows.map((row) => row.dot),
      ...lines.map(({said, fill}, i) => text(x + (right ? -8 : 8), first + 13 * i, said, right ? "end" : "start", fill)),
      "</g>"].join(""));
  });
  const plots = [...document.querySelectorAll("svg[data-plot]")].map((svg) => {
    const plot = {svg, whole: svg.querySelector(".plot").innerHTML, log: false, ...JSON.parse(svg.dataset.plot)};
    const place = (event) => {
      const box = svg.getBoundingClientRect(), {lo, hi, start, stop} = plot.along;
      const share = ((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width - start) / (stop - start);
      return lo + Math.min(Math.max(share, 0), 1) * (hi - lo);
    };
    const listen = (name, act) => svg.addEventListener(name, act);
    listen("pointermove", (event) => {
      const x = place(event);
      cross(from === null ? nearest(named(plot).flatMap(([, , , points]) => points), x)[0] : x);
    });
    listen("pointerdown", (event) => {
      if (event.button || event.target === plot.button) return;
      from = place(event);
      svg.setPointerCapture(event.pointerId);
    });
    listen("pointerup", (event) => {
      const ends = [from, place(event)].sort((a, b) => a - b), {lo, hi} = plot.along;
      if (from !== null && ends[1] - ends[0] > (hi - lo) / 40) show(ends);
      from = null;
    });
    listen("pointercancel", () => { from = null; cross(null); });
    listen("pointerleave", () => { if (from === null) cross(null); });
    listen("dblclick", (event) => { if (event.target !== plot.button) show(null); });
    if (plot.curves.some(([, , kind, points]) => /line|raw/.test(kind) && points.some(([, y]) => y > 0))) {
      const {width, height} = svg.viewBox.baseVal;
      svg.setAttribute("role", "group");
      svg.insertAdjacentHTML("beforeend", text(width - 12, height - 5, "log", "end"));
      plot.button = svg.lastChild;
      for (const [key, value] of [["class", "log"], ["role", "button"], ["tabindex", 0]]) plot.button.setAttribute(key, value);
      const toggle = () => { plot.log = !plot.log; draw(plot); cross(null); };
      plot.button.addEventListener("click", toggle);
      plot.button.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
    }
    draw(plot);
    return plot;
  });
  const show = (range) => { zoom = range; plots.forEach(draw); cross(null); };

  // Commands: a button copies what stands before it, or selects it where a page may not copy.
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      const text = button.previousElementSibling;
      try { await navigator.clipboard.writeText(text.textContent); button.textContent = "copied"; }
      catch { getSelection().selectAllChildren(text); }
    });
  }

  // Tooltips for fingers; a mouse has those of the browser.
  addEventListener("click", (event) => {
    document.getElementById("tip")?.remove();
    if (!matchMedia("(hover: none)").matches) return;
    const found = event.target.closest("[title]");
    const text = found && found.getAttribute("title");
    if (text) document.body.append(Object.assign(document.createElement("div"), {id: "tip", textContent: text}));
  });

  // The page of what goes on: again in a few seconds, at the same place; once a minute when stale.
  const {written, patience, reload} = document.body.dataset;
  const store = (write) => { try { return write(sessionStorage); } catch { return null; } };
  const key = "leash " + location.pathname;
  const folds = [...document.querySelectorAll("details")];
  const name = (fold) => fold.querySelector("summary").textContent;
  const scrolled = () => [...document.querySelectorAll(".scroll")];
  const kept = JSON.parse(store((s) => s.getItem(key)) || "null");
  if (kept) {
    store((s) => s.removeItem(key));
    folds.forEach((fold) => { fold.open = kept.open.includes(name(fold)); });
    for (const head of heads) {
      const how = kept.sorted[head.textContent];
      if (how) order(head, how === "descending");
    }
    plots.forEach((plot, i) => { plot.log = kept.logs.includes(i); });
    show(kept.zoom);
    if (kept.responses) document.getElementById("browser")?.restore?.(kept.responses);
    scrolled().forEach((e, i) => { e.scrollLeft = kept.x[i] || 0; });
    scrollTo(0, kept.y);
  }
  if (!reload) return;
  const stale = Date.now() / 1000 - written > patience;
  if (stale) document.getElementById("stale")?.removeAttribute("hidden");
  const again = () => {
    // someone copies, or types
    if (from !== null || !getSelection().isCollapsed || document.activeElement?.type === "search") return setTimeout(again, 1000);
    const open = folds.filter((fold) => fold.open).map(name);
    const sorted = Object.fromEntries(heads.map((h) => [h.textContent, h.getAttribute("aria-sort")]));
    const x = scrolled().map((e) => e.scrollLeft);
    const responses = document.getElementById("browser")?.told?.();
    const logs = [...plots.keys()].filter((i) => plots[i].log);
    store((s) => s.setItem(key, JSON.stringify({y: scrollY, x, open, sorted, responses, zoom, logs})));
    location.reload();
  };
  const count = () => document.querySelectorAll("[data-since]").forEach((e) => {
    const s = Math.max(Math.round(Date.now() / 1000 - e.dataset.since), 0);
    e.textContent = s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s`
      : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  });
  count();
  setInterval(count, 1000);
  setTimeout(again, 1000 * reload * (stale ? 12 : 1));
})();
