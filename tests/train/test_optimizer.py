"""Which optimizers run on shards, with which options for which parameter."""

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from terashard.comm.mesh import Mesh
from terashard.config.optimizers import UNFIT
from terashard.config.schema import OptimizerConfig, ParameterGroup
from terashard.errors import ConfigError
from terashard.spec.model import ModelSpec
from terashard.train.optimizer import build_optimizer, check_optimizer, set_rate
from tests.helpers.threads import run_mesh

SPEC = ModelSpec(
    vocab_size=11,
    hidden_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    mlp_size=8,
    max_length=8,
    head_dim=4,
)
KINDS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)
RANDOM = torch.Generator().manual_seed(0)
SHAPES = {"layers.0.mlp.up.weight": (5, 3), "layers.0.norm.weight": (3,)}
VALUES = {n: torch.randn(s, generator=RANDOM) for n, s in SHAPES.items()}
GRADIENTS = [{n: torch.randn(s, generator=RANDOM) for n, s in SHAPES.items()} for _ in range(3)]


def stepped(config: OptimizerConfig, cut: object) -> dict[str, nn.Parameter]:
    """Parameters after three steps; ``cut`` makes of a tensor what a rank holds."""
    assert callable(cut)
    parameters = {name: nn.Parameter(cut(value)) for name, value in VALUES.items()}
    optimizer = build_optimizer(config, parameters.items())
    for gradients in GRADIENTS:
        for name, parameter in parameters.items():
            parameter.grad = cut(gradients[name])
        optimizer.step()
    return parameters


@pytest.mark.parametrize("name", [name for name in KINDS if name not in UNFIT])
def test_every_class_that_is_allowed_steps_on_shards_as_on_whole_parameters(name: str) -> None:
    options = {"momentum": 0.9} if name == "SGD" else {}
    config = OptimizerConfig(name=name, lr=1e-2, options=options)
    whole = stepped(config, torch.clone)

    def work(mesh: Mesh) -> dict[str, Tensor]:
        def cut(value: Tensor) -> DTensor:
            parts = value.chunk(2)
            here = mesh.coordinates.shard
            rows = parts[here] if here < len(parts) else value[:0]
            return DTensor.from_local(
                rows.clone(),
                mesh.device_mesh,
                [Replicate(), Shard(0)],
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )

        found = stepped(config, cut)
        return {n: p.to_local().detach() for n, p in found.items()}  # type: ignore[operator]

    ranks = run_mesh(work, shards=2)
    for parameter, value in whole.items():
        together = torch.cat([rank[parameter] for rank in ranks])
        assert torch.equal(together, value.detach()), parameter
        assert not torch.equal(together, VALUES[parameter])


@pytest.mark.parametrize("name", sorted(UNFIT))
def test_classes_that_do_not_run_on_shards_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*every rank holds only its rows.*AdamW"):
        build_optimizer(OptimizerConfig(name=name), [])


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'adamw' is no class of torch.optim.*AdamW"):
        build_optimizer(OptimizerConfig(name="adamw"), [])


def groups_of(config: OptimizerConfig) -> dict[str, dict[str, object]]:
    """Parameter → options, of SPEC's parameters."""
    named = {n: nn.Parameter(torch.zeros(s)) for n, s in SPEC.parameters().items()}
    names = {id(p): n for n, p in named.items()}
    made = build_optimizer(config, named.items())
    found = {names[id(p)]: g for g in made.param_groups for p in g["params"]}
    assert found.keys() == named.keys()
    return found


def test_matrices_decay_and_norms_do_not() -> None:
    found = groups_of(OptimizerConfig(weight_decay=0.3))
    decays = {name: group["weight_decay"] for name, group in found.items()}
    assert {name for name, decay in decays.items() if decay == 0.0} == {
        "layers.0.attention_norm.weight",
        "layers.0.mlp_norm.weight",
        "head.norm.weight",
    }
    assert set(decays.values()) == {0.0, 0.3}


