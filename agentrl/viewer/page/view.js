"use strict";
// A run in the browser. What a model or a tool wrote becomes text nodes and nothing else: there is
// no innerHTML here, and attributes are only ever set to our own words and numbers (and titles).

const LONG_TEXT = 20000, LONG_STRIP = 4000, LONG_SEEN = 600, LONG_NAME = 80, REFRESH_MS = 5000;
const OUTCOMES = ["", "mixed", "solved", "failed", "faulted", "silent"];
const ENDINGS = ["", "answered", "truncated", "out_of_turns", "out_of_tokens", "cut_off", "timed_out", "sandbox_lost"];
const GROUP_HEADS = ["group", "task", "members", "endings", "turns", "tokens", "tools", "what was lost, and why no gradient"];
const COLOURINGS = ["author", "logprob", "advantage", "drift"];
// Okabe and Ito's palette: told apart with any colour vision; curves differ in dash, too.
const CURVES = [
  ["success", [["success_rate", "training", "step"], ["success", "held out", "eval"]]],
  ["reward", [["reward_mean", "mean", "step"]]],
  ["entropy and KL (nats)", [["entropy", "entropy", "step"], ["kl_ref", "KL", "step"]]],
  ["engine against learner (nats)", [["mismatch_max", "largest", "step"], ["mismatch_mean", "mean", "step"]]],
  ["groups with signal, faults", [["groups_with_signal", "signal", "step"], ["faults", "faults", "step"]]],
  ["seconds", [["sample_s", "sample", "step"], ["update_s", "update", "step"]]],
];
const INKS = [["#0072b2", ""], ["#d55e00", "6 4"]];
const KEYS = [
  ["j, k", "next, previous row or turn"], ["Enter", "open it"], ["u", "up"],
  ["n, p", "next, previous page or member"], ["c", "next colouring of tokens"], ["Tab, then ←, →", "one token after the other"],
  ["/", "search"], ["?", "this list"],
];
let colouring = "author", keys = {}, timer = null;

// ------------------------------------------------------------------ making elements

function el(tag, attributes = {}, ...parts) {
  const svg = ["svg", "polyline", "text", "line"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...parts.flat(Infinity).filter((part) => part != null && part !== false)
    .map((part) => (part instanceof Node ? part : visible(String(part)))));
  return node;
}

// Nothing that was written is invisible or stands in another order: control characters are shown by
// their pictures, and those without a shape (zero width, direction, tags, fillers, half a pair) by
// their numbers. Those that join an emoji stay.
const EMOJI = String.raw`\p{Extended_Pictographic}(?:\ufe0f|\p{Emoji_Modifier}|\u200d\p{Extended_Pictographic})*|[0-9#*]\ufe0f\u20e3`;
const SHAPELESS = new RegExp(String.raw`${EMOJI}|[\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}\u007f-\u009f]`, "gu"), IS_EMOJI = new RegExp(`^(?:${EMOJI})`, "u");

function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(SHAPELESS, (c) => (IS_EMOJI.test(c) ? c : `⟨${c.codePointAt(0).toString(16).padStart(4, "0")}⟩`));
}

function table(heads, rows) {
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, cell)))))));
}

function facts(pairs) {
  return el("dl", {}, pairs.filter(([, value]) => value != null && value !== "")
    .map(([name, value]) => [el("dt", { class: "soft" }, name), el("dd", {}, value)]));
}

function folded(title, ...parts) {
  return el("details", {}, el("summary", {}, title), parts);
}

function long(text, tag = "pre") {
  const node = el(tag, { dir: "auto" }, text.slice(0, LONG_TEXT));
  if (text.length <= LONG_TEXT) return node;
  const more = el("button", { type: "button", click: () => { node.replaceChildren(visible(text)); more.remove(); } },
    `show all ${text.length} characters`);
  return [node, more];
}

// A name that a model chose may be of any length.
function clipped(name) {
  return name.length > LONG_NAME ? `${name.slice(0, LONG_NAME)}… (${name.length} characters)` : name || "?";
}

