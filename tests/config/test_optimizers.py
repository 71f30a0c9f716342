"""The table of torch's optimizers is that of the installed torch."""

import inspect
import subprocess
import sys

import torch

from terashard.config.optimizers import FUSED, OPTIONS, UNFIT

KINDS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
}


def test_every_class_of_torch_is_in_the_table_with_exactly_its_options() -> None:
    assert KINDS.keys() - UNFIT.keys() == OPTIONS.keys()
    assert UNFIT.keys() < KINDS.keys()
    for name, options in OPTIONS.items():
        allowed = inspect.signature(KINDS[name]).parameters.keys() - {"params"}
        assert set(options) == allowed, name
        assert len(options) == len(allowed), name
        assert (name in FUSED) <= ("fused" in options)


def test_the_table_does_without_torch() -> None:
    code = "import sys, terashard.config.optimizers\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
