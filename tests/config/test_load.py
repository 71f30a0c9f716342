"""Run files, presets and command lines become one configuration, or one sentence."""

from pathlib import Path

import pytest

from terashard.config.load import build, layers, load, loads, presets, settings
from terashard.config.schema import (
    BatchConfig,
    ModelConfig,
    ParallelConfig,
    ParameterGroup,
    RunConfig,
    TrainConfig,
)
from terashard.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, "utf-8")
    return path


def test_nothing_gives_the_defaults() -> None:
    assert load(None) == RunConfig()


def test_a_run_file_is_read_section_by_section(tmp_path: Path) -> None:
    text = """
    [model]
    hidden_size = 64
    tied = true
    norm_eps = 1
    [parallel]
    slices = 4
    partition = [[2, [128, 128]], [1, [256]]]
    [optimizer]
    clip_norm = "none"
    options = { betas = [0.9, 0.95], fused = "none" }
    [[optimizer.groups]]
    match = "*.bias"
    options = { lr = 1e-4 }
    """
    config = load(write(tmp_path, text))
    assert config.model == ModelConfig(hidden_size=64, tied=True, norm_eps=1.0)
    assert type(config.model.norm_eps) is float
    assert config.parallel == ParallelConfig(slices=(4,), partition=((2, (128, 128)), (1, (256,))))
    assert config.optimizer.clip_norm is None
    assert config.optimizer.options == {"betas": [0.9, 0.95], "fused": None}
    assert config.optimizer.groups == (ParameterGroup(match="*.bias", options={"lr": 1e-4}),)


def test_slices_may_be_one_number_or_lengths() -> None:
    assert loads("[parallel]\nslices = 4").parallel.slices == (4,)
    assert loads("[parallel]\nslices = [128, 64, 64]").parallel.slices == (128, 64, 64)


def test_the_command_line_wins_over_the_file_over_the_preset_over_the_defaults(
    tmp_path: Path,
) -> None:
    tiny = load(None, (), "tiny")
    path = write(tmp_path, 'preset = "tiny"\n[batch]\nsequences = 6\ntokens = 32')
    config = load(path, ["--batch.tokens", "16"])
    assert config.batch == BatchConfig(sequences=6, tokens=16)
    assert config.model == tiny.model != ModelConfig()
    assert config.run == RunConfig().run


def test_the_preset_of_the_command_line_wins_over_the_one_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'preset = "tiny"')
    assert load(path, (), "small") == load(None, (), "small") != load(path)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_loads_and_says_how_long_it_runs(preset: str) -> None:
    assert load(None, (), preset).train.steps


def test_the_presets_promised_exist() -> None:
    assert {"demo", "small", "tiny"} <= set(presets())


@pytest.mark.parametrize("length", ["tokens", "epochs"])
def test_a_length_from_above_puts_the_length_below_aside(length: str) -> None:
    given = load(None, [f"--train.{length}", "7"], "tiny").train
    assert given.steps is None
    assert getattr(given, length) == 7


def test_no_length_from_above_leaves_the_length_below() -> None:
    assert load(None, ["--train.tokens", "none"], "tiny").train.steps


def test_slices_from_above_put_the_partition_below_aside(tmp_path: Path) -> None:
    path = write(tmp_path, "[parallel]\npartition = [[1, [128, 128]]]")
    assert load(path).parallel.partition
    assert load(path, ["--parallel.slices", "4"]).parallel == ParallelConfig(slices=(4,))


def test_two_lengths_in_one_place_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train.steps and train.tokens are given; .* keep one"):
        loads("[train]\nsteps = 3\ntokens = 4")


def test_a_setting_knows_the_line_that_made_it(tmp_path: Path) -> None:
    path = write(tmp_path, 'preset = "tiny"\n\n[batch] # here\nsequences = 6\n')
    merged = settings(layers(path, ["--train.log-every", "3"]))
    assert build(merged).train == TrainConfig(steps=50, log_every=3)
    assert merged["batch.sequences"].layer.place("batch.sequences") == f"{path}, line 4"
    assert merged["batch.tokens"].layer.place("batch.tokens").startswith("preset tiny, line ")
    assert merged["train.log_every"].layer.place("train.log_every") == "command line"


