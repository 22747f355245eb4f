"""Precision, TF32, attention, loss, compilation, optimizer: what the card can do best."""

from __future__ import annotations

from expert.core.text import counted
from expert.planning.choose.gains import COMPILE_PAYS_AFTER_SECONDS
from expert.planning.decisions import Ledger
from expert.planning.situation import Situation

AMPERE = (8, 0)
HOPPER = (9, 0)
TRITON_LEAST = (7, 0)
COMPILE_PAYS_FROM_FILL = 0.7
"""Compiled blocks want one width and ran 1.3-2.0x as fast; batches of varying width leave out what
is empty."""
# Well-tuned loops reach 35-65 % of a card's bf16 peak; this only decides whether a run is short.
LIKELY_SHARE_OF_PEAK = 0.4
FEW_EXAMPLES = 1000
FEW_STEPS = 50


def choose_precision(now: Situation, ledger: Ledger) -> str:
    """bf16 where the card has it, else fp16 with loss scaling; fp32 on a CPU or when asked for."""
    asked_bf16, asked_fp16 = now.config.bf16, now.config.fp16
    path = "kernels.precision"
    if asked_bf16 is True:
        chosen = _asked_bf16(now, ledger, path)
    elif asked_fp16 is True and not now.on_gpu:
        because = "fp16 was asked for, but it trains only on a GPU"
        ledger.warn(path, because)
        chosen = ledger.settle(path, "fp32", because, "fallback")
    elif asked_fp16 is True:
        if now.has_capability(AMPERE):
            ledger.advise(path, f"bf16: true is as fast on {now.target.name} and needs no scaling")
        chosen = ledger.settle(path, "fp16", "set in the manifest", "manifest")
    elif asked_bf16 is False and asked_fp16 is False:
        if now.on_gpu:
            ledger.warn(path, "fp32 leaves the tensor cores to TF32 and doubles the memory")
        chosen = ledger.settle(path, "fp32", "bf16 and fp16 are both false", "manifest")
    elif not now.on_gpu:
        chosen = ledger.settle(path, "fp32", "CPUs compute float32 best", "machine")
    elif now.has_capability(AMPERE) and asked_bf16 == "auto":
        because = f"{now.card_words} has bf16 tensor cores"
        if now.target.capability is None:
            because = "no card is named; every one since 2020 has bf16 tensor cores"
        chosen = ledger.settle(path, "bf16", because, "machine")
    elif asked_fp16 == "auto":
        ruled_out = "bf16 is ruled out" if asked_bf16 is False else f"{now.card_words} has no bf16"
        chosen = ledger.settle(path, "fp16", f"{ruled_out}; loss scaling on", "machine")
    else:
        because = f"{now.card_words} has no bf16 and fp16 is ruled out"
        chosen = ledger.settle(path, "fp32", because, "machine")
    scaling = chosen == "fp16"
    because = "fp16 gradients underflow without it" if scaling else f"not needed with {chosen}"
    ledger.settle("kernels.loss_scaling", scaling, because, "machine")
    return str(chosen)


def _asked_bf16(now: Situation, ledger: Ledger, path: str) -> str:
    if now.on_gpu and not now.has_capability(AMPERE):
        because = f"bf16 was asked for, but {now.card_words} has no bf16: fp16 with loss scaling"
        ledger.warn(path, because)
        return str(ledger.settle(path, "fp16", because, "fallback"))
    if not now.on_gpu:
        ledger.warn(path, "bf16 on a CPU is slower than fp32 unless it has AMX or bf16 units")
    return str(ledger.settle(path, "bf16", "set in the manifest", "manifest"))


def choose_tf32(now: Situation, ledger: Ledger) -> None:
    """TF32 for what float32 products are left, from Ampere on."""
    asked, path = now.config.use_tf32, "kernels.tf32"
    able = now.has_capability(AMPERE)
    if asked == "auto":
        because = "free on cards from 8.0 on" if able else f"{now.card_words} has no TF32"
        ledger.settle(path, able, because, "machine")
    elif asked and not able:
        because = f"asked for, but {now.card_words} has no TF32"
        ledger.warn(path, because)
        ledger.settle(path, False, because, "fallback")
    else:
        ledger.settle(path, asked, "set in the manifest", "manifest")


