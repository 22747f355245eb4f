// The board's script: live updates, actions, filters and copying.
// All HTML it shows was rendered and escaped by the server; charts.js draws the curves.
"use strict";

const byId = (id) => document.getElementById(id);
const sources = new WeakMap(); // the HTML an element was created from

function parsed(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content.firstElementChild;
}

// --- live elements --------------------------------------------------------------------------

const CONTAINERS = "section, section > details, .grid";

function inUse(element) {
  const active = document.activeElement;
  if (active && active !== document.body && element.contains(active)) return true;
  return element.matches("figure") && element.matches(":hover");
}

// Replace `old` by `fresh`; unchanged children stay, and so do those in use (returns false).
function morph(old, fresh) {
  const source = fresh.outerHTML;
  if (sources.get(old) === source || old.outerHTML === source) return;
  const nested = old.matches(CONTAINERS) && fresh.matches(CONTAINERS);
  if (nested && old.children.length === fresh.children.length) {
    let complete = true;
    [...fresh.children].forEach((child, place) => {
      complete = morph(old.children[place], child) !== false && complete;
    });
    if (complete) sources.set(old, source);
    return complete;
  }
  if (inUse(old)) return false;
  const opened = [...old.querySelectorAll("details")].map((details) => details.open);
  if (old.matches("details")) fresh.open = old.open;
  [...fresh.querySelectorAll("details")].forEach((details, place) => {
    if (place < opened.length) details.open = opened[place];
  });
  const checked = old.querySelector("input[type=checkbox]");
  const box = fresh.querySelector("input[type=checkbox]");
  if (checked && box) box.checked = checked.checked;
  const log = old.matches(".log") && old.scrollTop + old.clientHeight >= old.scrollHeight - 8;
  old.replaceWith(fresh);
  sources.set(fresh, source);
  if (log) fresh.scrollTop = fresh.scrollHeight;
}

const waiting = new Map(); // updates of elements in use

function show(parts) {
  const place = byId("parts");
  for (const [name, html] of Object.entries(parts)) {
    if (name === "order") continue;
    const fresh = parsed(html);
    const old = byId(name);
    if (!old) {
      if (fresh) place.append(fresh);
    } else if (morph(old, fresh) === false) {
      waiting.set(name, html);
    } else {
      waiting.delete(name);
    }
  }
  if (parts.order !== undefined) {
    const names = parts.order.split(" ");
    [...place.children].forEach((child) => names.includes(child.id) || child.remove());
    names.forEach((name, index) => {
      const child = byId(name);
      if (child && place.children[index] !== child) place.insertBefore(child, place.children[index]);
    });
  }
  afterwards();
}

function showWaiting() {
  if (waiting.size) show(Object.fromEntries(waiting));
}

function follow() {
  const place = byId("parts");
  if (!place || !place.dataset.live) return;
  const ask = async () => {
    if (document.hidden) {
      connection("paused");
      return setTimeout(ask, 1000);
    }
    let update = null;
    try {
      const answer = await fetch(`${place.dataset.live}?seen=${place.dataset.seen}`);
      if (answer.status === 401) return connection("token");
      if (answer.ok) update = await answer.json();
    } catch { /* the board does not answer */ }
    if (update) {
      place.dataset.seen = update.seen;
      if (Object.keys(update.parts).length) show(update.parts);
    }
    connection(update ? "live" : "lost");
    setTimeout(ask, update ? 1000 : 2000);
  };
  ask();
}

function connection(state) {
  const words = {
    live: "live",
    paused: "paused",
    lost: "connection lost, reconnecting",
    token: "the board was restarted: open the address it printed",
  };
  const place = byId("connection");
  place.textContent = words[state];
  place.dataset.state = state;
}

// --- after every update ---------------------------------------------------------------------

