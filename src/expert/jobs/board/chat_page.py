"""Talk to an expert, its base beside it."""

from __future__ import annotations

from collections.abc import Sequence

from expert.insight.page.markup import Markup, tag
from expert.jobs.board.chat import NAMES, Chat
from expert.jobs.board.job_pages import log_html, output_lines
from expert.jobs.board.layout import button, live, page, pill, state_pill, title_row
from expert.jobs.board.live import View
from expert.jobs.board.places import Found
from expert.jobs.board.summaries import Summary

WORDS = {"none": "not loaded", "other": "another run is loaded", "failed": "not loaded"}
TONES = {"loading": "note", "ready": "good", "failed": "error"}
FIELDS = (
    ("temperature", "Temperature", {"min": "0", "max": "2", "step": "any"}),
    ("max_tokens", "Most tokens", {"min": "1", "step": "1"}),
    ("seed", "Seed", {"min": "0", "step": "1"}),
)


class ChatView(View):
    """Whether the expert and its base are loaded."""

    def __init__(self, found: Found, chat: Chat) -> None:
        super().__init__()
        self._found, self._chat = found, chat

    def refresh(self) -> dict[str, str]:
        state, words, output = self._chat.state(self._found)
        load = None
        if state in ("none", "other", "failed"):
            load = button("Load it", f"/run/{self._found.id}/load", class_="primary", id="load")
        stands = pill(WORDS.get(state, state), TONES.get(state, "plain"), data_state=state)
        said = tag("span", words, class_="soft")
        head = tag("div", stands, said, load, class_="row", role="status")
        lines = output_lines(output)
        log: Markup | None = log_html(lines) if lines else None
        if log is not None and state != "failed":
            log = tag("details", tag("summary", "What expert serve says"), log, class_="notes")
        return {"status": tag("div", head, log, id="status"), "order": "status"}


def chat_page(found: Found, view: View) -> str:
    """Two conversations beside each other and one field for both; the rest is the script's."""
    columns = [
        tag("section", tag("h2", name.title()),
            tag("div", tag("p", note, class_="soft"), id=f"talk-{name}", class_="talk", role="log",
                tabindex="0", aria_label=f"Conversation with the {name}"))
        for name, note in zip(NAMES, ("What was trained.", "The same model, untrained."),
                              strict=True)
    ]  # fmt: skip
    settings = [
        tag("label", words, tag("input", type="number", name=name, placeholder="of the manifest",
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
            tag("small", "Enter sends, Shift+Enter begins a line", id="keys"), class_="row"),
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
    """Every run that has something to talk to."""
    cards = [
        tag("article",
            tag("div", tag("h2", tag("a", run.found.name, href=f"/run/{run.found.id}/chat")),
                tag("small", run.found.where), class_="who"),
            state_pill(run.state), class_="card run short")
        for run in runs
    ]  # fmt: skip
    if not cards:
        text = "No run of these folders has saved an expert yet."
        cards = [tag("div", tag("p", text), class_="card empty")]
    return page("Chat", title_row("Chat"), *cards, here="chat")
