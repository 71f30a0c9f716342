"""Values that must be the same on several ranks, compared by digest when a pipeline is made.

Gathers, sums and updates keep equal copies equal; nothing makes unequal ones equal. Two replicas
that were built from different random seeds would train on, each with a model of its own, under the
average of their gradients. Compared are, by global name:

* whole parameters as the modules were built, over all ranks of a stage;
* the rows that are kept, over replicas, and over the two stages that share a weight;
* 0-dim parameters, which are kept whole, over shards too.

Every rank tells all others, and so all ranks refuse with the same sentence.
"""

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from terashard.comm.mesh import Mesh
from terashard.errors import RunError
from terashard.nn.protocols import StageModule
from terashard.shard.unit import ShardUnit


@dataclass(frozen=True, slots=True)
class _Copy:
    """What one rank holds of something: whoever has the same ``what`` must hold the same."""

    what: Hashable
    rank: int
    name: str
    digest: str


def digest(tensor: Tensor) -> str:
    """A digest of the bytes of ``tensor``."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return blake2b(flat.view(torch.uint8).numpy().data).hexdigest()


def whole_digests(module: StageModule, mesh: Mesh) -> dict[str, str]:
    """Digests of all parameters with values, before they are cut; none if nobody has copies."""
    if mesh.data.size == 1:
        return {}
    named: Iterable[tuple[str, nn.Parameter]] = (
        (f"{unit}.{name}", parameter)
        for unit, part in module.units()
        for name, parameter in part.named_parameters()
    )
    return {
        name: digest(parameter)
        for name, parameter in named
        if not parameter.is_meta and not isinstance(parameter, DTensor)
    }


def require_equal_values(
    units: Sequence[ShardUnit], whole: Mapping[str, str], ties: Mapping[str, str], mesh: Mesh
) -> None:
    """Raise ``RunError`` on all ranks, naming parameter and ranks, where copies differ."""
    rows = {
        p.name: digest(p.local)
        for unit in units
        for p in unit.parameters
        if mesh.replicas > 1 or p.name in ties or (p.is_scalar and mesh.shards > 1)
    }
    scalars = [p.name for unit in units for p in unit.parameters if p.is_scalar]
    mine = json.dumps({"whole": whole, "rows": rows, "scalars": scalars, "ties": dict(ties)})
    first: dict[Hashable, _Copy] = {}
    for rank, words in enumerate(mesh.world.gather_bytes(mine.encode())):
        for copy in _copies(mesh, rank, json.loads(words)):
            other = first.setdefault(copy.what, copy)
            if copy.digest != other.digest:
                raise RunError(_sentence(other, copy))


def _copies(mesh: Mesh, rank: int, said: Mapping[str, Mapping[str, str]]) -> Iterator[_Copy]:
    at = mesh.layout.coordinates(rank)
    for name, value in said["whole"].items():
        yield _Copy(("whole", name), rank, name, value)
    for name, value in said["rows"].items():
        shard = None if name in said["scalars"] else at.shard
        yield _Copy(("rows", name, shard), rank, name, value)
        if name in said["ties"]:
            both = tuple(sorted((name, said["ties"][name])))
            yield _Copy(("tie", both, at.replica, at.shard), rank, name, value)


def _sentence(one: _Copy, other: _Copy) -> str:
    if one.name == other.name:
        return (
            f"parameter {one.name} has other values on rank {other.rank} than on rank {one.rank};"
            " build all copies of a stage from the same seed or file, or on meta with a fill"
        )
    return (
        f"{other.name} on rank {other.rank} is tied to {one.name} on rank {one.rank}, but has"
        " other values; give both the same ones at the start"
    )


def require_equal_ties(units: Sequence[ShardUnit], ties: Mapping[str, str], mesh: Mesh) -> None:
    """Raise ``RunError`` if a weight that two stages share is no longer the same on both."""
    if mesh.tie is None or not ties:
        return
    mine = {
        tuple(sorted((p.name, ties[p.name]))): digest(p.local)
        for unit in units
        for p in unit.parameters
        if p.name in ties
    }
    digests = [mine[key] for key in sorted(mine)]
    found = mesh.tie.gather_bytes(json.dumps(digests).encode())
    if len(set(found)) > 1:
        names = ", ".join(f"{a} and {b}" for a, b in sorted(mine))
        raise RunError(
            f"{mesh}: tied weights are no longer equal: {names}; give both the same"
            " optimizer options, or start again from the last checkpoint"
        )
