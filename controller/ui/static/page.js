// Requests the figures every few seconds and shows them. On the page of a namespace, it also requests the namespace's
// pods and claims. Names and messages are chosen by tenants, so every text becomes a text node, and never markup.
"use strict";

const POLL = 4000; // ms between two requests
const SOON = 1000; // ms until the next request if the Events have not been listed yet
const AGAIN = 2000; // ms until the first new attempt after a failed request
const LONGEST = 30000; // the most ms between two attempts
const BETWEEN = 8000; // the fewest ms between two announcements to a screen reader
const MAX_ROWS = 500; // the most rows in a table. Users find the other rows by the search field
const MAX_LISTED = 50; // the most entries in a list
const RENEWAL = 14 * 86400; // a certificate that ends within this many seconds is highlighted
const FULL = 10; // the step on the scale of colours for a limit that is reached
const OVER = 11; // the step for usage above the limit

const byId = (id) => document.getElementById(id);
const root = document.body.dataset.root;
const here = decodeURIComponent(/\/namespaces\/([^/]+)$/.exec(location.pathname)?.[1] ?? "");
const search = byId("q");
let figures; // the last document
let holders; // the pods and claims of this page's namespace

// Elements

function make(tag, attributes, ...children) {
  const space = ["svg", "rect"].includes(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const element = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat(Infinity).filter(Boolean));
  return element;
}

const quiet = (...children) => make("p", { class: "quiet" }, ...children);
const empty = (...children) => make("p", { class: "empty" }, ...children);
const big = (figure, rest) => make("p", { class: "big" }, figure && bold(figure), rest);
const bold = (text) => make("b", {}, text);
const small = (text, title) => make("small", { title }, text);
const tag = (text, title, hot) => make("span", { class: hot ? "tag hot" : "tag", title }, text);
const link = (href, text) => make("a", { href }, text);
const pathOf = (name) => `${root}namespaces/${encodeURIComponent(name)}`;

