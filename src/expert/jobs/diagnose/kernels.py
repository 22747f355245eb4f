"""Runs kernels once, forward and backward, and compares them with the same arithmetic in float32.

A trial returns the error of a kernel and its tolerance, or why it is absent. `try_kernels` runs
them in a separate process (`python -m expert.jobs.diagnose.kernels DEVICE NAME…`), because a kernel
may crash its process: each line it writes is one JSON object, "begin" before a trial and "result"
after it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from expert.core.process import Child, describe_exit

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SIZE = 512
"""Rows and columns of the matrices: large enough for tensor cores, small enough for any card."""
SMALL = 128
"""For a CPU that has to emulate bfloat16: 4 s for a product of SIZE and its gradients."""
# Relative to the float32 result, over all outputs and gradients. bf16 keeps 8 bits of mantissa:
# operands rounded at 2^-9 each leave 0.003 of a product of random numbers; TF32 keeps 11: 0.0005.
# The tolerances leave room to triple that; a wrong kernel is off by 1.
BF16, TF32, FP32 = 1e-2, 2e-3, 1e-5
# Four bits hold 16 values: products of NF4 weights are compared with those of the same weights
# dequantized to float32, so only the rounding of bf16 or float32 is left.
NF4 = 1e-2
# Two steps from equal states: 8-bit moments have 256 values, so a step is off by a few percent.
ADAM8 = 0.1
TIMED = 3
"""Runs of a trial after the first, which loads or compiles."""


State = Literal["works", "wrong", "failed", "crashed", "too slow", "absent", "not tried"]

TRIAL_SECONDS = 120.0
"""One trial may take this long: compiling for the first time takes 20 s, on a busy machine more."""
SECONDS_TO_START = 180.0
"""Importing torch from a cold network disk was seen to take minutes."""
KEPT_ERROR_LINES = 3


@dataclass(frozen=True, kw_only=True)
class TriedKernel:
    name: str
    state: State
    because: str = ""
    off_by: float | None = None
    """Largest relative difference of outputs and gradients from float32."""
    tolerance: float | None = None
    first_seconds: float | None = None
    """The first run, including whatever had to be loaded or compiled."""
    seconds: float | None = None
    """A later run: forward, backward and the comparison."""

    @property
    def bad(self) -> bool:
        return self.state in ("wrong", "failed", "crashed", "too slow")


@dataclass(frozen=True, kw_only=True)
class Trials:
    """All trials, and what torch was built for."""

    device: str
    tried: tuple[TriedKernel, ...]
    torch: dict[str, Any] = field(default_factory=dict)
    """version, cuda (that torch was built for), available, architectures, capability."""
    note: str = ""
    """Why nothing was run; empty if something was."""


class KernelMissing(Exception):
    """A kernel that this machine does not have and does not need, and why."""


def difference(ours: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative difference of pairs of tensors; NaN if one has NaN."""
    found = 0.0
    for one, other in zip(ours, right, strict=True):
        size = float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30))
        if math.isnan(size):
            return size
        found = max(found, size)
    return found


def _random_tensor(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device)


def _forward_backward(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], weight: Tensor | None = None
) -> list[Tensor]:
    """The output of a function and its gradients; `weight`: the gradient of its output."""
    import torch

    own = [each.detach().requires_grad_() for each in inputs]
    output = function(*own)
    weight = torch.ones_like(output) if weight is None else weight.to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, own, weight)]


def _emulates_bf16(device: torch.device) -> bool:
    """Whether a CPU has no bfloat16 products: one of SIZE takes seconds then."""
    import torch

    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _product(device: torch.device, size: int, precision: str, dtype: str) -> list[Tensor]:
    """A matrix product, with as much TF32 as this precision allows."""
    import torch

    parts = [
        _random_tensor(device, size, size, seed=seed).to(getattr(torch, dtype)) for seed in range(3)
    ]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return _forward_backward(torch.matmul, parts[:2], parts[2])
    finally:
        torch.set_float32_matmul_precision(before)


def bf16_matmul(device: torch.device) -> tuple[float, float]:
    size = SMALL if _emulates_bf16(device) else SIZE
    right = _product(device, size, "highest", "float32")
    return difference(_product(device, size, "highest", "bfloat16"), right), BF16


def tf32_matmul(device: torch.device) -> tuple[float, float]:
    import torch

    if device.type != "cuda":
        raise KernelMissing("TF32 is arithmetic of NVIDIA cards from 8.0 on")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise KernelMissing("the card is older than 8.0 and has no TF32")
    right = _product(device, SIZE, "highest", "float32")
    return difference(_product(device, SIZE, "high", "float32"), right), TF32


