/* Sparklines: a bar for each site, or for several neighbours, of which the largest counts.
   ``high`` is the value of a full bar: tables pass one for all their rows. */
const SVG = "http://www.w3.org/2000/svg";

function bars(rows, field, { least, most, high = highest(rows, field) }, what) {
  const count = Math.min(most, rows.length);
  const made = document.createElementNS(SVG, "svg");
  const paths = { plain: "", compressed: "" };
  for (let at = 0; at < count; at++) {
    const part = rows.slice(Math.floor((at * rows.length) / count), Math.floor(((at + 1) * rows.length) / count));
    const top = part.reduce((best, row) => ((row[field] ?? 0) > (best[field] ?? 0) ? row : best));
    const height = high > 0 ? Math.max(top[field] ?? 0, 0) / high : 0;
    const wide = count > 60 ? 1 : 0.8;
    paths[top.compressed ? "compressed" : "plain"] += `M${at} 1v${-Math.max(height, 0.02).toFixed(3)}h${wide}V1z`;
  }
  for (const [kind, d] of Object.entries(paths)) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("d", d);
    path.setAttribute("class", kind);
    made.append(path);
  }
  made.setAttribute("viewBox", `0 0 ${Math.max(count, least)} 1`);
  made.setAttribute("preserveAspectRatio", "none");
  made.setAttribute("class", "bars");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", what);
  return made;
}

function highest(rows, field) {
  return rows.reduce((most, row) => Math.max(most, row[field] ?? 0), 0);
}

/* The scale of an overview: its full height, half of it, and zero. */
function scale(high, say) {
  return make("div", { className: "scale", ariaHidden: "true" }, ...[1, 0.5, 0].map((part) => make("span", {}, part ? say(high * part) : "0")));
}
