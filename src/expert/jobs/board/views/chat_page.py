"""The chat page: an expert and its base side by side."""

from __future__ import annotations

from collections.abc import Sequence

from expert.insight.page.markup import Markup, tag
from expert.jobs.board.chat import NAMES, Chat
from expert.jobs.board.folders import BoardItem
from expert.jobs.board.live import View
from expert.jobs.board.summaries import Summary
from expert.jobs.board.views.job_pages import log_html, output_lines
from expert.jobs.board.views.layout import button, live, page, pill, state_pill, title_row

WORDS = {"none": "not loaded", "other": "another run is loaded", "failed": "not loaded"}
TONES = {"loading": "note", "ready": "good", "failed": "error"}
FIELDS = (
    ("temperature", "Temperature", {"min": "0", "max": "2", "step": "any"}),
    ("max_tokens", "Max tokens", {"min": "1", "step": "1"}),
    ("seed", "Seed", {"min": "0", "step": "1"}),
)


class ChatView(View):
    """Whether the expert and its base are loaded."""

    def __init__(self, found: BoardItem, chat: Chat) -> None:
        super().__init__()
        self._found, self._chat = found, chat

    def refresh(self) -> dict[str, str]:
        state, words, output = self._chat.state(self._found)
        load = None
        if state in ("none", "other", "failed"):
            load = button("Load", f"/run/{self._found.id}/load", class_="primary", id="load")
        state_mark = pill(WORDS.get(state, state), TONES.get(state, "plain"), data_state=state)
        sentence = tag("span", words, class_="soft")
        head = tag("div", state_mark, sentence, load, class_="row", role="status")
        lines = output_lines(output)
        log: Markup | None = log_html(lines) if lines else None
        if log is not None and state != "failed":
            log = tag("details", tag("summary", "Output of expert serve"), log, class_="notes")
        return {"status": tag("div", head, log, id="status"), "order": "status"}


def chat_page(found: BoardItem, view: View) -> str:
    """Two conversations and one input for both; the script does the rest."""
    columns = [
        tag("section", tag("h2", name.title()),
            tag("div", tag("p", note, class_="soft"), id=f"talk-{name}", class_="talk", role="log",
                tabindex="0", aria_label=f"Conversation with the {name}"))
        for name, note in zip(NAMES, ("The trained model.", "The same model before training."),
                              strict=True)
    ]  # fmt: skip
    settings = [
        tag("label", words, tag("input", type="number", name=name, placeholder="from the manifest",
                                autocomplete="off", **limits))
        for name, words, limits in FIELDS
    ]  # fmt: skip
    form = tag(
        "form",
        tag("label", "Your message", tag("textarea", name="message", rows="3", required="",
                                         aria_describedby="keys")),
        tag("div", tag("button", "Send", class_="primary", data_for="ready"),
            tag("button", "Stop", type="button", id="halt", hidden=""),
            tag("button", "New conversation", type="button", id="anew"),
            tag("small", "Enter sends, Shift+Enter starts a new line", id="keys"), class_="row"),
        tag("details", tag("summary", "Settings"), tag("div", *settings, class_="row")),
        id="chat", data_run=found.id, class_="card fields", aria_label="message",
    )  # fmt: skip
    where = tag("a", found.name, href=f"/run/{found.id}")
    return page(
        f"Chat with {found.name}",
        tag("p", tag("a", "Chat", href="/chat"), " / ", where, class_="crumbs"),
        title_row("Chat"),
        live(view, f"/live/chat/{found.id}"),
        tag("div", *columns, class_="columns"),
        form,
        here="chat",
        script="chat.js",
    )


def chats_page(runs: Sequence[Summary]) -> str:
    """All runs that can be loaded."""
    cards = [
        tag("article",
            tag("div", tag("h2", tag("a", run.found.name, href=f"/run/{run.found.id}/chat")),
                tag("small", run.found.where), class_="who"),
            state_pill(run.state), class_="card run short")
        for run in runs
    ]  # fmt: skip
    if not cards:
        text = "No run in these folders has saved an expert yet."
        cards = [tag("div", tag("p", text), class_="card empty")]
    return page("Chat", title_row("Chat"), *cards, here="chat")