function brief(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : value == null ? "–" : String(value);
}

function worth(verdict) {
  if (verdict.reward == null) return el("span", { class: "bad" }, "! no verdict: ", long(verdict.invalid, "span"));
  return el("span", { class: verdict.passed ? "good" : "bad" }, `${verdict.passed ? "✓" : "✗"} reward ${brief(verdict.reward)}`);
}

// ------------------------------------------------------------------ where the data comes from

async function ask(path, method = "GET") {
  const answer = await fetch(path, { method, headers: { "X-agentrl": "replay" } });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(found.error || answer.statusText);
  return found;
}

const server = {
  live: true,
  run: () => ask("api/run"),
  groups: (wanted) => ask(`api/groups?${new URLSearchParams(wanted)}`),
  group: (step, number) => ask(`api/group/${step}/${number}`),
  trajectory: (...place) => ask(`api/trajectory/${place.join("/")}`),
  difference: (...place) => ask(`api/difference/${place.join("/")}`),
  replay: (depth, ...place) => ask(`api/replay/${depth}/${place.join("/")}`, "POST"),
};

// An exported file holds the answers themselves, by the same names.
function exported(answers) {
  const get = async (name) => {
    if (!(name in answers)) throw new Error("this file does not hold that: open the run with `agentrl view`");
    return answers[name];
  };
  return {
    live: false,
    run: () => get("run"),
    groups: async (wanted) => {
      const begin = Number(wanted.begin || 0);
      const rows = (await get("rows")).filter((row) => fits(row, wanted, answers));
      return { rows: rows.slice(begin, begin + 50), more: rows.length > begin + 50 };
    },
    group: (...place) => get(`group/${place.join("/")}`),
    trajectory: (...place) => get(`trajectory/${place.join("/")}`),
    difference: (...place) => get(`difference/${place.join("/")}`),
    replay: (depth, ...place) => get(`replay/${depth}/${place.join("/")}`),
  };
}

function fits(row, wanted, answers) {
  if (row.broken) return !wanted.step || row.step === Number(wanted.step);
  const rewards = row.members.map((m) => m.reward).filter((reward) => reward != null);
  const graded = row.members.filter((m) => m.reward != null);
  const outcome = {
    "": true,
    mixed: new Set(rewards).size > 1,
    solved: graded.length > 0 && graded.every((m) => m.passed),
    failed: graded.length > 0 && !graded.some((m) => m.passed),
    faulted: row.faults.length > 0 || rewards.length < row.members.length,
    silent: row.members.some((m) => m.silent),
  }[wanted.outcome || ""];
  const low = wanted.low ? Number(wanted.low) : -Infinity, high = wanted.high ? Number(wanted.high) : Infinity;
  const words = wanted.text && texts(answers[`group/${row.step}/${row.number}`]).toLowerCase();
  return outcome && (!wanted.step || row.step === Number(wanted.step))
    && (!(wanted.low || wanted.high) || rewards.some((reward) => low <= reward && reward <= high))
    && (!wanted.ending || row.members.some((m) => m.ending === wanted.ending))
    && (!wanted.tool || row.members.some((m) => m.tools.includes(wanted.tool)))
    && (!wanted.text || words.includes(wanted.text.toLowerCase()));
}

function texts(value) {
  if (typeof value === "string") return value;
  return value && typeof value === "object" ? Object.values(value).map(texts).join("\n") : "";
}

async function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

let source = server;

// ------------------------------------------------------------------ the run

