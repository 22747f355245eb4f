"""Rules about what computes."""

from __future__ import annotations

from expert.jobs.diagnose.faults.asked import CONFIG, Answer, Asked, answer
from expert.planning.choose.kernels import COMPILED

# What guides to the RTX 4080 Super, 4090 and 5090 state for one switch alone, not measured here.
FUSED_GAIN, TF32_GAIN, BF16_GAIN, CARD_GAIN = 1.05, 1.5, 2.0, 10.0


def precision(a: Asked) -> Answer:
    precision = a.plan.kernels.precision
    if a.ampere and precision == "fp32":
        return answer(
            "fp32-on-a-bf16-card",
            "warning",
            "the run computes in float32",
            f"{a.plan.target} has bf16 tensor cores",
            "half the speed or less, and twice the memory",
            set_to=("bf16=true", "fp16=false"),
            gain=BF16_GAIN,
        )
    if a.ampere and precision == "fp16":
        return answer(
            "fp16",
            "warning",
            "the run computes in float16",
            f"{a.plan.target} has bf16 tensor cores",
            "loss scaling, and updates lost where a gradient overflows; bf16 is as fast",
            set_to=("bf16=true", "fp16=false"),
        )
    if a.on_gpu and a.asked("bf16") is True and precision != "bf16":
        return answer(
            "no-bf16",
            "note",
            "bf16 was asked for and the card has none",
            f"{precision} is used: {a.why('kernels.precision')}",
        )
    return None


def tf32(a: Asked) -> Answer:
    if not a.ampere or a.plan.kernels.tf32:
        return None
    matters = a.plan.kernels.precision == "fp32"
    return answer(
        "tf32-off",
        "warning" if matters else "note",
        "float32 products do not use TF32",
        f"use_tf32 is off, precision is {a.plan.kernels.precision}",
        "the tensor cores stand idle" if matters else "few products are left in float32",
        set_to=("use_tf32=auto",),
        gain=TF32_GAIN if matters else None,
    )


def attention(a: Asked) -> Answer:
    if a.on_gpu and a.plan.kernels.attention == "eager":
        return answer(
            "eager-attention",
            "warning",
            "attention is written out",
            f"attention: eager at {a.plan.data.max_seq_length} tokens",
            "every score is stored: memory and time grow with the square of the length",
            set_to=("attention=auto",),
        )
    if a.asked("flash_attention_2"):
        return answer(
            "flash-attention-package",
            "note",
            "the flash-attn package is not needed",
            f"attention: {a.plan.kernels.attention}, {a.why('kernels.attention')}",
        )
    if a.asked("use_sdpa") is False:
        return answer(
            "flash-attention-package",
            "note",
            "use_sdpa: false does not make attention slow",
            f"attention: {a.plan.kernels.attention}, {a.why('kernels.attention')}",
        )
    return None


def fused_adamw(a: Asked) -> Answer:
    if not a.on_gpu or a.plan.optim.optimizer != "adamw_torch":
        return None
    return answer(
        "plain-optimizer",
        "warning",
        "AdamW is not the fused one",
        "optim: adamw_torch",
        "many small kernels for every update instead of one",
        set_to=("optim=auto",),
        gain=FUSED_GAIN,
    )


def fused_loss(a: Asked) -> Answer:
    if a.plan.kernels.fused_loss:
        return None
    return answer(
        "whole-logits",
        "warning",
        "the whole logits are stored",
        "fused_loss is off: 12 bytes for each token and word of the vocabulary",
        "memory that a larger batch could use",
        set_to=("fused_loss=auto",),
    )


def compile(a: Asked) -> Answer:
    on, why = a.plan.kernels.compile, a.why("kernels.compile")
    if on and not a.on_gpu:
        return answer(
            "compile-on-cpu",
            "warning",
            "blocks are compiled for a CPU",
            "torch_compile is on",
            "compiling takes longer than it wins",
            set_to=("torch_compile=auto",),
        )
    old = a.capability is not None and a.capability < (7, 0)
    if on and (a.windows or old):
        reason = "Triton does not ship for Windows" if a.windows else "the card is older than 7.0"
        return answer(
            "compile-cannot",
            "warning",
            "compilation was asked for and will fall back",
            reason,
            "the run begins with a failed attempt and goes on without",
            set_to=("torch_compile=auto",),
        )
    if on and a.padded:
        return answer(
            "compile-padded",
            "warning",
            "padded rows are compiled anew for every width",
            "torch_compile is on and packing is off",
            "minutes of compiling instead of training",
            set_to=("packing=auto",),
        )
    if not a.on_gpu or on:
        return None
    if a.is_set("torch_compile") and a.asked("torch_compile") is False:
        return _would_compile(a)
    return answer("compile-off", "note", "blocks are not compiled", why)


def _would_compile(a: Asked) -> Answer:
    other = a.replan((f"{CONFIG}.torch_compile=auto",))
    if other is None or not other.kernels.compile:
        return None
    because = next(d.because for d in other.decisions if d.path == "kernels.compile")
    return answer(
        "compile-off",
        "warning",
        "blocks are not compiled although it would pay",
        f"torch_compile is off; {because}",
        "every operation is launched by itself",
        set_to=("torch_compile=auto",),
        gain=COMPILED,
    )


def device(a: Asked) -> Answer:
    if a.on_gpu or not a.gpu_here or a.asked("device") != "cpu":
        return None
    return answer(
        "cpu-asked",
        "warning",
        "training is to run on the CPU although there is a GPU",
        f"device: cpu, and this machine has {a.gpu_here}",
        "ten to a hundred times as slow",
        set_to=("device=auto",),
        gain=CARD_GAIN,
    )


def cudnn(a: Asked) -> Answer:
    if not a.on_gpu or a.plan.kernels.cudnn_benchmark:
        return None
    return answer(
        "cudnn-benchmark-off",
        "note",
        "cuDNN does not try its algorithms",
        "cudnn_benchmark is off",
        "language models hardly use cuDNN: about 1 %",
        set_to=("cudnn_benchmark=auto",),
    )