def choose_attention(
    now: Situation, ledger: Ledger, *, packed: bool, compiled: bool, precision: str
) -> str:
    """Kernels that keep packed documents apart; SDPA for rows alone, on older cards, in fp32.

    What takes the place of use_sdpa depends on the card: only here is that known.
    """
    chosen = _chosen_attention(now, ledger, packed=packed, compiled=compiled, precision=precision)
    config = now.config
    if config.use_sdpa is True and config.attention == "auto" and chosen != "sdpa":
        text = f"use_sdpa: packed rows are kept apart by {chosen} attention; SDPA would need a mask"
        ledger.supersede("kernels.attention", f"{text} of every pair of tokens")
    return chosen


def _chosen_attention(
    now: Situation, ledger: Ledger, *, packed: bool, compiled: bool, precision: str
) -> str:
    config, path = now.config, "kernels.attention"
    able = now.has_capability(AMPERE)
    flashes = able and precision != "fp32"
    asked = config.attention
    if asked == "auto" and config.flash_attention_2:
        asked = "flash"
    if asked == "auto" and config.use_sdpa is True and not packed:
        return str(ledger.settle(path, "sdpa", "use_sdpa in the manifest", "manifest"))
    if (asked == "flash" and not flashes) or (asked == "flex" and not able):
        lacking = f"{now.card_words} has no kernel for it" if not able else "it takes 16 bits only"
        because = f"{asked} was asked for, but {lacking}"
        ledger.warn(path, because)
        return str(ledger.settle(path, "sdpa", because, "fallback"))
    if asked != "auto":
        if asked == "eager":
            ledger.warn(path, "eager attention keeps every score: memory grows with the square")
        because = "set in the manifest"
        if config.attention == "auto":
            because = "flash_attention_2 in the manifest; torch's own flash kernels"
        return str(ledger.settle(path, asked, because, "manifest"))
    found = _measured_attention(now, packed=packed, compiled=compiled)
    if found is not None and (found[0] != "flash" or flashes):
        return str(ledger.settle(path, *found, "measurement"))
    if packed and compiled and now.target.capability == HOPPER:
        # docs/benchmarks/training-speed-h200.json: 117,143 against 108,998 tokens/s at 0.6B in one
        # run; at 8B, in two runs, 16,415 against 16,229.
        because = "FlexAttention with document masks ran 1.07x as fast as flash on an H200 (0.6B)"
        return str(ledger.settle(path, "flex", because, "measurement"))
    if packed and flashes:
        because = "packed documents are kept apart by variable-length flash attention"
        return str(ledger.settle(path, "flash", because, "machine"))
    because = "rows alone: SDPA picks its fastest kernel"
    if packed:
        lacking = f"{now.card_words} has no variable-length kernel"
        if able:
            lacking = "variable-length flash attention takes 16 bits only"
        because = f"{lacking}: SDPA with a document mask"
    return str(ledger.settle(path, "sdpa", because, "machine"))


def _measured_attention(now: Situation, *, packed: bool, compiled: bool) -> tuple[str, str] | None:
    """What a ladder found fastest with blocks as they are now; eager takes too much memory."""
    found, compiled_then = now.measured("kernels.attention"), now.measured("kernels.compile")
    if found is None or found[0] == "eager":
        return None
    able = found[0] == "sdpa" or (packed and now.has_capability(AMPERE))
    return found if able and compiled == bool(compiled_then and compiled_then[0]) else None


def choose_compile(
    now: Situation, ledger: Ledger, likely_seconds: float | None, *, packed: bool
) -> bool:
    """Per-block compilation where it pays: not for runs of two minutes, nor for padded rows."""
    config, path = now.config, "kernels.compile"
    padded = not packed and not now.is_char_model  # blocks of characters are equally long
    chosen: bool
    if config.torch_compile != "auto":
        chosen = ledger.settle(path, config.torch_compile, "set in the manifest", "manifest")
        obstacle = _cannot_compile(now)
        if chosen and obstacle:
            ledger.warn(path, f"{obstacle}: compilation may fall back")
        if chosen and padded:
            text = "widths of padded rows vary, and each is compiled anew: pack the rows instead"
            ledger.warn(path, text)
    else:
        steps = ledger.decisions["length.total_steps"].value
        chosen, because = _compile_pays(now, likely_seconds, steps, padded=padded)
        found = now.measured(path)
        if chosen and found is not None:
            chosen = ledger.settle(path, *found, "measurement")
        else:
            ledger.settle(path, chosen, because, "machine")
    mode = config.torch_compile_mode
    if mode == "auto":
        because = "per-block graphs gain little from more effort"
        ledger.settle("kernels.compile_mode", "default", because, "preset")
    else:
        ledger.settle("kernels.compile_mode", mode, "set in the manifest", "manifest")
    now.pass_on(ledger, "kernels.compile_backend", "torch_compile_backend")
    return chosen


