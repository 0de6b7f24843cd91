(() => {
  // The browser of responses: all from the JSON in the page; texts are texts, never markup.
  const root = document.getElementById("browser");
  if (!root) return;
  const data = JSON.parse(document.getElementById("responses-data").textContent);
  const STEP = 6;  // groups at a time
  const make = (tag, look = "", ...inner) => {
    const made = document.createElement(tag);
    if (look) made.className = look;
    made.append(...inner.filter((part) => part !== null && part !== ""));
    return made;
  };
  const button = (text, label, act) => {
    const made = Object.assign(make("button", "", text), {type: "button", ariaLabel: label});
    made.addEventListener("click", act);
    return made;
  };
  const short = (value) => value === 0 ? "0" : Math.abs(value) < 1e-3 ? value.toExponential(1)
    : String(Number(value.toPrecision(3)));

  // A token: coloured by its KL, underlined by its advantage.
  const tokens = (pieces, most) => pieces.text.map((text, i) => {
    const drawn = text.replaceAll("\n", "\u21b5\n"), at = (key) => pieces[key]?.[i] ?? null;
    if (at("log_prob") === null) return make("i", "", drawn);
    const token = make("u", "", drawn);
    for (const [key, signs, name, full] of [["kl", "ml", "k", .5], ["advantage", "ud", "a", 1]]) {
      const value = at(key) || 0, strength = Math.min(Math.abs(value) / most[key], 1) * full;
      if (strength < .01) continue;
      token.classList.add(signs[Number(value < 0)]);
      token.style.setProperty(`--${name}`, strength.toFixed(2));
    }
    const told = [["log-prob", "log_prob"], ["log-ratio", "kl"], ["advantage", "advantage"]];
    token.title = told.filter(([, key]) => at(key) !== null)
      .map(([title, key]) => `${title} ${short(at(key))}`).join(", ");
    return token;
  }).concat(pieces.left_out ? [make("i", "", ` ... ${pieces.left_out} more tokens`)] : []);

  const response = (row, most) => {
    const facts = [row.name || row.rank || ""];
    for (const [key, title, unit] of [["reward", "reward", ""], ["kl", "log-ratio", " nats"], ["advantage", "advantage", ""]])
      if (typeof row[key] === "number") facts.push(`${title} ${short(key === "kl" && Math.abs(row[key]) < 1e-5 ? 0 : row[key])}${unit}`);
    if (row.truncated) facts.push("cut");
    const parts = Object.entries(row.parts || {}).map(([name, value]) => `${name} ${short(value)}`);
    const text = row.pieces ? make("div", "response heat", ...tokens(row.pieces, most))
      : make("div", "response", row.response);
    const chat = (row.messages || []).map(({role, content}) => make("div", "response", `${role}: ${content}`));
    return make("div", "said", text, chat.length ? make("details", "", make("summary", "", "chat"), ...chat) : null,
      make("div", "facts", facts.filter(Boolean).join(" \u00b7 ")),
      parts.length ? make("div", "facts", `parts: ${parts.join(", ")}`) : null);
  };

  const size = (row) => (row.pieces ? row.pieces.text.join("") : row.response).length;

  const group = (found, most) => {
    const head = [found.at ? make("span", "muted", `iteration ${found.at} `) : null];
    const told = (found.messages || []).map(([role, text]) =>
      make("details", "", make("summary", "", role), make("div", "response", text)));
    return make("div", "card group", make("div", "prompt", ...head, found.prompt), ...told,
      found.answer ? make("div", "facts", "right answer: ", make("b", "", found.answer)) : null,
      make("div", "facts aside", `${found.responses.length} responses: scroll sideways \u2192`),
      make("div", `scroll row${found.responses.every((row) => size(row) < 40) ? " brief" : ""}`, ...found.responses.map((row) => response(row, most))));
  };

  // What all but the largest twentieth lie below is full colour.
  const scale = (groups, key) => {
    const sizes = groups.flatMap((g) => g.responses).flatMap((row) => row.pieces?.[key] || [])
      .filter((value) => typeof value === "number").map(Math.abs).sort((a, b) => a - b);
    return Math.max(sizes[Math.floor(.95 * (sizes.length - 1))] || 0, 1e-3);
  };

  const state = {at: null, held: !data.train.length, text: "", shown: STEP};  // at null: the newest
  const last = data.train.length - 1;
  const slider = Object.assign(make("input"), {type: "range", min: 0, max: Math.max(last, 0), ariaLabel: "iteration"});
  const search = Object.assign(make("input"), {type: "search", placeholder: "search prompts and responses", ariaLabel: "search"});
  const label = make("output"), list = make("div"), count = make("p", "muted");
  const go = (place) => {
    const to = Math.min(Math.max(place, 0), last);
    Object.assign(state, {at: to === last ? null : to, shown: STEP});
    draw();
  };
  const here = () => state.at ?? last;
  const back = button("\u2190", "iteration before", () => go(here() - 1));
  const on = button("\u2192", "next iteration", () => go(here() + 1));
  const views = ["training", "held-out prompts"].map((name, i) => button(name, name, () => {
    Object.assign(state, {held: Boolean(i), shown: STEP});
    draw();
  }));
  const more = button("", "more prompts", () => { state.shown += STEP; draw(); });
  more.className = "more";
  const along = make("span", "along", back, slider, on, label);
  const both = data.train.length && data.held.length ? make("span", "views", ...views) : null;
  const bar = make("div", "bar", both, along, search);

  // Responses that do not fit side by side say so.
  const aside = () => list.querySelectorAll(".row").forEach((row) =>
    row.parentElement.classList.toggle("wide", row.scrollWidth > row.clientWidth + 1));
  addEventListener("resize", aside);
  const legend = root.querySelectorAll(".legend");
  const fits = (found, text) => [found.prompt, found.answer, ...found.responses.map((row) => row.response)]
    .some((part) => part && part.toLowerCase().includes(text));
  const draw = () => {
    const text = state.text.trim().toLowerCase();
    const all = state.held ? data.held : text
      ? data.train.flatMap(({iteration, groups}) => groups.map((g) => ({...g, at: iteration}))).reverse()
      : data.train[here()].groups;
    const found = text ? all.filter((one) => fits(one, text)) : all;
    const shown = found.slice(0, state.shown);
    const most = {kl: scale(shown, "kl"), advantage: scale(shown, "advantage")};
    list.replaceChildren(...shown.map((one) => group(one, most)));
    list.className = shown.every((one) => one.responses.length === 1) ? "pairs" : "";
    legend.forEach((one) => {
      one.hidden = !list.querySelector(".heat");
      one.querySelector(".full").textContent = short(most.kl);
    });
    along.hidden = state.held || Boolean(text);
    views.forEach((one, i) => { one.ariaPressed = String(Boolean(i) === state.held); });
    slider.value = here();
    back.disabled = here() === 0;
    on.disabled = here() === last;
    label.textContent = last < 0 ? "" : `iteration ${data.train[here()].iteration} of ${data.train[last].iteration}`;
    slider.ariaValueText = label.textContent;
    count.textContent = text ? `${found.length} of ${all.length} prompts have it` : "";
    aside();
    more.hidden = found.length <= state.shown;
    more.textContent = `${found.length - shown.length} more prompts`;
  };
  slider.addEventListener("input", () => go(Number(slider.value)));
  search.addEventListener("input", () => { Object.assign(state, {text: search.value, shown: STEP}); draw(); });
  addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input,textarea,select,summary,.scroll:focus");
    const box = root.getBoundingClientRect(), seen = box.top < innerHeight && box.bottom > 0;
    const way = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!way || typing || along.hidden || !seen || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    go(here() + way);
  });
  root.querySelector(".plain").replaceChildren(bar, count, list, more);
  draw();
  // A page that reloads itself stays where its reader is (script.js).
  const number = (at) => (at === null ? null : data.train[at].iteration);
  root.told = () => ({...state, at: number(state.at)});
  root.restore = (kept) => {
    const near = data.train.findIndex(({iteration}) => iteration >= kept.at);  // thinned otherwise
    Object.assign(state, kept, {at: kept.at === null || near < 0 || near === last ? null : near});
    state.held = data.held.length ? state.held : false;
    if (!data.train.length) state.held = true;
    search.value = state.text;
    draw();
  };
})();
