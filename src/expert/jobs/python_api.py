"""`expert.sample` and `expert.export`: the Python API, returning a text and a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal


def sample(
    run: str | Path,
    prompt: str,
    *,
    system: str = "",
    tools: str | Path | None = None,
    plain: bool | None = None,
    checkpoint: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    **decoding: Any,
) -> str:
    """The answer of a trained expert. `run`: its run folder, a folder of runs, or its own.

    `decoding` overrides the manifest's settings: temperature, top_p, top_k, max_new_tokens and so
    on; the same `seed` gives the same text. `plain` continues the prompt verbatim; `tools` is a
    file with the tools it may call. Every call loads the model: for several prompts use
    `expert.jobs.sample.sample.sample`.
    """
    from expert.jobs.sample.sample import sample as sample_job

    how: dict[str, Any] = {"plain": plain, "checkpoint": checkpoint, "seed": seed}
    how["tools"] = Path(tools) if tools is not None else None
    found = sample_job(Path(run), [prompt], system=system, device=device, decoding=decoding, **how)
    return found.samples[0].text


def export(
    run: str | Path,
    to: str | Path,
    *,
    kind: Literal["adapter", "merged"] | None = None,
    gguf: str | None = None,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    checkpoint: str | None = None,
    device: str = "auto",
    allow_failed: bool = False,
) -> Path:
    """Write the trained weights to the new folder `to`, as `expert export` does, and return its
    path. `gguf`: the type of a GGUF file, such as q8_0."""
    from expert.jobs.export.export import export as export_job
    from expert.run.stored.locate import find_trained

    done = export_job(
        find_trained(Path(run), "validated").path,
        Path(to),
        kind=kind,
        gguf=gguf,
        dtype=dtype,
        checkpoint=checkpoint,
        device=device,
        allow_failed=allow_failed,
    )
    return done.folder
