"""Experts of a mixture, with LoRA, beside transformers' loop over them and PEFT's adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from expert.model.errors import ModelError
from expert.model.fused.experts import FusedExperts, busiest_experts, expert_layers, fuse_experts
from expert.model.load import LoadedModel
from expert.model.saving import save_trained
from expert.planning.memory.memory import saved_per_token
from expert.planning.memory.workload import Workload
from expert.planning.models.shapes import shape_from_config
from expert.run.build import PlanUnsupported, build
from tests.each import each
from tests.model.models import documents, load, make_batch, plain_base, tiny_model
from tests.model.test_layers_that_differ import kept_bytes, shape_of_folder
from tests.model.test_saving import assert_same, our_logits, plain_logits
from tests.planning.planning import manifest, plan

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe_text")
EXACT = 1e-12  # float64: sums of some hundred products in another order


def kernels(family: str) -> dict[str, Any]:
    return {"attention": "eager"} if family == "gpt_oss" else {}  # SDPA has no sinks


def moved(loaded: LoadedModel) -> LoadedModel:
    """With an adapter that does something."""
    with torch.no_grad():
        for _, weight in loaded.trainable:
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return loaded


@each(
    "kind",
    [
        *("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "olmoe", "qwen2_moe"),
        *("qwen3_5_moe_text", "granitemoe"),
    ],
)
def test_experts_of_every_kind_have_the_loss_and_the_gradients_of_peft(kind):
    """gpt-oss's have biases, turned weights and a gate of their own."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 8, "vocab_size": 64, "num_experts_per_tok": 2, "eos_token_id": 2}
    sizes |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    sizes |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6)
    config = AutoConfig.for_model(kind, **sizes)
    config._attn_implementation, config.use_cache = "eager", False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
    for name, weight in model.named_parameters():
        if weight.dim() == 3 or "bias" in name or "gate" in name or "router" in name:
            torch.nn.init.normal_(weight, std=0.4)
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    own: Any = {"target_modules": ["o_proj", "out_proj"], "target_parameters": parameters}
    adapter = LoraConfig(r=3, lora_alpha=8, **own)
    wrapped: Any = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    trained = [weight for weight in wrapped.parameters() if weight.requires_grad]
    with torch.no_grad():
        for weight in trained:
            weight.normal_(std=0.2)
    tokens = torch.randint(0, 64, (2, 7))

    def outcome() -> list[torch.Tensor]:
        loss = wrapped(tokens, labels=tokens).loss
        return [loss.detach(), *torch.autograd.grad(loss, trained)]

    theirs = outcome()
    fuse_experts(wrapped, "default")
    layers = [wrapped.get_submodule(name) for name in expert_layers(wrapped)]
    assert len(layers) == 2
    assert all(gradient.any() for gradient in theirs)
    torch.testing.assert_close(outcome(), theirs, rtol=EXACT, atol=EXACT)
    with wrapped.disable_adapter():
        assert abs(wrapped(tokens, labels=tokens).loss - theirs[0]) > 1e-4


@each("family", FAMILIES)
def test_plain_peft_loads_merges_and_continues_adapters_on_experts(tmp_path: Path, family):
    from peft import PeftModel

    folder = tiny_model(tmp_path / "model", family)
    loaded = moved(load(folder, **kernels(family)))
    fuse_experts(loaded.module, "default")
    ours = our_logits(loaded)
    save_trained(loaded, tmp_path / "saved")
    plain: Any = PeftModel.from_pretrained(plain_base(folder), tmp_path / "saved")
    assert_same(ours, plain_logits(plain))
    assert_same(ours, plain_logits(plain.merge_and_unload()))
    assert_same(ours, our_logits(load(folder, start=str(tmp_path / "saved"), **kernels(family))))
    merging: Any = loaded.module
    merged = merging.merge_and_unload()
    merged.set_attn_implementation("eager")
    assert_same(ours, plain_logits(merged))


