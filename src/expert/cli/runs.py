"""`expert sample`, `expert export` and `expert clear-cuda-cache`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expert.cli.options import Device, RunFolder, WhereToCompute, checkpoint_option, json_option

if TYPE_CHECKING:
    from rich.console import Console

    from expert.jobs.export.exported import Exported
    from expert.jobs.gpu_memory import CardMemory, GpuMemory
    from expert.jobs.sample.sample import Samples

Checkpoint = Annotated[
    str | None, checkpoint_option("training.packaging_checkpoint of the manifest")
]


class Dtype(StrEnum):
    """Of weights in a file."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


Plain = Annotated[
    bool | None,
    typer.Option(
        "--plain/--chat",
        help="Continue the prompt as it stands, or answer it; by default as the data was.",
    ),
]
Tools = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Tools it may call: a JSON list, or rows with a column tools; by default those of "
        "the first row it was trained on.",
    ),
]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=2, help="Randomness; 0: the likeliest token.")
]
TopP = Annotated[
    float | None, typer.Option(min=0.001, max=1, help="Likeliest tokens of this share.")
]


Prompts = Annotated[
    list[str] | None,
    typer.Option(
        help="What to answer or continue, several times; - reads it from standard input. Without "
        "it a terminal asks for one after the other."
    ),
]


def sample(
    run: RunFolder,
    prompt: Prompts = None,
    system: Annotated[str, typer.Option(help="The system turn before it.")] = "",
    tools: Tools = None,
    plain: Plain = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="So many likeliest tokens.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed gives the same text.")
    ] = None,
    checkpoint: Checkpoint = None,
    device: WhereToCompute = Device.auto,
    as_json: Annotated[bool, json_option("Texts and settings as JSON.")] = False,
) -> None:
    """Let a trained expert answer prompts; decoding is the manifest's where no flag says more."""
    from expert.cli.display import make_console, write_line
    from expert.cli.run_view import say
    from expert.jobs.sample.sample import sample as sample_job

    prompts = _prompts(prompt, talks=not as_json and _is_terminal())
    console, notes = make_console(), make_console(error=True)
    writer = _Writer(console, several=len(prompts) > 1, quiet=as_json)
    how: dict[str, Any] = {
        "system": system,
        "tools": tools,
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
        "loading": lambda what: say(notes, f"{what} …", "dim"),
    }
    if not prompts:
        _talk(run, writer, notes, how)
        return
    found = sample_job(run, prompts, begin=writer.begin, tell=writer.tell, **how)
    writer.end()
    if as_json:
        write_line(_samples_as_json(found))
        return
    for note in found.notes:
        say(notes, note, "dim")
    if found.decoding.temperature > 0 and seed is None:
        say(notes, f"the same again with --seed {found.seed}", "dim")


def _prompts(given: list[str] | None, *, talks: bool) -> list[str]:
    """What is to be answered; nothing where somebody will type it."""
    from expert.jobs.sample.decoding import CannotSample

    if not given and not talks:
        raise CannotSample(
            "--prompt: nothing to answer was given  (add --prompt TEXT, or --prompt - to read it "
            "from standard input; in a terminal it may be left out)"
        )
    return [sys.stdin.read().rstrip("\r\n") if text == "-" else text for text in given or ()]


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _talk(run: Path | None, writer: _Writer, notes: Console, how: dict[str, Any]) -> None:
    from expert.cli.run_view import say
    from expert.cli.talk import talk
    from expert.jobs.sample.sample import Conversation, ready

    loaded = ready(run, **how)
    for note in loaded.notes:
        say(notes, note, "dim")
    conversation = Conversation(loaded, system=how["system"])
    talk(conversation, writer, lambda text: say(notes, text, "dim"))


class _Writer:
    """Text as it comes; a prompt stands before it where it is continued or one of several."""

    def __init__(self, console: Console, *, several: bool, quiet: bool) -> None:
        self._console, self._several, self._quiet = console, several, quiet
        self._open = False

    def begin(self, prompt: str, plain: bool) -> None:
        self.end()
        self._open = not self._quiet
        if plain:
            self.tell(prompt)
        elif self._several and not self._quiet:
            from expert.cli.run_view import say

            say(self._console, f"> {prompt}", "bold")

    def tell(self, piece: str) -> None:
        if not self._quiet and piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def end(self) -> None:
        if self._open:
            sys.stdout.write("\n")
        self._open = False


def _samples_as_json(found: Samples) -> str:
    import json
    from dataclasses import asdict

    return json.dumps(asdict(found), indent=2, ensure_ascii=False, default=str)


