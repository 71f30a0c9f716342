"""A whole mesh in the threads of one process."""

from collections.abc import Callable
from typing import TypeVar

from terashard.comm.mesh import Mesh
from terashard.comm.threads import ThreadWorld, run_threads

T = TypeVar("T")


def run_mesh(
    function: Callable[[Mesh], T], *, replicas: int = 1, shards: int = 1, stages: int = 1
) -> list[T]:
    """Results of ``function(mesh)`` by rank, each rank a thread; the first exception of any."""

    def run(world: ThreadWorld, rank: int) -> T:
        return function(
            Mesh.of_threads(world, rank, replicas=replicas, shards=shards, stages=stages)
        )

    return run_threads(replicas * shards * stages, run)