async function overview(query) {
  const wanted = Object.fromEntries([...query].filter(([, value]) => value));
  let [run, found] = await Promise.all([source.run(), source.groups(wanted)]);
  const curves = el("div", { class: "curves" });
  const draw = (metrics) => curves.replaceChildren(...CURVES.map(([title, lines]) => figure(title, lines, metrics)).filter(Boolean));
  draw(run.metrics);
  const listed = el("div", {});
  const list = (rows) => listed.replaceChildren(rows.length ? table(GROUP_HEADS, rows.map(row)) : el("p", {}, "no group is like that"));
  list(found.rows);
  const begin = Number(wanted.begin || 0);
  const page = (to) => () => { location.hash = `#/?${new URLSearchParams({ ...wanted, begin: to })}`; };
  const back = begin > 0 && page(Math.max(0, begin - 50)), on = found.more && page(begin + 50);
  keys = { n: on, p: back };
  if (source.live) {
    timer = setInterval(async () => {
      const now = await source.run().catch(() => run);
      const told = ({ metrics, steps }) => JSON.stringify([metrics.at(-1), steps.length]);
      if (told(now) === told(run)) return;
      run = now;
      draw(run.metrics);
      const again = await source.groups(wanted).catch(() => found);
      if (!listed.contains(document.activeElement)) list(again.rows);  // nobody stands in it
    }, REFRESH_MS);
  }
  return [
    el("h1", {}, run.name),
    run.metrics.length ? curves : el("p", { class: "soft" }, run.steps.length ? "no metrics were kept" : "no step has been taken yet"),
    el("h2", {}, "Groups"),
    filter(run, wanted),
    listed,
    el("p", {}, back && el("button", { type: "button", click: back }, "previous page (p)"), " ",
      on && el("button", { type: "button", click: on }, "next page (n)")),
    folded("configuration", el("pre", {}, run.config || "not kept")),
    folded("what it was made of", el("pre", {}, JSON.stringify(run.provenance, null, 2))),
  ];
}

function figure(title, lines, metrics) {
  const drawn = lines.map(([name, label, kind]) => [label, metrics.filter((row) => row.kind === kind && typeof row[name] === "number")
    .map((row) => [row.step, row[name]])]).filter(([, points]) => points.length);
  if (!drawn.length) return null;
  const all = drawn.flatMap(([, points]) => points);
  const [[x0, x1], [low, y1]] = [range(all.map(([x]) => x)), range(all.map(([, y]) => y))], y0 = Math.min(0, low);
  const at = ([x, y]) => `${4 + 292 * (x - x0) / (x1 - x0 || 1)},${95 - 82 * (y - y0) / (y1 - y0 || 1)}`;
  const said = drawn.map(([label, points]) => `${label} ${brief(points.at(-1)[1])}`).join(", ");
  const label = (x, y, words, anchor = "start") => el("text", { x, y, "font-size": 9, fill: "currentColor", "text-anchor": anchor }, words);
  return el("figure", {},
    el("svg", { viewBox: "0 0 300 110", preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${said} at step ${x1}` },
      drawn.map(([, points], n) => el("polyline", { points: (points.length > 1 ? points : [points[0], [points[0][0] + 1e-9, points[0][1]]]).map(at).join(" "), stroke: INKS[n][0], "stroke-dasharray": INKS[n][1] })),
      label(4, 10, brief(y1)), label(4, 106, `${brief(y0)}, step ${x0}`), label(296, 106, `step ${x1}`, "end")),
    el("figcaption", {}, `${title}: ${said}`));
}

// Spread arguments end at some ten thousand.
function range(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function filter(run, wanted) {
  const choose = (name, label, values) => el("label", {}, label, el("select", { name },
    values.map((value) => el("option", { value, selected: String(value) === (wanted[name] || "") }, value === "" ? "any" : value))));
  const write = (name, label, size) => el("label", {}, label, el("input", { name, size, value: wanted[name] || "", autocomplete: "off" }));
  const form = el("form", { role: "search", submit: (event) => {
    event.preventDefault();
    const asked = [...new FormData(form)].filter(([, value]) => value !== "");
    location.hash = `#/?${new URLSearchParams(asked)}`;
  } }, choose("step", "step", ["", ...run.steps.slice().reverse()]), choose("outcome", "outcome", OUTCOMES),
  choose("ending", "ending", ENDINGS), write("tool", "tool, or its status", 12), write("low", "reward from", 5),
  write("high", "to", 5), write("text", "text (/)", 22), el("button", {}, "find"));
  return form;
}