REFUSED = {
    "unknown key": (
        "[train]\nsteps = 3\nstpes = 3",
        r"^run.toml, line 3: train.stpes is unknown; did you mean train.steps\? \[train\] allows",
    ),
    "right key, wrong section": (
        "[train]\nlr = 3.0",
        r"^run.toml, line 2: train.lr is unknown; did you mean optimizer.lr\?",
    ),
    "right key, although a key nearby looks alike": (
        "[train]\nstages = 2",
        r"^run.toml, line 2: train.stages is unknown; did you mean parallel.stages\?",
    ),
    "boolean for a fraction": (
        "[optimizer]\nlr = true",
        r"^run.toml, line 2: optimizer.lr is true; it must be a finite number$",
    ),
    "unknown key without a near one": (
        "[train]\nqqqqqq = 3",
        r"^run.toml, line 2: train.qqqqqq is unknown; \[train\] allows steps, tokens, epochs",
    ),
    "unknown section": (
        "\n[trian]\nsteps = 3",
        r"^run.toml, line 2: section \[trian\] is unknown; did you mean train\? allowed are run,",
    ),
    "key outside the sections": (
        "steps = 3",
        r"^run.toml, line 1: steps is unknown; did you mean train.steps\? only preset may stand",
    ),
    "section that is a value": (
        "train = 3",
        r"^run.toml, line 1: train is a section; write \[train\] and its keys below it",
    ),
    "word for a number": (
        '[batch]\n\ntokens = "many"',
        r'^run.toml, line 3: batch.tokens is the string "many"; it must be a whole number$',
    ),
    "number in quotes": (
        '[optimizer]\nlr = "1e-4"',
        r'^run.toml, line 2: optimizer.lr is the string "1e-4"; it must be a finite number$',
    ),
    "infinity": (
        "[run]\ntimeout = inf",
        r"^run.toml, line 2: run.timeout is inf; it must be a finite number$",
    ),
    "no number": (
        "[optimizer]\nclip_norm = nan",
        r'^run.toml, line 2: optimizer.clip_norm is nan; it must be a finite number or "none"$',
    ),
    "more than a float holds": (
        f"[train]\nepochs = 1{'0' * 400}",
        r"^run.toml, line 2: train.epochs is 10+\.\.\.; it must be a finite number or",
    ),
    "nothing beside the variance": (
        "[model]\nnorm_eps = -1",
        r"^run.toml, line 2: model.norm_eps is -1.0; it must be above 0$",
    ),
    "rotary positions without a base": (
        "[model]\nrope_theta = 0",
        r"^run.toml, line 2: model.rope_theta is 0.0; it must be above 0$",
    ),
    "no patience": (
        "[run]\nshutdown_timeout = 0",
        r"^run.toml, line 2: run.shutdown_timeout is 0.0; it must be above 0$",
    ),
    "fraction for a whole number": (
        "[batch]\ntokens = 1.0",
        r"^run.toml, line 2: batch.tokens is 1.0; it must be a whole number$",
    ),
    "boolean for a number": (
        "[batch]\ntokens = true",
        r"^run.toml, line 2: batch.tokens is true; it must be a whole number$",
    ),
    "number for a boolean": (
        "[data]\nshuffle = 1",
        r"^run.toml, line 2: data.shuffle is 1; it must be true or false$",
    ),
    "wrong optional": (
        "[train]\nsteps = [3]",
        r'^run.toml, line 2: train.steps is \[3\]; it must be a whole number or "none"$',
    ),
    "none where a value is needed": (
        '[batch]\ntokens = "none"',
        r'^run.toml, line 2: batch.tokens is the string "none"; it must be a whole number$',
    ),
    "choice": (
        '[model]\nfamily = "lama"',
        r'^run.toml, line 2: model.family is the string "lama";'
        r' it must be "llama" or "gpt2"; did you mean "llama"\?$',
    ),
    "item of a list": (
        '[parallel]\nslices = [128, "64"]',
        r'^run.toml, line 2: parallel.slices\[1\] is the string "64"; it must be a whole number$',
    ),
    "half a partition": (
        "[parallel]\npartition = [[2, [64]], [1]]",
        r"^run.toml, line 2: parallel.partition\[1\] is \[1\]; it must be \[a whole number, ",
    ),
    "flat partition": (
        "[parallel]\npartition = 4",
        r"^run.toml, line 2: parallel.partition is 4; it must be a list, each of it \[a whole",
    ),
    "no table": (
        "[optimizer]\noptions = 4",
        r"^run.toml, line 2: optimizer.options is 4; it must be a table$",
    ),
    "date": (
        "[optimizer]\noptions = {since = 2020-01-01}",
        r"^run.toml, line 2: optimizer.options.since is the date 2020-01-01; write it as a string$",
    ),
    "unknown key of a group": (
        '[[optimizer.groups]]\nmach = "*"',
        r"^run.toml, line 1: optimizer.groups\[0\].mach is unknown; did you mean match\?",
    ),
    "missing key of a group": (
        "[[optimizer.groups]]\noptions = {lr = 1.0}",
        r"^run.toml, line 1: optimizer.groups\[0\].match is missing; it must be a string$",
    ),
    "value out of range": (
        "[batch]\nsequences = 4\ntokens = 0",
        r"^run.toml, line 3: batch.tokens is 0; it must be at least 1$",
    ),
    "syntax": ("[batch\n", r"^run.toml is not valid TOML: .*line 1"),
    "unknown preset": (
        'preset = "tinny"',
        r"^there is no preset 'tinny'; did you mean tiny\? allowed are demo, small, tiny",
    ),
    "preset that is no name": ("preset = 3", r"^run.toml, line 1: preset is 3; it must be one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_text_is_refused_with_place_key_and_what_is_allowed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    write(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        load("run.toml")


def test_an_error_on_the_command_line_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, "[batch]\ntokens = 16")
    with pytest.raises(ConfigError, match=r"^command line: batch.tokens is 0; it must be at least"):
        load(path, ["--batch.tokens", "0"])


def test_a_missing_file_is_refused_and_a_preset_name_recognised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.toml does not exist; name a TOML file"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match=r"tiny does not exist; did you mean --preset tiny\?"):
        load("tiny")


def test_a_folder_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; name a TOML file"):
        load(tmp_path)
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text; name a TOML file"):
        load(tmp_path / "run.toml")
