// The chat page: each message goes to the expert and to its base, and both answers are streamed.
// Messages are added to the page as text, never as HTML.
"use strict";

const form = byId("chat");
const NAMES = ["expert", "base"];
const talks = { expert: [], base: [] }; // each model has its own conversation
let running = null;

function bubble(name, kind, text) {
  const place = byId(`talk-${name}`);
  const element = document.createElement("div");
  element.className = `said ${kind}`;
  element.textContent = text;
  place.append(element);
  place.scrollTop = place.scrollHeight;
  return element;
}

// The objects of server-sent events; chunks may be split anywhere.
async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(name, settings, signal) {
  const place = byId(`talk-${name}`);
  const shown = bubble(name, "theirs", "…");
  const talk = talks[name];
  const sent = form.elements.history.checked ? talk : talk.slice(-1);
  const began = performance.now();
  let text = "";
  let end = "";
  let tokens = 0;
  place.setAttribute("aria-busy", "true"); // screen readers wait for the complete answer
  try {
    const answer = await fetch(`/run/${form.dataset.run}/ask`, {
      method: "POST",
      headers: { "content-type": "application/json", "x-expert-board": "1" },
      body: JSON.stringify({ model: name, messages: sent, ...settings }),
      signal,
    });
    if (!answer.ok) {
      const kind = answer.headers.get("content-type") ?? "";
      const result = kind.includes("json") ? await answer.json() : {};
      throw new Error(result.problem ?? `The board answered ${answer.status}.`);
    }
    for await (const event of eventsOf(answer)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      const low = place.scrollTop + place.clientHeight >= place.scrollHeight - 40;
      text += choice?.delta.content ?? "";
      if (text) shown.textContent = text;
      if (low) place.scrollTop = place.scrollHeight;
      if (choice?.finish_reason === "length") end = "stopped at max tokens";
      if (event.notes) end = event.notes.join("; ");
      tokens = event.usage?.completion_tokens ?? tokens;
    }
    const seconds = (performance.now() - began) / 1000;
    end = [`${tokens} tokens in ${seconds.toFixed(1)} s`, end].filter(Boolean).join(", ");
    if (!text) shown.textContent = "(empty answer)";
  } catch (fault) {
    end = signal.aborted ? "stopped" : fault.message;
    if (!signal.aborted) bubble(name, "problem", fault.message);
    if (!text) shown.textContent = "";
    if (!text && !signal.aborted) shown.remove();
  }
  place.setAttribute("aria-busy", "false");
  if (text) talk.push({ role: "assistant", content: text });
  else talk.pop(); // no answer: the question can be repeated
  const about = document.createElement("small");
  about.textContent = end;
  if (shown.isConnected) shown.append(about);
}

function settingsIn() {
  const settings = {};
  for (const name of ["temperature", "max_tokens", "seed"]) {
    if (form.elements[name].value !== "") settings[name] = Number(form.elements[name].value);
  }
  return settings;
}

async function say() {
  const field = form.elements.message;
  const text = field.value.trim();
  const ready = document.querySelector('#status [data-state="ready"]');
  if (!text || running || !ready || !form.reportValidity()) return;
  field.value = "";
  running = new AbortController();
  byId("halt").hidden = false;
  NAMES.forEach((name) => {
    bubble(name, "mine", text);
    talks[name].push({ role: "user", content: text });
  });
  const row = [...(form.elements.row?.options ?? [])].find((option) => option.value.trim() === text);
  const settings = settingsIn();
  await Promise.all(NAMES.map((name) => ask(name, settings, running.signal)));
  running = null;
  byId("halt").hidden = true;
  if (row?.dataset.expected) NAMES.forEach((name) => bubble(name, "wanted", `expected: ${row.dataset.expected}`));
  field.focus();
}

form.elements.row?.addEventListener("change", (event) => {
  form.elements.message.value = event.target.value;
  form.elements.message.focus();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  say();
});
form.elements.message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  say();
});
byId("halt").addEventListener("click", () => running?.abort());
byId("anew").addEventListener("click", () => {
  running?.abort();
  NAMES.forEach((name) => {
    talks[name] = [];
    byId(`talk-${name}`).replaceChildren();
  });
  form.elements.message.focus();
});
if (document.querySelector('#status [data-state="none"]')) post(`/run/${form.dataset.run}/load`);
