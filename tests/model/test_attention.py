from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from expert.model import attention as attention_file
from expert.model.attention import (
    IMPLEMENTATIONS,
    AttentionKind,
    AttentionUnavailable,
    attention_failure,
    attention_kwargs,
    register_attention,
)
from tests.model.models import Batch, documents, make_batch
from tests.training.preferences import batches_of

WORDS = 40
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.5,  # wide enough for attention to matter
}
# Both compute their norms in float32 whatever they are given, which rounds at 6e-8; logits here
# are below 50 and gradients of their sum of squares below 5000.
LOGITS: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}
GRADIENTS: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-2}
ROWS = [[7, 5, 4], [3, 13]]  # lengths of the documents in every row


def a_batch(rows: list[list[int]], *, seed: int = 0) -> Batch:
    lengths = [length for row in rows for length in row]
    drawn = iter(documents(*lengths, vocabulary=WORDS, seed=seed))
    return make_batch([[next(drawn) for _ in row] for row in rows])


def a_model(family: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**SMALL, **options)
    torch.manual_seed(0)
    register_attention()
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).double()
    return model


def logits_of(model: Any, kind: AttentionKind, batch: Batch) -> Tensor:
    model.set_attn_implementation(IMPLEMENTATIONS[kind])
    inputs = {"input_ids": batch.tokens, "position_ids": batch.positions, "use_cache": False}
    logits: Tensor = model(**inputs, **attention_kwargs(kind, batch)).logits
    return logits


def gradients_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def documents_alone(model: Any, batch: Batch, implementation: str) -> list[Tensor]:
    """Logits of every document by itself, through an implementation of transformers."""
    model.set_attn_implementation(implementation)
    flat, bounds = batch.tokens.flatten(), batch.boundaries.tolist()
    pairs = [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    return [model(input_ids=flat[None, a:b], use_cache=False).logits[0] for a, b in pairs]


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_packed_rows_give_what_every_document_gives_alone(family, kind):
    model, batch = a_model(family), a_batch(ROWS)
    alone = torch.cat(documents_alone(model, batch, "eager"))
    expected = gradients_of(model, alone.square().sum())
    packed = logits_of(model, kind, batch).flatten(0, 1)
    found = gradients_of(model, packed.square().sum())
    torch.testing.assert_close(packed, alone, **LOGITS)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], **GRADIENTS, msg=name)


@pytest.mark.parametrize("kind", ["eager", "sdpa", "flex"])
def test_a_document_does_not_see_its_neighbours(kind):
    """Bit by bit: the same shapes and masks, so the same sums over exact zeros."""
    model, batch = a_model("Llama"), a_batch(ROWS)
    tokens = batch.tokens.clone()
    tokens[0, 7:12] = (tokens[0, 7:12] + 1) % WORDS
    with torch.no_grad():
        before = logits_of(model, kind, batch)
        after = logits_of(model, kind, dataclasses.replace(batch, tokens=tokens))
    assert (before[0, 7:12] != after[0, 7:12]).any(-1).all()
    assert torch.equal(before[0, :7], after[0, :7])
    assert torch.equal(before[0, 12:], after[0, 12:])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("kind", ["eager", "sdpa", "flex"])
def test_sliding_windows_are_those_of_transformers(kind):
    model, batch = a_model("Mistral", sliding_window=4), a_batch(ROWS)
    with torch.no_grad():
        alone = torch.cat(documents_alone(model, batch, "eager"))
        packed = logits_of(model, kind, batch).flatten(0, 1)
        model.config.sliding_window = None  # type: ignore[union-attr]
        unlimited = logits_of(model, kind, batch).flatten(0, 1)
    torch.testing.assert_close(packed, alone, **LOGITS)
    assert (packed - unlimited).abs().max() > 0.1  # the window is narrow enough to matter


