/* Tables whose rows are made when they are wanted: so many at once. */
const STEP = 100;

/* Fills a place with a table.
   columns: {head, cell(row) -> text or element, sort(row) -> number or text, number}
   detail(row, words) -> element, shown below a row that is opened; the first column opens it.
   words(row) -> texts that the filter looks through, one for each of the row's parts. */
function table(place, { name, rows, columns, detail, words, tools = [] }) {
  const shown = { order: null, down: false, limit: STEP, wanted: [], open: new Set() };
  const head = make("tr");
  const body = make("tbody");
  const said = make("output", { ariaLive: "polite" });
  const more = make("button", { type: "button", className: "more", onclick: () => {
    shown.limit += STEP;
    fill();
  } });

  for (const column of columns) {
    const cell = make("th", { scope: "col", className: column.number ? "number" : "" });
    if (column.sort) {
      cell.setAttribute("aria-sort", "none");
      cell.append(make("button", { type: "button", onclick: () => sort(column, cell) }, column.head));
    } else {
      cell.append(column.head);
    }
    head.append(cell);
  }

  function sort(column, cell) {
    shown.down = shown.order === column ? !shown.down : Boolean(column.number);
    shown.order = column;
    for (const other of head.children) if (other.hasAttribute("aria-sort")) other.ariaSort = "none";
    cell.ariaSort = shown.down ? "descending" : "ascending";
    fill();
  }

  function sorted(found) {
    if (!shown.order) return found;
    const keys = new Map(found.map((row) => [row, shown.order.sort(row)]));
    const sign = shown.down ? -1 : 1;
    const compare = (x, y) => (typeof x === "number" ? x - y : x.localeCompare(y, "en", { numeric: true }));
    return [...found].sort((a, b) => sign * compare(keys.get(a), keys.get(b)));
  }

  function fill() {
    const found = sorted(rows.filter((row) => words(row).some((text) => matches(text, shown.wanted))));
    body.replaceChildren(...found.slice(0, shown.limit).flatMap(lines));
    const left = found.length - shown.limit;
    more.hidden = left <= 0;
    more.textContent = `Show ${Math.min(STEP, left)} more of ${left.toLocaleString("en")}`;
    const parts = found.flatMap((row) => words(row).filter((text) => matches(text, shown.wanted)));
    said.textContent = shown.wanted.length
      ? `${found.length} of ${counted(rows.length, "line")}, ${counted(parts.length, "site")}`
      : counted(rows.length, "line");
  }

  function lines(row) {
    const cells = columns.map((column, at) => {
      const inside = column.cell(row);
      const first = at === 0;
      return make(first ? "th" : "td", {
        className: first ? "name" : column.number ? "number" : "text",
        ...(first ? { scope: "row" } : { "data-label": column.head }),
      }, first && detail ? opener(row, inside) : inside);
    });
    const line = make("tr", {}, ...cells);
    return shown.open.has(row) ? [line, below(row)] : [line];
  }

  function opener(row, inside) {
    const button = make("button", { type: "button", className: "open", ariaExpanded: String(shown.open.has(row)) }, inside);
    button.onclick = () => {
      const line = button.closest("tr");
      if (shown.open.delete(row)) line.nextSibling.remove();
      else {
        shown.open.add(row);
        line.after(below(row));
      }
      button.ariaExpanded = String(shown.open.has(row));
    };
    return button;
  }

  function below(row) {
    return make("tr", { className: "detail" }, make("td", { colSpan: columns.length }, detail(row, shown.wanted)));
  }

  const filter = make("input", { type: "search", placeholder: "for example: mlp int8 backward" });
  filter.oninput = () => {
    shown.wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown.limit = STEP;
    fill();
  };
  place.append(
    make("div", { className: "tools" }, make("label", {}, `Filter ${name}`, filter), ...tools, said),
    make("table", { className: "cards" }, make("thead", {}, head), body),
    more,
  );
  fill();
  return fill;
}

/* Whether a text has every word. */
function matches(text, wanted) {
  return wanted.every((word) => text.includes(word));
}

/* Elements of a long list, so many at once. */
function list(items, made) {
  const place = make("div");
  const more = make("button", { type: "button", className: "more" });
  let at = 0;
  function grow() {
    const next = items.slice(at, at + STEP).map(made);
    at += next.length;
    more.before(...next);
    more.hidden = at >= items.length;
    more.textContent = `Show ${Math.min(STEP, items.length - at)} more of ${(items.length - at).toLocaleString("en")}`;
    return next;
  }
  more.onclick = () => grow()[0].querySelector("summary")?.focus();
  place.append(more);
  grow();
  return place;
}