def sdpa(device: torch.device) -> tuple[float, float]:
    """The backend that torch chooses, against its math backend in float32."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = torch.bfloat16
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        dtype = torch.float16
    tokens = 64 if _emulates_bf16(device) else 256
    parts = [_random_tensor(device, 2, 8, tokens, 64, seed=seed).to(dtype) for seed in range(4)]
    causal = partial(F.scaled_dot_product_attention, is_causal=True)
    ours = _forward_backward(causal, parts[:3], parts[3])
    with sdpa_kernel(SDPBackend.MATH):
        right = _forward_backward(causal, [each.float() for each in parts[:3]], parts[3])
    return difference(ours, right), 2 * BF16


def packed_attention(kind: Any, device: torch.device) -> tuple[float, float]:
    import torch

    from expert.core.install import pip_install
    from expert.model.attention import attention_errors, attention_tolerance
    from expert.planning.machine.host import package_version

    if kind == "flash4" and package_version("flash-attn-4").value is None:
        raise KernelMissing(f"flash-attn-4 is not installed ({pip_install('flash4')})")
    if device.type != "cuda":
        raise KernelMissing("runs on NVIDIA cards only; a CPU uses SDPA with a document mask")
    dtype = torch.bfloat16
    errors = attention_errors(kind, device, dtype, 64, 8, 4)
    worst = max(errors.values(), key=lambda size: math.inf if math.isnan(size) else size)
    return worst, attention_tolerance(dtype)


def compile_small(device: torch.device) -> tuple[float, float]:
    import torch
    import torch.nn.functional as F

    def small(left: Tensor, right: Tensor) -> Tensor:
        return F.silu(left @ right).sum(-1) * 2.0

    inputs = [_random_tensor(device, 64, 64, seed=seed) for seed in (1, 2)]
    compiled = torch.compile(small, dynamic=False)
    return difference(_forward_backward(compiled, inputs), _forward_backward(small, inputs)), FP32


def _weight_change(
    device: torch.device, optimizer: Callable[..., Any], **options: Any
) -> list[Tensor]:
    """The change of a weight over two steps; two, so that the stored state is read."""
    import torch

    # bitsandbytes keeps fewer than 4096 numbers in 32 bits.
    weight = torch.nn.Parameter(_random_tensor(device, 128, 128, seed=1))
    instance = optimizer([weight], lr=1e-2, weight_decay=0.0, **options)
    for seed in (2, 3):
        weight.grad = _random_tensor(device, 128, 128, seed=seed)
        instance.step()
    return [weight.detach() - _random_tensor(device, 128, 128, seed=1)]


def fused_adamw(device: torch.device) -> tuple[float, float]:
    from torch.optim import AdamW

    right = _weight_change(device, AdamW, foreach=False)
    return difference(_weight_change(device, AdamW, fused=True), right), 1e-4


def adam_8bit(device: torch.device) -> tuple[float, float]:
    from torch.optim import AdamW

    ours = _weight_change(device, _bitsandbytes().optim.AdamW8bit)
    return difference(ours, _weight_change(device, AdamW)), ADAM8


def _bitsandbytes() -> Any:
    from expert.core.install import pip_install
    from expert.model.quantised import quiet_bitsandbytes

    if importlib.util.find_spec("bitsandbytes") is None:
        raise KernelMissing(f"bitsandbytes is not installed ({pip_install('quant')})")
    quiet_bitsandbytes()
    return importlib.import_module("bitsandbytes")


def nf4_linear(device: torch.device) -> tuple[float, float]:
    import torch

    bnb = _bitsandbytes()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    how = {"compress_statistics": True, "quant_type": "nf4"}
    layer = bnb.nn.Linear4bit(SIZE, SIZE, bias=False, compute_dtype=dtype, **how)
    numbers = _random_tensor(torch.device("cpu"), SIZE, SIZE, seed=1)
    layer.weight = bnb.nn.Params4bit(numbers, requires_grad=False, **how)
    layer = layer.to(device)
    plain = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
    rows, weight = (_random_tensor(device, 64, SIZE, seed=seed).to(dtype) for seed in (2, 3))
    right = _forward_backward(lambda rows: rows @ plain.t(), [rows.float()], weight)
    return difference(_forward_backward(layer, [rows], weight), right), NF4


def fused_loss(device: torch.device) -> tuple[float, float]:
    """The loss as training computes it here: a Triton kernel on a card, torch's elsewhere."""
    import torch

    from expert.model.loss import NO_LABEL, kernel_for, loss_kernel_failure, summed_loss

    trouble = loss_kernel_failure(device)
    if trouble:
        raise RuntimeError(trouble)
    rows, words, width = 96, 1000, 64
    labels = torch.arange(rows, device=device, dtype=torch.int32) * 7 % words
    labels[::5] = NO_LABEL
    places = (labels != NO_LABEL).nonzero().flatten().to(torch.int32)

    def loss(hidden: Tensor, head: Tensor, *, fused: bool) -> Tensor:
        kernel = kernel_for(device)
        return summed_loss(
            hidden, head, labels, places, len(places), fused=fused, chunk=32, kernel=kernel
        ).reshape(1)

    inputs = [
        _random_tensor(device, rows, width, seed=1),
        _random_tensor(device, words, width, seed=2),
    ]
    ours, right = (_forward_backward(partial(loss, fused=fused), inputs) for fused in (True, False))
    return difference(ours, right), 1e-4


