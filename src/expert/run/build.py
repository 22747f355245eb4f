"""Builds what a plan trains: model, kernels, optimizer, engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from expert import __version__
from expert.core.errors import ExpertError
from expert.core.install import NAME
from expert.manifest.schema.kinds import SPLITS_WEIGHTS
from expert.planning.machine.host import package_version
from expert.planning.memory.memory import CONTEXT_BYTES
from expert.telemetry.timeline import Timeline
from expert.training.recovery import KernelUnavailable, PrecisionUnsupported

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from expert.core.world import World
    from expert.data.tokens.encoder import Encoder
    from expert.model.load import LoadedModel
    from expert.parallel.engine import Engine, Groups
    from expert.parallel.graphs import Capture
    from expert.parallel.group import Group
    from expert.parallel.sharded import LocalShards
    from expert.planning.machine.machine import Machine
    from expert.planning.run_plan import KernelPlan, RunPlan

ADALORA = "adalora"
CONTEXT_GROWTH = 64 * 2**20
"""For kernels loaded after the context was measured: contexts differed by up to 92 MiB."""


@dataclass(frozen=True, kw_only=True)
class Built:
    loaded: LoadedModel
    engine: Engine
    timeline: Timeline

    def tensors(self, *, everywhere: bool = False) -> dict[str, dict[str, Tensor]]:
        """All tensors of a checkpoint by group and name, on the first rank or `everywhere`."""
        groups = self.engine.tensors(everywhere=everywhere)
        if self.loaded.ranks is not None:
            groups[ADALORA] = self.loaded.ranks.tensors()
        return groups

    def whole(self) -> LoadedModel:
        """The model with all weights gathered on the first rank for saving; the other ranks, which
        may share its machine, keep none."""
        if not self.loaded.is_sharded:
            return self.loaded
        first, engine = self.engine.world.is_first, cast("Any", self.engine)
        gathered: dict[int, Any] = {}  # by id: tied weights stay one tensor
        for tensor in self.loaded.weights.values():
            if id(tensor) not in gathered:
                whole = engine.whole(tensor)  # every rank takes part
                gathered[id(tensor)] = whole if first else None
                del whole
        weights = {name: gathered[id(tensor)] for name, tensor in self.loaded.weights.items()}
        return replace(self.loaded, weights=weights if first else {})

    def load(self, groups: Groups) -> None:
        """Restore what `tensors` returned."""
        self.engine.load(groups)
        if self.loaded.ranks is not None:
            self.loaded.ranks.load(dict(groups[ADALORA]))


def device_of(plan: RunPlan) -> torch.device:
    """The device of the plan; raises if torch cannot use the card."""
    import torch

    if plan.kernels.device == "cuda":
        if not torch.cuda.is_available():
            build = torch.version.cuda or "no CUDA at all"
            what = f"torch {torch.__version__} cannot use the card; it was built for CUDA {build}"
            fix = "install a torch build that fits the driver, or use --device cpu"
            raise ExpertError(f"{plan.target}: {what}  ({fix})")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class PlanUnsupported(ExpertError):
    """A part of the plan that this card cannot run; `failure` decides the next plan."""

    def __init__(self, failure: KernelUnavailable | PrecisionUnsupported) -> None:
        self.failure = failure
        super().__init__(failure.reason)


def check_precision(plan: RunPlan, device: torch.device) -> None:
    """Raise PlanUnsupported if the card cannot compute in the plan's precision."""
    import torch

    if device.type != "cuda" or plan.kernels.precision != "bf16":
        return
    if not torch.cuda.is_bf16_supported():
        raise PlanUnsupported(PrecisionUnsupported(precision="bf16", reason="the card has no bf16"))


