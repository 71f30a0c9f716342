"""How much faster two stages are when the sequence is cut into token slices. See README.md.

``python -m benchmarks.token_slices --json FILE`` starts two gloo processes with one thread each.
Every round times, one after the other: the whole model in one process, two stages without slices,
two stages with slices. Ratios are taken inside a round. The number of slices is chosen in rounds of
its own.
"""

import argparse
import json
import os
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

from benchmarks.load import ForeignLoad, machine
from terashard.comm.mesh import Mesh
from terashard.comm.threads import ThreadWorld
from terashard.nn.build import build_stage
from terashard.nn.init import Initialiser
from terashard.plan.plan import Plan, spread_layers
from terashard.runtime.pipeline import Pipeline
from terashard.spec.model import ModelSpec

TOKENS, LAYERS, WIDTH, HEADS, VOCABULARY = 2048, 8, 512, 8, 512
CANDIDATES = (4, 6, 8, 10, 12, 16)


def spec(family: str) -> ModelSpec:
    """8 layers, width 512, 8 heads, vocabulary 512, in the shape of a family."""
    llama = family == "llama"
    return ModelSpec(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=WIDTH // HEADS,
        mlp_size=1344 if llama else 4 * WIDTH,
        max_length=TOKENS,
        norm="rms" if llama else "layer",
        positions="rotary" if llama else "learned",
        activation="swiglu" if llama else "gelu",
        bias=not llama,
    )


def pipeline(model: ModelSpec, mesh: Mesh, stages: int, slices: int) -> Pipeline:
    """The model in ``stages`` stages, one sequence of 2048 tokens in ``slices`` equal slices."""
    plan = Plan.uniform(
        sequences=1,
        tokens=TOKENS,
        slices=slices,
        stages=stages,
        layers=spread_layers(LAYERS, stages),
    )
    return Pipeline(
        lambda i: build_stage(model, range(*plan.layers[i]), first=i == 0, last=i == stages - 1),
        plan,
        mesh,
        fill=Initialiser(model, 0),
    )


@dataclass
class Bench:
    """One of the two processes."""

    rank: int
    arguments: argparse.Namespace

    def __post_init__(self) -> None:
        self.model = spec(self.arguments.family)
        self.mesh = Mesh.of_processes(stages=2, timeout=60.0)
        self.pipelines: dict[int, Pipeline] = {}
        alone = Mesh.of_threads(ThreadWorld(1), 0)
        self.whole = pipeline(self.model, alone, 1, 1) if self.rank == 0 else None
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS + 1), generator=generator)
        self.batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        pids = [int(p) for p in self.mesh.world.gather_bytes(str(os.getpid()).encode())]
        self.load = ForeignLoad(pids)

    def one_process(self) -> float:
        """Seconds of one step of the whole model in the first process; the second waits."""
        self.mesh.world.barrier()
        began = time.perf_counter()
        if self.whole is not None:
            self.whole.step(*self.batch)
        seconds = time.perf_counter() - began
        self.mesh.world.barrier()
        return seconds

    def two_stages(self, slices: int) -> float:
        """Seconds of one step of both stages, until the slower one is done."""
        if slices not in self.pipelines:
            self.pipelines[slices] = pipeline(self.model, self.mesh, 2, slices)
        made = self.pipelines[slices]
        self.mesh.world.barrier()
        began = time.perf_counter()
        made.step(*self.batch)  # ends with a reduction over both ranks
        return time.perf_counter() - began

    def round(self, slices: list[int]) -> dict[str, float]:
        """One paired round; slice count 1 is the pipeline without slices."""
        self.load.start()
        times = {"one_process": self.one_process()}
        times |= {str(n): self.two_stages(n) for n in (1, *slices)}
        return times | {"foreign_cores": self.load.cores()}

    def choose(self) -> int:
        """The slice count with the smallest median time, the same on both ranks."""
        rounds = [self.round(list(CANDIDATES)) for _ in range(self.arguments.choice_rounds)]
        medians = {n: statistics.median(r[str(n)] for r in rounds) for n in CANDIDATES}
        best = min(medians, key=lambda n: medians[n])
        self.chosen = {str(n): round(seconds, 4) for n, seconds in medians.items()}
        return int(self.mesh.world.gather_bytes(str(best).encode())[0])

    def run(self) -> dict[str, Any]:
        """Warm up, choose, then measure."""
        self.round(list(CANDIDATES))
        best = self.choose()
        rounds = [self.round([best]) for _ in range(self.arguments.rounds)]
        return report(self.arguments, best, self.chosen, rounds)


def report(
    arguments: argparse.Namespace,
    best: int,
    chosen: dict[str, float],
    rounds: list[dict[str, float]],
) -> dict[str, Any]:
    """Medians and quartiles of the ratios."""
    figures: dict[str, Any] = {}
    for name, base in (("speedup_over_unsliced", "1"), ("speedup_over_one_process", "one_process")):
        ratios = sorted(r[base] / r[str(best)] for r in rounds)
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures[name] = round(middle, 3)
        figures[f"{name}_quartiles"] = [round(low, 3), round(high, 3)]
    return figures | {
        "slices": best,
        "ideal": round(2 * best / (best + 1), 3),
        "family": arguments.family,
        "choice_seconds": chosen,
        "rounds": [{k: round(v, 4) for k, v in r.items()} for r in rounds],
        "foreign_cores": round(statistics.median(r["foreign_cores"] for r in rounds), 3),
        "machine": machine() | {"torch": torch.__version__},
    }


def rank_main(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """What each process runs."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    bench = Bench(rank, arguments)
    found = bench.run()
    if rank == 0:
        text = json.dumps(found, indent=1)
        print(text)
        if arguments.json:
            Path(arguments.json).write_text(text + "\n")
    bench.mesh.close()


def main() -> None:
    """Read the command line, start both processes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_slices", description=__doc__)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (at least 7)")
    parser.add_argument(
        "--choice-rounds", type=int, default=3, help="rounds in which slices are chosen"
    )
    parser.add_argument("--family", choices=("llama", "gpt2"), default="llama")
    arguments = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(rank_main, (port, arguments), nprocs=2)
