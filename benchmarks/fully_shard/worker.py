"""One of the two processes of one engine: does what it is told over a pipe."""

import contextlib
import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.fully_shard.engines import WORDS, build, gathers


@dataclass(frozen=True)
class Order:
    """What to do: ``steps`` of ``parts`` micro-batches of ``tokens``, or a question."""

    ask: str
    tokens: int = 64
    parts: int = 1
    steps: int = 1


def work(rank: int, engine: str, port: int, pipe: Connection) -> None:
    """Build the engine and answer orders until the pipe closes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=600))
    base = _resident()
    made = build(engine)
    generator = torch.Generator().manual_seed(rank)

    def batches(order: Order) -> list[Tensor]:
        return [
            torch.randint(0, WORDS, (1, order.tokens), generator=generator)
            for _ in range(order.parts)
        ]

    with contextlib.suppress(EOFError):
        while True:
            order: Order = pipe.recv()
            answer: Any = None
            if order.ask == "steps":
                dist.barrier()
                answer = [_timed(made, batches(order)) for _ in range(order.steps)]
            elif order.ask == "norm":
                answer = made.norm(batches(order)[0])
            elif order.ask == "gathers":
                answer = gathers(made, batches(order)[0])
            elif order.ask == "peak":
                answer = _resident() - base
            pipe.send(answer)
    os._exit(0)  # nobody waits for the other rank to end


def _timed(engine: Any, batches: list[Tensor]) -> tuple[float, float]:
    began = time.perf_counter()
    loss = engine.step(batches)
    return time.perf_counter() - began, loss


def _resident() -> float:
    """The most memory that was resident in this process so far, in MB."""
    with open("/proc/self/status", encoding="utf-8") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