function afterwards() {
  filter();
  sortRuns();
  drawCharts();
  const begun = document.querySelector("#job[data-run]");
  if (begun && !begun.contains(document.activeElement)) location.replace(begun.dataset.run);
  const state = document.querySelector("#status [data-state]")?.dataset.state;
  document.querySelectorAll("[data-for]").forEach((element) => {
    element.hidden = !element.dataset.for.split(" ").includes(state);
  });
  const done = document.querySelector("#status .progress")?.getAttribute("aria-valuenow");
  const title = document.title.replace(/^\d+ % · /, "");
  document.title = state === "running" && done ? `${done} % · ${title}` : title;
}

function filter() {
  const field = byId("filter");
  if (!field) return;
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const state = byId("state").value;
  document.querySelectorAll("tr.run").forEach((run) => {
    const fits = words.every((word) => run.dataset.words.includes(word));
    run.hidden = !fits || (state !== "" && run.dataset.state !== state);
  });
  const chosen = document.querySelectorAll("tr.run:not([hidden]) input:checked").length;
  byId("compare").disabled = chosen < 2;
  byId("compare").textContent = chosen > 1 ? `Compare ${chosen}` : "Compare";
}

let sorting = { column: 0, down: false }; // 0: the order of the board

function sortRuns() {
  const place = byId("parts");
  if (!sorting.column || !place) return;
  const key = (run) => run.children[sorting.column].dataset.sort;
  const order = (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
  const number = (run) => (key(run) === "" ? -Infinity : Number(key(run)));
  const rows = [...place.querySelectorAll("tr.run")];
  const numeric = rows.every((run) => !Number.isNaN(number(run)));
  rows.sort((a, b) => (numeric ? number(a) - number(b) : order(a, b)) * (sorting.down ? -1 : 1));
  rows.forEach((run, index) => place.children[index] === run || place.insertBefore(run, place.children[index]));
}

function sortBy(column) {
  sorting = { column, down: sorting.column === column ? !sorting.down : column > 1 };
  document.querySelectorAll("th").forEach((head, index) => {
    head.ariaSort = index === column ? (sorting.down ? "descending" : "ascending") : null;
  });
  sortRuns();
}

function compare() {
  const boxes = document.querySelectorAll("tr.run:not([hidden]) input:checked");
  location.href = `/compare?${[...boxes].map((box) => `run=${box.value}`).join("&")}`;
}

// --- actions --------------------------------------------------------------------------------

function toast(text, tone = "note") {
  const place = byId("toast");
  place.textContent = text;
  place.className = `shown tone-${tone}`;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => (place.className = ""), 7000);
}

// Send an action, with a header that pages of other sites cannot send.
async function post(path, body) {
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json", "x-expert-board": "1" },
      body: JSON.stringify(body ?? {}),
    });
    const kind = answer.headers.get("content-type") ?? "";
    const result = kind.includes("json") ? await answer.json() : {};
    if (!answer.ok) toast(result.problem ?? `The board answered ${answer.status}.`, "error");
    else if (result.done) toast(result.done, "good");
    return answer.ok ? result : null;
  } catch {
    toast("The board is not responding.", "error");
    return null;
  }
}

async function act(button) {
  const { action, confirm: question, body, copy } = button.dataset;
  if (action === "copy") {
    await copyText(copy);
    return;
  }
  if (question && !window.confirm(question)) return;
  button.disabled = true;
  const result = await post(action, body ? JSON.parse(body) : {});
  button.disabled = false;
  if (result?.go) location.href = result.go;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  toast("Copied.", "good");
}

async function send(form) {
  const fields = Object.fromEntries(new FormData(form));
  const result = await post(form.dataset.action, fields);
  if (result?.go) location.href = result.go;
}

// --- a manifest: the plan is updated while typing --------------------------------------------

function changedFields() {
  const set = {};
  byId("settings").querySelectorAll("[data-was]").forEach((field) => {
    if (field.value !== field.dataset.was) set[field.name] = field.value;
  });
  return { set, gpu: byId("settings").elements.gpu.value };
}