function row(row) {
  if (row.broken) return [`step ${row.step}`, el("span", { class: "bad" }, row.broken), "", "", "", "", "", ""];
  const counted = (values) => [...new Set(values)].map((value) => `${value} ${values.filter((v) => v === value).length}`).join(", ");
  const span = (name) => { const all = row.members.map((m) => m[name]); return all.length ? [...new Set(range(all))].join("–") : ""; };
  return [
    el("a", { href: `#/group/${row.step}/${row.number}`, "data-item": true }, `${row.step} · ${row.number}`),
    row.task_id,
    el("div", { class: "chips" }, row.members.map((m) => chip(row, m))),
    counted(row.members.map((m) => m.ending)), span("turns"), span("tokens"),
    [...new Set(row.members.flatMap((m) => m.tools))].map(clipped).join(", "),
    el("span", { class: row.faults.length ? "bad" : "soft" }, [...new Set([...row.faults, ...row.members.map((m) => m.silent).filter(Boolean)])].join("; ")),
  ];
}

function chip(row, m) {
  const mark = m.reward == null ? "!" : m.passed ? "✓" : "✗";
  return el("a", { class: `chip ${m.passed ? "good" : "bad"}`, href: `#/episode/${row.step}/${row.number}/${m.place}`,
    title: `member ${m.member}, ${m.ending}` }, `${mark} ${m.reward == null ? "" : brief(m.reward)}`);
}

// ------------------------------------------------------------------ a group

async function groupPage(step, number, query) {
  const group = await source.group(step, number);
  const members = group.members.map((m) => m.place);
  const left = Number(query.get("left") ?? members[0]), right = Number(query.get("right") ?? members[1]);
  const compared = el("div", {});
  if (members.length > 1) compared.append(el("div", {}, await difference(group, left, right)));
  const pick = (name, value) => el("select", { "aria-label": name, change: (event) => {
    const chosen = { left, right, [name]: event.target.value };
    location.hash = `#/group/${step}/${number}?${new URLSearchParams(chosen)}`;
  } }, group.members.map((m) => el("option", { value: m.place, selected: m.place === value }, named(m, group.members))));
  return [
    el("h1", {}, `task ${group.task_id}`),
    group.faults.map((fault) => el("p", { class: "bad" }, `! a member was lost: ${fault}`)),
    group.task && folded("what was asked", messages(group.task.prompt)),
    table(["member", "worth", "advantage by turn", "ending", "turns", "sampled tokens", "gradient"], group.members.map((m) => [
      el("a", { href: `#/episode/${step}/${number}/${m.place}`, "data-item": true }, named(m, group.members)),
      worth(m.verdict), m.lesson ? m.lesson.advantages.map(brief).join(", ") : "not learned from",
      m.ending, m.turns.length, m.turns.reduce((sum, turn) => sum + turn.sampled, 0), gradient(m.lesson),
    ])),
    members.length > 1 && [el("h2", {}, "Side by side"), el("p", {}, pick("left", left), " ", pick("right", right)), compared],
  ];
}

// An agent program's forked talk leaves several trajectories of one member.
function named(m, members) {
  const own = members.filter((other) => other.member === m.member);
  return `member ${m.member}${own.length > 1 ? `, part ${own.indexOf(m) + 1}` : ""}`;
}

function gradient(lesson) {
  if (!lesson) return "";
  return lesson.silent ? el("span", { class: "soft" }, `none: ${lesson.silent}`) : `${lesson.trained_tokens} tokens`;
}