// Makes `old` equal to `fresh`. Equal parts stay, and so do the focus and the position of scrollbars
function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE) return void old.replaceWith(fresh);
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  after.forEach((child, index) => (before[index] ? morph(before[index], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
}

function put(part, ...children) {
  const fresh = byId(`part-${part}`).cloneNode(false);
  fresh.append(...children.flat(Infinity).filter(Boolean));
  morph(byId(`part-${part}`), fresh);
}

// Texts

const number = (cards) => String(Number(cards.toFixed(2)));
const plural = (count, one, many) => `${number(count)} ${count === 1 ? one : many}`;
const memory = (mib) => (mib < 1024 ? `${mib} MiB` : `${(mib / 1024).toFixed(1).replace(/\.0$/, "")} GiB`);
const secondsSince = (time) => (Date.now() - Date.parse(time)) / 1000;
const sum = (values) => Math.round(values.reduce((all, value) => all + value, 0) * 100) / 100;

function span(seconds) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.max(Math.floor(seconds), 0)} s`;
}

function age(time, after = "") {
  if (Number.isNaN(Date.parse(time))) return make("span", {}, time || "unknown");
  return make("time", { datetime: time, title: time }, span(secondsSince(time)) + after);
}

// The usage of one GPU model by a namespace

const used = (part, limit) => (limit ? part / limit : part ? 2 : 0); // any usage of a limit of 0 is over the limit
const isBlocked = (use) => (use.limit ?? use.memory_limit) === 0 && !use.used;
const limits = (use) => (use.total ? [...use.models, use.total] : use.models);
const shared = (use) => (use.team ? limits(use.team) : []);
const isFull = (use) => [...limits(use), ...shared(use)].some((each) => each.used && fullness(each) >= 1);

function fullness(use) {
  const cards = use.limit === null ? 0 : used(use.used, use.limit);
  return use.memory_limit === null ? cards : Math.max(cards, used(use.memory_used ?? 0, use.memory_limit));
}

// The term 1e-9 corrects rounding errors (6.99 for 7). Any usage gets at least the first step
function step(use) {
  const full = fullness(use);
  if (full > 1) return OVER;
  return full > 0 ? Math.max(Math.floor(full * FULL + 1e-9), 1) : 0;
}

function fullest(use) {
  const found = limits(use).filter((each) => !isBlocked(each));
  return found.sort((one, other) => fullness(other) - fullness(one) || other.used - one.used)[0];
}

// A percentage is rounded down, so that 100 % is shown only if the limit is reached
function share(use) {
  const most = fullest(use);
  if (!most) return use.models.length ? "blocked" : "none";
  if (!most.limit && !most.memory_limit) return [bold("over"), ` the limit of ${most.model}`];
  return [bold(`${Math.floor(fullness(most) * 100 + 1e-9)} %`), ` of ${most.model}`];
}

function bar(part, pending, limit, reserved = 0) {
  const whole = Math.max(limit ?? 0, part + reserved);
  const percent = (value) => `${((100 * value) / whole).toFixed(2)}%`;
  const rect = (name, x, width) => make("rect", { class: name, x: percent(x), width: percent(width), height: 8 });
  return make("svg", { class: "fill", width: "100%", height: 8, "aria-hidden": "true" },
    make("rect", { class: "track", width: "100%", height: 8, rx: 4 }),
    whole && rect(limit !== null && part > limit ? "part-over" : "part-used", 0, part),
    pending && rect("part-pending", part - pending, pending),
    reserved && rect("part-reserved", part, reserved));
}

const RESERVED = "Reserved by the webhook to admit the next pods faster. Unused cards are released within seconds.";
const TAKING_EFFECT = "The API server possibly does not call the webhook for pods of this namespace yet";
const LOST = "No GPU pod is admitted for about a minute and a half, until every pod that was charged in the lost ledger"
  + " is stored or can no longer be stored";
const UNPINNED = "Pods that are not charged, because neither they nor their nodes have a known GPU model";

const TEAM = "The namespaces of a team share its limits";

const notes = (use) => [
  use.team && tag(`team ${use.team.name}`, TEAM),
  use.mode === "warn" && tag("warn", "A pod over quota is admitted, and its owner is warned"),
  use.mode === "audit" && tag("audit", "A pod over quota is admitted, and only recorded"),
  use.unregistered && tag("not in effect", use.unregistered, true),
  use.taking_effect && !use.unregistered && tag("taking effect", TAKING_EFFECT, true),
  use.ledger_lost && tag("ledger lost", LOST, true),
  use.more_unpinned && tag(`${use.more_unpinned} unpinned`, UNPINNED, true),
];
const granted = (grant) => `${grant.cards === null ? memory(grant.memory) : number(grant.cards)}`;

// The parts of both pages

function nav(...links) {
  const { docs, grafana } = figures;
  const variable = here && `${grafana.includes("?") ? "&" : "?"}var-namespace=${encodeURIComponent(here)}`;
  put("nav", links, docs && link(docs, "Documentation"), grafana && link(grafana + variable, "Grafana"));
}

function rejections(list) {
  if (!list) return empty("Rejections are not known yet, because the Events have not been listed. If this does not change, see the controller’s log.");
  const more = list.length - MAX_LISTED;
  return [reports(list, "No recent rejections."), more > 0 && quiet(`And ${more} others.`)];
}

// `list` begins with the newest entry of each namespace
function reports(list, none) {
  if (!list.length) return empty(none);
  const shown = list.slice(0, MAX_LISTED).sort((one, other) => (one.at < other.at ? 1 : one.at > other.at ? -1 : 0));
  return make("ul", { class: "list" }, shown.map((each) => make("li", {},
    make("div", { class: "head" },
      each.namespace && each.namespace !== here && link(pathOf(each.namespace), each.namespace),
      make("span", {}, `${each.kind} `, bold(each.name)),
      each.count > 1 && tag(`${each.count} times`, "The number in the Events that the cluster still has"),
      make("span", { class: "when" }, age(each.at, " ago"))),
    make("p", { class: "why" }, each.message))));
}

// Tables. A column has the key by which the address sorts, a label, and a function that returns a row's sort keys. It
// returns none for a row without a figure, which comes last

const TEXTS = ["name", "kind", "model", "node"]; // a first click sorts these from a to z, others from the largest

function header(column, index, now) {
  const query = new URLSearchParams(search.value.trim() ? { q: search.value.trim() } : {});
  query.set("sort", column.key);
  if (column.key === now.key ? !now.down : !TEXTS.includes(column.key)) query.set("order", "desc");
  const way = column.key !== now.key ? "none" : now.down ? "descending" : "ascending";
  return make("th", { scope: "col", "aria-sort": way, class: column.kind },
    make("a", { class: "sort", id: `by-${index}`, href: `?${query}` }, column.label));
}

function compare(one, other, down) {
  if (!one.length || !other.length) return other.length - one.length;
  const at = one.findIndex((value, index) => value !== other[index]);
  return at < 0 ? 0 : (one[at] < other[at] ? -1 : 1) * (down ? -1 : 1);
}

function table(kind, caption, rows, columns, first, nouns, rowOf) {
  const words = search.value.toLowerCase().split(/\s+/);
  const texts = (row) => `${row.key} ${row.team?.name ?? ""}`.toLowerCase();
  const found = rows.filter((row) => words.every((word) => texts(row).includes(word)));
  const query = new URLSearchParams(location.search);
  const column = columns.find((each) => each.key === query.get("sort"));
  const now = column ? { key: column.key, down: query.get("order") === "desc" } : first;
  const { value } = column ?? columns.find((each) => each.key === first.key);
  found.sort((one, other) => compare([one.key], [other.key]));
  found.sort((one, other) => compare(value(one), value(other), now.down));
  const some = found.length > MAX_ROWS ? `${MAX_ROWS} of ${found.length} ${nouns[1]}; search to find the others`
    : plural(found.length, ...nouns) + (search.value.trim() ? ` of ${rows.length}` : "");
  const counted = make("p", { id: "count", class: "quiet" }, some);
  if (!found.length) return [counted, empty(`No ${nouns[0]} matches.`)];
  return [
    make("div", { class: "under" }, counted, kind === "heat" && legend()),
    make("div", { class: "scroll", role: "region", "aria-label": `Table of ${nouns[1]}`, tabindex: 0 },
      make("table", { class: kind, "aria-describedby": "caption" }, make("caption", { class: "unseen", id: "caption" }, caption),
        make("thead", {}, make("tr", {}, columns.map((each, index) => header(each, index, now)))),
        make("tbody", { id: "rows" }, found.slice(0, MAX_ROWS).map(rowOf)))),
  ];
}

function legend() {
  const steps = [...Array(FULL + 1).keys()].map((each) => make("i", { class: `h${each}` }));
  return make("p", { class: "legend", "aria-hidden": "true" }, "unused", make("span", { class: "ramp" }, steps), "full",
    make("i", { class: "h11" }), "over the limit");
}

const files = (path) => quiet("Download all rows as ", link(`${path}.csv`, "CSV"), " or ", link(`${path}.json`, "JSON"));
const cell = (label, kind, ...children) => make("td", { "data-m": label, class: kind }, ...children);
const row = (key, head, ...cells) => make("tr", { "data-ns": key }, make("th", { scope: "row" }, head), cells);

// The page of all namespaces

function overview() {
  const { namespaces, models } = figures;
  nav(link("#rows-title", "Namespaces"), link("#rejections", "Rejections"), link("#beyond", "Beyond the quota"),
    figures.removals && link("#removals", "Garbage"), figures.certificates && link("#certificates", "Certificates"));
  const missing = new Set(namespaces.map((use) => use.unregistered).filter(Boolean));
  put("lead", [...missing].map((text) => make("p", { class: "lead" }, tag("not in effect", undefined, true), ` ${text}`)),
    make("p", { class: "lead" }, summary()));
  put("models", models.length ? make("ul", { class: "tiles" }, models.map(tile)) : empty("No node has a GPU model yet."));
  put("table", namespaces.length ? heat() : empty("No namespace has a GPU quota yet. To limit a namespace, add an entry",
    " to the quota ConfigMap, for example ", make("code", {}, "team-a: {quota: {A100: 8}}"), "."));
  put("rejections", rejections(figures.rejections));
  put("beyond", reports(figures.beyond, "Every pod and claim is within its quota."));
  put("removals", reports(figures.removals ?? [], "No stale allocation was removed in the last hour."));
  put("certificates", certificates(figures.certificates ?? []));
  for (const part of ["beyond", "removals", "certificates"]) byId(part).parentElement.hidden = figures[part] === null;
}

const free = (model) => (!model || model.cards === null ? null : Math.max(model.cards - model.used, 0));

function summary() {
  const { namespaces, models } = figures;
  const known = models.filter((model) => model.cards !== null);
  const several = (list) => (list.length > 1 ? ` of ${list.length} models` : "");
  const left = sum(known.map(free));
  const full = namespaces.filter(isFull).length;
  const cards = (list, name) => plural(sum(list.map((each) => each[name])), "card", "cards");
  const said = known.length ? [bold(number(left)), ` of ${cards(known, "cards")}${several(known)} ${left === 1 ? "is" : "are"} free`]
    : models.length ? [bold(cards(models, "used")), `${several(models)} in use`] : "No cards are known yet";
  return [said, ", ", namespaces.length ? plural(namespaces.length, "namespace has", "namespaces have") : "no namespace has",
    " a quota", full && [", ", bold(String(full)), ` of them ${full === 1 ? "has" : "have"} reached a limit`], "."];
}

function tile(model) {
  const over = model.cards !== null && model.limits > model.cards;
  return make("li", { class: "tile" }, make("h3", {}, model.model),
    model.cards === null ? big(number(model.used), " in use") : big(number(free(model)), " free"),
    bar(model.cards === null ? 0 : model.used, 0, model.cards),
    quiet(model.cards === null ? "the number of cards is not known" : `${number(model.used)} of ${number(model.cards)} in use`),
    make("p", { class: over ? "quiet warm" : "quiet" }, `quotas add up to ${number(model.limits)}`, over && " (oversubscribed)"));
}

function heat() {
  const byName = (use) => new Map(limits(use).map((each) => [each.model, each]));
  const teams = new Map(figures.namespaces.filter((use) => use.team).map(({ team }) => [team.name, team]));
  const uses = [
    ...figures.namespaces.map((use) => ({ ...use, key: use.namespace, of: byName(use) })),
    ...[...teams.values()].map((team) => ({ ...team, key: `team ${team.name}`, of: byName(team), isTeam: true })),
  ];
  const names = [...new Set([...uses.flatMap((use) => [...use.of.keys()]), ...figures.models.map((each) => each.model)])];
  names.sort((one, other) => compare([one.toLowerCase()], [other.toLowerCase()]));
  const cards = (use) => (use ? [use.used, fullness(use)] : []);
  const columns = [
    { key: "name", label: "Namespace", value: (use) => (use.isTeam ? [use.name, 0] : [use.team?.name ?? use.key, 1, use.key]) },
    { key: "fullest", label: "Fullest limit", value: (use) => cards(fullest(use)).reverse() },
    ...names.map((name) => ({ key: `model.${name}`, label: name, value: (use) => cards(use.of.get(name)) })),
  ];
  const caption = "Cards used of each namespace's limit, by model. A namespace without a figure may not use that model.";
  const head = (use) => (use.isTeam ? bold(use.key) : [link(pathOf(use.key), use.key), notes(use)]);
  const rowOf = (use) => row(use.key, head(use), cell("Fullest limit", "sum", share(use)),
    names.map((name) => amount(name, use.of.get(name))));
  return [table("heat", caption, uses, columns, { key: "name" }, teams.size ? ["namespace or team", "namespaces and teams"] : ["namespace", "namespaces"], rowOf), files(`${root}usage`)];
}

function amount(name, use) {
  if (!use) return cell(undefined, "no", make("span", { class: "unseen" }, "no quota"));
  if (isBlocked(use)) return cell(name, "no", "blocked");
  return cell(name, `h${step(use)}`, bold(number(use.used)), use.limit !== null && ` of ${number(use.limit)}`,
    step(use) === OVER && make("em", {}, " over"),
    use.pending && small(`${number(use.pending)} pending`),
    use.terminating && small(`${number(use.terminating)} terminating`, "Charged to deleted pods whose containers may still run"),
    use.reserved && small(`${number(use.reserved)} reserved`, RESERVED),
    use.grants.map((grant) => small(`${granted(grant)} until ${grant.until}`)),
    use.memory_limit !== null && small(`${memory(use.memory_used)} of ${memory(use.memory_limit)}`));
}

function certificates(list) {
  if (!list.length) return empty("No certificate was found.");
  return make("ul", { class: "list" }, list.map((each) => {
    const left = -secondsSince(each.end ?? "");
    const text = left > 0 ? `${span(left)} left` : left <= 0 ? `ended ${span(-left)} ago` : "the end is not known";
    return make("li", {}, make("div", { class: "head" }, bold(`webhook at ${each.address}`), tag(text, undefined, each.fault || left < RENEWAL),
      make("span", { class: "when" }, each.end && `until ${each.end.slice(0, 10)}`)),
    each.fault && make("p", { class: "why" }, each.fault));
  }));
}

// The page of one namespace

function namespacePage() {
  const use = figures.namespaces.find((each) => each.namespace === here);
  nav(link(root, "All namespaces"));
  byId("title").textContent = here;
  byId("rows-title").textContent = "Pods and claims";
  document.title = `${here} · GPU quota`;
  put("lead", make("p", { class: "lead" }, use ? own(use) : "This namespace has no GPU quota: its pods and claims are not limited."));
  const others = (each) => sum([each.used, ...use.models.filter((own) => [own.model, "total"].includes(each.model)).map((own) => -own.used)]);
  const tiles = () => [limits(use).map((each) => ownTile(each)), shared(use).map((each) => ownTile(each, use.team.name, Math.max(others(each), 0)))];
  put("models", use && (use.models.length ? make("ul", { class: "tiles" }, tiles())
    : empty("The quota of this namespace lists no model, so no pod here may use a GPU.")));
  put("table", holders.items.length ? pods() : empty("No pod or claim here holds a card."));
  put("rejections", rejections(figures.rejections?.filter((each) => each.namespace === here)));
}

function own(use) {
  const total = (name) => sum(use.models.map((each) => each[name]));
  const limit = use.total?.limit ?? (use.models.some((each) => each.limit === null) ? null : total("limit"));
  return [limit === null ? bold(plural(total("used"), "card", "cards")) : [bold(number(total("used"))), ` of ${plural(limit, "card", "cards")}`],
    use.models.length > 1 && ` of ${use.models.length} models`, " in use", total("pending") && `, ${number(total("pending"))} of them pending`,
    total("reserved") && `, ${number(total("reserved"))} reserved`, ". ", notes(use)];
}

// `team`: the name of the team, if the tile shows a limit of the team. `others`: the cards that its other namespaces use
function ownTile(use, team, others) {
  const left = free(figures.models.find((each) => each.model === use.model));
  const cards = use.limit !== null;
  const text = cards ? number : memory;
  const [part, limit, pending, reserved] = cards ? [use.used, use.limit, use.pending, use.reserved]
    : [use.memory_used, use.memory_limit, 0, use.memory_reserved];
  const over = part > limit ? make("span", { class: "warm" }, `${text(part - limit)} over the limit`)
    : `${text(cards ? use.available : Math.max(limit - part - reserved, 0))} available`;
  return make("li", { class: "tile" }, make("h3", {}, team ? `${use.model} in team ${team}` : use.model),
    isBlocked(use) ? [big("", "blocked"), quiet("the limit is 0")] : [
      big(text(part), ` of ${text(limit)}`), bar(part, pending, limit, reserved),
      quiet(over, pending && `, ${text(pending)} pending`, reserved && [", ", make("span", { title: RESERVED }, `${text(reserved)} reserved`)]),
      !cards && quiet(`${plural(use.used, "card", "cards")} charged; a whole card takes ${memory(use.card_memory)}`),
      cards && use.memory_limit !== null && quiet(`memory: ${memory(use.memory_used)} of ${memory(use.memory_limit)}`)],
    use.grants.map((grant) => quiet(`${granted(grant)} of these until ${grant.until}${grant.why && `: ${grant.why}`}`)),
    team ? quiet(`${plural(others, "card", "cards")} used by other namespaces`)
      : use.model !== "total" && quiet(left === null ? "free in the cluster: not known" : `${number(left)} free in the cluster`));
}

function pods() {
  const items = holders.items.map((each) => ({ ...each, key: each.name }));
  const nouns = items.some((each) => each.kind === "claim") ? ["pod or claim", "pods and claims"] : ["pod", "pods"];
  const columns = ["name", "kind", "model", "cards", "memory", "node", "age"].map((key) => ({
    key, label: key[0].toUpperCase() + key.slice(1), kind: ["cards", "memory", "age"].includes(key) ? "n" : undefined,
    value: (each) => [key === "age" ? secondsSince(each.created) || -Infinity : each[key] ?? ""],
  }));
  const gray = (text) => make("span", { class: "quiet" }, text);
  const none = () => tag("none", "The pod is pinned to no model, and its node has no known model", true);
  const rowOf = (each) => row(each.name, each.name, cell("Kind", "", each.kind), cell("Model", "", each.model ?? none()),
    cell("Cards", "n", number(each.cards)), cell("Memory", "n", each.memory ? memory(each.memory) : gray("–")),
    cell("Node", "", each.node || gray("not placed yet")), cell("Age", "n", age(each.created)));
  const more = holders.left_out && quiet(`${holders.left_out} pods and claims with fewer cards are left out, also of the files.`);
  const caption = "Pods and claims that hold cards, with their charges.";
  return [table("pods", caption, items, columns, { key: "cards", down: true }, nouns, rowOf), files(`${pathOf(here)}/pods`), more];
}

function render() {
  if (!figures) return;
  const focused = document.activeElement.closest("#rows > tr")?.dataset.ns;
  here ? namespacePage() : overview();
  // A row may have moved. Then the focus follows it
  const at = [...document.querySelectorAll("#rows > tr")].find((each) => each.dataset.ns === focused);
  if (!at?.contains(document.activeElement)) at?.querySelector("a")?.focus({ preventScroll: true });
}

// Announcements to screen readers. Only the newest announcement is made, and not too often

let announced = 0;
let announcing;

function announce(text, soon) {
  clearTimeout(announcing);
  announcing = setTimeout(() => {
    announced = Date.now();
    byId("said").textContent = text;
  }, soon ? 400 : Math.max(announced + BETWEEN - Date.now(), 0));
}

// Returns the namespaces of the entries that are new or have changed
function changed(before, after) {
  const known = new Set((before ?? after ?? []).map((each) => JSON.stringify(each)));
  const names = (after ?? []).filter((each) => !known.has(JSON.stringify(each))).map((each) => each.namespace);
  return [...new Set(names)].filter((name) => !here || name === here);
}

function announceChanges(before) {
  const [rejected, used] = ["rejections", "namespaces"].map((part) => changed(before[part], figures[part]));
  const some = rejected.length ? rejected : used;
  const text = some.slice(0, 3).join(", ") + (some.length > 3 ? ` and ${some.length - 3} more` : "");
  if (text) announce(rejected.length ? `Rejected in ${text}` : `Changed: ${text}`);
}

// The requests

const tags = new Map(); // the ETag of the last answer of each URL

// Returns the JSON at this URL; undefined if it has not changed
async function get(url) {
  const headers = tags.has(url) ? { "If-None-Match": tags.get(url) } : {};
  const answer = await fetch(url, { cache: "no-store", redirect: "manual", headers });
  // The leader never redirects. A redirect comes from a proxy at which the user must log in again
  if (answer.type === "opaqueredirect" || answer.status === 401) location.reload();
  if (answer.status === 304) return void update(answer.headers.get("Date") ?? Date.now());
  if (!answer.ok) throw Object.assign(new Error(await answer.text()), { status: answer.status });
  const read = await answer.json();
  tags.set(url, answer.headers.get("ETag"));
  update(read.updated);
  return read;
}

function update(at) {
  const time = new Date(at);
  const today = time.toDateString() === new Date().toDateString();
  byId("updated").dateTime = time.toISOString();
  byId("updated").textContent = today ? time.toLocaleTimeString() : time.toLocaleString();
}

let failures = 0;
let next;

async function poll() {
  clearTimeout(next);
  if (document.hidden) return; // a hidden tab makes no requests
  let wait = POLL;
  const before = figures;
  try {
    const [fresh, held] = await Promise.all([get(`${root}usage.json`), here && get(`${pathOf(here)}/pods.json`)]);
    [figures, holders] = [fresh ?? figures, held || holders];
    failures = 0;
    show("live", "Live", "Live again");
    render();
    if (before && fresh) announceChanges(before);
    if (!figures.rejections) wait = SOON;
  } catch (error) {
    wait = Math.min(AGAIN * 2 ** failures, LONGEST);
    failures += 1;
    if (error.status === 404 && figures) location.reload(); // the namespace was deleted
    if (!figures) put("lead", make("p", { class: "lead" }, error.message.slice(0, 500)));
    else show("late", "Connecting again…", "Connection lost: the figures may be out of date");
  }
  clearTimeout(next);
  next = setTimeout(poll, wait);
}

function show(name, text, told) {
  const state = byId("state");
  const before = state.dataset.state;
  state.hidden = false;
  if (before === name) return;
  [state.dataset.state, state.textContent] = [name, text];
  if (before !== "none") announce(told, true);
}

// The search and the order, which the address keeps

function find() {
  render();
  announce(byId("count")?.textContent, true);
  const url = new URL(location.href);
  url.searchParams.set("q", search.value.trim());
  if (!search.value.trim()) url.searchParams.delete("q");
  history.replaceState(null, "", url);
}

function sort(event) {
  const clicked = event.target.closest("a.sort");
  if (!clicked || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  history.pushState(null, "", clicked.href);
  render();
  const head = byId(clicked.id).closest("th");
  announce(`Sorted by ${head.textContent}, ${head.getAttribute("aria-sort")}`, true);
}

function restore() {
  search.value = new URLSearchParams(location.search).get("q") ?? "";
  render();
}

search.labels[0].textContent = search.placeholder = here ? "Find a pod or claim" : "Find a namespace";
document.addEventListener("click", sort);
search.addEventListener("input", find);
byId("search").addEventListener("submit", (event) => event.preventDefault());
addEventListener("popstate", restore);
document.addEventListener("visibilitychange", poll);
addEventListener("pageshow", (event) => event.persisted && poll());
setInterval(render, 15000); // ages change while the figures do not
restore();
poll();
