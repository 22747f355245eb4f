"""Fused blocks, compared with transformers' blocks and PEFT's layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from expert.answer.cache import attention_for
from expert.model.blocks import checkpoint_blocks
from expert.model.fused import dropout, float8
from expert.model.fused.block import (
    AttentionOutput,
    BlockParts,
    FusedForward,
    GatedMlp,
    fuse_blocks,
    fusion_obstacle,
)
from expert.model.fused.experts import fuse_experts
from expert.model.fused.product import Product
from expert.model.load import LoadedModel
from expert.model.saving import save_trained
from expert.planning.models.architectures import FUSED_TYPES
from tests.each import each
from tests.model.models import (
    documents,
    load,
    make_batch,
    tiny_model,
)

# Sums of some hundred products in float64, which keeps 53 bits, in another order. transformers
# takes the root of the mean square in float32 whatever the model is in: 24 bits.
EXACT = 1e-5
LAYERS = 2
ADAPTER = "default"


def a_model(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float64,
    fused: bool = True,
    quantization: str = "none",
    **adapter: Any,
) -> LoadedModel:
    """The same adapter with the same values, fused or not."""
    loaded = load(folder, quantization=quantization, **adapter)
    if quantization == "none":
        loaded.module.to(dtype)
    loaded.causal_lm.config._experts_implementation = "eager"  # the others know no float64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in loaded.trainable:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(dtype), alpha=0.1)
        for name, parameter in loaded.module.named_parameters():
            if name.endswith("bias") or "norm" in name:  # which are 0 and 1 in a fresh model
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(dtype), alpha=0.3)
    if fused:
        fuse_experts(loaded.module, ADAPTER)
        assert fuse_blocks(loaded.blocks, ADAPTER) == ""
        assert isinstance(loaded.blocks[0].forward, FusedForward)
    return loaded


def outcome(loaded: LoadedModel) -> list[Tensor]:
    """The loss of a batch, and the gradients of everything trained."""
    loss = loaded.loss_sum(make_batch([documents(20, 11), documents(25)]))
    trained = [parameter for _, parameter in loaded.trainable]
    return [loss.detach(), *torch.autograd.grad(loss, trained)]


def assert_equal(one: list[Tensor], other: list[Tensor], tolerance: float = EXACT) -> None:
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


GROWING = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "llama_4_scaling_beta": 0.5,
    "original_max_position_embeddings": 8,
}
UNCAPPED: dict[str, dict[str, Any]] = {"gemma2": {"attn_logit_softcapping": None}}
"""SDPA, which these models use, does not cap scores."""
OF_ATTENTION = {"gpt_oss": {"attention": "eager"}}  # SDPA has no sinks either
TARGETS = [
    ["q_proj", "v_proj"],
    ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    ["gate_proj", "down_proj"],
]
"""The other layers have no adapter."""
OF_EXPERTS = [["q_proj", "gate_proj"], ["q_proj", "down_proj"], ["q_proj"]]


@each(
    ("family", "model", "adapter"),
    [
        *(
            (family, UNCAPPED.get(family, {}), OF_ATTENTION.get(family, {}))
            for family in FUSED_TYPES
        ),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", {"attention_bias": True}, {"kind": "dora"}),
        *((family, {}, {"kind": "dora"}) for family in ("gemma3_text", "phi3")),
        *(
            ("granite", {"residual_multiplier": 0.3, **more}, {"kind": kind})
            for kind in ("lora", "dora")
            for more in ({}, {"attention_bias": True, "mlp_bias": True})
        ),
        # Of each head RoPE rotates a part; heads whose size is no power of two.
        ("phi3", {"partial_rotary_factor": 0.5}, {"kind": "dora"}),
        ("phi3", {"partial_rotary_factor": 0.75, "head_dim": 24}, {}),
        ("qwen3", {"head_dim": 24}, {}),
        ("qwen3_moe", {"mlp_only_layers": [0]}, {"dropout": 0.0, "rank": 3}),
        ("mixtral", {}, {"kind": "dora"}),
        *(("qwen3_moe", {}, {"target_modules": names}) for names in OF_EXPERTS),
        ("olmo3", {"sliding_window": 8}, {"kind": "dora"}),
        ("ministral3", {"rope_parameters": GROWING}, {}),
        ("gemma3_text", {}, {"target_modules": ["q_proj", "gate_proj"]}),
        ("phi3", {"sliding_window": 8}, {"target_modules": ["qkv_proj", "down_proj"]}),
        # A sliding window of Mistral is the model's, of Qwen each layer's own.
        ("mistral", {"sliding_window": 8}, {}),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, {}),
        *(
            ("qwen3", {}, {"kind": kind, "target_modules": targets})
            for kind in ("lora", "dora")
            for targets in TARGETS
        ),
    ],
)
def test_losses_and_gradients_are_those_of_peft(tmp_path, monkeypatch, family, model, adapter):
    folder = tiny_model(tmp_path / "model", family, **model)
    ours = outcome(a_model(folder, **adapter))
    monkeypatch.setattr("expert.model.adapters.replace_lora_layers", lambda wrapped, adapter: None)
    assert_equal(ours, outcome(a_model(folder, fused=False, **adapter)))


def test_every_architecture_that_is_fused_was_compared():
    assert set(FUSED_TYPES) == {
        *("llama", "mistral", "ministral3", "qwen2", "qwen3"),
        *("smollm3", "phi3", "gemma", "gemma2", "gemma3_text", "granite"),
        *("glm4", "olmo2", "olmo3", "qwen3_moe", "mixtral", "gpt_oss"),
    }


class Dropped(nn.Dropout):
    """A layer's dropout with a seed of its own, as fused blocks have it."""

    seed = 0

    def forward(self, x: Tensor) -> Tensor:
        return dropout._dropped(x, self.seed, self.p) if self.training else x