async function difference(group, left, right) {
  const found = await source.difference(group.step, group.number, left, right);
  const pair = [left, right].map((place) => group.members[place].turns);
  return [
    el("p", {}, found.parts_at == null ? "They are the same." : `They part at turn ${found.parts_at}.`),
    found.turns.map((turn, n) => el("div", { class: turn.turn === found.parts_at ? "turn parts" : "turn", tabindex: -1, "data-item": true },
      el("p", { class: "soft" }, `turn ${turn.turn}: ${turn.same_observation ? "shown the same" : "shown something else"}, `
        + (turn.token == null ? "did the same" : `first other token: ${turn.token} (logprob ${turn.logprobs.map(brief).join(" and ")})`)),
      el("div", { class: "pair" }, pair.map((turns) => el("div", {}, turns[n] ? messages([turns[n].message, ...turns[n].reply]) : "–"))))),
  ];
}

// ------------------------------------------------------------------ a trajectory

async function episodePage(step, number, place) {
  const one = await source.trajectory(step, number, place);
  const near = (by) => { const to = place + by; return to >= 0 && to < one.count && (() => { location.hash = `#/episode/${step}/${number}/${to}`; }); };
  const strips = [], results = el("div", {}), legend = el("p", { class: "soft" });
  const paint = () => { strips.forEach((strip) => strip.paint()); legend.replaceChildren(LEGENDS[colouring]); pick.value = colouring; };
  const pick = el("select", { "aria-label": "colour tokens by", change: () => { colouring = pick.value; paint(); } },
    COLOURINGS.map((name) => el("option", { value: name }, name)));
  const advantages = one.lesson ? one.lesson.advantages : [];
  const largest = Math.max(1e-9, range(advantages.map(Math.abs))[1]);
  const drift = { values: null };
  let sampled = 0;
  const turns = one.turns.map((turn, n) => {
    const from = sampled;
    sampled += turn.action.ids.length;
    const about = { advantage: advantages[n] ?? null, largest, drift: (i) => drift.values && drift.values[from + i] };
    const seen = stripOf(turn.seen, (i) => (turn.seen.scaffold[i] ? "scaffold" : "observation"), null);
    const said = stripOf(turn.action, () => "model", about);
    strips.push(seen, said);
    return turnPart(one, turn, n, seen.node, said.node, advantages[n]);
  });
  keys = { n: near(1), p: near(-1), c: () => { colouring = COLOURINGS[(COLOURINGS.indexOf(colouring) + 1) % COLOURINGS.length]; paint(); } };
  const rung = (depth) => el("button", { type: "button", click: async () => {
    results.replaceChildren(el("p", {}, `${depth} …`));
    try {
      const told = await source.replay(depth, step, number, place);
      results.replaceChildren(el("p", { class: told.same ? "good" : "bad" }, told.drift ? "✓ reforward" : told.same ? `✓ ${depth}: as recorded` : `✗ ${depth}: not as recorded`),
        told.lines.length ? long(told.lines.join("\n")) : "");
      if (told.drift) { drift.values = told.drift; colouring = "drift"; paint(); }
    } catch (error) { results.replaceChildren(el("p", { class: "bad" }, `! ${depth}: ${error.message}`)); }
  } }, depth);
  const { components, step_rewards: steps, note } = one.verdict;
  const body = [
    el("h1", {}, `task ${one.task_id}, member ${one.member}`),
    el("p", {}, worth(one.verdict), ` · ${one.ending} · ${one.turns.length} turns · ${sampled} sampled tokens · seed ${one.seed}`),
    facts([["verdict's parts", Object.entries(components).map(([name, value]) => `${name} ${brief(value)}`).join(", ")],
      ["rewards by turn", steps.map(brief).join(", ")], ["note", note && long(note, "span")], ["gradient", one.lesson && gradient(one.lesson)],
      ["advantage by turn", advantages.map(brief).join(", ")]]),
    el("p", {}, "replay: ", ["check", "regrade", "reexecute", "reforward"].map((depth) => [rung(depth), " "])), results,
    el("p", {}, el("label", {}, "colour tokens by (c)", pick)), legend,
    !one.exact && el("p", { class: "soft" }, "The run's tokenizer is not at hand, so tokens are shown as ids."),
    folded("messages that it began with", messages(one.prompt)),
    turns,
    folded("sandbox", facts(Object.entries(one.sandbox).map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value)]))),
    one.artifacts.length > 0 && folded("what the verifier saw of its files", one.artifacts.map((file) =>
      [el("p", {}, `${file.name}, ${file.bytes} bytes${file.cut ? ", the first of them:" : ""}`), el("pre", { dir: "auto" }, file.text)])),
    folded("measured", facts(Object.entries(one.metrics).map(([name, value]) => [name, brief(value)]))),
  ];
  paint();
  return body;
}

