"""A program written for torch's ``fully_shard`` runs with ours by changing one import."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import terashard
from terashard.errors import ConfigError
from tests.helpers.torch_threads import run_ranks
from tests.shard.engines import (
    Block,
    Here,
    Net,
    alike,
    gradients,
    loss_of,
    mesh_of,
    run,
    same,
    seeded,
    shard,
    whole,
    words,
)

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped")  # torch's advice on views

Optimizer = Callable[[Any], torch.optim.Optimizer]


def train(
    here: Here, *, steps: int = 3, optimizer: Optimizer | None = None, parts: int = 1
) -> dict[str, Any]:
    """Losses, gradient norms and parameters of a few steps."""
    make = optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2))
    chosen = make(here.model.parameters())
    told: list[tuple[float, float]] = []
    for step in range(steps):
        for part in range(parts):
            loss = loss_of(here.model, words(here.rank, step * parts + part)) / parts
            loss.backward()
        norm = nn.utils.clip_grad_norm_(here.model.parameters(), 0.5)
        told.append((loss.item(), whole({"": norm})[""].item()))
        chosen.step()
        chosen.zero_grad()
    return {"told": told, "values": whole(here.model.state_dict())}


@pytest.mark.parametrize("keep", [None, True, False])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_training_is_the_same(shape: tuple[int, ...], keep: bool | None) -> None:
    def program(here: Here) -> Any:
        shard(here.model, *shape, reshard_after_forward=keep, engine=here.engine)
        return train(here)

    alike(program, size=torch.Size(shape).numel())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_of_torch_work(kind: type[torch.optim.Optimizer], fused: bool) -> None:
    if fused and kind is torch.optim.SGD:
        pytest.skip("torch has no fused SGD over DTensors")
    rest = {"fused": True} if fused else {"foreach": True}
    if kind is torch.optim.SGD:
        rest["momentum"] = 0.9  # type: ignore[assignment]

    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        return train(here, optimizer=lambda p: kind(p, lr=1e-2, **rest))  # type: ignore[call-arg]

    alike(program)


def test_parameters_are_dtensors_of_the_same_placement_and_names_stay() -> None:
    def program(here: Here) -> Any:
        names = [name for name, _ in here.model.named_parameters()]
        shard(here.model, 2, engine=here.engine)
        found = {}
        for name, p in here.model.named_parameters():
            assert isinstance(p, DTensor)
            found[name] = (tuple(p.shape), tuple(p.to_local().shape), str(p.placements))
        assert list(found) == names
        return found

    alike(program)


def test_the_class_is_swapped_in_place() -> None:
    def program(here: Here) -> None:
        model = here.model
        assert shard(here.model, 2, engine=here.engine) is model
        assert isinstance(model, Net)
        assert isinstance(model, terashard.ShardedModule)
        assert not isinstance(model, FSDPModule)
        assert type(model).__name__ == "ShardedNet"
        assert type(model.blocks[0]) is type(model.blocks[1])

    run("ours", program, 2, lambda: seeded(Net()))


def test_what_stands_in_the_module_at_each_time_is_the_same() -> None:
    def program(here: Here) -> Any:
        seen: list[tuple[str, bool]] = []

        def note(when: str) -> None:
            weight = here.model.blocks[0].up.weight
            seen.append((when, isinstance(weight, DTensor)))

        shard(here.model, 2, engine=here.engine)
        block = here.model.blocks[0]
        block.up.register_forward_hook(lambda *_: note("in forward"))
        note("before")
        loss = loss_of(here.model, words(here.rank, 0))
        note("after forward")
        root = isinstance(here.model.head.weight, DTensor)
        loss.backward()
        note("after backward")
        block.unshard()
        note("unsharded")
        block.reshard()
        note("resharded")
        handle = block.unshard(async_op=True)
        handle.wait()
        note("waited")
        block.reshard()
        return seen, root

    alike(program)


@pytest.mark.parametrize("reduce", [None, torch.float32])
@pytest.mark.parametrize("output", [None, torch.float32])
def test_mixed_precision_is_the_same(
    reduce: torch.dtype | None, output: torch.dtype | None
) -> None:
    def program(here: Here) -> Any:
        rest = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce}
        for block in here.model.blocks:
            policy = here.engine.MixedPrecisionPolicy(**rest)
            here.engine.fully_shard(block, mesh=mesh_of(2), mp_policy=policy)
        policy = here.engine.MixedPrecisionPolicy(**rest, output_dtype=output)
        here.engine.fully_shard(here.model, mesh=mesh_of(2), mp_policy=policy)
        out = here.model(words(here.rank, 0))
        loss_of(here.model, words(here.rank, 0)).backward()
        return str(out.dtype), gradients(here.model)

    alike(program, within=2e-2, build=lambda: seeded(Net()).float())


def test_cutting_along_another_dim_is_the_same() -> None:
    def program(here: Here) -> Any:
        def second(p: nn.Parameter) -> Shard | None:
            return Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None

        shard(here.model, 2, shard_placement_fn=second, engine=here.engine)
        places = {name: str(p.placements) for name, p in here.model.named_parameters()}
        return places, train(here)

    alike(program)


def test_ours_also_cuts_another_dim_unevenly_and_replicates() -> None:
    def program(here: Here) -> Any:
        def chosen(p: nn.Parameter) -> Any:
            return Shard(1) if p.ndim == 2 else Replicate()

        shard(here.model, 4, shard_placement_fn=chosen, engine=here.engine)
        return train(here)

    def plain(here: Here) -> Any:
        shard(here.model, 4, engine=here.engine)
        return train(here)

    build = lambda: seeded(Net(width=5))  # noqa: E731
    same(run("ours", program, 4, build), run("torch", plain, 4, build))


def test_ignored_parameters_are_left_alone() -> None:
    def program(here: Here) -> Any:
        ignored = {here.model.head.weight}
        shard(here.model, 2, ignored_params=ignored, engine=here.engine)
        kept = here.model.head.weight
        loss_of(here.model, words(here.rank, 0)).backward()
        return isinstance(kept, DTensor), gradients(here.model)

    alike(program)


def test_several_modules_as_one_unit() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm, self.head = Net(1), nn.LayerNorm(11), nn.Linear(11, 11)

        def forward(self, batch: Tensor) -> Tensor:
            out: Tensor = self.head(self.norm(self.net(batch)))
            return out

    def program(here: Here) -> Any:
        mesh = mesh_of(2)
        here.engine.fully_shard([here.model.norm, here.model.head], mesh=mesh)
        here.engine.fully_shard(here.model, mesh=mesh)
        return train(here)

    alike(program, build=lambda: seeded(Two()))


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_accumulation_without_sums_is_the_same(shape: tuple[int, ...]) -> None:
    def program(here: Here) -> Any:
        shard(here.model, *shape, engine=here.engine)
        optimizer = torch.optim.SGD(here.model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            for part in range(3):
                here.model.set_requires_gradient_sync(part == 2)
                here.model.set_is_last_backward(part == 2)
                loss_of(here.model, words(here.rank, 3 * step + part)).backward()
                if part < 2:
                    assert all(p.grad is None for p in here.model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        return whole(here.model.state_dict())

    alike(program, size=torch.Size(shape).numel())


def test_accumulation_with_sums_is_the_same() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        return train(here, parts=3)

    alike(program)


def test_partial_sums_over_shards_are_carried_to_the_sum_over_replicas() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, 2, engine=here.engine)
        for part in range(3):
            here.model.set_requires_all_reduce(part == 2)
            loss_of(here.model, words(here.rank, part)).backward()
        return gradients(here.model)

    alike(program, size=4)


def test_parameters_may_stay_after_backward() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        here.model.set_reshard_after_backward(False)
        for part in range(2):
            loss_of(here.model, words(here.rank, part)).backward()
        held = [isinstance(b.up.weight, DTensor) for b in here.model.blocks]
        for module in (here.model, *here.model.blocks):
            module.reshard()
        return held, gradients(here.model)

    alike(program)


def test_a_divide_factor_replaces_the_number_of_ranks() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        for module in (here.model, *here.model.blocks):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        loss_of(here.model, words(here.rank, 0)).backward()
        return gradients(here.model)

    alike(program)


def test_prefetching_by_name_changes_no_value() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        blocks = list(here.model.blocks)
        blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
        blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
        return train(here)

    alike(program)


def test_the_other_setters_are_there() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        here.model.set_reshard_after_forward(True)
        here.model.blocks[0].set_unshard_in_backward(True)
        here.model.set_reduce_scatter_unused_params(True)
        here.model.set_reduce_scatter_max_input_buffers(2)
        here.model.set_is_last_backward(True)
        here.engine.share_comm_ctx([here.model, here.model.blocks[0]])
        return train(here)

    alike(program)


def test_the_hook_on_summed_gradients_is_called() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        here.model.blocks[0].set_all_reduce_hook(lambda flat: flat.mul_(3.0))
        loss_of(here.model, words(here.rank, 0)).backward()
        return gradients(here.model)

    alike(program)


def test_another_method_may_be_a_forward() -> None:
    class Coder(Net):
        def encode(self, batch: Tensor) -> Tensor:
            return self.blocks[0](self.embed(batch))  # type: ignore[no-any-return]

    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        here.engine.register_fsdp_forward_method(here.model, "encode")
        here.engine.register_fsdp_forward_method(nn.Linear(2, 2), "anything")
        with pytest.raises(ValueError, match="does not have a method"):
            here.engine.register_fsdp_forward_method(here.model, "decode")
        loss = here.model.encode(words(here.rank, 0)).square().sum()
        loss.backward()
        found = {n: g for n, g in gradients(here.model).items() if g is not None and g.any()}
        return loss.item(), found

    alike(program, build=lambda: seeded(Coder()))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_activation_checkpointing_is_the_same(inside: bool, reentrant: bool) -> None:
    class Checked(Net):
        def forward(self, batch: Tensor) -> Tensor:
            x = self.embed(batch)
            for block in self.blocks:
                x = block(x) if inside else checkpoint(block, x, use_reentrant=reentrant)
            out: Tensor = self.head(x)
            return out

    class CheckedBlock(Block):
        def forward(self, x: Tensor) -> Tensor:
            again = super().forward
            return checkpoint(again, x, use_reentrant=reentrant)  # type: ignore[no-any-return]

    def build() -> nn.Module:
        model = Checked()
        if inside:
            model.blocks = nn.ModuleList(CheckedBlock() for _ in range(3))
        return seeded(model)

    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        return train(here)

    alike(program, build=build)


def test_state_goes_out_and_comes_in() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        before = {k: v.clone() for k, v in here.model.state_dict().items()}
        train(here)
        here.model.load_state_dict(before)
        return whole(here.model.state_dict()), train(here, steps=1)["told"]

    alike(program)


def test_a_plain_state_dict_loads_too() -> None:
    plain = seeded(Net(), 5).state_dict()

    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        here.model.load_state_dict(plain)
        return whole(here.model.state_dict())

    for found in run("ours", program, 2, lambda: seeded(Net())):
        same(found, dict(plain))


def test_state_may_be_assigned() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        other = {k: v.detach() * 2 for k, v in here.model.state_dict().items()}
        here.model.load_state_dict(other, assign=True)
        return train(here)

    alike(program)


def test_other_formats_and_meta_come_in_through_apply() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        here.model.float()
        assert here.model.head.weight.dtype == torch.float32
        return train(here)["told"]

    alike(program, within=1e-4)


def test_birth_on_meta_as_torch_does_it() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return Net().double()

    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        here.model.to_empty(device="cpu")
        for index, p in enumerate(here.model.parameters()):
            nn.init.constant_(p, 0.01 * index)
        return train(here)

    alike(program, build=build)


def test_a_sequence_is_indexed_to_a_plain_one() -> None:
    def program(here: Here) -> Any:
        here.engine.fully_shard(here.model, mesh=mesh_of(2))
        part = here.model[:1]
        return type(part).__name__, len(part)

    alike(program, build=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_refusals() -> None:
    def program(here: Here) -> None:
        mesh = mesh_of(2)
        with pytest.raises(ValueError, match="do not implement forward"):
            here.engine.fully_shard(here.model.blocks, mesh=mesh)
        with pytest.raises(ValueError, match="factor of 2"):
            here.engine.fully_shard(here.model.embed, mesh=mesh, reshard_after_forward=3)
        with pytest.raises(ValueError, match="reshard_after_forward"):
            here.engine.fully_shard(here.model.head, mesh=mesh, reshard_after_forward="no")
        here.engine.fully_shard(here.model, mesh=mesh)
        with pytest.raises(TypeError, match="int"):
            here.model.set_reduce_scatter_max_input_buffers(True)
        with pytest.raises(ValueError, match=r"sharded|FSDPModule"):
            here.model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
        if here.engine is terashard:
            with pytest.raises(ConfigError, match="sharded already"):
                here.engine.fully_shard(here.model, mesh=mesh)
            for call in (
                lambda: here.model.set_symm_mem_for_comm(),
                lambda: here.model.set_allocate_memory_from_process_group_for_comm(True),
            ):
                with pytest.raises(ConfigError, match="Leave the call out"):
                    call()

    for engine in ("torch", "ours"):
        run(engine, program, 2, lambda: seeded(Net()))


def test_the_mesh_is_all_ranks_by_default() -> None:
    def program(rank: int) -> int:
        model = nn.Linear(4, 4)
        terashard.fully_shard(model)
        return int(model.weight.to_local().shape[0])  # type: ignore[operator, union-attr]

    assert run_ranks(2, program) == [2, 2]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_parameters_may_be_cut_over_a_smaller_group_after_forward(shape: tuple[int, ...]) -> None:
    def program(here: Here) -> Any:
        shard(here.model, *shape, reshard_after_forward=2, engine=here.engine)
        return train(here)

    alike(program, size=4)


def test_after_forward_a_smaller_group_gathers() -> None:
    def program(here: Here) -> list[int]:
        shard(here.model, 4, reshard_after_forward=2, engine=here.engine)
        loss = loss_of(here.model, words(here.rank, 0))
        unit = here.model.blocks[0]._own.units[0]
        group = unit.smaller
        called: list[int] = []
        plain = type(group).gather_rows
        type(group).gather_rows = lambda g, full: called.append(g.size) or plain(g, full)
        try:
            loss.backward()
        finally:
            type(group).gather_rows = plain
        return called

    assert run("ours", program, 4, lambda: seeded(Net()))[0].count(2) >= 3


class Gathering:
    """An all-gather of the caller's own, as torch describes it."""

    def __init__(self, base: type) -> None:
        self.calls = 0

    __hash__ = None  # type: ignore[assignment]  # as of a plain dataclass

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Scattering(Gathering):
    """A reduce-scatter of the caller's own."""

    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.calls += 1
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def test_communication_may_be_the_callers_own() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        gather, scatter = Gathering(object), Scattering(object)
        here.model.blocks[1].set_custom_all_gather(gather)
        here.model.blocks[1].set_custom_reduce_scatter(scatter)
        told = train(here)
        assert gather.calls
        assert scatter.calls == 3
        return told

    alike(program)


