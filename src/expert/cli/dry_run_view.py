"""What `expert train --dry-run` shows: plan, data, a row and the folder of a run; nothing is
written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from expert.core.errors import EXIT_DOES_NOT_FIT

if TYPE_CHECKING:
    from rich.console import Console

    from expert.run.open import Opened


def show_dry_run(opened: Opened, console: Console, *, as_json: bool) -> None:
    """Shows what a run would do; the exit code says whether it would fit."""
    from expert.cli.manifest import show_notices
    from expert.cli.plan_view import show_plan
    from expert.cli.row_view import show_rows
    from expert.core.visible import visible
    from expert.jobs.datasets.showing import JSON_TOKENS, SCREEN_TOKENS, first_row_of

    read, plan = opened.read, opened.plan
    data = would_prepare(opened)
    run = str(opened.resumed.folder.path) if opened.resumed else None
    row, absent = first_row_of(opened, most_tokens=JSON_TOKENS if as_json else SCREEN_TOKENS)
    if as_json:
        import json
        from dataclasses import asdict

        from expert.cli.display import write_line

        found = {"plan": plan.model_dump(mode="json"), "data": data, "resume": run}
        found |= {"row": asdict(row) if row else None, "no_row_because": absent}
        write_line(json.dumps(found, indent=2))
    else:
        from expert.cli.run_view import say

        show_notices(read, console, brief=True)
        show_plan(plan, console, everything=False)
        say(console, "\ndata that would be read", "bold")
        for entry in data["sources"]:
            say(console, f"  {entry['split']}: {entry['text']}")
        say(console, f"  prepared tokens: {data['cache']}")
        if row is not None:
            show_rows([row], console)
            say(console, "  expert dataset check shows more", "dim")
        else:
            say(console, f"  no row is shown: {visible(absent)}", "dim")
        where = f"go on with {run}" if run else f"make a folder in {plan.watch.output_dir}"
        say(console, f"the run would {where}; nothing was written")
    if not plan.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def would_prepare(opened: Opened) -> dict[str, Any]:
    """Where the rows of a run would come from and where their tokens go; nothing is read."""
    from expert.cli.words import gib
    from expert.data.read.sources import Source
    from expert.data.tokens.tokenised import columns_in

    asked, plan = opened.named, opened.plan
    found = asked.first
    named: list[tuple[str, Source | None]] = [
        ("train", found.train),
        ("validation", found.validation),
        ("test", found.test),
    ]
    for task in found.tasks:
        named += [(f"{task.name} train", task.train), (f"{task.name} validation", task.validation)]
        named.append((f"{task.name} test", task.test))
    sources = []
    for split, source in named:
        if source is not None:
            sizes = [path.stat().st_size for path in source.files if path.is_file()]
            size = f", {gib(sum(sizes))}" if sizes else ""
            files = [str(path) for path in source.files]
            are_tokens = asked.tokens is not None and columns_in(source) is not None
            kind = "tokens made elsewhere" if are_tokens else source.kind
            text = f"{source.name} ({kind}{size})"
            sources.append({"split": split, "text": text, "files": files})
    cache = plan.data.cache or str(opened.read.folder / "datasets_optimized")
    made = len(list(Path(cache).glob("tokens-*"))) if Path(cache).is_dir() else 0
    there = "1 set is" if made == 1 else f"{made} sets are"
    state = f"{there} there and used where the content fits" if made else "none yet"
    return {"sources": sources, "cache": f"{cache} ({state})"}