function turnPart(one, turn, n, seen, said, advantage) {
  const events = one.events.filter((event) => event.turn === n);
  const versions = turn.action.versions.join(", ");
  return el("section", { class: "turn", tabindex: -1, "data-item": true, "aria-label": `turn ${n}` },
    el("p", { class: "soft" }, `turn ${n} · ${turn.seen.ids.length} tokens shown, ${turn.action.ids.length} sampled by version ${versions}, ${turn.action.finish}`
      + (advantage == null ? "" : ` · advantage ${brief(advantage)}`) + (turn.reward ? ` · step reward ${brief(turn.reward)}` : "")),
    el("details", { open: turn.seen.ids.length <= LONG_SEEN }, el("summary", {}, "shown to it"), seen), said,
    turn.message.tool_calls.map((call) => el("p", {}, el("b", {}, `call ${clipped(call.name)}`), call.error ? el("span", { class: "bad" }, " ! ", long(call.error, "span")) : "", long(call.arguments))),
    events.map((event) => el("p", { class: event.status === "ok" ? "soft" : "bad" }, `${event.status === "ok" ? "✓" : "!"} ${clipped(event.name)}: ${event.status}, `
      + `${event.exit_code == null ? "" : `exit ${event.exit_code}, `}${event.output_bytes} bytes${event.cut ? " (cut)" : ""}, at ${event.at_s.toFixed(3)} s for ${event.seconds.toFixed(3)} s`)),
    turn.reply.length > 0 && messages(turn.reply));
}

function messages(list) {
  return list.map((message) => el("div", {}, el("span", { class: "soft" }, message.role),
    message.reasoning && long(message.reasoning), message.content && long(message.content),
    message.tool_calls.map((call) => el("p", {}, `call ${clipped(call.name)}`, long(call.arguments)))));
}

// ------------------------------------------------------------------ the token strip

const LEGENDS = {
  author: "green, underlined: the model; blue: the environment's words; grey, dotted: the chat template",
  logprob: "the darker, the less likely the token was when it was sampled (black: below -6 nats)",
  advantage: "blue: made likelier (advantage above 0); orange, dashed: made less likely; the stronger, the larger",
  drift: "the darker, the farther the model is from the record (black: 1 nat); press “reforward” first",
};