let asked = 0;
async function plan() {
  const turn = ++asked;
  const place = byId("plan");
  place.classList.add("stale");
  const result = await post(`/manifest/${byId("settings").dataset.manifest}/plan`, changedFields());
  if (turn !== asked) return; // outdated by further typing
  if (result) {
    place.innerHTML = result.html;
    byId("settings").querySelectorAll("[data-was]").forEach((field) => {
      field.setAttribute("aria-invalid", result.wrong.includes(field.name));
    });
  }
  place.classList.remove("stale");
}

async function planAndRows() {
  const form = byId("settings");
  if (!form) return;
  let timer = null;
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(plan, 500);
    byId("start").dataset.body = JSON.stringify(changedFields());
  });
  await plan();
  const result = await post(`/manifest/${form.dataset.manifest}/rows`);
  if (result) byId("rows").innerHTML = result.html;
}

// --- upload of a data file ------------------------------------------------------------------

async function upload(form) {
  const { file, name, model, root } = form.elements;
  const chosen = file.files[0];
  const query = new URLSearchParams({ file: chosen.name, name: name.value, model: model.value });
  if (root) query.set("root", root.value);
  const button = form.querySelector("button");
  const said = byId("said");
  button.disabled = true;
  said.hidden = false;
  said.textContent = "Uploading and checking the rows…";
  try {
    const answer = await fetch(`${form.dataset.upload}?${query}`, {
      method: "POST",
      headers: { "content-type": "application/octet-stream", "x-expert-board": "1" },
      body: chosen,
    });
    const result = await answer.json();
    if (answer.ok) location.href = result.go;
    else said.textContent = result.problem;
  } catch {
    said.textContent = "The upload failed.";
  }
  button.disabled = false;
}

function nameByFile(form) {
  const { file, name } = form.elements;
  const chosen = file.files[0];
  if (!chosen) return;
  form.querySelector(".drop b").textContent = chosen.name;
  const plain = chosen.name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9_.-]+/g, "-");
  if (!name.value) name.value = plain.replace(/^[-.]+/, "");
}

document.addEventListener("change", (event) => {
  if (event.target.name === "file") nameByFile(event.target.form);
});
document.addEventListener("dragover", (event) => {
  if (byId("said")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  const field = document.querySelector("input[type=file]");
  if (!field) return;
  event.preventDefault();
  field.files = event.dataTransfer.files;
  nameByFile(field.form);
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (button) act(button);
  else if (event.target.closest("#compare")) compare();
  else if (event.target.dataset.column) sortBy(Number(event.target.dataset.column));
});
document.addEventListener("submit", (event) => {
  const { action, upload: place } = event.target.dataset;
  if (!action && !place && event.target.id !== "settings") return;
  event.preventDefault();
  if (action) send(event.target);
  else if (place) upload(event.target);
});
// Show the fields whose key or meaning has the words, wherever they are folded.
function findKeys(words) {
  const fits = (field) => !field.querySelector("[data-was]") || field.textContent.toLowerCase().includes(words);
  byId("settings").querySelectorAll("label").forEach((field) => (field.hidden = !fits(field)));
  byId("settings").querySelectorAll("details").forEach((group) => {
    group.hidden = !group.querySelector("label:not([hidden])");
    group.open = words !== "" && !group.hidden;
  });
}

document.addEventListener("input", (event) => {
  if (event.target.id === "find-key") findKeys(event.target.value.trim().toLowerCase());
  if (event.target.closest("#filter, #state, tr.run")) filter();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "/" && !typing && byId("filter")) {
    event.preventDefault();
    byId("filter").focus();
  }
});
document.addEventListener("focusout", () => setTimeout(showWaiting, 0));
document.addEventListener("mouseout", (event) => {
  if (event.target.closest?.("figure")) setTimeout(showWaiting, 0);
});
document.querySelectorAll("figure").forEach((figure) => sources.set(figure, figure.outerHTML));
afterwards();
follow();
planAndRows();
