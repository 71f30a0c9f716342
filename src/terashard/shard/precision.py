"""In which number format parameters compute, and in which they are kept."""

from dataclasses import dataclass

import torch

from terashard.errors import ConfigError

_MASTERS = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """``compute``: format of gathered parameters; ``master``: of everything that is kept."""

    compute: torch.dtype = torch.float32
    master: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Refuse a master that loses bits, and a compute format wider than the master."""
        if self.master not in _MASTERS:
            raise ConfigError(
                f"parameters are to be kept in {self.master}; float32 and float64 are allowed,"
                " because sums over slices and steps lose bits in anything shorter"
            )
        if not self.compute.is_floating_point or self.compute.itemsize > self.master.itemsize:
            raise ConfigError(
                f"parameters are to compute in {self.compute} and to be kept in {self.master};"
                " the first must be a floating-point type no wider than the second"
            )
