"""The Triton kernels of fused blocks against the same written with torch.

With a card they run on it (`make gpu-test`); without one, by Triton's interpreter if that is asked
for (TRITON_INTERPRET=1) and Triton is installed, which CPU builds of torch come without.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from expert.model.fused import (
    document_attention,
    dropout,
    expert_rows,
    experts,
    float8,
    kernels,
    launching,
    magnitudes,
    packing,
    rotation,
    swiglu_with_adapter,
)
from expert.model.fused.kernels import Epilogue
from expert.model.fused.swiglu_with_adapter import DeferredAdapter
from expert.model.lora.nf4 import is_doubly_quantised
from tests.each import each

ROWS, WIDTH, HEADS, INNER = 5, 96, (6, 2), 1500
# Two roundings, of values whose sums differ in order.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("triton", reason="CPU builds of torch come without Triton")
    if torch.cuda.is_available():
        yield "cuda"
        return
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no card; TRITON_INTERPRET=1 runs Triton's interpreter instead")
    monkeypatch.setattr(launching, "INTERPRETED", True)
    yield "cpu"


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def both_ways(
    run: Callable[..., list[Tensor]],
    given: list[Any],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    terms: int = 1,
    codes: float = 0.0,
) -> None:
    """What the kernels make of copies of `given`, and torch; `terms`: of sums in another order;
    `codes`: of what is rounded to few bits, how far apart its steps are."""

    def copies() -> list[Any]:
        return [part.clone().to(device) if isinstance(part, Tensor) else part for part in given]

    found = run(*copies())
    with monkeypatch.context() as patch:
        for module in (kernels, rotation, dropout, expert_rows, float8, magnitudes, packing):
            patch.setattr(module, "uses_triton", lambda tensor: False)
        right = run(*copies())
    for one, other in zip(found, right, strict=True):
        close = max(codes, CLOSE.get(other.dtype, 2e-6) * max(1.0, terms**0.5))
        torch.testing.assert_close(one, other, rtol=close, atol=close)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_kernels_on_a_card(dtype, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA card")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # a run before may have switched TF32 on
    try:
        all_kernels(dtype, "cuda", monkeypatch)
    finally:
        torch.set_float32_matmul_precision(before)


# The interpreter warns of what becomes 1 / (1 + inf) = 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
def test_kernels_do_what_torch_does(dtype, device, monkeypatch):
    all_kernels(dtype, device, monkeypatch)


def all_kernels(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for plus_one in (False, True):
        norms(dtype, device, monkeypatch, plus_one=plus_one)
        rotations(dtype, True, device, monkeypatch, plus_one=plus_one)
    rotations(dtype, False, device, monkeypatch)
    ways: list[dict[str, Any]] = [{"turns": 12}, {"turns": 8, "pairs": True}]
    for way in (*ways, {"width": 24, "turns": 24}):
        for normed in (False, True):
            rotations(dtype, normed, device, monkeypatch, **way)
    gathered_sums(dtype, device, monkeypatch)
    for gelu in (False, True):
        swiglus(dtype, device, monkeypatch, gelu=gelu)
    columns(dtype, device, monkeypatch)
    if device == "cuda" or dtype == torch.float32:  # the interpreter multiplies bfloat16 wrongly
        dropouts(dtype, device, monkeypatch)
        row_scales(dtype, device, monkeypatch)
        float8_sums(dtype, device, monkeypatch)
        for ranks in (0, 8, 24):
            rows_of_experts(dtype, device, monkeypatch, ranks)
        for gelu in (False, True):
            swiglus_of_sums(dtype, device, monkeypatch, gelu=gelu)
    if importlib.util.find_spec("bitsandbytes") is not None:
        unpacked_weights(dtype, device, monkeypatch)


def row_scales(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs, inputs, ranks = 70, 40, 24
    weight, first = drawn(outputs, inputs, dtype=dtype), drawn(ranks, inputs, dtype=dtype)
    second, vectors = drawn(outputs, ranks, dtype=dtype), drawn(outputs, dtype=dtype, seed=2)

    def run(weight: Tensor, first: Tensor, second: Tensor, vectors: Tensor) -> list[Tensor]:
        squares = weight.float().square().sum(1)
        own = magnitudes.Magnitudes(vectors=[], all=vectors, squares=squares, places=[])
        return list(magnitudes.row_scales(own, weight, first, second, 0.7))

    given = [weight, first, second, vectors]
    # Norms are rounded to the weights' type: in bfloat16 they may be one step apart.
    one_step = {"codes": 2**-7} if dtype == torch.bfloat16 else {}
    both_ways(run, given, device, monkeypatch, terms=inputs, **one_step)


def float8_sums(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, ranks = 70, 144, 20
    made, low = drawn(rows, width, dtype=dtype), drawn(rows, ranks, dtype=dtype)
    second, added = drawn(width, ranks, dtype=dtype), drawn(rows, width, dtype=dtype, seed=4)
    factors = drawn(width, dtype=torch.float32)

    def run(*given: Tensor) -> list[Tensor]:
        made, low, second, added, factors = given
        made_of = [float8.quantised_rows(made, *more) for more in ((), (factors,))]
        # The interpreter rounds to FP8 in a way of its own.
        found = [part.float() for pair in made_of for part in pair[device == "cpu" :]]
        turned = float8._turned(made.to(float8.KIND)).float()
        sums = [float8.added(made.clone(), low, second, residual) for residual in (None, added)]
        back = float8.added(low.clone(), made, second.t(), None)
        return [*found, turned, *sums, back]

    given = [made, low, second, added, factors]
    # A code that is rounded the other way is one step of three bits away.
    both_ways(run, given, device, monkeypatch, terms=ranks, codes=0.13)


def swiglus_of_sums(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch, *, gelu: bool
) -> None:
    rows, width, ranks = 70, 144, 20
    both, gradient = drawn(rows, 2 * width, dtype=dtype), drawn(rows, width, dtype=dtype)
    low, below = drawn(rows, ranks + 4, dtype=dtype), drawn(rows, 9, dtype=dtype)
    second, first = drawn(2 * width, ranks, dtype=dtype), drawn(9, width, dtype=dtype)
    bias = drawn(2 * width, dtype=dtype, seed=3)

    def run(*given: Tensor) -> list[Tensor]:
        both, gradient, low, below, second, first, bias = given
        rest = DeferredAdapter(low[:, :ranks], second, 2**0.5)
        found = []
        for finish in (Epilogue(None, None, rest), Epilogue(None, bias, rest)):
            for of_gradient in (None, DeferredAdapter(below, first.t(), 2**0.5)):
                out = torch.zeros(rows, width + 8, dtype=dtype, device=device)
                kernels.swiglu(both, out[:, :width], finish, gelu=gelu)
                copy = gradient.clone()
                back = kernels.swiglu_backward(both, copy, finish, of_gradient, gelu=gelu)
                found += [out, back, copy]
        return found

    if device == "cpu":  # bfloat16 is not tried there, whose tiles these are
        monkeypatch.setattr(swiglu_with_adapter, "TILE", swiglu_with_adapter.TILE_BACK)
    # A product of three such sums.
    given = [both, gradient, low, below, second, first, bias]
    both_ways(run, given, device, monkeypatch, terms=9 * ranks)


def unpacked_weights(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bnb: Any = pytest.importorskip("bitsandbytes")
    bases = []
    for seed in (1, 2):
        base = bnb.nn.Linear4bit(128, 40, quant_type="nf4", bias=False)
        values = drawn(40, 128, dtype=dtype, seed=seed)
        base.weight = bnb.nn.Params4bit(values, quant_type="nf4", requires_grad=False).to(device)
        bases.append(base)
    assert all(is_doubly_quantised(base) for base in bases)
    both_ways(lambda: [packing.unpacked(bases, dtype)], [], device, monkeypatch)


def finish_of(width: int, dtype: torch.dtype, device: str) -> Epilogue:
    """DoRA's scale and a bias."""
    return Epilogue(
        drawn(width, dtype=torch.float32, seed=11).to(device),
        drawn(width, dtype=dtype, seed=12).to(device),
    )