@each("kind", ["lora", "dora"])
def test_dropout_drops_of_every_layer_what_its_seed_says(llama, monkeypatch, kind):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    options: dict[str, Any] = {"kind": kind, "dropout": 0.3, "target_modules": targets, "rank": 6}
    apart, together = (a_model(llama, fused=fused, **options) for fused in (False, True))
    for loaded in (apart, together):
        loaded.module.eval()
    whole = outcome(together)
    assert_equal(whole, outcome(apart))
    seeds = torch.arange(len(targets)) * 977 + 5
    monkeypatch.setattr("expert.model.fused.block.seeds_of", lambda count, device: seeds[:count])
    for name, layer in apart.module.named_modules():
        if hasattr(layer, "lora_dropout"):
            own = Dropped(0.3)
            own.seed = int(seeds[targets.index(name.rsplit(".", 1)[-1])])
            layer.lora_dropout[ADAPTER] = own
    for loaded in (apart, together):
        loaded.module.train()
    found = outcome(together)
    assert_equal(found, outcome(apart))
    assert abs(found[0] - whole[0]) > 1e-3


@each("quantization", ["int8", "int4"])
@each("kind", ["lora", "dora"])
@each("family", ["llama", "granite", "gemma3_text"])
def test_quantised_layers_are_as_one_by_one(tmp_path, quantization, kind, family):
    own: dict[str, Any] = {"residual_multiplier": 0.3} if family == "granite" else {}
    llama = tiny_model(tmp_path / "model", family, **own)
    pytest.importorskip("bitsandbytes")
    options: dict[str, Any] = {"kind": kind, "quantization": quantization, "dtype": torch.float32}
    apart = outcome(a_model(llama, fused=False, **options))
    # Float32 keeps 24 bits, through two blocks and back: a few hundred roundings.
    assert_equal(outcome(a_model(llama, **options)), apart, 1e-4)


def test_fp8_layers_are_near_those_that_are_not_quantised(llama):
    options: dict[str, Any] = {"dtype": torch.float32, "target_modules": ["q_proj", "down_proj"]}
    plain = outcome(a_model(llama, fused=False, **options))
    for fused in (False, True):
        found = outcome(a_model(llama, fused=fused, quantization="fp8", **options))
        # e4m3 keeps 3 bits behind the first: each of some dozen products is 2 to 5 % off.
        assert float(found[0]) == pytest.approx(float(plain[0]), rel=0.03)
        for ours, right in zip(found[1:], plain[1:], strict=True):
            assert float((ours - right).norm() / right.norm()) < 0.35