def test_sums_may_share_the_communicator_of_gathers() -> None:
    def program(here: Here) -> Any:
        shard(here.model, 2, engine=here.engine)
        here.model.set_separate_reduce_scatter_group(False)
        return train(here)

    alike(program)


def test_offloading_means_nothing_on_a_cpu() -> None:
    def program(here: Here) -> Any:
        shard(
            here.model,
            2,
            offload_policy=here.engine.CPUOffloadPolicy(pin_memory=False),
            engine=here.engine,
        )
        return train(here)

    alike(program)


def test_parameters_of_one_module_may_be_cut_over_different_ranks() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    def program(here: Here) -> Any:
        whole_mesh = mesh_of(2, 2)
        small = FSDPMeshInfo(mesh=whole_mesh["shard"], shard_mesh_dim=0)
        everyone = init_device_mesh("cpu", (4,))

        def chosen(p: nn.Parameter) -> Any:
            if p.ndim == 2:
                return terashard.ShardPlacementResult(Shard(0), small)
            return None

        for block in here.model.blocks:
            here.engine.fully_shard(block, mesh=everyone, shard_placement_fn=chosen)
        here.engine.fully_shard(here.model, mesh=everyone)
        loss_of(here.model, words(here.rank, 0)).backward()
        return gradients(here.model)

    alike(program, size=4)


