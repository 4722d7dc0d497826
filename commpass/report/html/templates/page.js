/* Fills the places that the page has left for its tables and timelines. */
function rulesTable(place, run) {
  table(place, {
    name: "rules",
    rows: run.rules,
    columns: [
      { head: "rule", sort: (rule) => rule.rule, cell: (rule) => rule.rule },
      { head: "times", number: true, sort: (rule) => rule.count, cell: (rule) => rule.count.toLocaleString("en") },
      { head: "bytes less", number: true, sort: (rule) => rule.saved_bytes, cell: (rule) => size(rule.saved_bytes) },
    ],
    words: (rule) => rule.steps.map(([, site, into]) => `${rule.rule} ${site} ${into}`.toLowerCase()),
    detail: (rule, wanted) => list(
      rule.steps.filter(([, site, into]) => matches(`${rule.rule} ${site} ${into}`.toLowerCase(), wanted)),
      ([graph, site, into, saved]) => make("div", {}, make("code", {}, site), ` → ${into}, ${size(saved)} less `, make("span", { className: "quiet" }, `graph ${graph}`)),
    ),
  });
}

function changesTable(place, changes) {
  const of = (change, field) => change.sides.map((side) => side?.[field] ?? 0);
  const both = (field, say) => (change) => {
    const [a, b] = of(change, field);
    const [one, other] = change.sides;
    return twice(one ? say(a) : "-", other ? say(b) : "-", one && other ? share(b, a) : "");
  };
  const wordsOf = (change) => [change.graph, change.module, change.kind, ...change.what].join(" ").toLowerCase();
  table(place, {
    name: "places",
    rows: changes,
    columns: [
      { head: "place", sort: (change) => change.module, cell: (change) => make("span", {}, make("code", {}, change.module || "(root)"), make("span", { className: "sub" }, `${change.graph} · ${change.kind}`)) },
      { head: "sites", number: true, sort: (change) => of(change, "sites")[0], cell: both("sites", String) },
      { head: "what", sort: (change) => change.what.join(), cell: (change) => (change.what.length ? make("span", {}, ...change.what.map((text) => make("div", {}, text))) : "decided alike; other times, bytes or number of sites") },
      { head: "bytes on the wire", number: true, sort: (change) => of(change, "wire_bytes")[1], cell: both("wire_bytes", size) },
      { head: "time, predicted", number: true, sort: (change) => of(change, "predicted_us")[1], cell: (change) => (change.sides.every(Boolean) ? slower(...of(change, "predicted_us").reverse(), both("predicted_us", micros)(change)) : both("predicted_us", micros)(change)) },
    ],
    words: (change) => [wordsOf(change)],
    detail: (change) => make("div", {}, ...change.sides.map((side, at) => make("div", {},
      make("strong", {}, `${"AB"[at]}: `),
      side ? `${side.choice}` : "no such site",
      make("ul", {}, ...(side?.reasons ?? []).map((text) => make("li", {}, text))),
    ))),
  });
}

for (const place of document.querySelectorAll("[data-table]")) {
  const run = data.runs[place.dataset.run];
  if (place.dataset.table === "sites") sitesTable(place, run);
  else if (place.dataset.table === "rules") rulesTable(place, run);
  else changesTable(place, data.changes);
}
for (const place of document.querySelectorAll("[data-timelines]")) {
  const { strips } = data.runs[place.dataset.timelines];
  if (strips.length) place.append(legend(data.kinds), ...strips.map((strip) => timeline(strip, data.kinds)));
}
