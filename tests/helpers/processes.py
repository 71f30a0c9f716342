"""Real gloo processes for tests, started in a fraction of a second.

They are forked from multiprocessing's fork server, which imported torch once and has run nothing
since: no kernel, no thread pool, no autograd. So torch is imported once per test session, and what
is forked is safe to fork, which a test process with thread pools is not. Processes meet over a
file, so no port can be taken. A child ends with the test process, whatever kills that.
"""

import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "terashard.comm.mesh"]
"""Imported once, by the fork server; the first step of any optimizer imports torch._dynamo."""


class RemoteTraceback(Exception):  # noqa: N818  # it is a cause, not an error of its own
    """The traceback of an exception in another process, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run_processes(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Run ``function(rank, *args)`` in ``size`` gloo processes; results by rank.

    ``function`` is importable by name; torch.distributed is initialised when it starts, and a wait
    in it ends after ``timeout`` seconds. The first exception of any process is raised here, its own
    traceback as its cause; so is the end of a process without a result. None is left running.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's import starts a pool otherwise
    task = pickle.dumps((function, args))
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(size):
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child,
                    args=(there, rank, size, f"{folder}/meet", (task, timeout)),
                    daemon=True,
                )
                process.start()
                there.close()
                processes.append(process)
                pipes.append(here)
            return _collect(pipes, processes, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], processes: list[BaseProcess], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, max(deadline - time.monotonic(), 0))
        if not ready:
            late = [rank for rank in range(len(pipes)) if rank not in results]
            raise TimeoutError(f"ranks {late} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            results[rank] = _result(rank, pipes[rank], processes[rank])
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    return [results[rank] for rank in range(len(pipes))]


def _result(rank: int, pipe: Connection, process: BaseProcess) -> Any:
    try:
        good, value, text = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}") from None
    if not good:
        raise value from RemoteTraceback(f"rank {rank}: {text}")
    return value


def _child(pipe: Connection, rank: int, size: int, meeting: str, job: tuple[bytes, float]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = (True, _work(rank, size, meeting, job), "")
    except BaseException as error:
        answer = (False, _portable(error), traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()


def _work(rank: int, size: int, meeting: str, job: tuple[bytes, float]) -> Any:
    import torch
    import torch.distributed as dist

    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    task, timeout = job
    function, args = pickle.loads(task)
    dist.init_process_group(
        "gloo",
        init_method=Path(meeting).as_uri(),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    result = function(rank, *args)
    if dist.is_initialized():
        dist.barrier()  # nobody hangs up while another still waits for a message
        dist.destroy_process_group()
    return result


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