@pytest.mark.parametrize("kind", ["eager", "flex"])
def test_capped_scores_are_those_of_transformers(kind):
    """Gemma 2: caps, windows in every other layer, and a scale of its own."""
    options = {"attn_logit_softcapping": 0.5, "sliding_window": 4, "query_pre_attn_scalar": 3}
    model, batch = a_model("Gemma2", **options), a_batch(ROWS)
    with torch.no_grad():
        alone = torch.cat(documents_alone(model, batch, "eager"))
        packed = logits_of(model, kind, batch).flatten(0, 1)
    torch.testing.assert_close(packed, alone, **LOGITS)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_attention_dropout_is_honoured_while_learning_only(kind):
    model, batch = a_model("Llama", attention_dropout=0.5), a_batch(ROWS)
    plain = logits_of(model.eval(), kind, batch)
    assert torch.equal(plain, logits_of(model, kind, batch))
    dropped = logits_of(model.train(), kind, batch)
    assert (dropped - plain).abs().max() > 0.1


def three() -> list[Tensor]:
    return [torch.randn(2, 2, 16, 8) for _ in range(3)]


def run(
    kind: AttentionKind, parts: list[Tensor], mask: Tensor | None = None, **options: Any
) -> None:
    known = attention_kwargs(kind, a_batch(ROWS))
    attention_file._FUNCTIONS[kind](None, *parts, mask, **known, **options)


def test_what_a_kernel_cannot_do_names_the_kernel_and_another():
    cases: list[tuple[AttentionKind, dict[str, Any], str]] = [
        ("sdpa", {"softcap": 5.0}, "'sdpa': cannot cap scores .*attention: flex or eager"),
        ("flash", {"softcap": 5.0}, "'flash': cannot cap .*attention: flex"),
        ("flash4", {"softcap": 5.0}, "'flash4': cannot cap .*attention: flex"),
        ("flash4", {}, "'flash4': .*attention: sdpa"),
        ("flash", {"dropout": 0.1}, "'flash': .*attention_dropout.*: sdpa, or"),
        ("flex", {"dropout": 0.1}, "'flex': .*attention_dropout.*: sdpa, or"),
        ("flash", {}, "'flash': needs bf16 or fp16 on a CUDA card, not .* on cpu"),
        ("sdpa", {"s_aux": torch.ones(2)}, "'sdpa': does not support attention sinks"),
        (
            "eager",
            {"position_bias": torch.ones(2)},
            "'eager': does not support a position bias .*use another model",
        ),
    ]
    for kind, options, text in cases:
        with pytest.raises(AttentionUnavailable, match=text):
            run(kind, three(), **options)
    with pytest.raises(AttentionUnavailable, match="'eager': the model builds its own"):
        run("eager", three(), mask=torch.ones(1))
    with pytest.raises(AttentionUnavailable, match="'flex': cannot train on a CPU"):
        run("flex", [each.requires_grad_() for each in three()])


def test_the_probe_says_why_a_kernel_cannot_be_used(monkeypatch):
    sizes = (torch.device("cpu"), torch.float32, 8, 4, 2)
    assert attention_failure("eager", *sizes) == ""
    assert attention_failure("sdpa", *sizes) == ""
    assert attention_failure("flash", *sizes).startswith("AttentionUnavailable: attention 'flash'")

    masked = attention_file._FUNCTIONS["sdpa"]

    def unmasked(*args: Any, **options: Any) -> tuple[Tensor, None]:
        return masked(*args, **{**options, "document_mask": None})

    monkeypatch.setitem(attention_file._FUNCTIONS, "sdpa", unmasked)
    why = attention_failure("sdpa", *sizes)
    assert why.startswith("output is off by")
    assert "(tolerance 0.004" in why


def test_flash_attention_is_that_of_torch_where_our_kernels_fail(monkeypatch):
    """As here, without a card."""
    monkeypatch.setattr(attention_file, "_prefers_own_kernels", lambda device: True)
    failure: Any = attention_file.own_kernels_failure
    failure.cache_clear()
    rows = torch.arange(4, dtype=torch.int32)[None]
    batch: Any = SimpleNamespace(tokens=rows, boundaries=torch.zeros(1), longest=4)
    assert failure(rows.device)
    assert set(attention_file.attention_kwargs("flash", batch)) == {"boundaries", "longest"}
    failure.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("kind", ["eager", "sdpa", "flash", "flash4", "flex"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (16, 8, 128), (14, 2, 64)])