@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallel_parameters_are_cut_in_their_local_part(dim: int) -> None:
    def program(here: Here) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        for block in here.model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
        batch = words(here.rank // 2, 0)
        chosen = None if dim == 0 else (lambda p: Shard(1) if p.ndim == 2 else None)
        for block in here.model.blocks:
            here.engine.fully_shard(block, mesh=mesh["data"], shard_placement_fn=chosen)
        here.engine.fully_shard(here.model, mesh=mesh["data"])
        loss_of(here.model, batch).backward()
        block = here.model.blocks[0]
        places = str(block.up.weight.placements), str(block.down.weight.placements)
        optimizer = torch.optim.SGD(here.model.parameters(), lr=0.1)
        found = gradients(here.model)
        optimizer.step()
        return places, found, whole(here.model.state_dict())

    alike(program, size=4, build=lambda: seeded(Net(width=8)))


def test_parameters_on_the_full_mesh_whose_data_axes_are_named() -> None:
    def program(here: Here) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = here.model
        for name, p in list(model.named_parameters()):
            way = Shard(0) if name == "0.weight" else Replicate()
            spread = distribute_tensor(p.detach(), mesh, [Replicate(), way])
            module = model.get_submodule(name.split(".")[0])
            setattr(module, name.split(".")[1], nn.Parameter(spread))
        dims = here.engine.DataParallelMeshDims(shard="data")
        here.engine.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        generator = torch.Generator().manual_seed(here.rank // 2)
        x = torch.randn(3, 8, generator=generator, dtype=torch.float64)
        spread = DTensor.from_local(x, mesh, [Replicate(), Replicate()], run_check=False)
        out = model(spread)
        out.full_tensor().square().sum().backward()
        places = {n: str(p.placements) for n, p in model.named_parameters()}
        return places, gradients(model)

    def build() -> nn.Module:
        return seeded(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)))

    alike(program, size=4, build=build)


