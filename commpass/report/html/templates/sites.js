/* What a bar of a site may show. */
const METRICS = {
  exposed_us: { head: "exposed time, predicted", say: micros },
  measured_us: { head: "exposed time, measured", say: micros },
  predicted_us: { head: "time, predicted", say: micros },
  plain_us: { head: "time uncompressed, predicted", say: micros },
  wire_bytes: { head: "bytes on the wire", say: size },
  bytes: { head: "bytes before", say: size },
};

/* Bars of the overview; more sites share one. */
const MOST = 400;

function sitesTable(place, run) {
  for (const group of run.groups) {
    const about = [group.module, group.direction, group.kind, group.group, group.tensor, group.choice].join(" ");
    for (const row of group.sites) {
      row.compressed = group.compressed;
      row.words = [about, row.name, row.module, ...row.before].join(" ").toLowerCase();
    }
    for (const field of ["bytes", "wire_bytes", "plain_us", "predicted_us", "exposed_us", "measured_us"]) {
      group[field] = sum(group.sites, field);
    }
  }
  const inOrder = run.groups.flatMap((group) => group.sites).sort((a, b) => a.graph - b.graph || a.number - b.number);
  const fields = Object.keys(METRICS).filter((field) => field !== "measured_us" || run.measured);
  const start = inOrder.some((row) => row.exposed_us > 0) ? "exposed_us" : "predicted_us";
  const metric = make("select", {}, ...fields.map((field) => make("option", { value: field }, METRICS[field].head)));
  metric.value = start;

  const all = make("div");
  function overview() {
    const field = metric.value;
    const top = inOrder.reduce((best, row) => ((row[field] ?? 0) > (best[field] ?? 0) ? row : best));
    const { head, say } = METRICS[field];
    const where = top.module ? ` in ${top.module}` : "";
    const text = `${counted(inOrder.length, "site")} in graph order, by ${head}; the highest bar is ${say(top[field])}, ${top.name}${where}`;
    const made = bars(inOrder, field, { least: 40, most: MOST }, text);
    made.classList.add("all");
    const several = inOrder.length > MOST ? " A bar is the highest of several neighbours." : "";
    all.replaceChildren(make("div", { className: "scaled" }, scale(highest(inOrder, field), say), made), make("p", { className: "quiet" }, `${text}.${several} Compressed sites have the colour of the policy.`));
  }

  const columns = [
    { head: "sites", sort: (group) => group.module, cell: (group) => title(group) },
    { head: "count", number: true, sort: (group) => group.sites.length, cell: (group) => group.sites.length.toLocaleString("en") },
    { head: "choice", sort: (group) => group.choice, cell: (group) => make("span", { className: group.compressed ? "less" : "" }, group.choice) },
    { head: "bytes on the wire", number: true, sort: (group) => group.wire_bytes, cell: (group) => twice(size(group.bytes), size(group.wire_bytes), share(group.wire_bytes, group.bytes)) },
    { head: "time, predicted", number: true, sort: (group) => group.predicted_us, cell: (group) => slower(group.predicted_us, group.plain_us, twice(micros(group.plain_us), micros(group.predicted_us, group.plain_us), share(group.predicted_us, group.plain_us))) },
    { head: "exposed, predicted", number: true, sort: (group) => group.exposed_us, cell: (group) => micros(group.exposed_us) },
    ...(run.measured ? [{ head: "exposed, measured", number: true, sort: (group) => group.measured_us, cell: (group) => micros(group.measured_us) }] : []),
    { head: "by site", cell: (group) => {
      const { head, say } = METRICS[metric.value];
      const high = highest(inOrder, metric.value);
      const made = bars(group.sites, metric.value, { least: 8, most: 60, high }, `${head} of each site`);
      made.classList.add("spark");
      return make("span", {}, made, make("span", { className: "sub" }, `up to ${say(highest(group.sites, metric.value))}`));
    } },
  ];
  place.append(all);
  const fill = table(place, {
    name: "sites",
    rows: run.groups,
    columns,
    detail: (group, wanted) => groupDetail(run, group, wanted),
    words: (group) => group.sites.map((row) => row.words),
    tools: [make("label", {}, "Bars show", metric)],
  });
  metric.onchange = () => {
    overview();
    fill();
  };
  overview();
}

