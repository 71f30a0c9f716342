import pytest

from terashard.config.schema import ModelConfig
from terashard.errors import PlanError
from terashard.spec.model import ModelSpec, describe

GPT2_SMALL = ModelConfig(
    family="gpt2", hidden_size=768, num_layers=12, num_heads=12, max_length=1024, tied=True
)


def test_gpt2_small_has_its_published_number_of_parameters():
    spec = describe(GPT2_SMALL, vocab_size=50257, max_length=512)
    assert spec.num_parameters() == 124_439_808
    assert spec.parameters()["embed.positions.weight"] == (1024, 768)
    assert spec.mlp_size == 3072


def test_a_llama_is_counted_by_hand():
    """Width 64, four query and two key/value heads of 16, MLP 192, vocabulary 1,000, two layers."""
    model = ModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=192)
    spec = describe(model, vocab_size=1000, max_length=128)
    attention = 64 * 64 + 2 * (32 * 64) + 64 * 64
    layer = 64 + attention + 64 + 3 * 192 * 64
    assert spec.num_parameters() == 1000 * 64 + 2 * layer + 64 + 64 * 1000


def test_smollm2_135m_has_its_published_number_of_parameters():
    model = ModelConfig(
        hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, mlp_size=1536, tied=True
    )
    assert describe(model, vocab_size=49152, max_length=8192).num_parameters() == 134_515_008


def test_a_tied_head_owns_no_weight_of_its_own():
    tied = describe(GPT2_SMALL, vocab_size=50257, max_length=512)
    assert set(tied.unit_parameters("head")) == {"head.norm.weight", "head.norm.bias"}
    untied = describe(ModelConfig(), vocab_size=256, max_length=64)
    assert set(untied.unit_parameters("head")) == {"head.norm.weight", "head.output.weight"}


def test_names_do_not_repeat_and_begin_with_their_unit():
    spec = describe(ModelConfig(num_layers=3), vocab_size=256, max_length=64)
    assert spec.unit_names() == ("embed", "layers.0", "layers.1", "layers.2", "head")
    parts = [spec.unit_parameters(unit) for unit in spec.unit_names()]
    assert sum(map(len, parts)) == len(spec.parameters())
    for unit, part in zip(spec.unit_names(), parts, strict=True):
        assert all(name.startswith(f"{unit}.") for name in part)


def test_what_is_left_open_is_filled_in():
    spec = describe(ModelConfig(hidden_size=256, num_heads=4), vocab_size=300, max_length=64)
    assert (spec.vocab_size, spec.max_length) == (300, 64)
    assert (spec.num_kv_heads, spec.head_dim, spec.mlp_size) == (4, 64, 704)
    assert describe(ModelConfig(vocab_size=512), vocab_size=300, max_length=8).vocab_size == 512


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ({"hidden_size": 65}, "model.hidden_size = 65 is no multiple of model.num_heads = 4"),
        ({"vocab_size": 100}, "model.vocab_size is 100, but the data has 256 tokens"),
        ({"max_length": 32}, "model.max_length is 32, shorter than batch.tokens = 64"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3 does not divide model.num_heads = 4"),
        ({"head_dim": 33}, "model.head_dim is 33; rotary positions need an even number"),
    ],
)
def test_a_model_that_cannot_be_gets_one_sentence(model, sentence):
    with pytest.raises(PlanError, match=sentence):
        describe(ModelConfig(**model), vocab_size=256, max_length=64)


def test_learned_positions_do_not_mind_odd_heads():
    model = ModelConfig(family="gpt2", head_dim=33)
    assert describe(model, vocab_size=256, max_length=64).head_dim == 33


def test_sizes_are_at_least_one():
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "mlp_size"), 2
    ) | {"max_length": 2, "head_dim": 2}
    ModelSpec(**sizes)
    for name in sizes:
        with pytest.raises(PlanError, match=f"model.{name} is 0; it must be at least 1"):
            ModelSpec(**(sizes | {name: 0}))
