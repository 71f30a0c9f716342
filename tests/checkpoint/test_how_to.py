import re
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.cuts import same, sample, save_on

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "checkpoints.md"


def test_the_how_to_reads_what_was_saved_with_and_without_terashard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sample()
    save_on(tmp_path / "checkpoints", 2, tensors)
    monkeypatch.chdir(tmp_path)
    ours, plain = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(ours, names)
    weight = tensors["model/layers.0.mlp.up.weight"]
    assert same(names["whole"], weight)
    assert same(names["some"], weight[2:5])
    names = {}
    exec(plain, names)
    assert same(names["weight"], weight)
    assert same(names["read"]("optimizer/step"), tensors["optimizer/step"])
