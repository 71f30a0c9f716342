"""Stages on meta: their names, shapes, ties and refusals."""

from dataclasses import replace

import pytest

from terashard.errors import PlanError
from terashard.nn.build import build_stage
from terashard.nn.protocols import StageModule
from terashard.spec.model import ModelSpec
from tests.nn.witness import GPT2, LLAMA

SPECS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "tied": replace(GPT2, tied=True),
    "wide heads": replace(LLAMA, head_dim=10),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_names_and_shapes_are_the_specs_however_layers_are_split(spec: ModelSpec, cut: int) -> None:
    stages = [
        build_stage(spec, range(cut), first=True, last=False),
        build_stage(spec, range(cut, 3), first=False, last=True),
    ]
    names = []
    for stage in stages:
        for name, unit in stage.units():
            names.append(name)
            shapes = {f"{name}.{n}": tuple(p.shape) for n, p in unit.named_parameters()}
            copies = {c: shapes.pop(c) for c in stage.ties() if c in shapes}
            assert shapes == spec.unit_parameters(name)
            assert set(copies.values()) <= {(spec.vocab_size, spec.hidden_size)}
            assert all(p.is_meta for p in unit.parameters())
    assert tuple(names) == spec.unit_names()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_stage_names_its_parameters_as_the_whole_model_does(spec: ModelSpec) -> None:
    stage = build_stage(spec, range(3), first=True, last=True)
    assert {n: tuple(p.shape) for n, p in stage.named_parameters()} == spec.parameters()
    middle = build_stage(spec, range(1, 2), first=False, last=False)
    assert {n for n, _ in middle.named_parameters()} == set(spec.unit_parameters("layers.1"))


def test_no_module_holds_a_buffer() -> None:
    assert not list(build_stage(LLAMA, range(3), first=True, last=True).buffers())


def test_tied_weights_are_one_parameter_on_one_stage_and_a_named_copy_on_two() -> None:
    tied = replace(LLAMA, tied=True)
    whole = build_stage(tied, range(3), first=True, last=True)
    assert whole.embed is not None
    assert whole.head is not None
    assert whole.head.output.weight is whole.embed.tokens.weight
    assert whole.ties() == {}
    last = build_stage(tied, range(1, 3), first=False, last=True)
    assert last.ties() == {"head.output.weight": "embed.tokens.weight"}
    assert "head.output.weight" in dict(last.named_parameters())
    assert build_stage(tied, range(1), first=True, last=False).ties() == {}
    assert build_stage(LLAMA, range(1, 3), first=False, last=True).ties() == {}


def test_stages_and_units_implement_the_protocols() -> None:
    stage = build_stage(LLAMA, range(3), first=True, last=True)
    assert isinstance(stage, StageModule)
    assert stage.has_head()
    assert stage.width == LLAMA.hidden_size
    assert not build_stage(LLAMA, range(1), first=True, last=False).has_head()


@pytest.mark.parametrize("layers", [range(2, 4), range(-1, 1), range(0, 3, 2)], ids=str)
def test_layers_the_model_does_not_have_are_refused(layers: range) -> None:
    with pytest.raises(PlanError, match="the model has layers 0 to 2"):
        build_stage(LLAMA, layers, first=True, last=True)