def test_biases_do_not_decay() -> None:
    bias = nn.Parameter(torch.zeros(3))
    made = build_optimizer(OptimizerConfig(), [("layers.0.mlp.up.bias", bias)])
    assert made.param_groups[0]["weight_decay"] == 0.0


def test_the_first_pattern_that_matches_decides_and_keeps_what_it_does_not_say() -> None:
    config = OptimizerConfig(
        lr=1.0,
        weight_decay=0.3,
        options={"betas": [0.5, 0.6]},
        groups=(
            ParameterGroup(match="*.mlp.up.*", options={"lr": 0.25, "betas": [0.1, 0.2]}),
            ParameterGroup(match="*.mlp.*", options={"weight_decay": 0.0}),
        ),
    )
    found = groups_of(config)
    up, down = found["layers.0.mlp.up.weight"], found["layers.0.mlp.down.weight"]
    assert (up["lr"], up["betas"], up["weight_decay"]) == (0.25, (0.1, 0.2), 0.3)
    assert (down["lr"], down["betas"], down["weight_decay"]) == (1.0, (0.5, 0.6), 0.0)
    assert found["embed.tokens.weight"]["weight_decay"] == 0.3


def test_a_rate_is_a_part_of_every_groups_own_peak() -> None:
    config = OptimizerConfig(
        lr=1.0, groups=(ParameterGroup(match="embed.*", options={"lr": 0.25}),)
    )
    named = [(n, nn.Parameter(torch.zeros(s))) for n, s in SPEC.parameters().items()]
    made = build_optimizer(config, named)
    for part in (0.5, 0.1, 1.0):
        set_rate(made, part)
        assert sorted({group["lr"] for group in made.param_groups}) == [0.25 * part, part]


def test_adamw_is_fused_unless_told_otherwise() -> None:
    named = [("w", nn.Parameter(torch.zeros(2, 2)))]
    assert build_optimizer(OptimizerConfig(), named).defaults["fused"] is True
    plain = OptimizerConfig(options={"fused": False})
    assert build_optimizer(plain, named).defaults["fused"] is False


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OptimizerConfig(options={"beta": 1}), "AdamW has no option 'beta'; its options are lr"),
        (OptimizerConfig(options={"betas": [2.0, 0.1]}), "AdamW refuses its options: Invalid beta"),
        (OptimizerConfig(name="SGD", options={"fused": True}), "SGD cannot be fused on sharded"),
        (
            OptimizerConfig(groups=(ParameterGroup(match="embed.*", options={"l": 1}),)),
            "AdamW has no option 'l'",
        ),
        (
            OptimizerConfig(groups=(ParameterGroup(match="mlp.*", options={}),)),
            r"no parameter matches 'mlp.\*'; names are like embed.tokens.weight",
        ),
    ],
)
def test_wrong_options_are_refused_before_a_run(config: OptimizerConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_optimizer(config, SPEC)


def test_weight_decay_is_left_out_where_a_class_has_none() -> None:
    for name in set(KINDS) - UNFIT.keys():
        if "weight_decay" not in inspect.signature(vars(torch.optim)[name]).parameters:
            check_optimizer(OptimizerConfig(name=name), SPEC)


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_options_may_not_say_again_what_has_a_key_of_its_own(name: str) -> None:
    """It was dropped (weight_decay), or used while the records spoke of the key's value (lr)."""
    with pytest.raises(
        ConfigError, match=f"options has {name} = 7.0.*write it as optimizer.{name}"
    ):
        OptimizerConfig(options={name: 7.0})
    kept = OptimizerConfig(groups=(ParameterGroup(match="*.mlp.up.*", options={name: 7.0}),))
    found = groups_of(kept)
    assert found["layers.0.mlp.up.weight"][name] == 7.0
    assert found["embed.tokens.weight"][name] == getattr(kept, name)
