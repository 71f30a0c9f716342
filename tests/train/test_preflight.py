"""What is wrong with a run is found before torch is imported, by everybody in the same words."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from terashard.config.schema import RunConfig, RunSection, TrainConfig
from terashard.errors import ConfigError
from terashard.train import launch
from terashard.train.preflight import check, threads_each
from terashard.train.samples import Samples
from tests.train.runs import config_of


@pytest.mark.parametrize("refuse", [check, launch.check, lambda c: Samples.of(c).steps(c)])
def test_a_run_without_a_length_is_refused_in_one_sentence_everywhere(
    refuse: object, tmp_path: Path
) -> None:
    config = replace(config_of(tmp_path), train=TrainConfig())
    assert callable(refuse)
    with pytest.raises(ConfigError) as caught:
        refuse(config)
    assert str(caught.value) == (
        "the run has no length; give train.steps, train.tokens or train.epochs"
    )


@pytest.mark.parametrize("refuse", [check, launch.check])
def test_more_processes_than_ranks_are_refused_by_command_and_launcher(
    refuse: object, tmp_path: Path
) -> None:
    """The launcher started as many as it was told, whatever the plan said."""
    config = config_of(tmp_path, "--parallel.stages", "2")
    assert callable(refuse)
    refuse(config, 2)
    with pytest.raises(ConfigError, match=r"-n 3 does not match .* 2 stages x 1 shards = 2 proc"):
        refuse(config, 3)


def test_a_run_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.train is empty; name a folder"):
        check(replace(RunConfig(), train=TrainConfig(steps=1)))


def test_threads_are_shared_by_the_processes_of_a_machine() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_each(RunSection(), 1) == cores
    assert threads_each(RunSection(), 10 * cores) == 1
    assert threads_each(RunSection(threads=3), 10 * cores) == 3


def test_nothing_heavy_is_imported_until_something_is_checked() -> None:
    code = (
        "import sys, terashard.train.preflight\n"
        "assert not {'torch', 'numpy', 'tyro', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
