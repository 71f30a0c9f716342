r"""One parameter: the part that this rank keeps, and the full view that computes.

A parameter is cut along one dim (0 if nobody says otherwise) as ``torch.chunk`` cuts: this rank
keeps ``[start, stop)`` of that dim, perhaps nothing. A 0-dim parameter, or one that is to be
replicated, is kept whole by every rank. Two faces stand in the modules, one at a time:

* ``sharded``, a DTensor over the unit's flat shard. It is what the user, the optimizer and
  checkpoints see, and stands there whenever the unit is not gathered.
* ``full``, an ordinary leaf over the unit's slot of the pool, while the unit is gathered (over its
  local part of a tensor-parallel mesh, if the parameter was a DTensor before it was cut).

Both are made once and stay the same objects, so an optimizer or a saved graph never points at a
discarded one.

If the cut dim is the slowest in memory, every rank's part of the full parameter is one contiguous
run, which travels from there and lands there without a copy. Otherwise it travels in a tensor with
the cut dim first, and is copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from terashard.comm.pieces import local_part
from terashard.comm.rows import row_range
from terashard.errors import RunError
from terashard.shard.flat import Form
from terashard.shard.sparse import gives_sparse_gradient


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module keeps a parameter."""

    module: nn.Module
    attribute: str

    def put(self, parameter: nn.Parameter) -> None:
        """Let ``parameter`` stand here, without the checks and copies of ``setattr``."""
        self.module._parameters[self.attribute] = parameter

    def find(self) -> nn.Parameter | None:
        """What stands here."""
        return self.module._parameters.get(self.attribute)


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a parameter is whose: ``dim`` in ``shards`` parts, or None for all of it."""

    dim: int | None
    shards: int
    shard: int

    def range(self, shape: torch.Size) -> tuple[int, int]:
        """Half-open range of the cut dim that this rank keeps."""
        return (0, 1) if self.dim is None else row_range(shape[self.dim], self.shards, self.shard)

    def part(self, form: Form) -> Form:
        """The form of this rank's part of a tensor."""
        if self.dim is None:
            return form
        start, stop = self.range(form.shape)
        return form.part(self.dim, stop - start)

    def own(self, full: Tensor) -> Tensor:
        """This rank's part of ``full``, a view."""
        if self.dim is None:
            return full
        start, stop = self.range(full.shape)
        return full.narrow(self.dim, start, stop - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the parts of a parameter make a DTensor: where, and of which whole."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def over(self, local: Tensor) -> DTensor:
        """``local`` as this rank's piece of a DTensor, without a copy."""
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class ShardedParameter:
    """A parameter that is kept in pieces.

    ``form`` is that of the kept full tensor, ``compute`` the format in which it is gathered.
    ``original`` is the parameter as the module was built, dropped once its part is cut. ``places``
    are all uses, in this unit and in later ones. ``tied_to`` names the parameter of another stage
    that always equals this one. ``dress`` makes a full leaf of a plain one (tensor parallelism).
    """

    name: str
    form: Form
    cut: Cut
    compute: torch.dtype
    spread: Spread
    trainable: bool
    original: nn.Parameter | None = field(repr=False)
    dress: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    data_axes: tuple[int, ...] = ()
    """Axes of the full leaf's own mesh that are data-parallel."""
    places: list[Place] = field(default_factory=list, repr=False)
    tied_to: str | None = None
    written: bool = False
    digest: int | None = None
    """Of the full values when the parameter was cut; None if it had none."""
    sharded: nn.Parameter = field(init=False, repr=False)
    full: nn.Parameter = field(init=False, repr=False)
    local: Tensor = field(init=False, repr=False)
    _storage: torch.UntypedStorage = field(init=False, repr=False)

    @property
    def shape(self) -> torch.Size:
        """Shape of the full parameter (of its local part, on a tensor-parallel mesh)."""
        return self.form.shape

    @property
    def rows(self) -> tuple[int, int]:
        """Half-open range of the cut dim that this rank keeps."""
        return self.cut.range(self.shape)

    @property
    def is_sparse(self) -> bool:
        """Whether its gradient comes as a list of rows."""
        return self.cut.dim == 0 and all(gives_sparse_gradient(p.module) for p in self.places)

    @property
    def is_scalar(self) -> bool:
        """Whether every shard keeps all of it, as there is nothing to cut."""
        return self.cut.dim is None

    @property
    def local_shape(self) -> torch.Size:
        """Shape of the part that this rank keeps."""
        return self.cut.part(self.form).shape

    @property
    def is_in_place(self) -> bool:
        """Whether every rank's part is one run of the full tensor."""
        return self.cut.dim is None or self.form.order[0] == self.cut.dim

    def own_rows(self, full: Tensor) -> Tensor:
        """This rank's part of ``full``, a tensor of the parameter's shape."""
        return self.cut.own(full)

    def travelling(self, full: Tensor) -> Tensor:
        """The tensor in which the parts of ``full`` travel, the cut dim first; maybe ``full``'s."""
        if self.is_in_place:
            return self.form.lying(full)
        assert self.cut.dim is not None
        return torch.empty_like(
            full.movedim(self.cut.dim, 0), memory_format=torch.contiguous_format
        )

    def as_rows(self, tensor: Tensor) -> Tensor:
        """``tensor``, full or this rank's part, with the cut dim first; a view."""
        if self.is_in_place:
            return tensor.permute(self.form.order)
        assert self.cut.dim is not None
        return tensor.movedim(self.cut.dim, 0)

    def at_home(self, travelled: Tensor) -> Tensor:
        """``travelled`` with the parameter's own order of dims, a view."""
        if self.is_in_place:
            back = tuple(self.form.order.index(dim) for dim in range(len(self.form.order)))
            return travelled.permute(back)
        assert self.cut.dim is not None
        return travelled.movedim(0, self.cut.dim)

    def distribute(self, local: Tensor) -> DTensor:
        """``local``, of ``local_shape``, as this rank's piece of a DTensor, without a copy."""
        public = getattr(self, "sharded", None)
        if isinstance(public, DTensor) and public.dtype == local.dtype:
            # Ten times as fast as from_local, which derives the same spec again.
            return DTensor(local, public._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return self.spread.over(local)

    def copied(self) -> nn.Parameter:
        """A copy of the public parameter, with memory of its own."""
        local = self.local.detach().clone(memory_format=torch.preserve_format)
        return nn.Parameter(self.distribute(local), requires_grad=self.sharded.requires_grad)

    def keep_in(self, local: Tensor) -> None:
        """Move the parameter into ``local``, and let the DTensor over it stand in all places."""
        original = self.original
        assert original is not None
        if not original.is_meta:
            source = original.detach()
            local.copy_(self.own_rows(local_part(source)))
            self.written = True
        self.local = local
        self.sharded = nn.Parameter(self.distribute(local), requires_grad=self.trainable)
        # Held, so that no other storage is ever found at its address.
        self._storage = self.sharded.untyped_storage()
        self.original = None
        self.show_sharded()

    def is_full(self, there: nn.Parameter | None) -> bool:
        """Whether ``there`` is the full leaf."""
        full: nn.Parameter | None = getattr(self, "full", None)
        return there is not None and there is full

    @property
    def lies_in_place(self) -> bool:
        """Whether the public parameter still lies where it was put."""
        found: Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return bool(found.untyped_storage()._cdata == self.local.untyped_storage()._cdata)

    def lie_in(self, local: Tensor) -> None:
        """Move the values of the public parameter, whatever was made of it, into ``local``."""
        public = self.sharded
        assert isinstance(public, DTensor)
        local.copy_(public._local_tensor)
        public._local_tensor = local
        self.local = local
        self.show_sharded()

    def compute_in(self, view: Tensor) -> None:
        """Make the full parameter: a leaf over ``view``, sharing its version counter."""
        dressed = view if self.dress is None else self.dress(view)
        self.full = nn.Parameter(dressed, requires_grad=self.trainable)

    def local_gradient(self, gradient: DTensor) -> Tensor:
        """This rank's part of a gradient that is spread over a tensor-parallel mesh.

        On the axes over which the parameter is cut here, partial sums stay: they are summed later.
        """
        full = self.full
        assert isinstance(full, DTensor)
        if gradient.placements != full.placements:
            wanted = [
                found if axis in self.data_axes and found.is_partial() else here
                for axis, (found, here) in enumerate(
                    zip(gradient.placements, full.placements, strict=True)
                )
            ]
            gradient = gradient.redistribute(placements=wanted)
        local: Tensor = gradient._local_tensor
        return local

    def require_written(self) -> None:
        """Refuse to go on with values that nobody ever set."""
        if not self.written:
            raise RunError(
                f"parameter {self.name} was built on meta and never written;"
                " call terashard.initialise(model) or load_full(model, …) first, or give a pipeline"
                " a fill"
            )

    def require_in_place(self) -> None:
        """Refuse a tensor that was assigned to ``.data``: a DTensor takes it and keeps its rows."""
        if self.sharded.untyped_storage()._cdata != self._storage._cdata:
            raise RunError(
                f"parameter {self.name} was given another tensor through .data, which changes no"
                " value of a DTensor; change it in place, p.sub_(…) under torch.no_grad(),"
                " and build the pipeline anew"
            )

    def show_full(self) -> None:
        """Let the full parameter stand in all places."""
        for place in self.places:
            place.put(self.full)

    def show_sharded(self) -> None:
        """Let the DTensor stand in all places."""
        for place in self.places:
            place.put(self.sharded)


def rows_of_stage(form: Form, mesh: DeviceMesh, shards: int, shard: int) -> tuple[Cut, Spread]:
    """How a pipeline's stage cuts a parameter on its ("replica", "shard") mesh: by rows."""
    scalar = not form.shape
    placements: tuple[Placement, ...] = (Replicate(), Replicate() if scalar else Shard(0))
    spread = Spread(mesh=mesh, placements=placements, shape=form.shape, stride=form.stride)
    return Cut(None if scalar else 0, shards, shard), spread