function title(group) {
  return make("span", {}, make("code", {}, group.module || "(root)"), make("span", { className: "sub" }, [group.direction, group.kind, group.group, group.tensor].join(" · ")));
}

function twice(before, after, part) {
  return make("span", {}, arrow(before, after), before === after || !part ? "" : make("span", { className: "sub" }, part));
}

/* Each site of a group that has the wanted words. What all share is said once, above. */
function groupDetail(run, group, wanted) {
  const rows = group.sites.filter((row) => matches(row.words, wanted));
  const alike = (field) => rows.every((row) => row[field] === rows[0][field]);
  const place = make("div");
  if (alike("reason")) place.append(make("p", {}, make("strong", {}, "Reason: "), run.texts[rows[0].reason] || "none was recorded"));
  if (group.error > 0) place.append(make("p", {}, `Expected relative error: ${(100 * group.error).toPrecision(3)}%.`));
  if (alike("choice")) {
    const same = rows.length > 1 ? ": the same for each site" : "";
    const shared = make("details", {}, make("summary", {}, `All candidates, and why others lost${same}`));
    whenOpened(shared, () => candidates(run, rows[0]));
    place.append(shared);
  }
  place.append(list(rows, (row) => site(run, row, alike)));
  return place;
}

function whenOpened(details, made) {
  details.addEventListener("toggle", () => details.append(made()), { once: true });
}

function site(run, row, alike) {
  const exposed = (us, how) => (us > 0 ? make("span", {}, `exposed ${micros(us)} ${how}`) : "");
  const origin = row.before.length > 1 ? ", made of " : ", a part of ";
  const made = make("details", { className: "site" }, make("summary", {},
    make("code", {}, row.module || row.name),
    make("span", { className: "quiet" }, `graph ${row.graph}, no. ${row.number}`),
    make("span", {}, arrow(size(row.bytes), size(row.wire_bytes))),
    make("span", {}, `${arrow(micros(row.plain_us), micros(row.predicted_us, row.plain_us))} predicted`),
    exposed(row.exposed_us, "predicted"),
    exposed(row.measured_us, "measured"),
  ));
  whenOpened(made, () => make("div", {},
    make("p", {}, make("code", {}, row.name), row.before.length ? origin + row.before.join(", ") : ""),
    alike("reason") ? "" : make("p", {}, make("strong", {}, "Reason: "), run.texts[row.reason] || "none was recorded"),
    run.texts[row.missed] ? make("p", {}, make("strong", {}, "Still exposed: "), run.texts[row.missed]) : "",
    alike("choice") ? "" : candidates(run, row),
  ));
  return made;
}

/* What might have been done to a site, best first. */
function candidates(run, row) {
  if (row.choice < 0) return make("p", { className: "quiet" }, "This dump holds no candidates of it.");
  const head = ["candidate", "on the wire", "error", "time, predicted", "why not"];
  const lines = run.choices[row.choice].map((each) => {
    const scored = each.us != null;
    const cells = [
      scored ? `${size(each.wire_bytes)}${each.share == null ? "" : ` (${Math.round(100 * each.share)}%)`}` : "",
      scored ? `${(100 * each.error).toPrecision(3)}%` : "",
      scored ? micros(each.us) : "",
      each.why,
    ];
    const made = cells.map((cell, at) => make("td", { className: at < 3 ? "number" : "", ...(cell ? { "data-label": head[at + 1] } : {}) }, cell));
    return make("tr", { className: each.why === "chosen" ? "chosen" : "" }, make("th", { scope: "row" }, each.what), ...made);
  });
  const heads = head.map((text, at) => make("th", { scope: "col", className: at > 0 && at < 4 ? "number" : "" }, text));
  return make("table", { className: "cards" }, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines));
}
