"""The engine of a model whose weights are sharded over many devices with torch's FSDP2.

A block's weights are gathered while it computes and freed afterwards. If all weights are trained,
gradients and optimizer state are sharded too: each rank steps its own part. Adapters are small:
every rank has them whole, and their gradients are summed as in data-parallel training.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from expert.core.world import World
from expert.parallel.engine import Groups, StepResult
from expert.parallel.replicated import Replicated, sum_over_ranks

Named = Sequence[tuple[str, Parameter]]
MODEL = "model"


@dataclass(frozen=True, eq=False)
class Sharding:
    mesh: DeviceMesh
    device: torch.device

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that together hold one copy of the model."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def place(self) -> int:
        """Index of the part that this rank holds."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def parts(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor: rows, split as by torch.chunk."""
        parts = whole.chunk(self.parts, 0)
        return parts[self.place] if self.place < len(parts) else whole[:0]

    def whole(self, part: Tensor, like: Tensor) -> Tensor:
        """Gather a tensor that is sharded like `like`; all ranks of the group must call this."""
        # Not DTensor.full_tensor(), which ends the process with gloo and CUDA (torch 2.11).
        rows = -(-like.shape[0] // self.parts)
        shape = (rows, *like.shape[1:])
        padded = torch.zeros(shape, dtype=part.dtype, device=self.device)
        padded[: len(part)] = part.detach()
        gathered = padded.new_empty((rows * self.parts, *like.shape[1:]))
        # The only name in torch 2.11; deprecated in 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, padded, group=self.group)
        return gathered[: like.shape[0]]


def sharding_for(world: World, device: torch.device, *, holders: int | None = None) -> Sharding:
    """Shard over all ranks, or over groups of `holders` neighbouring ranks: those of one machine,
    so that gathering each block uses its fast link."""
    copies = world.size // (holders or world.size)
    shape = (copies, world.size // copies) if copies > 1 else (world.size,)
    names = ("copies", "holders") if copies > 1 else ("holders",)
    return Sharding(init_device_mesh(device.type, shape, mesh_dim_names=names), device)


def shard(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    whole: set[Parameter],
    *,
    sharding: Sharding,
    offload: bool = False,
    gathered_as: torch.dtype | None = None,
) -> None:
    """Shard the weights of every block, and then the rest of the model: embedding and head.

    `whole`: parameters that every rank keeps. `offload`: parts stay in host memory. `gathered_as`:
    float32 weights are sent and computed in this precision; gradients are always summed in float32.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=gathered_as, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    policy: OffloadPolicy = OffloadPolicy()
    if offload:
        policy = CPUOffloadPolicy(pin_memory=sharding.device.type == "cuda")
    for unit in (*blocks, model):
        sharded: Any = fully_shard(
            unit,
            mesh=sharding.mesh,
            mp_policy=precision,
            offload_policy=policy,
            ignored_params=whole,
        )
        # Losses are already divided by the targets of all ranks, so gradients are only summed.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


class LocalShards:
    """The parameters that this rank steps: its parts of sharded ones, and the others."""

    def __init__(self, named: Named, sharding: Sharding) -> None:
        self.sharding = sharding
        self._spread: dict[str, tuple[Any, Parameter]] = {}
        self.named: list[tuple[str, Parameter]] = []
        for name, parameter in named:
            own = parameter
            if isinstance(parameter, DTensor):
                own = Parameter(parameter.to_local())
                own.whole_shape = parameter.shape  # type: ignore[attr-defined]
                self._spread[name] = (parameter, own)
            self.named.append((name, own))

    def take_gradients(self) -> None:
        """Assign gradients of sharded weights, already summed over the ranks, to the parts."""
        for parameter, own in self._spread.values():
            own.grad = None if parameter.grad is None else parameter.grad.to_local()

    def discard(self) -> None:
        for parameter, own in self._spread.values():
            parameter.grad = own.grad = None

    def to_sum(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Of the gradients, in the order of `named`, and anything after them: those that are not
        summed over the ranks yet."""
        pairs = zip(gradients, self.named, strict=False)
        waiting = [gradient for gradient, (name, _) in pairs if name not in self._spread]
        return [*waiting, *gradients[len(self.named) :]]

    def total_norm(self, norms: Tensor) -> Tensor:
        """The norm of all gradients from this rank's norms."""
        first = self.sharding.place == 0
        counts = [name in self._spread or first for name, _ in self.named]
        squares = (norms.double() ** 2 * norms.new_tensor(counts, dtype=torch.float64)).sum()
        dist.all_reduce(squares, group=self.sharding.group)
        return squares.sqrt().to(norms.dtype)

    def gathered(self, groups: Groups, keep: bool) -> dict[str, dict[str, Tensor]]:
        """Gather whole tensors by group and name in host memory; empty unless `keep`."""
        gathered: dict[str, dict[str, Tensor]] = {}
        for group, tensors in groups.items():
            gathered[group] = {}
            for name, tensor in tensors.items():
                spread = self._like(group, name, tensor)
                if spread is not None:
                    tensor = self.sharding.whole(tensor, spread)
                if keep:
                    gathered[group][name] = tensor if spread is None else tensor.cpu()
        return gathered

    def cut(self, groups: Groups) -> dict[str, dict[str, Tensor]]:
        """This rank's parts of whole tensors."""
        return {
            group: {
                name: tensor
                if self._like(group, name, tensor) is None
                else self.sharding.part_of(tensor)
                for name, tensor in tensors.items()
            }
            for group, tensors in groups.items()
        }

    def _like(self, group: str, name: str, tensor: Tensor) -> Any | None:
        """The sharded weight that a tensor belongs to; None if it is not sharded."""
        owner = name if group == MODEL else name.rpartition(".")[0]
        sharded = self._spread.get(owner)
        return sharded[0] if sharded is not None and tensor.ndim else None


class Sharded(Replicated):
    """An Engine whose ranks each hold a part of the weights and see different rows."""

    def __init__(self, *parts: Any, shards: LocalShards, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._shards = shards

    def step(self, *, step: int, rate: float, max_norm: float) -> StepResult:
        self._shards.take_gradients()
        applied = super().step(step=step, rate=rate, max_norm=max_norm)
        self._shards.discard()
        return applied

    def sum_gradients(self) -> None:
        sum_over_ranks(self._shards.to_sum(self._learner.gradients_to_reduce()))

    def discard(self) -> None:
        super().discard()
        self._shards.discard()

    def tensors(self, *, everywhere: bool = False) -> dict[str, dict[str, Tensor]]:
        keep = everywhere or self.world.is_first
        return self._shards.gathered(self._learner.tensors(), keep=keep)

    def whole(self, weight: Any) -> Tensor:
        """A whole weight in host memory; all ranks must call this."""
        if not isinstance(weight, DTensor):
            whole: Tensor = weight
            return whole
        return self._shards.sharding.whole(weight.to_local(), weight).cpu()

    def load(self, groups: Groups) -> None:
        self._learner.load(self._shards.cut(groups))
