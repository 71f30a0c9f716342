"""A checkpoint holds every parameter of the model once, whatever layout saved it."""

from pathlib import Path

import pytest

from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.train.state import require_match
from terashard.train.worker import model_and_plan
from tests.train.runs import config_of, stop_after, train


@pytest.mark.parametrize("layout", [{"stages": 2}, {"stages": 2, "replicas": 2}, {"shards": 2}])
def test_tied_ends_are_saved_under_one_name(layout: dict[str, int], tmp_path: Path) -> None:
    config = config_of(tmp_path, "--model.family", "gpt2", "--model.tied", "true")
    train(config, tmp_path / "run", prepare=stop_after(1), **layout)
    checkpoint = Checkpoint.open(find_latest(tmp_path / "run" / "checkpoints"))
    spec, _ = model_and_plan(config)
    found = {name: checkpoint.shape(name) for name in checkpoint.names()}
    names = {name.rpartition("/")[2] for name in found}
    assert names == spec.parameters().keys()
    for name, shape in spec.parameters().items():
        assert found[f"model/{name}"] == found[f"optimizer/exp_avg/{name}"] == shape
    require_match(checkpoint, spec, config)
