"""What is written loads back to the same, and the fingerprint tells configurations apart."""

from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terashard.config.fields import keys, sections
from terashard.config.load import load, loads
from terashard.config.schema import OptimizerConfig, ParameterGroup, RunConfig, TrainConfig
from terashard.config.write import differences, dump, fingerprint, versions
from terashard.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
COUNT = st.integers(min_value=1, max_value=2**40)
PART = st.floats(min_value=0.0, max_value=0.99)
LEAF = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
OPTIONS = st.dictionaries(
    TEXT,
    st.recursive(
        LEAF.filter(lambda leaf: leaf != "none"),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
GROUPS = st.lists(st.builds(ParameterGroup, match=TEXT, options=OPTIONS), max_size=2)
PARTITION = st.lists(
    st.tuples(COUNT, st.lists(COUNT, min_size=1, max_size=3).map(tuple)), max_size=3
)


def values(key: str, to: Any) -> st.SearchStrategy[Any]:
    if key == "optimizer.options":
        return OPTIONS
    if key == "optimizer.groups":
        return GROUPS.map(tuple)
    if key == "parallel.partition":
        return PARTITION.map(tuple)
    if get_origin(to) is tuple:
        item = COUNT if get_args(to)[0] is int else TEXT
        return st.lists(item, min_size=1, max_size=3).map(tuple)
    if choices := [c for c in get_args(to) if isinstance(c, str)]:
        return st.sampled_from(choices)
    if type(None) in get_args(to):
        return st.none() | values(key, get_args(to)[0])
    return {int: COUNT, float: PART | st.just(1e-5), bool: st.booleans(), str: TEXT}[to]


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    made = {}
    lengths = st.sampled_from(["train.steps", "train.tokens", "train.epochs"])
    length = draw(lengths)
    above_zero = {"run.timeout", "run.shutdown_timeout", "optimizer.clip_norm", "loss.soft_cap"}
    above_zero |= {"model.norm_eps", "model.rope_theta"}
    for section, cls in sections().items():
        chosen = {}
        for dotted, key in keys().items():
            if key.section != section or (draw(st.booleans()) and key.default is not None):
                continue
            if dotted in ("train.steps", "train.tokens", "train.epochs") and dotted != length:
                continue
            value = draw(values(dotted, key.type))
            if value == 0 and dotted in {*above_zero, "train.epochs"}:
                value = 0.5
            chosen[key.name] = value
        made[section] = cls(**chosen)
    return RunConfig(**made)


@settings(max_examples=60, deadline=None)
@given(configs())
def test_dump_loads_back_to_an_equal_configuration(config: RunConfig) -> None:
    text = dump(config)
    assert loads(text) == config
    assert dump(loads(text)) == text


@settings(max_examples=30, deadline=None)
@given(configs(), configs())
def test_fingerprints_are_equal_exactly_for_equal_configurations(
    one: RunConfig, other: RunConfig
) -> None:
    assert (fingerprint(one) == fingerprint(other)) is (one == other)


def test_a_fingerprint_does_not_change_between_processes_or_spellings() -> None:
    assert fingerprint(RunConfig()) == fingerprint(loads(dump(RunConfig())))
    assert fingerprint(load(None, (), "tiny")) != fingerprint(RunConfig())
    assert fingerprint(RunConfig(optimizer=OptimizerConfig(lr=1))) == fingerprint(
        RunConfig(optimizer=OptimizerConfig(lr=1.0))
    )


def test_a_file_begins_with_its_format_and_fingerprint() -> None:
    first = dump(RunConfig()).splitlines()[0]
    assert first == f"# terashard run, format 1, fingerprint {fingerprint(RunConfig())}"


def test_what_toml_cannot_say_is_refused() -> None:
    config = RunConfig(optimizer=OptimizerConfig(options={"hook": print}))
    with pytest.raises(ConfigError, match=r"cannot be written to a run file; use numbers"):
        dump(config)


def test_differences_lists_only_what_was_changed() -> None:
    config = RunConfig(train=TrainConfig(steps=3))
    assert differences(config) == {"train.steps": (None, 3)}
    assert differences(config, config) == {}


def test_versions_name_the_packages_a_run_depends_on() -> None:
    found = versions()
    assert {"terashard", "python", "torch", "numpy"} <= set(found)
    assert "not installed" not in found.values()
