"""``--section.key value`` reads as the run file would, and names what it does not understand."""

from collections.abc import Sequence
from typing import Any

import pytest

from terashard.config.fields import keys
from terashard.config.override import Kept, read_overrides, settings_type
from terashard.config.schema import ParameterGroup, RunConfig
from terashard.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {}),
        (["--batch.tokens", "3"], {"batch.tokens": 3}),
        (["--batch.tokens=3"], {"batch.tokens": 3}),
        (["--optimizer.lr", "1e-4"], {"optimizer.lr": 1e-4}),
        (["--optimizer.lr", "1"], {"optimizer.lr": 1.0}),
        (["--loss.ignore-index", "-100"], {"loss.ignore_index": -100}),
        (["--loss.ignore_index=-1"], {"loss.ignore_index": -1}),
        (["--model.family", "gpt2"], {"model.family": "gpt2"}),
        (["--data.shuffle", "false"], {"data.shuffle": False}),
        (["--model.tied"], {"model.tied": True}),
        (["--train.steps", "none"], {"train.steps": None}),
        (["--data.train", "none"], {"data.train": "none"}),
        (["--data.train", "3"], {"data.train": "3"}),
        (["--data.train", "a = b"], {"data.train": "a = b"}),
        (["--parallel.slices", "4"], {"parallel.slices": (4,)}),
        (["--parallel.slices", "128", "64", "64"], {"parallel.slices": (128, 64, 64)}),
        (["--parallel.slices", "[128, 64]"], {"parallel.slices": (128, 64)}),
        (
            ["--parallel.partition", "[[2, [64, 64]], [1, [128]]]"],
            {"parallel.partition": ((2, (64, 64)), (1, (128,)))},
        ),
        (["--train.callbacks", '["a:b", "c:d"]'], {"train.callbacks": ("a:b", "c:d")}),
        (["--train.callbacks", "[]"], {"train.callbacks": ()}),
        (["--data.train", "[]"], {"data.train": "[]"}),
        (["--train.callbacks", "a:b", "c:d"], {"train.callbacks": ("a:b", "c:d")}),
        (
            ["--optimizer.options", "{betas = [0.9, 0.95]}"],
            {"optimizer.options": {"betas": [0.9, 0.95]}},
        ),
        (
            ["--optimizer.groups", "[{match = 'x', options = {lr = 1e-4}}]"],
            {"optimizer.groups": (ParameterGroup(match="x", options={"lr": 1e-4}),)},
        ),
        (
            ["--batch.tokens", "3", "--model.num-layers", "2", "--train.steps", "9"],
            {"batch.tokens": 3, "model.num_layers": 2, "train.steps": 9},
        ),
    ],
)
def test_options_become_values(words: Sequence[str], given: dict[str, Any]) -> None:
    assert read_overrides(words) == given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch.tokns", "3"], r"no option --batch.tokns; did you mean --batch.tokens\?"),
        (["--train.lr", "3"], r"no option --train.lr; did you mean --optimizer.lr\?"),
        (["--lr=3"], r"no option --lr; did you mean --optimizer.lr\?"),
        (["--qqqqqq.x", "3"], r"no option --qqqqqq.x; --help lists them all"),
        (["oops"], r"'oops' follows no option; write --section.key oops"),
        (["--batch.tokens"], r"--batch.tokens got nothing; it takes one value, a whole number"),
        (["--batch.tokens", "3", "4"], r"--batch.tokens got 2 values: 3 4; it takes one value"),
        (["--batch.tokens", "1.5"], r"--batch.tokens is 1.5; it must be a whole number"),
        (["--batch.tokens", "ten"], r'--batch.tokens is the string "ten"; it must be a whole'),
        (["--batch.tokens", "3\nmore = 4"], r"--batch.tokens is the string"),
        (
            ["--train.steps", "x"],
            r'--train.steps is the string "x"; it must be a whole number or "',
        ),
        (["--model.family", "bert"], r'--model.family is .*; it must be "llama" or "gpt2"'),
        (["--parallel.slices", "3", "x"], r'--parallel.slices\[1\] is the string "x"'),
        (
            ["--parallel.partition", "3", "4"],
            r"--parallel.partition\[0\] is 3; it must be \[a whole",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(words: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_overrides(words)


def test_every_key_has_an_option_a_default_and_a_help_text() -> None:
    twin = settings_type(RunConfig())()
    for dotted, key in keys().items():
        assert key.help.endswith("."), dotted
        assert getattr(getattr(twin, key.section), key.name) == Kept(key.default)
