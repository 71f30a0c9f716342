"""How busy the machine was with other things while a benchmark ran."""

import os
import time

from psutil import Process, cpu_times


class ForeignLoad:
    """Cores kept busy by others, over the time between ``start`` and ``cores``."""

    def __init__(self, pids: list[int]) -> None:
        self._ours = [Process(pid) for pid in pids]

    def start(self) -> None:
        """Begin to look."""
        self._began = time.perf_counter()
        self._before = _busy(), self._own()

    def cores(self) -> float:
        """Mean number of cores that others used since ``start``."""
        elapsed = time.perf_counter() - self._began
        busy, own = _busy() - self._before[0], self._own() - self._before[1]
        return max(0.0, (busy - own) / elapsed)

    def _own(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self._ours)


def _busy() -> float:
    found = cpu_times()
    return float(
        sum(found) - found.idle - getattr(found, "iowait", 0.0) - getattr(found, "guest", 0.0)
    )


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return {"cpu": names[0] if names else "unknown", "cores": len(os.sched_getaffinity(0))}
