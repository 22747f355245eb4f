"""`expert sample`: a trained expert answers prompts, or chats in a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from expert.cli.show import options
from expert.cli.show.display import make_console, show, write_json
from expert.core.errors import ExpertError
from expert.core.text import visible

NEW = "/new"
MARK = "> "

Prompts = Annotated[
    list[str] | None,
    typer.Option(
        help="What to answer or continue; repeatable; - reads standard input. Without it, a "
        "terminal starts a conversation."
    ),
]
Plain = Annotated[
    bool | None,
    typer.Option(
        "--plain/--chat", help="Continue the prompt, or answer it; default: like the training data."
    ),
]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=2, help="Randomness; 0: the most likely token.")
]
TopP = Annotated[
    float | None, typer.Option(min=0.001, max=1, help="Keep the tokens with this probability mass.")
]
TopK = Annotated[int | None, typer.Option(min=1, help="Keep this many most likely tokens.")]
Seed = Annotated[int | None, typer.Option(min=0, help="The same seed gives the same text.")]


def sample(
    run: options.RunFolder = None,
    expert: options.ExpertPlace = None,
    prompt: Prompts = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    plain: Plain = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    checkpoint: options.Checkpoint = None,
    device: options.ComputeDevice = options.Device.auto,
    as_json: Annotated[bool, options.json_option("Print texts and settings as JSON.")] = False,
) -> None:
    """Answer prompts with a trained expert, or chat with it."""
    from expert.jobs.sample.sample import sample as sample_job

    run = options.chosen_run(run, expert)
    prompts = _prompts(prompt, interactive=not as_json and _is_terminal())
    console, notes = make_console(), make_console(error=True)
    how: dict[str, Any] = {
        "system": system,
        "plain": plain,
        "checkpoint": checkpoint,
        "seed": seed,
        "device": device.value,
        "decoding": {
            "max_new_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
        },
        "loading": lambda what: show(notes, f"{what} …", "dim"),
    }
    if as_json:
        write_json(sample_job(run, prompts, **how))
        return
    writer = _Writer(console, several=len(prompts) > 1)
    if not prompts:
        _chat(run, writer, notes, how)
        return
    found = sample_job(run, prompts, begin=writer.begin, tell=writer.write, **how)
    writer.end()
    for note in found.notes:
        show(notes, note, "dim")
    if found.decoding.temperature > 0 and seed is None:
        show(notes, f"repeat it with --seed {found.seed}", "dim")


def _prompts(given: list[str] | None, *, interactive: bool) -> list[str]:
    """The prompts; empty if they will be typed."""

    if not given and not interactive:
        fix = "add --prompt TEXT, or --prompt - for standard input; in a terminal, leave it out"
        raise ExpertError(f"--prompt: nothing to answer  ({fix})")
    return [sys.stdin.read().rstrip("\r\n") if text == "-" else text for text in given or ()]


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


class _Writer:
    """Prints text as it is generated; the prompt first if it is continued or one of several."""

    def __init__(self, console: Console, *, several: bool) -> None:
        self._console, self._several, self._open = console, several, False

    def begin(self, prompt: str, plain: bool) -> None:
        self.end()
        self._open = True
        if plain:
            self.write(prompt)
        elif self._several:
            show(self._console, f"> {prompt}", "bold")

    def write(self, piece: str) -> None:
        sys.stdout.write(visible(piece, keep="\n\t"))
        sys.stdout.flush()

    def end(self) -> None:
        if self._open:
            sys.stdout.write("\n")
        self._open = False


def _chat(run: Path | None, writer: _Writer, notes: Console, how: dict[str, Any]) -> None:
    """Answer line after line; a line that cannot be answered gets the reason."""
    import readline  # noqa: F401 - input() edits lines with it once it is imported

    from expert.jobs.sample.sample import Conversation, load_expert

    loaded = load_expert(run, **how)
    conversation = Conversation(loaded, system=how["system"])
    kept = f"history is kept; {NEW} starts a new conversation"
    alone = "every line is continued by itself"
    first = f"{kept if conversation.keeps_history else alone}; Ctrl-D ends"
    for note in (*loaded.notes, first):
        show(notes, note, "dim")
    while True:
        try:
            line = input(MARK).strip()
        except EOFError:
            writer.write("\n")
            return
        if line == NEW:
            conversation.reset()
            show(notes, "new conversation", "dim")
        elif line:
            try:
                answer = conversation.ask(line, begin=writer.begin, tell=writer.write)
            except ExpertError as error:
                show(notes, str(error), "dim")
                continue
            finally:
                writer.end()
            if answer.note:
                show(notes, answer.note, "dim")