@pytest.mark.filterwarnings(f"ignore:{attention_file.FLASH4_WARNS}")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of cutlass, by FlashAttention 4
def test_every_kernel_works_on_the_card(kind, heads, kv_heads, head_dim):
    device = torch.device("cuda")
    if kind == "flash4":
        pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    assert attention_failure(kind, device, torch.bfloat16, head_dim, heads, kv_heads) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("kind", ["flash", "flash4", "flex"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by dynamo
@pytest.mark.filterwarnings(f"ignore:{attention_file.FLASH4_WARNS}")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of cutlass, by FlashAttention 4
def test_packed_rows_on_the_card_give_what_written_out_attention_gives(kind, window):
    if kind == "flash4":
        pytest.importorskip("flash_attn.cute", reason="needs flash-attn-4")
    sizes = {**SMALL, "head_dim": 64, "initializer_range": 0.1, "sliding_window": window}
    register_attention()
    torch.manual_seed(0)
    model: Any = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))
    model = model.to("cuda", torch.bfloat16)
    cpu = a_batch(ROWS)
    parts = {name: getattr(cpu, name).cuda() for name in ("tokens", "positions", "boundaries")}
    batch = dataclasses.replace(cpu, **parts)
    one, other = logits_of(model, "eager", batch), logits_of(model, kind, batch)
    # bf16 rounds at 2^-9 in every one of some ten steps of two layers.
    assert (one - other).norm() < 0.03 * one.norm()
    left = gradients_of(model, one.float().square().sum())
    right = gradients_of(model, other.float().square().sum())
    for name, gradient in left.items():
        assert (gradient - right[name]).norm() < 0.1 * gradient.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sdpa", "flash"])
@pytest.mark.parametrize("flat", [False, True])
def test_answers_that_share_a_prompt_attend_alike_with_every_kernel(kind, flat):
    """Gathered keys and values against a mask, forward and backward."""
    rows = [(range(1, 60), range(3, 40), range(7, 90)), (range(1, 200), range(2, 9), [5])]
    (batch,) = batches_of(rows, length=512, bins=2, flat=flat)
    moved: dict[str, Any] = {
        name: value.to("cuda")
        for name in batch.__dataclass_fields__
        if isinstance(value := getattr(batch, name), Tensor)
    }
    batch = dataclasses.replace(batch, **moved)
    places = batch.tokens.shape

    def results(kind, dtype):
        torch.manual_seed(0)
        shape = (places[0], 4, places[1], 64)
        drawn = [torch.randn(shape, device="cuda").to(torch.bfloat16) for _ in range(4)]
        parts = [drawn[0], drawn[1][:, :2], drawn[2][:, :2]]  # two heads of keys
        parts = [part.to(dtype).requires_grad_() for part in parts]
        attend = attention_file._FUNCTIONS[kind]
        output, _ = attend(None, *parts, None, **attention_kwargs(kind, batch))
        weights = drawn[3].to(dtype).transpose(1, 2)
        return [output.detach(), *torch.autograd.grad(output, parts, weights)]

    expected = results("eager", torch.float32)
    for ours, theirs in zip(results(kind, torch.bfloat16), expected, strict=True):
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert float(error) < 2e-2  # bf16, as attention_failure allows


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by dynamo
def test_sinks_take_the_same_share_in_flex_attention_as_written_out(window):
    cpu = a_batch([[120, 60], [200]])
    parts = {name: getattr(cpu, name).cuda() for name in ("tokens", "positions", "boundaries")}
    batch = dataclasses.replace(cpu, **parts)
    rows, length = batch.tokens.shape

    def results(kind, dtype):
        torch.manual_seed(0)
        drawn = [torch.randn(rows, 4, length, 64, device="cuda").bfloat16() for _ in range(4)]
        given = [
            each.to(dtype).requires_grad_() for each in (drawn[0], *(x[:, :2] for x in drawn[1:3]))
        ]
        sinks = torch.randn(4, device="cuda").to(dtype).requires_grad_()
        attend = attention_file._FUNCTIONS[kind]
        more = {**attention_kwargs(kind, batch), "s_aux": sinks, "sliding_window": window}
        output, _ = attend(None, *given, None, **more)
        weights = drawn[3].to(dtype).transpose(1, 2)
        return [output.detach(), *torch.autograd.grad(output, [*given, sinks], weights)]

    expected = results("eager", torch.float32)
    for ours, theirs in zip(results("flex", torch.bfloat16), expected, strict=True):
        assert float((ours.float() - theirs).norm() / theirs.norm()) < 3e-2  # bf16 and its sums
