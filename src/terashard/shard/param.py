r"""One parameter: the rows that this rank keeps, and the full view that computes.

A parameter of shape ``[R, …]`` is cut along dim 0 as ``torch.chunk`` cuts: this rank keeps rows
``[start, stop)``, perhaps none. A 0-dim parameter is kept whole by every rank. Two faces stand in
the modules, one at a time:

* ``sharded``, a DTensor over the unit's flat shard, placements ``[Replicate(), Shard(0)]`` on
  ("replica", "shard"). It is what the user, the optimizer and checkpoints see, and stands there
  whenever the unit is not gathered.
* ``full``, an ordinary leaf over the unit's slot of the pool, while the unit is gathered.

Both are made once and stay the same objects, so an optimizer or a saved graph never points at a
discarded one.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from terashard.comm.rows import row_range
from terashard.errors import RunError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module keeps a parameter."""

    module: nn.Module
    attribute: str

    def put(self, parameter: nn.Parameter) -> None:
        """Let ``parameter`` stand here, without the checks and copies of ``setattr``."""
        self.module._parameters[self.attribute] = parameter


@dataclass(slots=True, eq=False, kw_only=True)
class ShardedParameter:
    """A parameter that is kept in pieces.

    ``original`` is the parameter as the module was built, dropped once its rows are cut. ``places``
    are all uses, in this unit and in later ones. ``tied_to`` names the parameter of another stage
    that always equals this one.
    """

    name: str
    shape: torch.Size
    trainable: bool
    rows: tuple[int, int]
    original: nn.Parameter | None = field(repr=False)
    places: list[Place] = field(default_factory=list, repr=False)
    tied_to: str | None = None
    written: bool = False
    sharded: nn.Parameter = field(init=False, repr=False)
    full: nn.Parameter = field(init=False, repr=False)
    local: Tensor = field(init=False, repr=False)
    _storage: torch.UntypedStorage = field(init=False, repr=False)

    @classmethod
    def of(cls, name: str, parameter: nn.Parameter, shards: int, shard: int) -> "ShardedParameter":
        """Describe what one shard of ``shards`` keeps of ``parameter``; nothing is allocated."""
        rows = row_range(parameter.shape[0], shards, shard) if parameter.dim() else (0, 1)
        return cls(
            name=name,
            shape=parameter.shape,
            trainable=parameter.requires_grad,
            rows=rows,
            original=parameter,
        )

    @property
    def is_scalar(self) -> bool:
        """Whether the parameter has no dim to cut, so that every shard keeps all of it."""
        return not self.shape

    @property
    def local_shape(self) -> torch.Size:
        """Shape of the rows that this rank keeps."""
        if self.is_scalar:
            return self.shape
        return torch.Size((self.rows[1] - self.rows[0], *self.shape[1:]))

    def own_rows(self, full: Tensor) -> Tensor:
        """This rank's rows of ``full``, a tensor of the parameter's shape."""
        return full if self.is_scalar else full[self.rows[0] : self.rows[1]]

    def distribute(self, local: Tensor, mesh: DeviceMesh) -> DTensor:
        """``local``, of ``local_shape``, as this rank's piece of a DTensor, without a copy."""
        placements: list[Placement] = [Replicate(), Replicate() if self.is_scalar else Shard(0)]
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=self.shape, stride=stride
        )

    def keep_in(self, local: Tensor, mesh: DeviceMesh) -> None:
        """Move the parameter into ``local``, and let the DTensor over it stand in all places."""
        original = self.original
        assert original is not None
        if not original.is_meta:
            local.copy_(self.own_rows(original.detach()))
            self.written = True
        self.local = local
        self.sharded = nn.Parameter(self.distribute(local, mesh), requires_grad=self.trainable)
        # Held, so that no other storage is ever found at its address.
        self._storage = self.sharded.untyped_storage()
        self.original = None
        self.show_sharded()

    def compute_in(self, view: Tensor) -> None:
        """Make the full parameter: a leaf over ``view``, sharing its version counter."""
        # A leaf born in inference mode could never take part in a later training step.
        with torch.inference_mode(False):
            self.full = nn.Parameter(view, requires_grad=self.trainable)

    def require_written(self) -> None:
        """Refuse to go on with values that nobody ever set."""
        if not self.written:
            raise RunError(
                f"parameter {self.name} was built on meta and never written;"
                " materialise its unit first"
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
