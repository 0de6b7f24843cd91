
(() => {
  // Tables: the button in a header sorts, the second time the other way round; empty cells last.
  const value = (row, i) => row.cells[i].textContent.trim();
  const number = (text) => {
    const found = /^(-?[\d.,]+(?:e-?\d+)?)([kM]?)$/.exec(text);
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
    const found = event.target.closest("[title],.tip");
    const text = found && (found.getAttribute("title") || found.textContent);
    if (text) document.body.append(Object.assign(document.createElement("div"), {id: "tip", textContent: text}));
  });

  // The page of what goes on: again in a few seconds, at the same place; once a minute when stale.
  const {written, patience, reload} = document.body.dataset;
  const store = (write) => { try { return write(sessionStorage); } catch { return null; } };
  const key = "leash " + location.pathname;
  const folds = [...document.querySelectorAll("details")];
  const name = (fold) => fold.querySelector("summary").textContent;
  const picks = [...document.querySelectorAll(".tabs input")];
  const scrolled = () => [...document.querySelectorAll(".scroll")];
  const kept = JSON.parse(store((s) => s.getItem(key)) || "null");
  if (kept) {
    store((s) => s.removeItem(key));
    picks.forEach((pick, i) => { pick.checked ||= i === kept.pick; });
    folds.forEach((fold) => { fold.open = kept.open.includes(name(fold)); });
    for (const head of heads) {
      const how = kept.sorted[head.textContent];
      if (how) order(head, how === "descending");
    }
    if (kept.replies) document.getElementById("browser")?.restore?.(kept.replies);
    scrolled().forEach((e, i) => { e.scrollLeft = kept.x[i] || 0; });
    scrollTo(0, kept.y);
  }
  if (!reload) return;
  const stale = Date.now() / 1000 - written > patience;
  if (stale) document.getElementById("stale")?.removeAttribute("hidden");
  const again = () => {
    // someone copies, or types
    if (!getSelection().isCollapsed || document.activeElement?.type === "search") return setTimeout(again, 1000);
    const open = folds.filter((fold) => fold.open).map(name);
    const sorted = Object.fromEntries(heads.map((h) => [h.textContent, h.getAttribute("aria-sort")]));
    const pick = picks.findIndex((one) => one.checked);
    const x = scrolled().map((e) => e.scrollLeft);
    const replies = document.getElementById("browser")?.told?.();
    store((s) => s.setItem(key, JSON.stringify({y: scrollY, x, open, sorted, pick, replies})));
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
