"""Ranks as threads over torch's own threaded process group, for what needs a ``DeviceMesh``.

Torch's own collectives meet in memory, each blocking until all ranks are there. Terashard's groups
over them are those of a ``ThreadWorld``, asynchronous as real ones are. Random state and the
default dtype are shared by all threads: use generators of your own.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from terashard.comm.collectives import MAKERS
from terashard.comm.group import Group
from terashard.comm.threads import ThreadWorld

T = TypeVar("T")


def run_ranks(size: int, function: Callable[..., T], *args: Any, timeout: float = 60.0) -> list[T]:
    """Results of ``function(rank, *args)`` by rank; the first exception of any rank is raised."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()
    world = ThreadWorld(size, timeout=timeout)

    def make(handle: dist.ProcessGroup, ranks: tuple[int, ...], name: str) -> Group:
        return world.group(dist.get_rank(), ranks, name)

    MAKERS["threaded"] = make
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            results[rank] = function(rank, *args)
        except BaseException as error:
            failures.append(error)
            world.abort(error)
            ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for this one
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        ProcessLocalGroup.reset()
    finally:
        del MAKERS["threaded"]
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise failures[0]
    if late:
        raise TimeoutError(f"ranks {late} did not finish within {timeout} s")
    return [results[rank] for rank in range(size)]
