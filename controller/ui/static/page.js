// Updates the page with the changes that the leader sends, and filters rows without a request. The page also works
// without this script.
"use strict";

const BEAT = 35000; // ms without an event after which the connection counts as lost. The server sends one every 10 s
const AGAIN = 2000; // ms until the first new attempt to connect
const LONGEST = 30000; // the most ms between two attempts to connect
const BETWEEN = 8000; // the fewest ms between two announcements to a screen reader

const body = document.body;
const state = document.getElementById("state");
const said = document.getElementById("said");
const search = document.getElementById("q");
const byId = (id) => document.getElementById(id);

// The ages that the page shows, which change with time

const SPANS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function span(seconds) {
  for (const [size, unit] of SPANS) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return "0 s";
}

function tick() {
  for (const time of document.querySelectorAll("time:not([data-fixed])")) {
    const text = span((Date.now() - Date.parse(time.dateTime)) / 1000);
    if (time.textContent !== text) time.textContent = text;
  }
}

// The time at which the leader read the figures

function update(at) {
  const updated = byId("updated");
  const time = new Date(at);
  if (Number.isNaN(time.getTime())) return;
  const today = time.toDateString() === new Date().toDateString();
  updated.dateTime = at;
  updated.textContent = today ? time.toLocaleTimeString() : time.toLocaleString();
}

// Announcements to screen readers. Only the newest announcement is made, and not too often

let announced = 0;
let announcing = 0;

function announce(text, soon) {
  clearTimeout(announcing);
  const wait = soon ? 400 : Math.max(announced + BETWEEN - Date.now(), 0);
  announcing = setTimeout(() => {
    announced = Date.now();
    said.textContent = text;
  }, wait);
}

function listed(names) {
  const some = names.slice(0, 3).join(", ");
  return names.length > 3 ? `${some} and ${names.length - 3} more` : some;
}

// The search. If the page has all rows, it hides the rows that do not match. Otherwise it requests the matching rows

let searching = 0;
const total = () => Number(byId("part-table").dataset.all);
const complete = () => byId("part-table").dataset.complete === "yes";
const rows = () => Array.from(document.querySelectorAll("#rows > tr"));

function sought(row) {
  const name = row.dataset.ns.toLowerCase();
  return search.value.toLowerCase().split(/\s+/).every((word) => name.includes(word));
}

function filter() {
  let shown = 0;
  for (const row of rows()) {
    row.hidden = !sought(row);
    if (!row.hidden) shown += 1;
  }
  const count = byId("count");
  const { one = "namespace", many = "namespaces" } = byId("part-table").dataset;
  if (count) count.textContent = `${shown} ${shown === 1 ? one : many}${search.value.trim() ? ` of ${total()}` : ""}`;
  if (byId("none")) byId("none").hidden = shown > 0;
  return `${shown} of ${total()} ${many}`;
}

function address() {
  const url = new URL(location.href);
  const words = search.value.trim();
  if (words) url.searchParams.set("q", words);
  else url.searchParams.delete("q");
  url.hash = "";
  return url;
}

function find() {
  clearTimeout(searching);
  if (complete()) {
    announce(filter(), true);
    searching = setTimeout(() => history.replaceState(null, "", address()), 300);
    for (const link of document.querySelectorAll("a.sort")) {
      const url = new URL(link.href);
      if (search.value.trim()) url.searchParams.set("q", search.value.trim());
      else url.searchParams.delete("q");
      link.href = url.search || "?";
    }
  } else {
    searching = setTimeout(() => load(address(), true), 250);
  }
}

// Loads the page for another search or order, and replaces the parts of this page by the parts of the response

let loading = 0;

async function load(url, kept) {
  const mine = ++loading;
  let answer;
  try {
    answer = await fetch(url, { cache: "no-store", redirect: "manual" });
    if (!answer.ok) throw new Error(String(answer.status));
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (mine !== loading) return;
    replace(fresh);
  } catch {
    if (mine !== loading) return;
    // The leader never redirects. A redirect comes from a proxy at which the user must log in again
    if (answer && (answer.status === 404 || answer.type === "opaqueredirect")) location.reload();
    else setTimeout(() => mine === loading && load(url, kept), AGAIN);
    return;
  }
  if (kept) history.replaceState(null, "", url);
}