Trial = Callable[["torch.device"], tuple[float, float]]
TRIALS: dict[str, Trial] = {
    "bf16 matmul": bf16_matmul,
    "TF32 matmul": tf32_matmul,
    "SDPA": sdpa,
    "varlen attention": partial(packed_attention, "flash"),
    "FlashAttention 4": partial(packed_attention, "flash4"),
    "FlexAttention": partial(packed_attention, "flex"),
    "fused loss": fused_loss,
    "fused AdamW": fused_adamw,
    "torch.compile": compile_small,
    "bitsandbytes NF4": nf4_linear,
    "bitsandbytes 8-bit AdamW": adam_8bit,
}


# --- the process that runs them ------------------------------------------------------------------


def run_trial(name: str, device: torch.device) -> TriedKernel:
    import torch

    times = []
    try:
        for _ in range(1 + TIMED):
            start = time.perf_counter()
            off_by, tolerance = TRIALS[name](device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
    except KernelMissing as reason:
        return TriedKernel(name=name, state="absent", because=str(reason))
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises here is the answer
        lines = [line for line in str(error).splitlines() if line.strip()]
        because = f"{type(error).__name__}: {lines[0] if lines else ''}"
        return TriedKernel(name=name, state="failed", because=because)
    right = off_by <= tolerance
    return TriedKernel(
        name=name,
        state="works" if right else "wrong",
        because="" if right else f"off by {off_by:.2g} where {tolerance:.2g} is allowed",
        off_by=None if math.isnan(off_by) else off_by,
        tolerance=tolerance,
        first_seconds=times[0],
        seconds=sorted(times[1:])[TIMED // 2],
    )


def torch_facts() -> dict[str, Any]:
    import torch

    cuda = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "available": cuda,
        "architectures": torch.cuda.get_arch_list() if cuda else [],
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
    }


def main() -> None:
    """Run the named trials one after the other."""
    import torch

    device_name, *names = sys.argv[1:]
    _send({"facts": torch_facts()})
    device = torch.device(device_name)
    for name in names:
        _send({"begin": name})
        result = run_trial(name, device)
        _send({"result": asdict(result)})
        if result.state == "failed" and "CUDA error" in result.because:
            return  # the card's context is lost for this process; the rest runs in another


def _send(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


# --- from outside --------------------------------------------------------------------------------


def try_kernels(
    device: Literal["cuda", "cpu"],
    names: Sequence[str] | None = None,
    *,
    command: Sequence[str] = (sys.executable, "-m", "expert.jobs.diagnose.kernels"),
    seconds: float = TRIAL_SECONDS,
    tell: Callable[[str], None] = lambda name: None,
) -> Trials:
    """Run the named trials, or all; after one that ends its process, the rest run in a new one."""
    left = list(TRIALS if names is None else names)
    done: list[TriedKernel] = []
    facts: dict[str, Any] = {}
    note = ""
    while left:
        before = len(done)
        note = _run([*command, device, *left], seconds, tell, done, facts)
        if len(done) == before:
            break
        left = [name for name in left if name not in {each.name for each in done}]
    done += [TriedKernel(name=name, state="not tried", because=note) for name in left]
    return Trials(device=device, tried=tuple(done), torch=facts, note=note if not facts else "")


def _run(
    command: list[str],
    seconds: float,
    tell: Callable[[str], None],
    done: list[TriedKernel],
    facts: dict[str, Any],
) -> str:
    """One process of trials, until all have run or one has ended it; why it started none."""
    # Without synchronous launches, a failure would be blamed on a later kernel.
    child = Child(command, env={"CUDA_LAUNCH_BLOCKING": "1", "PYTHONFAULTHANDLER": "1"})
    begun: str | None = None
    limit = time.monotonic() + SECONDS_TO_START
    try:
        while (message := child.next(limit)) is not None:
            if "facts" in message:
                facts |= message["facts"]
            elif "begin" in message:
                begun = str(message["begin"])
                tell(begun)
                limit = time.monotonic() + seconds
            elif "result" in message:
                done.append(TriedKernel(**message["result"]))
                begun = None
        if time.monotonic() >= limit:
            if begun is not None:
                because = f"not done after {seconds:.0f} s"
                done.append(TriedKernel(name=begun, state="too slow", because=because))
            return f"no answer for {SECONDS_TO_START:.0f} s"
        code = child.wait()
        words = child.stderr_tail(KEPT_ERROR_LINES)
        if begun is not None:
            last = f": {child.stderr_tail()}" if code >= 0 and words else ""
            because = f"the process {describe_exit(code)}{last}"
            done.append(TriedKernel(name=begun, state="crashed", because=because))
        return words or "the trials did not start"
    finally:
        child.stop()


if __name__ == "__main__":
    main()