function stripOf(tokens, author, about) {
  const node = el("div", { class: "strip", dir: "ltr", tabindex: 0, "aria-label": "tokens" });
  let spans = [], here = -1;
  const tell = (i) => [`id ${tokens.ids[i]}`, author(i), about && tokens.logprobs && `logprob ${brief(tokens.logprobs[i])}`,
    about && about.advantage != null && `advantage ${brief(about.advantage)}`,
    about && about.drift(i) != null && `drift ${about.drift(i).toExponential(2)}`].filter(Boolean).join(" · ");
  const show = (event) => point(spans.indexOf(event.target));
  const point = (i) => {
    if (i < 0 || i >= spans.length) return;
    spans[here]?.classList.remove("here");
    here = i;
    spans[i].classList.add("here");
    spans[i].title = tell(i);
    document.getElementById("token").replaceChildren(visible(`${JSON.stringify(tokens.texts[i])} · ${tell(i)}`));
  };
  node.addEventListener("mouseover", show);
  node.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    point(here + by);
    spans[here]?.scrollIntoView({ block: "nearest" });
  });
  node.addEventListener("click", show);
  const paint = () => spans.forEach((span, i) => colour(span, i));
  const colour = (span, i) => {
    span.className = author(i);
    span.style.background = "";
    if (!about || colouring === "author") return;
    const [hue, amount] = strength(i);
    if (amount == null) return;
    span.style.background = hue.map((to) => Math.round(255 + (to - 255) * amount)).reduce((rgb, v) => `${rgb},${v}`, "").replace(/^,(.*)$/, "rgb($1)");
    span.classList.add(amount > 0.55 ? "dark" : "light");
    if (colouring === "advantage" && about.advantage < 0) span.classList.add("less");
  };
  const strength = (i) => {
    if (colouring === "logprob") return [[0, 0, 0], tokens.logprobs && Math.min(1, -tokens.logprobs[i] / 6)];
    if (colouring === "advantage") return [about.advantage > 0 ? [0, 114, 178] : [213, 94, 0], about.advantage == null ? null : Math.abs(about.advantage) / about.largest];
    const d = about.drift(i);
    return [[0, 0, 0], d == null ? null : Math.max(0, Math.min(1, 1 + Math.log10(Math.abs(d) + 1e-9) / 6))];
  };
  const fill = (count) => {
    spans = tokens.ids.slice(0, count).map((_, i) => el("span", { class: author(i) }, tokens.texts[i].replaceAll("\n", "↵\n")));
    node.replaceChildren(...spans);
    if (count < tokens.ids.length) node.append(el("button", { type: "button", click: () => { fill(tokens.ids.length); paint(); } }, `show all ${tokens.ids.length} tokens`));
  };
  fill(LONG_STRIP);
  return { node, paint };
}

// ------------------------------------------------------------------ getting about

async function show() {
  clearInterval(timer);
  keys = {};
  const [place, query] = location.hash.slice(2).split("?");
  const [kind, ...numbers] = place.split("/");
  const at = numbers.map(Number), asked = new URLSearchParams(query || "");
  const pages = { "": () => overview(asked), group: () => groupPage(at[0], at[1], asked), episode: () => episodePage(...at) };
  const path = [["run", "#/"], kind && at.length > 1 && [`step ${at[0]}, group ${at[1]}`, `#/group/${at[0]}/${at[1]}`], kind === "episode" && [`trajectory ${at[2]}`, location.hash]].filter(Boolean);
  document.getElementById("path").replaceChildren(...path.flatMap(([name, href], n) => [n ? " › " : "", el("a", { href }, name)]));
  document.getElementById("token").replaceChildren();
  const asking = location.hash, main = document.getElementById("main");
  let parts;
  try { parts = await (pages[kind] || pages[""])(); } catch (error) { parts = [el("p", { class: "bad" }, `! ${error.message}`)]; }
  if (asking !== location.hash) return;
  main.replaceChildren(el("div", {}, parts));
  document.title = `agentrl: ${path.at(-1)[0]}`;
  window.scrollTo(0, 0);
}

function step(by) {
  const items = [...document.querySelectorAll("[data-item]")];
  const now = items.indexOf(document.activeElement);
  const next = items[now < 0 ? (by > 0 ? 0 : items.length - 1) : Math.max(0, Math.min(items.length - 1, now + by))];
  if (next) { next.focus(); next.scrollIntoView({ block: "nearest" }); }
}

function help() {
  const box = document.getElementById("help");
  box.replaceChildren(el("h2", {}, "Keys"), facts(KEYS), el("form", { method: "dialog" }, el("button", {}, "close")));
  box.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
  const links = document.querySelectorAll("#path a");
  const run = { j: () => step(1), k: () => step(-1), u: () => links.length > 1 && links[links.length - 2].click(), "?": help,
    "/": () => document.querySelector("input[name=text]")?.focus(), ...keys }[event.key];
  if (run) { event.preventDefault(); run(); }
});
document.getElementById("keys").addEventListener("click", help);

async function start() {
  const embedded = document.getElementById("data");
  if (embedded) source = exported(await unpacked(embedded.textContent));
  window.addEventListener("hashchange", show);
  await show();
}
start();