function replace(fresh) {
  const focused = document.activeElement && document.activeElement.id;
  const row = rowOf(document.activeElement);
  const scrolled = document.querySelector(".scroll")?.scrollTop;
  for (const part of document.querySelectorAll("[id^='part-']")) {
    const other = fresh.getElementById(part.id);
    if (other && !part.parentElement.closest("[id^='part-']")) {
      part.replaceWith(other);
    }
  }
  body.dataset.version = fresh.body.dataset.version;
  update(fresh.getElementById("updated").dateTime);
  const region = document.querySelector(".scroll");
  if (region && scrolled) region.scrollTop = scrolled;
  if (search.value.trim() && complete()) filter();
  if (focused && byId(focused) && byId(focused) !== document.activeElement) byId(focused).focus({ preventScroll: true });
  else if (row) linkOf(row)?.focus({ preventScroll: true });
}

const rowOf = (element) => element?.closest?.("#rows > tr")?.dataset.ns;
const rowNamed = (name) => rows().find((row) => row.dataset.ns === name);
const linkOf = (name) => rowNamed(name)?.querySelector("a");

async function sort(event) {
  const link = event.target.closest("a.sort");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  const url = new URL(link.href);
  history.pushState(null, "", url);
  await load(url);
  const header = byId(link.id)?.closest("th");
  const way = header?.getAttribute("aria-sort");
  if (header && way !== "none") announce(`Sorted by ${header.textContent.trim()}, ${way}`, true);
  for (const hidden of document.querySelectorAll("#search input[type=hidden]")) {
    if (url.searchParams.has(hidden.name)) hidden.value = url.searchParams.get(hidden.name);
    else hidden.remove();
  }
}

// The stream of changes

function apply(change) {
  for (const [part, html] of Object.entries(change.parts)) {
    const place = byId(`part-${part}`);
    if (place) place.innerHTML = html;
  }
  const here = body.dataset.namespace;
  if (here) {
    if (change.touched.includes(here) || change.refused.includes(here)) load(location.href);
  } else {
    for (const [name, html] of Object.entries(change.rows)) replaceRow(name, html);
  }
  body.dataset.version = change.version;
  update(change.updated);
  const refused = here ? change.refused.filter((name) => name === here) : change.refused;
  const touched = here ? change.touched.filter((name) => name === here) : change.touched;
  if (refused.length) announce(`Refused in ${listed(refused)}`);
  else if (touched.length) announce(`Changed: ${listed(touched)}`);
}

function replaceRow(name, html) {
  const old = rowNamed(name);
  if (!old) return;
  const holder = document.createElement("template");
  holder.innerHTML = html;
  const row = holder.content.querySelector("tr");
  row.classList.add("fresh");
  row.hidden = old.hidden;
  const focused = old.contains(document.activeElement);
  old.replaceWith(row);
  if (focused) row.querySelector("a")?.focus({ preventScroll: true });
}

let source;
let heard = 0;
let failures = 0;

function show(name, text, told) {
  state.hidden = false;
  const before = state.dataset.state;
  if (before === name) return;
  state.dataset.state = name;
  state.textContent = text;
  if (before !== "none") announce(told, true);
}

// A hidden tab closes its stream of changes, because browsers limit the connections, and the leader the listeners
function follow() {
  source?.close();
  if (document.hidden) return;
  const query = new URLSearchParams({ since: body.dataset.version, namespace: body.dataset.namespace });
  source = new EventSource(`${body.dataset.root || "./"}updates?${query}`);
  const hear = () => {
    heard = Date.now();
    failures = 0;
    show("live", "Live", "Live again");
  };
  source.addEventListener("open", hear);
  source.addEventListener("beat", (event) => {
    hear();
    update(event.data);
  });
  source.addEventListener("reset", () => {
    hear();
    load(location.href);
  });
  source.addEventListener("change", (event) => {
    hear();
    apply(JSON.parse(event.data));
  });
  source.addEventListener("error", lost);
  heard = Date.now();
}

// Retries a lost stream of changes. After several failures, the figures are also loaded without the stream
function lost() {
  source.close();
  show("late", "Connecting again…", "Connection lost: the figures may be out of date");
  setTimeout(follow, Math.min(AGAIN * 2 ** failures, LONGEST));
  failures += 1;
  if (failures > 3) load(location.href);
}

function watch() {
  tick();
  if (source?.readyState === EventSource.OPEN && Date.now() - heard > BEAT) lost();
}

document.addEventListener("click", sort);
search.addEventListener("input", find);
byId("search").addEventListener("submit", (event) => {
  if (complete()) event.preventDefault();
});
addEventListener("popstate", () => {
  search.value = new URL(location.href).searchParams.get("q") || "";
  load(location.href);
});
document.addEventListener("visibilitychange", () => (document.hidden ? source?.close() : follow()));
addEventListener("pagehide", () => source?.close());
addEventListener("pageshow", (event) => event.persisted && follow());
tick();
update(byId("updated").dateTime);
follow();
setInterval(watch, 10000);