def dropouts(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width, rank, layers = 70, 90, 5, 3
    x, first = drawn(rows, width + 6, dtype=dtype), drawn(rank * layers + 1, width, dtype=dtype)
    below, out = drawn(rows, rank * layers + 1, dtype=dtype), drawn(rows, width, dtype=dtype)

    def run(x: Tensor, first: Tensor, below: Tensor, out: Tensor) -> list[Tensor]:
        seeds = torch.tensor([3, 2**31 - 1, 77], device=device)
        drops = dropout.LayerDropout(seeds, 0.2, rank)
        low = torch.zeros(rows, rank * layers + 1, dtype=dtype, device=device)
        dropout.low_product(x[:, :width], first, drops, 0.5, low)
        dropout.add_to_input(out, below, first, drops)
        return [low, out, dropout.of_first(below, x[:, :width], drops)]

    both_ways(run, [x, first, below, out], device, monkeypatch, terms=width)


def norms(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch, *, plus_one: bool
) -> None:
    x, weight = drawn(ROWS, WIDTH, dtype=dtype), drawn(WIDTH, dtype=dtype)
    gradient, added = (drawn(ROWS, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2))

    def run(x: Tensor, weight: Tensor, gradient: Tensor, added: Tensor) -> list[Tensor]:
        by, found = kernels.Norm(weight, 1e-6, plus_one), []
        for more in (None, added):
            out, back = (torch.zeros(ROWS, WIDTH + 8, dtype=dtype, device=device) for _ in range(2))
            inverse = kernels.norm(x, by, out[:, :WIDTH], more)
            kernels.norm_backward(gradient, x, by, inverse, more, back[:, :WIDTH])
            found += [out, inverse, back]
        return found

    both_ways(run, [x, weight, gradient, added], device, monkeypatch)


def rotations(
    dtype: torch.dtype,
    normed: bool,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    plus_one: bool = False,
    width: int = 16,
    turns: int = 16,
    pairs: bool = False,
) -> None:
    queries, keys = HEADS
    qkv = drawn(ROWS, (queries + 2 * keys) * width, dtype=dtype)
    angles = drawn(ROWS, turns // 2, dtype=torch.float32)
    cos, sin = (torch.cat((part, part), 1).to(dtype) for part in (angles.cos(), angles.sin()))
    weights = [drawn(width, dtype=dtype, seed=seed) for seed in (3, 4)]
    shapes = [(1, count, ROWS, width) for count in (queries, keys, keys)]
    gradients = [drawn(*shape, dtype=dtype, seed=5) for shape in shapes]
    gradients[0] = gradients[0].transpose(1, 2).contiguous().transpose(1, 2)

    def run(qkv: Tensor, cos: Tensor, sin: Tensor, *more: Tensor) -> list[Tensor]:
        first, second = (kernels.Norm(weight, 1e-6, plus_one) for weight in more[:2])
        by = (first, second) if normed else None
        found = []
        for finish in (kernels.PLAIN, finish_of(qkv.shape[1], dtype, device)):
            out = torch.zeros_like(qkv)
            found += [rotation.rotate(qkv, cos, sin, by, HEADS, finish, pairs=pairs), out]
            given = (qkv, cos, sin, by, HEADS, out, finish)
            rotation.rotate_backward((more[2], more[3], more[4]), *given, pairs=pairs)
        return found

    # Differences of two products of what was rounded twice.
    both_ways(run, [qkv, cos, sin, *weights, *gradients], device, monkeypatch, terms=4)


def gathered_sums(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, shares = drawn(3 * ROWS, 1030, dtype=dtype), drawn(ROWS, 3, dtype=dtype)
    places = torch.arange(3 * ROWS).flip(0).view(ROWS, 3)

    def run(rows: Tensor, places: Tensor, shares: Tensor) -> list[Tensor]:
        made = rows[:, :1020]  # beside spare columns
        return [expert_rows.gathered_sum(made, places, each) for each in (None, shares)]

    both_ways(run, [rows, places, shares], device, monkeypatch, terms=3)


def rows_of_experts(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Of seven experts the third is never chosen, and the last takes more than a program has."""
    monkeypatch.setattr(expert_rows, "ROWS", 16)
    tokens, inner, numbers = 90, 160, torch.Generator().manual_seed(5)
    chosen = torch.randint(3, 7, (tokens, 2), generator=numbers).clamp(max=6)
    chosen[:9] -= 3
    chosen[60:] = 6
    hidden, gradient = (drawn(tokens, WIDTH, dtype=dtype, seed=seed) for seed in (2, 3))
    both, of_gated = (drawn(2 * tokens, n * inner, dtype=dtype, seed=n) for n in (2, 1))
    whole = drawn(7, ranks + 2 * inner, ranks + WIDTH, dtype=dtype)
    shares, low = drawn(tokens, 2, dtype=dtype), drawn(2 * tokens, 24, dtype=dtype)

    def run(hidden: Tensor, gradient: Tensor, both: Tensor, *more: Tensor) -> list[Tensor]:
        of_gated, whole, shares, low = more
        routes = expert_rows.routes_of(chosen.to(device), 7)
        below, beside = whole[:, 2 * inner :, :WIDTH].mT, whole[:, : 2 * inner, WIDTH:]
        share = shares.reshape(-1)[routes.order]
        of_both = torch.cat((both, low[:, :ranks]), 1)
        return [
            *expert_rows.gathered_with_low(hidden, routes, below),
            expert_rows.add_low(of_both, routes, beside),
            of_both,
            expert_rows.gated_backward(both, of_gated, share, of_both[:, : 2 * inner]).to(dtype),
            of_gated,
            of_both,
            expert_rows.outer(low, both, routes),
            expert_rows.outer(low, hidden, routes, routes.tokens, share),
        ]

    given = [hidden, gradient, both, of_gated, whole, shares, low]
    both_ways(run, given, device, monkeypatch, terms=2 * inner)


def swiglus(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch, *, gelu: bool
) -> None:
    both, gradient = drawn(ROWS, 2 * INNER, dtype=dtype), drawn(ROWS, INNER, dtype=dtype)

    def run(both: Tensor, gradient: Tensor) -> list[Tensor]:
        out = torch.zeros(2, ROWS, INNER + 8, dtype=dtype, device=device)
        finish, copy = finish_of(2 * INNER, dtype, device), gradient.clone()
        kernels.swiglu(both, out[0, :, :INNER], gelu=gelu)
        kernels.swiglu(both, out[1, :, :INNER], finish, gelu=gelu)
        ways = ((gradient,), (copy, finish))
        back = [kernels.swiglu_backward(both, *more, gelu=gelu) for more in ways]
        residual = drawn(ROWS, 2 * INNER, dtype=dtype, seed=13).to(device)
        wide = torch.zeros(ROWS, 2 * INNER + 8, dtype=dtype, device=device)
        kernels.swiglu_backward(both, copy.clone(), gelu=gelu, out=wide[:, : 2 * INNER])
        return [out, wide, *back, gradient, copy, kernels.add_epilogue(both, finish, residual)]

    both_ways(run, [both, gradient], device, monkeypatch)


def columns(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 130, 200
    gradient, before = (drawn(rows, width, dtype=dtype, seed=seed) for seed in (7, 8))
    scale = drawn(width, dtype=torch.float32)

    def run(gradient: Tensor, before: Tensor, scale: Tensor) -> list[Tensor]:
        made = kernels.scale_columns(gradient, before, scale, in_place=False)
        return [*made, *kernels.scale_columns(gradient, before, scale, in_place=True), gradient]

    both_ways(run, [gradient, before, scale], device, monkeypatch, terms=rows)


def test_gradients_may_be_expanded(device, monkeypatch):
    """As a sum's are, whose columns are one number."""
    parts = [drawn(70, 2, 16, dtype=torch.float32, seed=seed).to(device) for seed in range(3)]
    boundaries = torch.zeros(1, dtype=torch.int32, device=device)
    query = parts[0].requires_grad_()
    tiles = document_attention.tiles_of(boundaries, 70)
    made = document_attention.attend_in_documents(query, parts[1], parts[2], tiles, None)
    (right,) = torch.autograd.grad(made, query, torch.ones_like(made), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(made.sum(), query)[0], right)
    monkeypatch.setattr(expert_rows, "ROWS", 16)
    routes = expert_rows.routes_of(torch.arange(40, device=device)[:, None] % 2, 2)

    def product(outputs: int, inputs: int) -> experts.ExpertProduct:
        sizes = (2, outputs + 8, inputs + 8), (16, inputs), (outputs, 16)
        whole, *adapter = (drawn(*size, dtype=torch.float32).to(device) for size in sizes)
        first, second = (part.requires_grad_() for part in adapter)
        own: Any = {"outputs": outputs, "inputs": inputs, "bias": None, "scaling": 1.0}
        made = experts.ExpertProduct(whole=whole, first=first, second=second, **own)
        made.place_adapter()
        return made

    up, down = product(40, 24), product(24, 20)
    trained: list[Any] = [drawn(40, 24, dtype=torch.float32).to(device).requires_grad_()]
    trained += [up.first, up.second, down.first, down.second]
    run: Any = experts.MixedExperts.apply
    shares, each_part = torch.ones(40, 1, device=device), experts.ExpertParts(up, down, None)
    out = run(trained[0], routes, shares, each_part, *trained[1:])
    exact = torch.autograd.grad(out, trained, torch.ones_like(out), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), trained), exact)


@each(("heads", "kept", "width"), [(4, 2, 16), (3, 3, 24)])
def test_attention_of_documents_is_that_of_a_mask(device, heads, kept, width):
    """Documents of one token, of a tile and one more, and of several tiles; some boundaries are
    not used."""
    boundaries = torch.tensor([0, 1, 66, 130, 290, 290, 290], dtype=torch.int32)
    sizes = ((heads, 1), (kept, 2), (kept, 3), (heads, 4))
    drawn_parts = [drawn(290, n, width, dtype=torch.float32, seed=seed) for n, seed in sizes]
    given = [part.to(device) for part in drawn_parts]
    parts, upstream = [part.requires_grad_() for part in given[:3]], given[3]
    tiles = document_attention.tiles_of(boundaries.to(device), 290)
    made = document_attention.attend_in_documents(parts[0], parts[1], parts[2], tiles, None)
    found = [made.detach(), *torch.autograd.grad(made, parts, upstream)]
    places = torch.arange(290)
    document = torch.bucketize(places, boundaries[1:], right=True)
    mask = (document[:, None] == document) & (places[:, None] >= places)
    exact = [part.double().requires_grad_() for part in drawn_parts[:3]]
    rows = [part.transpose(0, 1)[None] for part in exact]
    attend: Any = F.scaled_dot_product_attention
    plain = attend(*rows, attn_mask=mask, enable_gqa=heads != kept)[0]
    right = [plain.transpose(0, 1)]
    right += torch.autograd.grad(right[0], exact, drawn_parts[3].double())
    for one, other in zip(found, right, strict=True):
        error = (one.cpu().double() - other.detach()).norm() / other.detach().norm()
        assert error < 1e-5  # float32: sums of 160 scores in another order


@each(("dtype", "gelu"), [(torch.float64, False), (torch.float32, False), (torch.float64, True)])
def test_gradients_written_by_hand_are_those_of_autograd(dtype, gelu):
    generator = torch.Generator().manual_seed(3)
    both = torch.randn(4, 6, dtype=dtype, generator=generator, requires_grad=True)
    gradient = torch.randn(4, 3, dtype=dtype, generator=generator)
    gate = both[:, :3]
    passed = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    made = passed * both[:, 3:]
    (right,) = torch.autograd.grad(made, both, gradient)
    found = kernels.swiglu_backward(both.detach(), gradient, gelu=gelu)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(gradient, made.detach())
