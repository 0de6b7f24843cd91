
(() => {
  // Tables: a click on a header sorts, the second one the other way round.
  const value = (row, i) => row.cells[i].textContent.trim();
  const number = (text) => {
    const found = /^(-?[\d.,]+(?:e-?\d+)?)([kM]?)$/.exec(text);
    return found ? Number(found[1].replaceAll(",", "")) * ({k: 1e3, M: 1e6}[found[2]] || 1) : NaN;
  };
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
    return isNaN(x) ? a.localeCompare(b, undefined, {numeric: true}) : x - y;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => {
      head.setAttribute("role", "button");
      head.tabIndex = 0;
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => compare(value(a, i), value(b, i)) * (down ? -1 : 1));
        table.tBodies[0].append(...rows);
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
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

  // The page of a running run: again in a few seconds, at the same place.
  const {written, patience, reload} = document.body.dataset;
  const store = (write) => { try { return write(sessionStorage); } catch { return null; } };
  const key = "leash " + location.pathname;
  const folds = [...document.querySelectorAll("details")];
  const kept = JSON.parse(store((s) => s.getItem(key)) || "null");
  if (kept) {
    store((s) => s.removeItem(key));
    folds.forEach((fold) => { fold.open = kept.open.includes(fold.querySelector("summary").textContent); });
    scrollTo(0, kept.y);
  }
  if (!reload) return;
  if (Date.now() / 1000 - written > patience) document.getElementById("stale")?.removeAttribute("hidden");
  setTimeout(() => {
    const open = folds.filter((f) => f.open).map((f) => f.querySelector("summary").textContent);
    store((s) => s.setItem(key, JSON.stringify({y: scrollY, open})));
    location.reload();
  }, 1000 * reload);
})();
