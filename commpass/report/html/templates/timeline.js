/* One timeline as a picture that can be looked at from near. Colours are those of the style. */
const BAR_COLOURS = ["compute", "coding", "starting", "exchange", "exposed"];
const LANE = 34, AXIS = 22, NAMES = 18;

function timeline(strip, kinds) {
  const canvas = make("canvas", { role: "img", ariaLabel: strip.title });
  const said = make("output", { className: "said", ariaLive: "polite" });
  const waits = strip.bars.filter((bar) => kinds[bar[1]].startsWith("exposed"));
  const view = { begin: 0, end: strip.end_us, picked: null };
  const about = (label) => strip.labels[label].split(",")[0];
  const sites = new Map();
  for (const bar of strip.bars) {
    const text = about(bar[5]);
    if (BAR_COLOURS[bar[1]] === "exchange" && !sites.has(text)) sites.set(text, sites.size);
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`);
    const wide = canvas.clientWidth, tall = strip.lanes.length * (LANE + NAMES) + AXIS;
    const dots = window.devicePixelRatio || 1;
    canvas.width = Math.round(wide * dots);
    canvas.height = Math.round(tall * dots);
    canvas.style.height = `${tall}px`;
    const pen = canvas.getContext("2d");
    pen.scale(dots, dots);
    pen.font = "12px system-ui, sans-serif";
    const scale = wide / (view.end - view.begin);
    const x = (us) => (us - view.begin) * scale;
    strip.lanes.forEach((lane, at) => {
      pen.fillStyle = colour("quiet");
      pen.fillText(lane, 0, at * (LANE + NAMES) + 13);
      pen.fillStyle = colour("raised");
      pen.fillRect(0, at * (LANE + NAMES) + NAMES, wide, LANE);
    });
    const narrow = new Map();
    for (const bar of strip.bars) {
      const [lane, kind, begin, us, latency, label] = bar;
      if (begin + us + latency < view.begin || begin > view.end) continue;
      const name = BAR_COLOURS[kind], top = lane * (LANE + NAMES) + NAMES;
      const left = Math.max(-1, x(begin)), right = Math.min(wide + 1, x(begin + us));
      const width = right - left;
      if (width < 1 && bar !== view.picked) {
        const column = `${lane} ${Math.floor(left)}`;
        if (!narrow.has(column)) narrow.set(column, BAR_COLOURS.map(() => 0));
        narrow.get(column)[kind] += width;
        continue;
      }
      if (latency > 0) {
        pen.fillStyle = colour("latency");
        pen.fillRect(right, top + LANE / 4, latency * scale, LANE / 2);
      }
      pen.fillStyle = colour(name === "exchange" ? shade(label) : name);
      if (name === "exposed" && width > 3) hatch(pen, left, top, width, colour);
      else pen.fillRect(left, top, width, LANE);
      if (bar === view.picked) {
        pen.strokeStyle = colour("text");
        pen.lineWidth = 2;
        pen.strokeRect(left, top, width, LANE);
      }
    }
    for (const [column, widths] of narrow) stack(pen, ...column.split(" ").map(Number), widths, colour);
    modules(pen, wide, x, colour);
    axis(pen, wide, tall, x, colour);
  }

  /* The colour of a site's exchanges: neighbours differ. */
  function shade(label) {
    return sites.get(about(label)) % 2 ? "exchange-b" : "exchange";
  }

  /* The module on each exchange with room for it, up to the next one. */
  function modules(pen, wide, x, colour) {
    const next = strip.lanes.map(() => wide);
    for (const [lane, kind, begin, us, , label] of strip.bars.toReversed()) {
      if (BAR_COLOURS[kind] !== "exchange") continue;
      const left = Math.max(0, x(begin)), right = Math.min(next[lane], x(begin + us));
      const text = strip.modules[label];
      next[lane] = Math.min(next[lane], left);
      if (!text || pen.measureText(text).width + 8 > right - left) continue;
      pen.fillStyle = colour(`on-${shade(label)}`);
      pen.fillText(text, left + 4, lane * (LANE + NAMES) + NAMES + LANE / 2 + 4);
    }
  }

  /* Bars that are narrower than a dot: above each other, each as high as its share of the dot. */
  function stack(pen, lane, left, widths, colour) {
    const whole = Math.max(1, widths.reduce((all, width) => all + width, 0));
    let bottom = lane * (LANE + NAMES) + NAMES + LANE;
    widths.forEach((width, kind) => {
      const height = (LANE * width) / whole;
      pen.fillStyle = colour(BAR_COLOURS[kind]);
      pen.fillRect(left, bottom - height, 1, height);
      bottom -= height;
    });
  }

  function hatch(pen, left, top, width, colour) {
    pen.fillStyle = colour("exposed-back");
    pen.fillRect(left, top, width, LANE);
    pen.strokeStyle = colour("exposed");
    pen.lineWidth = 1;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width, LANE);
    pen.stroke();
    pen.clip();
    for (let at = left - LANE; at < left + width; at += 6) {
      pen.moveTo(at, top + LANE);
      pen.lineTo(at + LANE, top);
    }
    pen.stroke();
    pen.restore();
  }

  function axis(pen, wide, tall, x, colour) {
    const span = view.end - view.begin;
    const rough = (span / Math.max(2, wide / 110)) || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const digits = Math.max(0, Math.ceil(-Math.log10(step / 1000)));
    pen.fillStyle = colour("quiet");
    for (let at = Math.ceil(view.begin / step) * step; at <= view.end; at += step) {
      const text = `${rounded(at / 1000, digits)} ms`;
      const left = Math.min(Math.max(x(at) - pen.measureText(text).width / 2, 0), wide - pen.measureText(text).width);
      pen.fillRect(x(at), tall - AXIS, 1, 5);
      pen.fillText(text, left, tall - 4);
    }
  }

  function say(bar) {
    view.picked = bar;
    if (bar) {
      const [lane, kind, begin, us, latency, label] = bar;
      const late = latency > 0 ? ` and ${micros(latency)} of latency` : "";
      said.textContent = `${kinds[kind]}: ${strip.labels[label] || "computing"}; ${micros(us)}${late} from ${rounded(begin / 1000, 3)} ms on (${strip.lanes[lane]})`;
    } else said.textContent = "";
    draw();
  }

  function look(begin, end) {
    const span = Math.min(Math.max(end - begin, strip.end_us / 1e5), strip.end_us) || 1;
    view.begin = Math.min(Math.max(0, begin), strip.end_us - span);
    view.end = view.begin + span;
    draw();
  }

  function zoom(factor) {
    const middle = (view.begin + view.end) / 2, half = ((view.end - view.begin) * factor) / 2;
    look(middle - half, middle + half);
  }

  function move(part) {
    const by = (view.end - view.begin) * part;
    look(view.begin + by, view.end + by);
  }

  function toWait(step) {
    const at = waits.indexOf(view.picked);
    const next = waits[at < 0 ? (step > 0 ? 0 : waits.length - 1) : (at + step + waits.length) % waits.length];
    const half = Math.min((view.end - view.begin) / 2, Math.max(next[3] * 4, strip.end_us / 200));
    look(next[2] + next[3] / 2 - half, next[2] + next[3] / 2 + half);
    say(next);
  }

  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const lane = Math.floor((event.clientY - box.top) / (LANE + NAMES));
    const at = view.begin + ((event.clientX - box.left) / box.width) * (view.end - view.begin);
    const near = (view.end - view.begin) / box.width;
    const found = strip.bars.find((bar) => bar[0] === lane && bar[2] - near <= at && at <= bar[2] + bar[3] + bar[4] + near);
    if (found && found !== view.picked) say(found);
  };

  const button = (text, name, act, off = false) => make("button", { type: "button", ariaLabel: name, title: name, disabled: off, onclick: act }, text);
  const none = waits.length === 0;
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", draw);
  return make("figure", { className: "strip" },
    make("figcaption", {}, strip.title),
    make("div", { className: "tools" },
      button("+", "Nearer", () => zoom(0.5)), button("−", "Farther", () => zoom(2)),
      button("◂", "Earlier", () => move(-0.5)), button("▸", "Later", () => move(0.5)),
      button("All", "All of it", () => look(0, strip.end_us)),
      button("Previous wait", "Previous wait", () => toWait(-1), none), button("Next wait", "Next wait", () => toWait(1), none),
    ),
    canvas, said);
}

/* What the colours of bars mean. */
function legend(kinds) {
  return make("ul", { className: "legend" }, ...[...kinds, "latency"].map((kind, at) => {
    const name = BAR_COLOURS[at] ?? "latency";
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = name === "exposed" ? "none" : `var(--${name})`;
    if (name === "exposed") swatch.style.borderColor = "var(--exposed)";
    return make("li", {}, swatch, kind);
  }));
}
