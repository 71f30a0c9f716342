"""How fast and how small our ``fully_shard`` is beside DDP and torch's engines. See README.md.

Every engine has two processes of its own that live as long as the benchmark and take turns: while
one pair runs, the others wait on a pipe. In every round each engine takes a few steps; ratios are
taken inside a round. Memory is measured in processes of its own.
"""

import argparse
import json
import os
import socket
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

from benchmarks.fully_shard.engines import LAYERS, NAMES
from benchmarks.fully_shard.volumes import volumes_held
from benchmarks.fully_shard.worker import Order, work
from benchmarks.load import ForeignLoad, machine

TRIMMED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Makes glibc give freed memory back, so that the peak is what is used and not what is kept."""


class Pair:
    """The two processes of one engine."""

    def __init__(self, engine: str) -> None:
        context = processes.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(rank, engine, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def ask(self, order: Order) -> list[Any]:
        """Both ranks' answers."""
        for pipe in self.pipes:
            pipe.send(order)
        return [pipe.recv() for pipe in self.pipes]

    def end(self) -> None:
        """End both processes."""
        for process in self.processes:
            process.kill()
            process.join()


def seconds(pair: Pair, order: Order) -> float:
    """Median time of a step, the slower rank's."""
    first, second = pair.ask(order)
    return statistics.median(max(a[0], b[0]) for a, b in zip(first, second, strict=True))


def rounds(pairs: dict[str, Pair], count: int, order: Order) -> list[dict[str, float]]:
    """Seconds of every engine in every round, in turn."""
    for pair in pairs.values():
        pair.ask(Order("steps", order.tokens, order.parts, 1))
    return [{name: seconds(pair, order) for name, pair in pairs.items()} for _ in range(count)]


def ratios(found: list[dict[str, float]], suffix: str) -> dict[str, Any]:
    """The figures of one setting: medians over rounds of ratios inside a round."""
    chosen = {
        "full_shard_vs_best_torch": ("ours", ("fsdp1", "fsdp2")),
        "kept_vs_best_torch": ("ours_kept", ("fsdp1_kept", "fsdp2_kept")),
        "full_shard_vs_ddp": ("ours", ("ddp",)),
        "kept_vs_ddp": ("ours_kept", ("ddp",)),
    }
    figures: dict[str, Any] = {}
    for name, (ours, others) in chosen.items():
        each = sorted(one[ours] / min(one[other] for other in others) for one in found)
        figures[name + suffix] = round(statistics.median(each), 3)
        figures[f"{name}{suffix}_range"] = [round(each[0], 3), round(each[-1], 3)]
    return figures


def agreement(pairs: dict[str, Pair]) -> dict[str, Any]:
    """Losses and gradient norms of all engines on the same values and data, before any timing."""
    told = {
        name: (
            pair.ask(Order("norm"))[0],
            [round(loss, 4) for _, loss in pair.ask(Order("steps", steps=2))[0]],
        )
        for name, pair in pairs.items()
    }
    norm, losses = told["ddp"]
    return {
        "losses": {name: found[1] for name, found in told.items()},
        "norms": {name: round(found[0], 6) for name, found in told.items()},
        "losses_equal": all(
            abs(a - b) < 1.5e-4
            for _, own in told.values()
            for a, b in zip(own, losses, strict=True)
        ),
        "norms_equal": all(abs(own / norm - 1) < 1e-5 for own, _ in told.values()),
    }


def counted(pairs: dict[str, Pair]) -> dict[str, Any]:
    """Gathers per unit and step, and whether ours counts as full shard."""
    found = {name: pair.ask(Order("gathers"))[0] for name, pair in pairs.items()}
    inner = [count for unit, count in found["ours"].items() if unit != "root"]
    return {
        "gathers_per_unit": found,
        "ours_is_full_shard": len(inner) == LAYERS
        and all(count in (1, 2) for count in inner)
        and inner.count(1) <= 2,
    }


def peak(engine: str, environment: dict[str, str]) -> float:
    """MB above the import baseline after a few steps, of the worse rank, in fresh processes."""
    with _environment(environment):
        pair = Pair(engine)
        try:
            pair.ask(Order("steps", steps=4))
            return float(max(pair.ask(Order("peak"))))
        finally:
            pair.end()


def memory() -> dict[str, Any]:
    """Peaks, with malloc as it is and with malloc that gives memory back."""
    default = {name: round(peak(name, {})) for name in NAMES}
    trimmed = {name: round(peak(name, TRIMMED)) for name in ("fsdp1", "fsdp2", "ours")}
    return {
        "peak_mb": default,
        "peak_mb_trimmed": trimmed,
        "peak_vs_ddp": round(default["ours"] / default["ddp"], 3),
        "kept_peak_vs_ddp": round(default["ours_kept"] / default["ddp"], 3),
        "peak_vs_best_torch_trimmed": round(
            trimmed["ours"] / min(trimmed["fsdp1"], trimmed["fsdp2"]), 3
        ),
    }


def main() -> None:
    """Measure what is asked for, and print and save it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fully_shard")
    parser.add_argument("--json", type=Path, help="where to save the figures")
    parser.add_argument("--rounds", type=int, default=9, help="paired rounds of 64 tokens")
    parser.add_argument("--quick", action="store_true", help="two rounds, and no memory")
    arguments = parser.parse_args()
    found = run(2 if arguments.quick else arguments.rounds, memory=not arguments.quick)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


def run(count: int, *, memory: bool) -> dict[str, Any]:
    """All figures."""
    figures: dict[str, Any] = {"volumes_held": volumes_held()}
    if memory:
        figures |= globals()["memory"]()
    pairs = {name: Pair(name) for name in NAMES}
    load = ForeignLoad([p.pid for pair in pairs.values() for p in pair.processes if p.pid])
    try:
        figures |= agreement(pairs) | counted(pairs)
        load.start()
        settings = (
            ("", 64, 1, count),
            ("_512", 512, 1, -(-count // 3)),
            ("_acc4", 64, 4, -(-count // 3)),
        )
        for suffix, tokens, parts, times in settings:
            found = rounds(pairs, times, Order("steps", tokens, parts, 4 if not suffix else 2))
            figures |= ratios(found, suffix)
            figures[f"seconds{suffix}"] = {
                name: round(statistics.median(one[name] for one in found), 4) for name in NAMES
            }
        figures["foreign_cores"] = round(load.cores(), 3)
    finally:
        for pair in pairs.values():
            pair.end()
    return figures | {"rounds": count, "torch": torch.__version__, "machine": machine()}


@contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= extra
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