@each("kind", ["lora", "dora"])
def test_evaluation_of_an_fp8_base_does_not_round_activations(llama, kind):
    options: dict[str, Any] = {"kind": kind, "quantization": "fp8", "dtype": torch.float32}
    fused, apart = a_model(llama, **options), a_model(llama, fused=False, **options)
    batch = make_batch([documents(20, 11), documents(25)])
    unrounded, _ = apart.evaluate(batch)
    # Float32 keeps 24 bits, through two blocks: a hundred roundings.
    torch.testing.assert_close(fused.evaluate(batch)[0], unrounded, rtol=1e-5, atol=0)
    with torch.no_grad():
        assert float(fused.loss_sum(batch)) != pytest.approx(float(unrounded), rel=1e-4)


def test_fp8_products_are_those_of_the_rounded_numbers(tmp_path):
    generator = torch.Generator().manual_seed(3)
    shapes = ((40, 64), (48, 64), (40, 24), (48, 24), (40, 48))
    x, weight, low, second, added = (torch.randn(*s, generator=generator) for s in shapes)
    codes, scales = float8.quantised_rows(weight)
    packed = float8.Float8Weight(codes=codes, scales=scales)
    whole = codes.float() * scales[:, None]
    assert float((whole - weight).norm() / weight.norm()) < 0.04
    read, read_scales = float8.quantised_rows(x)
    right = (read.float() * read_scales[:, None]) @ whole.t() + low @ second.t() + added
    found = float8.added(packed.times(x), low, second, added)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    first = torch.randn(24, 64, generator=generator)
    found = float8.added(packed.back(added), low, first.t(), None)
    right = added @ whole + low @ first
    assert float((found - right).norm() / right.norm()) < 0.04


@each("dropout", [0.0, 0.3])
def test_what_is_resumed_or_recomputed_drops_the_same(llama, dropout):
    loaded = a_model(llama, dropout=dropout)
    loaded.module.train()
    state = torch.get_rng_state()
    right = outcome(loaded)
    assert (outcome(loaded)[0] != right[0]) == bool(dropout)
    for _ in range(2):
        torch.set_rng_state(state)
        assert_equal(outcome(loaded), right, 0)
        checkpoint_blocks(loaded.blocks, LAYERS)  # for the second time


@torch.no_grad()
def answered(loaded: LoadedModel) -> list[Tensor]:
    """The scores of a padded batch of two prompts, and of four tokens after them."""
    loaded.module.eval()
    if attention_for(loaded.causal_lm.config) == "eager":  # caps scores, or has sinks
        loaded.causal_lm.set_attn_implementation("eager")
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    ids, past, scores = torch.tensor([[5, 6, 7, 8, 9, 3], [0, 0, 4, 3, 2, 7]]), None, []
    with torch.inference_mode():
        for _ in range(5):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = loaded.causal_lm(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=past,
                use_cache=True,
            )
            past, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
            scores.append(output.logits[:, -1])
            mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    return scores


@each(
    ("family", "kind"),
    [
        *((family, "lora") for family in FUSED_TYPES),
        *((family, kind) for family in ("qwen3", "gemma3_text") for kind in ("dora", "none")),
    ],
)
def test_answers_with_a_kv_cache_are_those_of_plain_blocks(tmp_path, family, kind, monkeypatch):
    folder, own = tiny_model(tmp_path / "model", family), OF_ATTENTION.get(family, {})
    # The largest float64, which transformers masks with, is infinite in eager attention's float32.
    dtype = torch.float32 if family in ("gemma2", "gpt_oss") else torch.float64
    expected = answered(a_model(folder, kind=kind, fused=False, dtype=dtype, **own))
    fused = a_model(folder, kind=kind, fused=False, dtype=dtype, **own)
    assert fuse_blocks(fused.blocks, ADAPTER, to_answer=True) == ""
    # DoRA's scale is computed once for all answers.
    monkeypatch.setattr("expert.model.fused.product.row_scales", pytest.fail)
    assert_equal(answered(fused), expected, EXACT if dtype == torch.float64 else 1e-4)


def test_a_quantised_base_answers_with_plain_blocks(llama):
    loaded = a_model(llama, quantization="int8", fused=False)
    assert fuse_blocks(loaded.blocks, ADAPTER, to_answer=True)