def check_attention(plan: RunPlan, loaded: LoadedModel, device: torch.device) -> None:
    """Raise PlanUnsupported if the card cannot run flash attention for the model's head sizes.

    Only that kernel depends on the card; a compiler missing for flex is noticed when it is called.
    """
    from expert.model.attention import attention_failure
    from expert.model.chargpt import CharGpt
    from expert.model.load import DTYPES

    kind = plan.kernels.attention
    if device.type != "cuda" or kind not in ("flash", "flash4"):
        return
    if isinstance(loaded.module, CharGpt):
        return
    config = loaded.causal_lm.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    # Layers may differ: their widest heads.
    sizes = [
        (module.head_dim, heads // getattr(module, "num_key_value_groups", 1))
        for module in loaded.causal_lm.modules()
        if isinstance(getattr(module, "head_dim", None), int)
    ]
    width, groups = max(sizes, default=(config.hidden_size // heads, heads))
    reason = attention_failure(kind, device, DTYPES[plan.kernels.precision], width, heads, groups)
    if reason and "out of memory" not in reason:  # that shows with the first batch
        raise PlanUnsupported(KernelUnavailable(kernel="attention", reason=reason))


def build(
    plan: RunPlan,
    encoder: Encoder,
    *,
    device: torch.device,
    allow_remote_code: bool = False,
    group: Group | None = None,
) -> Built:
    """Load the model, set the plan's switches, and create the optimizer and the engine."""
    import torch

    from expert.model.adapters import ADAPTER
    from expert.model.fused.experts import fuse_experts
    from expert.model.load import DTYPES, load_model
    from expert.model.switches import set_switches
    from expert.parallel.engine import Engine
    from expert.parallel.group import Group
    from expert.parallel.replicated import Replicated, broadcast_weights
    from expert.parallel.sharded import Sharded
    from expert.training.learner import OptimizerLearner

    set_switches(plan.kernels)
    cap_memory(plan, device)
    if device.type == "cuda":  # the peak is the run's, not that of answers given before
        torch.cuda.reset_peak_memory_stats(device)
    check_precision(plan, device)
    sharded, group = plan.parallel.engine in SPLITS_WEIGHTS, group or Group()
    # Sharded weights are loaded into host memory: they need not fit one device.
    # Adapters compute in bfloat16 with float32 master weights. Float16 cannot hold their gradients,
    # so there they are float32 and autocast rounds them in the passes.
    loaded = load_model(
        plan.model,
        plan.adapter,
        plan.kernels,
        vocabulary=getattr(encoder, "characters", None),
        device="cpu" if sharded else device,
        seed=plan.optim.seed,
        total_steps=plan.length.total_steps,
        adapter_dtype=torch.bfloat16 if plan.kernels.precision == "bf16" else torch.float32,
        allow_remote_code=allow_remote_code,
    )
    check_attention(plan, loaded, device)
    shards = None
    if group.is_distributed:
        broadcast_weights(loaded.trainable, group.world, device)
    if sharded:
        loaded, shards = _spread(loaded, plan, group.world, device)
    else:
        switched_on = [name for name in ("compile", "cuda_graphs") if getattr(plan.kernels, name)]
        if fuse_experts(loaded.module, ADAPTER) and switched_on:
            # They would be compiled again in every step, and graphs would keep an old adapter.
            reason = "not with the experts of a mixture"
            raise PlanUnsupported(KernelUnavailable(kernel=switched_on[0], reason=reason))
    _arrange_blocks(loaded, plan.kernels)
    # Gathering and reducing during a pass cannot be captured in a CUDA graph.
    capture = capture_for(plan, device) if shards is None else None
    learner = OptimizerLearner(
        loaded.trainable if shards is None else shards.named,
        plan.optim,
        device=device,
        loss_scaling=plan.kernels.loss_scaling,
        capture=capture,
        total_norm=None if shards is None else shards.total_norm,
    )
    timeline = Timeline(device)
    options: dict[str, Any] = {
        "device": device,
        "autocast": _autocast(loaded, DTYPES[plan.kernels.precision]),
        "phase": timeline.phase,
        "after_step": loaded.after_step,
        "capture": capture,
        "warm_up_each_shape": plan.kernels.compile,
    }
    engine: Engine
    if shards is not None:
        engine = Sharded(loaded, learner, group=group, shards=shards, **options)
    elif group.is_distributed:
        engine = Replicated(loaded, learner, group=group, **options)
    else:
        engine = Engine(loaded, learner, **options)
    return Built(loaded=loaded, engine=engine, timeline=timeline)


def _arrange_blocks(loaded: LoadedModel, kernels: KernelPlan) -> None:
    from expert.model.adapters import ADAPTER
    from expert.model.blocks import checkpoint_blocks, compile_blocks
    from expert.model.chargpt import CharGpt
    from expert.model.fused.block import fuse_blocks
    from expert.model.fused.kernels import triton_failure

    if kernels.fused_blocks:
        trouble = triton_failure(loaded.head().device)
        reason = trouble or fuse_blocks(loaded.blocks, ADAPTER)
        if reason:
            kernel = "triton" if trouble else "fused_blocks"
            raise PlanUnsupported(KernelUnavailable(kernel=kernel, reason=reason))
    blocks = len(loaded.blocks)
    if kernels.checkpointing != "none":
        default = blocks if kernels.checkpointing == "full" else -(-blocks // 2)
        count = kernels.recomputed_blocks
        checkpoint_blocks(loaded.blocks, default if count is None else min(count, blocks))
    if kernels.compile and isinstance(loaded.module, CharGpt):
        loaded.module.compile_hidden(kernels.compile_mode, kernels.compile_backend)
    elif kernels.compile:
        compile_blocks(loaded.blocks, kernels.compile_mode, kernels.compile_backend)


def _spread(
    loaded: LoadedModel, plan: RunPlan, world: World, device: torch.device
) -> tuple[LoadedModel, LocalShards]:
    """Shard the model over the ranks; returns it with the shards that this rank trains."""
    from torch.distributed.tensor import DTensor

    from expert.model.load import DTYPES
    from expert.parallel.group import open_single_process_group
    from expert.parallel.sharded import LocalShards, shard, sharding_for

    open_single_process_group(device)
    sharding = sharding_for(world, device, holders=plan.parallel.shard_ranks)
    kind, trains_all = plan.kernels.precision, plan.adapter.type == "full"
    over_ranks = partial(
        shard,
        sharding=sharding,
        offload=plan.parallel.offload,
        gathered_as=DTYPES[kind] if trains_all and kind != "fp32" else None,
    )
    loaded = loaded.spread(over_ranks, device)
    prompts = (parameter for _, parameter in loaded.trainable)  # they are outside the module
    for tensor in (*loaded.module.parameters(), *loaded.module.buffers(), *prompts):
        if not isinstance(tensor, DTensor):  # what is offloaded stays
            tensor.data = tensor.data.to(device)
    return loaded, LocalShards(loaded.trainable, sharding)


def capture_for(plan: RunPlan, device: torch.device) -> Capture | None:
    from expert.parallel.graphs import CudaCapture

    return CudaCapture() if plan.kernels.cuda_graphs and device.type == "cuda" else None


def evaluation_engine(loaded: LoadedModel, device: torch.device) -> Engine:
    """An engine without an optimizer, for evaluation only."""
    from expert.model.load import DTYPES
    from expert.parallel.engine import Engine

    autocast = _autocast(loaded, DTYPES[loaded.kernels.precision])
    nothing: Any = None
    return Engine(loaded, nothing, device=device, autocast=autocast)


def _autocast(loaded: LoadedModel, precision: torch.dtype) -> torch.dtype | None:
    """The autocast dtype, if trainable weights are stored in another one; else None."""
    import torch

    mixed = any(parameter.dtype != precision for _, parameter in loaded.trainable)
    return precision if mixed and precision != torch.float32 else None


def cap_memory(plan: RunPlan, device: torch.device) -> None:
    """Limit the process to the requested memory, CUDA context included."""
    import torch

    if device.type != "cuda":
        return
    cap, share = plan.memory.cap_bytes, 1.0  # undoes the cap of an earlier plan
    if cap is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        context = (plan.memory.parts or {}).get("cuda_context", CONTEXT_BYTES)
        share = min(1.0, max(0.01, (cap - context - CONTEXT_GROWTH) / total))
    torch.cuda.set_per_process_memory_fraction(share, device)


def environment(machine: Machine | None = None) -> dict[str, Any]:
    """Versions, machine and card of the run; the machine is examined if not given."""
    import platform

    import torch

    from expert.planning.machine.machine import describe_machine, machine_as_dict

    names = ("torch", "transformers", "peft", "tokenizers", "numpy", "pyarrow")
    optional = ("bitsandbytes", "liger-kernel", "datasets", "triton")
    installed = {name: package_version(name).value for name in (*names, *optional)}
    versions = {NAME: __version__, **installed}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "machine": machine_as_dict(machine or describe_machine()),
    }
