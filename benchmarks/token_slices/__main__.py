"""``python -m benchmarks.token_slices``."""

from benchmarks.token_slices.measure import main

main()