def _cannot_compile(now: Situation) -> str:
    """Why compilation does not work or pay here at all, or nothing."""
    if not now.on_gpu:
        return "compiling is not worth it on a CPU"
    if now.target.windows:
        return "Triton does not ship for Windows"
    if not now.has_capability(TRITON_LEAST):
        return f"{now.card_words} is older than Triton supports (7.0)"
    return ""


def _compile_pays(
    now: Situation, likely_seconds: float | None, steps: int | None, *, padded: bool
) -> tuple[bool, str]:
    obstacle = _cannot_compile(now)
    if obstacle:
        return False, obstacle
    if padded:
        return False, "widths of padded rows vary: each would be compiled anew"
    if likely_seconds is not None and likely_seconds < COMPILE_PAYS_AFTER_SECONDS:
        return False, f"run too short: about {likely_seconds:.0f} s, compiling takes 20"
    if likely_seconds is None and steps is not None and steps < FEW_STEPS:
        return False, f"run too short: {counted(steps, 'update')}"
    known = now.survey.packed
    if known is not None and known.fill < COMPILE_PAYS_FROM_FILL:
        full = f"updates fill {known.fill:.0%} of sequences that could hold a long row"
        return False, f"{full}: batches vary in width instead, and each would be compiled anew"
    rows = now.survey.rows
    if likely_seconds is None and rows is not None and rows * now.config.epochs < FEW_EXAMPLES:
        return False, f"run too short: {counted(rows, 'row')}"
    return True, "blocks of fixed shape ran 1.3-2.0x as fast on an H200, after 7-18 s of compiling"


def choose_optimizer(now: Situation, ledger: Ledger) -> str:
    """Fused AdamW on a GPU, or what was asked for."""
    asked, path = now.config.optim, "optim.optimizer"
    found = now.measured(path)
    if asked == "auto" and found is not None:
        return str(ledger.settle(path, *found, "measurement"))
    if asked == "auto":
        if now.on_gpu:
            because = "one kernel for all weights"
            return str(ledger.settle(path, "adamw_torch_fused", because, "machine"))
        return str(ledger.settle(path, "adamw_torch", "no GPU", "machine"))
    return str(ledger.settle(path, asked, "set in the manifest", "manifest"))


def choose_switches(now: Situation, ledger: Ledger) -> bool:
    """The fused loss and cuDNN's search; returns whether the loss is fused."""
    config = now.config
    if config.fused_loss == "auto":
        because = "the whole logits are never stored"
        fused = ledger.settle("kernels.fused_loss", True, because, "preset")
    else:
        fused = config.fused_loss
        ledger.settle("kernels.fused_loss", fused, "set in the manifest", "manifest")
        if not fused:
            text = "the whole logits are stored: 12 bytes for each token and vocabulary entry"
            ledger.warn("kernels.fused_loss", text)
    now.pass_on(ledger, "kernels.deterministic", "deterministic")
    _choose_cudnn_search(now, ledger)
    return bool(fused)


def _choose_cudnn_search(now: Situation, ledger: Ledger) -> None:
    asked, path = now.config.cudnn_benchmark, "kernels.cudnn_benchmark"
    if now.config.deterministic:
        because = "deterministic: what is found fastest may differ from run to run"
        ledger.settle(path, False, because, "manifest")
        if asked is True:
            ledger.supersede(path, f"cudnn_benchmark: {because}")
    elif asked == "auto":
        because = "shapes are fixed" if now.on_gpu else "no GPU"
        ledger.settle(path, now.on_gpu, because, "machine")
    else:
        ledger.settle(path, asked, "set in the manifest", "manifest")
