"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

/* Bytes for people; a negative count is one that nobody knows. */
function size(count) {
  if (count == null || count < 0) return "?";
  if (count < 1024) return `${count} B`;
  const power = Math.min(3, Math.floor(Math.log2(count) / 10));
  return `${rounded(count / 1024 ** power, 1)} ${["KiB", "MiB", "GiB"][power - 1]}`;
}

/* A time in us, or in ms if it or the number that it stands beside is at least 1 ms. */
function micros(us, beside = us) {
  if (us == null) return "-";
  return Math.max(us, beside ?? 0) < 1000 ? `${rounded(us, 1)} us` : `${rounded(us / 1000, 1)} ms`;
}

function rounded(value, digits) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function share(after, before) {
  return before > 0 && after >= 0 ? `${Math.round((100 * after) / before)}%` : "-";
}

/* What was and what is, or one of them where they are the same. Lines break at the arrow alone. */
function arrow(before, after) {
  const whole = (text) => String(text).replaceAll(" ", "\u00a0");
  return before === after ? whole(after) : `${whole(before)} → ${whole(after)}`;
}

function counted(count, what) {
  return `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
}

/* A sum of what is known. */
function sum(rows, field) {
  return rows.reduce((total, row) => total + Math.max(0, row[field] ?? 0), 0);
}

/* An element. Texts are always set as text, never as markup. */
function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child != null && child !== ""));
  return made;
}

/* From this ratio of times on, something counts as slower. */
const SLOWER = 1.005;

/* An element, marked if the time after is longer than the one before. */
function slower(after, before, made) {
  if (!(before > 0 && after > SLOWER * before)) return made;
  return make("span", { className: "slower" }, made, make("span", { className: "sub" }, "slower"));
}