def test_an_adapter_that_is_off_is_left_to_transformers(llama):
    batch = make_batch([documents(20, 11)])
    losses = []
    for fused in (True, False):
        loaded = a_model(llama, fused=fused)
        module: Any = loaded.module
        with module.disable_adapter():
            losses.append(loaded.loss_sum(batch))
    assert losses[0] == losses[1]


@each(
    ("family", "adapter", "words"),
    [
        ("llama", {"kind": "ia3"}, "no linear layer"),
        ("gpt2", {}, "GPT2Block"),
        ("phi", {}, "PhiDecoderLayer has LayerNorm, attention and MLP side by side"),
        ("cohere", {}, "CohereDecoderLayer is not of llama, "),
    ],
    ids=str,
)
def test_blocks_that_cannot_be_fused_say_why_and_stay_as_they_are(tmp_path, family, adapter, words):
    loaded = a_model(tiny_model(tmp_path / "model", family), fused=False, **adapter)
    assert words in fusion_obstacle(loaded.blocks[0], ADAPTER)
    assert words in fuse_blocks(loaded.blocks, ADAPTER)
    assert not isinstance(loaded.blocks[0].forward, FusedForward)


def test_what_is_saved_is_what_other_blocks_save(llama, tmp_path):
    for name, fused in (("one", True), ("other", False)):
        save_trained(a_model(llama, dtype=torch.float32, fused=fused), tmp_path / name)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("one", "other")]
    assert files[0].read_bytes() == files[1].read_bytes()


@torch.no_grad()
@each("name", ["down_proj", "o_proj"])
def test_small_adapter_changes_survive_bfloat16_rounding(llama, name):
    """Also where it is added to a residual that is a thousand times as large: it is rounded once
    with all that it is added to."""
    loaded = a_model(llama, dtype=torch.bfloat16)
    forward: Any = loaded.blocks[0].forward
    layer: Any = next(m for n, m in loaded.module.named_modules() if n.endswith(name))
    second = layer.lora_B[ADAPTER].weight
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 1200, 64, generator=generator).bfloat16()
    weights, outputs = second.clone(), []
    for size in (0.0, 0.004):
        second.copy_(size * weights)
        exact = a_copy(forward.parts, torch.float64)
        outputs.append((run(forward.parts, hidden, name), run(exact, hidden.double(), name)))
    (before, base), (after, meant) = outputs
    change = meant - base
    assert 0 < change.norm() < 0.003 * base.norm()
    share = ((after.double() - before.double()) * change).sum() / change.square().sum()
    # 77,000 roundings of at most 2^-9 of a value: their mean is within a tenth of such a change. A
    # product that is added to the rounded sum of residual and adapter lets 0.75 of it arrive.
    assert float(share) == pytest.approx(1, abs=0.15)


def run(parts: BlockParts, hidden: Tensor, name: str) -> Tensor:
    """The function that has the layer."""
    apply: Any = AttentionOutput.apply if name == "o_proj" else GatedMlp.apply
    given = (hidden[0],) if name == "o_proj" else ()
    seeds = None if name == "o_proj" else (None, None)
    made: Tensor = apply(*given, hidden, parts, seeds)
    return made


def a_copy(parts: BlockParts, dtype: torch.dtype) -> BlockParts:
    """The same numbers, more exactly computed with."""

    def of(product: Product) -> Product:
        assert product.matrix is not None
        outputs, inputs, matrix = product.outputs, product.inputs, product.matrix.to(dtype)
        first, second = matrix[outputs:, :inputs], matrix[:outputs, inputs:]
        return replace(product, matrix=matrix, first=first, second=second)

    assert parts.first_norm is not None
    assert parts.second_norm is not None
    assert parts.mlp is not None
    return replace(
        parts,
        qkv=of(parts.qkv),
        out=of(parts.out),
        mlp=(of(parts.mlp[0]), of(parts.mlp[1])),
        first_norm=parts.first_norm._replace(weight=parts.first_norm.weight.to(dtype)),
        second_norm=parts.second_norm._replace(weight=parts.second_norm.weight.to(dtype)),
    )
