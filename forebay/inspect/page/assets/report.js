"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (id) => document.getElementById(id);
  const make = (name, text, kind) => {
    const element = document.createElement(name);
    if (text !== undefined && text !== null) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };

  // Dark and light: what was chosen on this page wins over what the system says.
  const root = document.documentElement;
  const store = (value) => { try { localStorage.setItem("forebay-theme", value); } catch { /* a page without storage */ } };
  try { const kept = localStorage.getItem("forebay-theme"); if (kept === "dark" || kept === "light") root.dataset.theme = kept; } catch { /* the same */ }
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const turn = () => { root.dataset.theme = isDark() ? "light" : "dark"; store(root.dataset.theme); };
  one("theme").addEventListener("click", turn);

  // Sound: a button beside the picture, which shows where one is and is clicked to go there.
  const players = new Map();
  const shape = (path, kind) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 16 16");
    svg.setAttribute("class", kind);
    svg.setAttribute("aria-hidden", "true");
    const drawn = document.createElementNS("http://www.w3.org/2000/svg", "path");
    drawn.setAttribute("d", path);
    svg.append(drawn);
    return svg;
  };
  const upgrade = (card) => {
    const audio = card.querySelector("audio"), scale = card.querySelector(".scale"), player = card.querySelector(".player");
    if (!audio) return;
    players.set(card, audio);
    audio.addEventListener("play", () => players.forEach((other) => { if (other !== audio) other.pause(); }));
    if (!scale) { player.classList.add("plain"); return; }
    audio.controls = false;
    const button = make("button", null, "play"), head = scale.querySelector(".head");
    button.type = "button";
    const name = card.getAttribute("aria-label");
    button.append(shape("M4 2.2v11.6a.8.8 0 0 0 1.2.7l9.3-5.8a.8.8 0 0 0 0-1.4L5.2 1.5A.8.8 0 0 0 4 2.2z", "go"), shape("M3.5 2.5h3.2v11H3.5zm5.8 0h3.2v11H9.3z", "stop"));
    const show = () => {
      const on = !audio.paused;
      button.setAttribute("aria-pressed", String(on));
      button.setAttribute("aria-label", (on ? "stop " : "play ") + name);
    };
    // The file may hold less than the picture shows: the picture's own seconds are the scale.
    const seconds = () => Number(scale.dataset.seconds) || audio.duration || 1;
    const place = () => {
      card.classList.toggle("playing", !audio.paused || audio.currentTime > 0);
      head.style.left = Math.min(100, 100 * audio.currentTime / seconds()) + "%";
      if (!audio.paused) requestAnimationFrame(place);
    };
    button.addEventListener("click", () => toggle(card));
    for (const event of ["play", "pause", "ended", "seeked"]) audio.addEventListener(event, () => { show(); place(); });
    audio.addEventListener("error", () => { button.disabled = true; button.title = "this browser cannot play it"; });
    scale.classList.add("seeks");
    scale.addEventListener("click", (event) => {
      const box = scale.getBoundingClientRect();
      audio.currentTime = seconds() * Math.max(0, (event.clientX - box.left) / box.width);
      if (audio.paused) toggle(card); else place();
    });
    audio.before(button);
    show();
  };
  const toggle = (card) => {
    const audio = players.get(card);
    if (!audio) return;
    if (audio.paused) audio.play().catch(() => undefined); else audio.pause();
  };
  const cards = all(".card");
  cards.forEach(upgrade);

  // Keys.
  const dialog = one("keys"), search = one("search");
  one("help").addEventListener("click", () => dialog.showModal());
  one("close").addEventListener("click", () => dialog.close());
  const current = () => cards.findIndex((card) => card === document.activeElement || card.contains(document.activeElement));
  // A page of one sample has its neighbours' addresses.
  let last = data.neighbours ? 0 : -1;
  const step = (by) => {
    const where = data.neighbours && data.neighbours[by > 0 ? "next" : "previous"];
    if (where) { location.href = where; return; }
    if (!cards.length) return;
    const from = current() >= 0 ? current() : last;
    last = Math.max(0, Math.min(cards.length - 1, from + by));
    cards[last].focus({ preventScroll: true });
    cards[last].scrollIntoView({ block: "nearest" });
  };
  const actions = {
    j: () => step(1),
    k: () => step(-1),
    t: turn,
    g: () => document.body.classList.toggle("plainly"),
    "?": () => dialog.showModal(),
    "/": () => { if (search) { search.focus(); search.select(); } },
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    const at = event.target, writes = at.matches("input, select, textarea");
    if (event.key === "Escape") { at.blur(); return; }
    if (writes) return;
    if (event.key === " " && !at.matches("button, a, summary, audio")) {
      const place = current() >= 0 ? current() : last;
      if (place >= 0) { event.preventDefault(); toggle(cards[place]); }
      return;
    }
    if (Object.hasOwn(actions, event.key)) { event.preventDefault(); actions[event.key](); }
  });

  // The table: rows that stand in this page, or that are asked for.
  const table = one("rows");
  if (!table) return;
  const heads = all("thead th", table), body = table.querySelector("tbody"), count = one("count");
  const columns = data.columns, size = 50, shown = new Set(data.cards || []);
  const state = { first: 0, text: "", language: "", by: 0, down: false };
  const language = one("language"), places = columns.map((column) => column.name);
  const fit = places.indexOf("fit"), spoken = places.indexOf("language");
  const whole = new Intl.NumberFormat("en");

  const cell = (value, place, index) => {
    const column = columns[place], isLast = place === columns.length - 1;
    if (place === 1) {
      const head = make("th"), code = make("code", value);
      code.title = value;
      code.dir = "auto";
      head.scope = "row";
      const where = data.root ? data.root + "/sample/" + index : shown.has(index) ? "#s" + index : null;
      if (where) { const link = make("a"); link.href = where; link.append(code); head.append(link); } else head.append(code);
      return head;
    }
    const text = value === null ? "" : typeof value !== "number" || !place ? value : column.places ? value.toFixed(column.places) : Number.isInteger(value) ? whole.format(value) : value;
    const made = make("td", isLast ? null : text, column.number ? "n" : isLast ? "text" : "");
    if (isLast) { const inner = make("span", text); inner.dir = "auto"; inner.title = text; made.append(inner); }
    if (!isLast && typeof value === "string") made.dir = "auto";
    if (place === fit && value !== null && Math.abs(value) > data.far) made.classList.add("off");
    return made;
  };
  const fill = (rows, total) => {
    body.replaceChildren(...rows.map((row) => {
      const line = make("tr");
      line.append(...row.map((value, place) => cell(value, place, row[0])));
      return line;
    }));
    const to = state.first + rows.length;
    count.textContent = total ? whole.format(state.first + 1) + " to " + whole.format(to) + " of " + whole.format(total) : "nothing found";
    one("previous").disabled = state.first === 0;
    one("next").disabled = to >= total;
    heads.forEach((head, place) => head.setAttribute("aria-sort", place !== state.by ? "none" : state.down ? "descending" : "ascending"));
  };
  const compare = (a, b) => a === b ? 0 : a === null ? 1 : b === null ? -1 : typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  const here = () => {
    const wanted = state.text.toLowerCase(), end = columns.length - 1;
    const name = state.language === "" ? null : data.languages[Number(state.language)];
    const found = data.rows.filter((row) => (!wanted || String(row[1]).toLowerCase().includes(wanted) || String(row[end]).toLowerCase().includes(wanted)) && (name === null || row[spoken] === name));
    const sign = state.down ? -1 : 1;
    found.sort((a, b) => (a[state.by] === null || b[state.by] === null ? compare(a[state.by], b[state.by]) : sign * compare(a[state.by], b[state.by])) || a[0] - b[0]);
    fill(found.slice(state.first, state.first + size), found.length);
  };
  let asked = 0;
  const there = async () => {
    const mine = ++asked;
    const query = new URLSearchParams({ first: state.first, size, by: state.by, down: state.down ? 1 : 0, text: state.text, language: state.language });
    try {
      const answer = await fetch(data.root + "/rows?" + query, { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const found = await answer.json();
      if (mine === asked) fill(found.rows, found.total);
    } catch {
      if (mine === asked) count.textContent = "forebay inspect --serve does not answer";
    }
  };
  const draw = () => data.root ? there() : here();
  const again = (change) => { Object.assign(state, change, { first: change.first || 0 }); draw(); };
  let wait = 0;
  search.addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(() => again({ text: search.value }), data.root ? 180 : 40); });
  if (language) language.addEventListener("change", () => again({ language: language.value }));
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => again({ by: place, down: state.by === place ? !state.down : false })));
  one("previous").addEventListener("click", () => again({ first: Math.max(0, state.first - size) }));
  one("next").addEventListener("click", () => again({ first: state.first + size }));
  draw();
})();