def export(
    run: RunFolder,
    to: Annotated[Path, typer.Option("--to", help="The folder to write; it must be new.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The adapter merged into the base's weights.")
    ] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter as it is.")] = False,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of merged or whole weights; that of the run by default.")
    ] = None,
    checkpoint: Checkpoint = None,
    device: WhereToCompute = Device.auto,
    allow_failed: Annotated[
        bool,
        typer.Option("--allow-failed", help="Even where expert validate found it not good enough."),
    ] = False,
    as_json: Annotated[bool, json_option("What was written as JSON.")] = False,
) -> None:
    """Write the adapter, or merged weights, with tokenizer and model card, logits compared."""
    from expert.cli.display import make_console, write_line
    from expert.cli.run_view import say, waiting
    from expert.jobs.export.export import export as export_job
    from expert.run.locate import find_trained

    if merged and adapter:
        raise typer.BadParameter("--merged and --adapter are two exports: choose one")
    console = make_console(error=as_json)
    with _Stages(console, waiting) as stage:
        done = export_job(
            find_trained(run).path,
            to,
            kind="merged" if merged else "adapter" if adapter else None,
            dtype=dtype.value if dtype else None,
            checkpoint=checkpoint,
            device=device.value,
            allow_failed=allow_failed,
            tell=stage,
        )
    if as_json:
        import json
        from dataclasses import asdict

        found = {**asdict(done), "warnings": done.warnings()}
        write_line(json.dumps(found, indent=2, default=str))
        return
    for text, style in exported_lines(done):
        say(console, text, style)


class _Stages:
    """What is being done, one thing after the other."""

    def __init__(self, console: Console, waiting: Any) -> None:
        from contextlib import ExitStack

        self._console, self._waiting = console, waiting
        self._now = ExitStack()

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._now.close()

    def __call__(self, what: str) -> None:
        self._now.close()
        self._now.enter_context(self._waiting(self._console, what))


def exported_lines(done: Exported) -> list[tuple[str, str]]:
    """What was written, how near it is to what was trained, and what to know about it."""
    from expert.cli.words import gib

    what = {"adapter": "the adapter", "merged": "merged weights", "model": "the model"}[done.kind]
    lines = [
        (f"✓ wrote {what} ({done.checkpoint}, {done.dtype}, {gib(done.bytes)}): {done.folder}", ""),
        (
            f"  logits on {done.texts} texts differ from the trained model's by at most "
            f"{done.largest_difference:.3g}, {done.share:.2%} of their spread "
            f"(tolerance {done.tolerance:.1%})",
            "dim",
        ),
    ]
    judged = (
        f"  validated: {done.judged}" if done.judged else "  not validated: no accuracy is known"
    )
    lines.append((judged, "dim"))
    return lines + [(f"warning: {warning}", "yellow") for warning in done.warnings()]


# --- memory of the cards -------------------------------------------------------------------------

_WHY_NOTHING = (
    "Nothing was freed. PyTorch's cache of GPU memory belongs to the process that filled it, and "
    "this one holds none. The memory of another process comes back when that process ends, or "
    "when it calls torch.cuda.empty_cache() itself; no command can do that from outside."
)


def clear_cuda_cache(
    as_json: Annotated[bool, json_option("Cards and holders as JSON.")] = False,
) -> None:
    """Say who holds GPU memory and what would free it; from outside no cache can be cleared."""
    from expert.cli.display import make_console, write_line
    from expert.jobs.gpu_memory import gpu_memory

    found = gpu_memory()
    if as_json:
        import json
        from dataclasses import asdict

        cards = [{**asdict(c), "could_be_freed_bytes": c.could_be_freed_bytes} for c in found.cards]
        write_line(json.dumps({**asdict(found), "cards": cards}, indent=2))
        return
    from expert.cli.run_view import say

    console = make_console()
    for text, style in memory_lines(found):
        say(console, text, style)


def memory_lines(found: GpuMemory) -> list[tuple[str, str]]:
    """Every card with who holds it, then what could be done."""
    if not found.cards:
        return [(f"There is no GPU here, and no GPU memory to free: {found.note}.", "")]
    lines = [line for card in found.cards for line in _card_lines(card)]
    if found.note:
        lines.append((f"note: {found.note}", "dim"))
    held = [card for card in found.cards if card.holders]
    if held:
        lines.append((_WHY_NOTHING, ""))
    else:
        lines.append(("Nothing was freed: no process that can be seen holds memory.", ""))
    return lines


def _card_lines(card: CardMemory) -> list[tuple[str, str]]:
    from expert.cli.words import gib

    def size(amount: int | None) -> str:
        return "an unknown amount" if amount is None else gib(amount)

    total, free = card.total_bytes, card.free_bytes
    known = total is not None and free is not None
    used = f": {gib((total or 0) - (free or 0))} of {gib(total or 0)} in use" if known else ""
    lines = [(f"GPU {card.index} {card.name or 'unknown card'}{used}", "bold")]
    if card.holders is None:
        return [*lines, (f"  who holds it is not told: {card.note}", "yellow")]
    for each in card.holders:
        who = f"  pid {each.pid}  {each.name or 'unknown process'}  {size(each.bytes)}"
        by = f"  (user {each.user})" if each.user else ""
        lines.append((who + by, ""))
        if each.command:
            shown = each.command if len(each.command) <= 100 else each.command[:99] + "…"
            lines.append((f"    {shown}", "dim"))
        freed = (
            "it is this command itself" if each.own else f"ending it would free {size(each.bytes)}"
        )
        lines.append((f"    {freed}", "dim"))
    if card.elsewhere_bytes:
        what = "the driver itself, or processes that cannot be seen from here"
        lines.append((f"  {gib(card.elsewhere_bytes)}: {what}", "dim"))
    if not card.holders:
        lines.append(("  no process holds memory of it", ""))
    return lines
