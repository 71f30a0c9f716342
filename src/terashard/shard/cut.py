"""From modules to units: who owns which parameter, and where it is used.

A parameter object that stands in several places is one parameter. The first unit that uses it owns
it; later units borrow it, and list the owner among their ``lenders``.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

from terashard.comm.mesh import Mesh
from terashard.errors import RunError
from terashard.shard.flat import Form
from terashard.shard.gradient import WeightStash
from terashard.shard.param import Place, ShardedParameter, rows_of_stage
from terashard.shard.places import Places
from terashard.shard.pool import BufferPool
from terashard.shard.precision import Precision
from terashard.shard.unit import ShardUnit


def make_units(
    units: Sequence[tuple[str, nn.Module]],
    *,
    mesh: Mesh,
    precision: Precision,
    ties: Mapping[str, str],
    each_micro: bool = False,
    stashes: Mapping[nn.Module, WeightStash] | None = None,
    slots: Mapping[str, int] | None = None,
    places: Places | None = None,
) -> list[ShardUnit]:
    """Cut the parameters of every (name, module), in place, and return one unit for each.

    Modules with values must hold the same ones on all ranks; modules on meta are cut unwritten, to
    be filled by ``materialise``. Buffers are not cut, not in ``state_dict`` and not saved, so only
    non-persistent ones are allowed. Global names are ``f"{unit}.{name inside the unit}"``. ``ties``
    maps such a name to the name of the parameter, in another stage, that always equals it.
    ``slots`` says which slot of the pool a unit uses; by default each has its own. With
    ``places`` every gather names a slot of these. Whether a parameter trains is settled here, by
    its ``requires_grad``. ``each_micro`` and ``stashes``, by the module whose weight it is: see
    ``ShardUnit``.
    """
    _refuse_persistent_buffers(units)
    claims = _claim(units, mesh, precision)
    _tie(claims, ties)
    pool = BufferPool(mesh.device)
    made: list[ShardUnit] = []
    for index, (name, module) in enumerate(units):
        unit = ShardUnit(
            name,
            module,
            claims.owned[index],
            mesh=mesh,
            precision=precision,
            each_micro=each_micro,
            stashes=None if stashes is None else _by_sharded(claims.owned[index], stashes),
        )
        unit.lenders = tuple(made[owner] for owner in sorted(claims.borrowed[index]))
        if places is None:
            unit.assign(pool.slot(index if slots is None else slots[name]))
        else:
            unit.assign(places.free(unit), moving=True)
        _move_buffers(module, mesh)
        made.append(unit)
    return made


def _by_sharded(
    parameters: Sequence[ShardedParameter], stashes: Mapping[nn.Module, WeightStash]
) -> dict[ShardedParameter, WeightStash]:
    return {
        p: stashes[place.module]
        for p in parameters
        for place in p.places
        if place.attribute == "weight" and place.module in stashes
    }


def named_parameters(units: Sequence[ShardUnit]) -> dict[str, nn.Parameter]:
    """Global name → public parameter (a DTensor), in order, every parameter once."""
    return {p.name: p.sharded for unit in units for p in unit.parameters}


def copied_parameters(units: Sequence[ShardUnit]) -> dict[str, DTensor]:
    """Global name → detached copy of a parameter, with storage of its own."""
    return {
        p.name: p.distribute(p.local.detach().clone()) for unit in units for p in unit.parameters
    }


class _Claims:
    """Parameters by owner, whom every unit borrows from, and every global name in use."""

    def __init__(self, units: int) -> None:
        self.owned: list[list[ShardedParameter]] = [[] for _ in range(units)]
        self.borrowed: list[set[int]] = [set() for _ in range(units)]
        self.by_name: dict[str, ShardedParameter] = {}


def _claim(units: Sequence[tuple[str, nn.Module]], mesh: Mesh, precision: Precision) -> _Claims:
    claims = _Claims(len(units))
    # Keyed by the object itself: a ShardedParameter keeps it alive, so no id is used twice.
    owners: dict[nn.Parameter, tuple[int, ShardedParameter]] = {}
    for index, (unit, module) in enumerate(units):
        for name, parameter, place in _uses(unit, module):
            if parameter not in owners:
                _require_plain(name, parameter)
                owners[parameter] = (index, _described(name, parameter, mesh, precision))
                claims.owned[index].append(owners[parameter][1])
            owner, sharded = owners[parameter]
            sharded.places.append(place)
            claims.by_name[name] = sharded
            if owner != index:
                claims.borrowed[index].add(owner)
    return claims


def _described(
    name: str, parameter: nn.Parameter, mesh: Mesh, precision: Precision
) -> ShardedParameter:
    form = Form.plain(parameter.shape, precision.master)
    cut, spread = rows_of_stage(form, mesh.device_mesh, mesh.shards, mesh.shard)
    return ShardedParameter(
        name=name,
        form=form,
        cut=cut,
        compute=precision.compute,
        spread=spread,
        trainable=parameter.requires_grad,
        original=parameter,
    )


def _uses(unit: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Place]]:
    for prefix, child in module.named_modules(prefix=unit):
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{attribute}", parameter, Place(child, attribute)


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise RunError(f"parameter {name} is a DTensor already; a module can be cut only once")
    if not parameter.is_floating_point():
        raise RunError(
            f"parameter {name} is {parameter.dtype}; only floating-point parameters can be cut:"
            " make it a buffer"
        )


def _refuse_persistent_buffers(units: Sequence[tuple[str, nn.Module]]) -> None:
    for unit, module in units:
        for prefix, child in module.named_modules(prefix=unit):
            for name, buffer in child._buffers.items():
                if buffer is not None and name not in child._non_persistent_buffers_set:
                    raise RunError(
                        f"{prefix}.{name} is a persistent buffer, which no checkpoint would keep;"
                        " register it with persistent=False, or make it a parameter"
                    )


def _tie(claims: _Claims, ties: Mapping[str, str]) -> None:
    for here, there in ties.items():
        if here not in claims.by_name:
            raise RunError(
                f"{here} is said to be tied to {there}, but no unit here has such a parameter;"
                f" there are {', '.join(claims.by_name)}"
            )
        claims.by_name[here].tied_to = there


def _move_buffers(module: nn.Module, mesh: Mesh) -> None:
    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and not buffer.is_meta:
                child._buffers[name] = buffer.to(mesh.device)
