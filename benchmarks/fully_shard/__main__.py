"""``python -m benchmarks.fully_shard``."""

from benchmarks.fully_shard.measure import main

main()