def test_experts_in_four_bits_are_trained_from_what_they_stand_for(tmp_path: Path):
    """gpt-oss is published so: two numbers in a byte, and a power of two for every 32."""
    folder = tiny_model(tmp_path / "model", "gpt_oss", hidden_size=64, intermediate_size=64)
    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, inputs, outputs = tensors.pop(name).shape
        shape = (count, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads(config_file.read_text())
    own = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config_file.write_text(json.dumps({**config, "quantization_config": own}))
    loaded = moved(load(folder, attention="eager"))
    [first, *_] = expert_layers(loaded.module).values()
    weights: Any = first.down_proj
    blocks = tensors["model.layers.0.mlp.experts.down_proj_blocks"][3, 5, 1]
    power = int(tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 5, 1]) - 127
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-value for value in values]
    digits = [int(digit) for byte in blocks for digit in (byte % 16, byte // 16)]
    expected = torch.tensor([values[digit] * 2.0**power for digit in digits])
    torch.testing.assert_close(weights[3, 32:64, 5].detach(), expected, rtol=0, atol=0)
    fuse_experts(loaded.module, "default")
    ours = our_logits(loaded)
    merging: Any = loaded.module
    merging.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_same(ours, plain_logits(plain_base(tmp_path / "merged")))
    with pytest.raises(ModelError, match="stored in mxfp4"):
        load(folder, quantization="int8")


def test_a_changed_adapter_is_used_at_once(tmp_path: Path):
    folder = tiny_model(tmp_path / "model", "qwen3_moe")
    loaded = load(folder, target_modules=["gate_up_proj", "down_proj"])
    fuse_experts(loaded.module, "default")
    before = our_logits(loaded)
    assert_same(our_logits(moved(loaded)), our_logits(loaded))
    assert (our_logits(loaded) - before).abs().max() > 0.01


def test_every_token_may_choose_the_same_experts(tmp_path: Path):
    loaded = moved(load(tiny_model(tmp_path / "model", "qwen3_moe")))
    plain = our_logits(loaded)
    fuse_experts(loaded.module, "default")
    assert_same(our_logits(loaded), plain)
    blocks: list[Any] = loaded.blocks
    for router in [block.mlp.gate for block in blocks]:
        with torch.no_grad():
            router.weight[2:] = router.weight[:1]  # of equal scores the first are chosen
    loss = loaded.loss_sum(make_batch([documents(9)]))
    gradients = torch.autograd.grad(loss, [weight for _, weight in loaded.trainable])
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_experts_without_an_adapter_are_fused_and_trained_ones_are_not(tmp_path: Path):
    folder = tiny_model(tmp_path / "model", "mixtral")
    for kind, expected in (("dora", True), ("none", True), ("full", False)):
        loaded = load(folder, kind)
        before = our_logits(loaded)
        fuse_experts(loaded.module, "default")
        [first, _] = expert_layers(loaded.module).values()
        assert isinstance(first.__dict__.get("forward"), FusedExperts) == expected
        assert_same(our_logits(loaded), before)


def test_the_busiest_experts_are_counted_between_two_lines(tmp_path: Path):
    loaded = load(tiny_model(tmp_path / "model", "qwen3_moe"))
    assert busiest_experts(loaded.module) is None
    fuse_experts(loaded.module, "default")
    loaded.loss_sum(make_batch([documents(90)]))
    counted = busiest_experts(loaded.module)
    assert counted is not None
    assert 1 < counted.item() <= 4  # two of eight are chosen: all tokens may choose the same
    our_logits(loaded)
    assert busiest_experts(loaded.module) is None  # answers and evaluations do not count


def test_an_expert_layer_can_be_named_and_layers_beside_experts_keep_their_adapters(tmp_path: Path):
    folder = tiny_model(tmp_path / "one", "qwen3_moe")
    path = "model.layers.1.mlp.experts.down_proj"
    names = [name for name, _ in load(folder, target_modules=[path]).trainable]
    assert len(names) == 2
    assert all(".layers.1." in name for name in names)
    shared = tiny_model(tmp_path / "shared", "qwen3_5_moe_text")
    names = [name for name, _ in load(shared).trainable]
    assert sum("shared_expert.down_proj" in name for name in names) == 4
    mixed = tiny_model(tmp_path / "mixed", "qwen3_moe", mlp_only_layers=[0])
    ways: list[tuple[str, dict[str, Any]]] = [("dora", {}), ("lora", {"init": "pissa"})]
    for kind, more in (*ways, ("lora", {})):
        found = {name.split(".lora_")[0] for name, _ in load(mixed, kind, **more).trainable}
        assert not any("layers.0.mlp" in name for name in found)  # PEFT could not load it


def test_experts_are_neither_compiled_nor_captured(tmp_path: Path):
    folder = tiny_model(tmp_path / "models" / "base", "olmoe")
    assert not plan(manifest({}, base_models=[{"name": str(folder)}]), "h200").kernels.compile
    made = plan(manifest({"torch_compile": True}, base_models=[{"name": str(folder)}]), "h200")
    with pytest.raises(PlanUnsupported, match="not with the experts"):
        build(made, cast(Any, None), device=torch.device("cpu"))


def test_dropout_is_that_of_layers_alone(tmp_path: Path):
    loaded = load(tiny_model(tmp_path / "model", "qwen3_moe"), dropout=0.5)
    loaded.module.train()
    layer: Any = loaded.causal_lm.model.layers[0]
    assert layer.self_attn.q_proj.lora_dropout["default"].p == 0.5
    assert loaded.causal_lm.peft_config["default"].target_parameters


@each("targets", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"], ["down_proj"]])
@each("family", FAMILIES)
def test_planned_adapters_are_those_of_the_model(tmp_path: Path, family, targets):
    folder = tiny_model(tmp_path / "model", family)
    loaded = load(folder, target_modules=targets, **kernels(family))
    chosen = frozenset() if targets == "all-linear" else frozenset(targets)
    work = Workload(shape=shape_of_folder(folder), rows=1, row_tokens=8, rank=4, targets=chosen)
    assert work.trainable_parameters == sum(weight.numel() for _, weight in loaded.trainable)


@each("rank", [0, 16])
def test_planned_bytes_are_what_experts_keep(tmp_path: Path, rank):
    """The rest of a block is planned with some room."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 1, "num_experts": 16, "head_dim": 64}
    sizes |= {"moe_intermediate_size": 128}
    folder = tiny_model(tmp_path / "model", "qwen3_moe", **sizes)
    own: dict[str, Any] = {"target_modules": ["gate_up_proj", "down_proj"], "rank": rank}
    loaded = load(folder, "lora", **own) if rank else load(folder, "none")
    loaded.module.to(torch.bfloat16)
    fuse_experts(loaded.module, "default")
    [block] = cast(list[Any], loaded.blocks)
    hidden = torch.randn(1, 256, 512, dtype=torch.bfloat16, requires_grad=True)
    kept = kept_bytes(loaded.module, lambda: block.mlp(hidden))
    work = Workload(shape=shape_of_folder(folder), rows=1, row_tokens=256, compiled=False)
    more = {"targets": frozenset(own["target_modules"])} if rank else {"adapter": "none"}
    whole = replace(work, attention="sdpa", rank=rank, **more)
    without = replace(whole, shape=replace(whole.shape, experts=0, ffn=0))
    planned = saved_per_token(whole) - saved_per_token(without)
    assert planned == pytest.approx(kept / 256, rel=0.05)


def test_a_mixture_of_experts_is_planned_by_its_parameters_and_those_that_compute_a_token(tmp_path):
    """As published: Qwen3-30B-A3B, gpt-oss-20b and Qwen3.5-35B-A3B."""
    from transformers import GptOssConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig

    sizes: dict[str, Any] = {"num_hidden_layers": 48, "num_experts": 128, "head_dim": 128}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=8, vocab_size=151_936)
    shape = shape_from_config(config.to_dict())
    assert (shape.parameters, shape.active_parameters) == (30_532_122_624, 3_353_032_704)
    other = GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    assert shape_from_config(other.to_dict()).parameters == 20_914_757_184
    newest = shape_from_config(Qwen3_5MoeTextConfig().to_dict())
    assert (newest.parameters, newest.active_parameters) == (34_660_610_688, 3_454_988_928)
    folder = tiny_model(tmp_path / "models" / "base", "qwen3_moe")
    data = manifest({}, base_models=[{"name": str(folder)}])
    made = plan(data, "h200")
    assert any("is not trained" in remark.text for remark in made.remarks)
    assert made.kernels.fused_blocks
    assert not made.kernels.compile
    for settings in ({"adapter_type": "dora"}, {"adapter_init": "pissa"}):
        without = plan(manifest(settings, base_models=[{"name": str(folder)}]), "h200")
        assert any(
            "8 experts of a layer get no adapter" in remark.text for remark in without.remarks
        )
        assert 2 * (without.adapter.trainable_parameters or 0) < (
            made.adapter.trainable_parameters or 0
        )
    base = [{"name": str(folder), "quantization": "int4"}]
    small = plan(manifest({}, base_models=base), "h200")
    assert any("experts stay in 16 bits" in remark.text for remark in small.remarks)
    sinks = tiny_model(tmp_path / "models" / "sinks", "gpt_oss")
    own = manifest({}, base_models=[{"name": str(sinks)}])
    assert [plan(own, card).kernels.attention for card in ("h200", None)] == ["flex", "eager"]
    data["soft_prompts"] = [{"name": "lead", "tokens": 4}]
    assert plan(data, "h200").memory.fits
    data["training"]["config"] |= {"adapter_type": "none"}
    assert plan(data, "h200").adapter.trainable_parameters == 4 * 64
    [found] = [each for each in made.decisions if each.path == "model.parameters"]
    assert f"{shape_of_folder(folder).active_parameters:,} of them compute" in found.because


@pytest.mark.gpu
@each("rank", [16, 3])
def test_experts_on_a_card_are_those_of_a_cpu(rank):
    """In bfloat16 beside float64, with the same values; one expert is never chosen."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    generator = torch.Generator().manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=8)
    config._experts_implementation = "eager"
    hidden = torch.randn(300, 256, generator=generator).bfloat16()
    chosen = torch.stack([torch.randperm(7, generator=generator)[:2] for _ in range(300)])
    shares = torch.rand(300, 2, generator=generator).bfloat16()
    upstream = torch.randn(300, 256, generator=generator).bfloat16()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Qwen3MoeExperts(config)
            for weight in self.experts.parameters():
                torch.nn.init.normal_(weight, std=0.06, generator=generator)

    def outcome(layer: torch.nn.Module, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        from peft import LoraConfig, inject_adapter_in_model

        own: Any = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=[], **own)
        wrapped = inject_adapter_in_model(adapter, layer.bfloat16()).to(device, dtype)
        drawn = torch.Generator().manual_seed(1)
        trained = [weight for weight in wrapped.parameters() if weight.requires_grad]
        for weight in trained:
            values = torch.randn(weight.shape, generator=drawn) * 0.06
            weight.data.copy_(values.bfloat16())
        fuse_experts(wrapped, "default")
        given = [each.to(device, dtype).requires_grad_() for each in (hidden, shares)]
        experts: Any = wrapped.experts
        made = experts(given[0], chosen.to(device), given[1])
        gradients = torch.autograd.grad(made, [*given, *trained], upstream.to(device, dtype))
        return [made.detach().cpu().double(), *(each.cpu().double() for each in gradients)]

    layer = Layer()
    same = Layer()
    same.load_state_dict(layer.state_dict())
    exact = outcome(layer, "cpu", torch.float64)
    for ours, theirs in zip(outcome(same, "cuda", torch.bfloat16), exact, strict=True):
        # Values are rounded to 8 bits some times on the way.
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