@pytest.mark.parametrize("pool", ["static", "any", "off"])
def test_gathers_ahead_change_no_value_and_come_before_the_sum(pool: str) -> None:
    def program(here: Here) -> Any:
        arguments = {"pool": pool} if here.engine is terashard else {}
        shard(here.model, 2, engine=here.engine, **arguments)
        if here.engine is terashard:
            here.model.set_gathers_ahead(1)
            with pytest.raises(ValueError, match="ahead is no number"):
                here.model.set_gathers_ahead(-1)
        return train(here)

    alike(program, build=lambda: seeded(Net(5)))


def test_the_next_gather_is_issued_before_the_current_sum() -> None:
    def program(here: Here) -> list[str]:
        shard(here.model, 2, engine=here.engine)
        here.model.set_gathers_ahead(1)
        loss_of(here.model, words(here.rank, 0)).backward()
        order: list[str] = []
        for unit in here.model._own.root.units:
            gather, issue = unit.gather, unit.landing.issue
            unit.gather = lambda *a, u=unit, g=gather: order.append(f"G {u.name}") or g(*a)
            unit.landing.issue = lambda u=unit, i=issue: order.append(f"A {u.name}") or i()
        loss_of(here.model, words(here.rank, 1)).backward()
        return order

    order = run("ours", program, 2, lambda: seeded(Net(5)))[0]
    assert order.index("G blocks.2", 6) < order.index("A blocks.3")
    assert order.index("G blocks.1", 6) < order.index("A blocks.2")
