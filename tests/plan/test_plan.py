import json

import pytest

from terashard.config.schema import BatchConfig, ModelConfig, ParallelConfig, RunConfig
from terashard.errors import PlanError, ScheduleError
from terashard.plan.partition import equal_slices
from terashard.plan.plan import Plan, plan_of, spread_layers, stage_units
from terashard.schedule.actions import MicroBatch, Send
from terashard.schedule.check import check
from terashard.schedule.lower import fuse_pairs
from terashard.spec.model import describe

MIXED = (MicroBatch(2, (3, 5)), MicroBatch(1, (4, 2, 2)))


def config(sequences=8, tokens=16, **parallel):
    batch = BatchConfig(sequences=sequences, tokens=tokens)
    return RunConfig(batch=batch, parallel=ParallelConfig(**parallel))


def spec(num_layers=4, tied=False):
    model = ModelConfig(num_layers=num_layers, tied=tied)
    return describe(model, vocab_size=256, max_length=16)


def test_a_plan_states_what_the_configuration_says():
    plan = plan_of(config(stages=2, shards=2, micro_batches=2, slices=(4,)), num_layers=5)
    assert plan == Plan(
        stages=2,
        shards=2,
        partition=(MicroBatch(2, (4, 4, 4, 4)),) * 2,
        layers=((0, 3), (3, 5)),
    )
    assert (plan.processes, plan.sequences, plan.tokens) == (4, 4, 16)


def test_slices_may_be_given_by_length_and_partitions_as_they_are():
    assert plan_of(config(slices=(10, 6)), 1).partition == (MicroBatch(8, (10, 6)),)
    given = ((5, (10, 6)), (3, (16,)))
    mixed = plan_of(config(partition=given, micro_batches=7, slices=(3,)), 1)
    assert mixed.partition == (MicroBatch(5, (10, 6)), MicroBatch(3, (16,)))


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        ({"stages": 5}, "parallel.stages = 5 is more than the model's 4 layers; use at most 4"),
        (
            {"shards": 3},
            r"batch.sequences = 8 cannot be shared by 3 data-parallel ranks \(shards x replicas ="
            r" 3 x 1\); make it a multiple of 3",
        ),
        (
            {"micro_batches": 3},
            "8 sequences per data-parallel rank cannot be cut into parallel.micro_batches = 3",
        ),
        (
            {"slices": (8, 7)},
            r"parallel.slices: slices \[8, 7\] add up to 15 tokens, but batch.tokens = 16; the",
        ),
        ({"slices": (17,)}, "17 slices of a sequence of 16 tokens would be empty; use at most 16"),
        ({"partition": ((8, (9, 8)),)}, r"parallel.partition: slices \[9, 8\] add up to 17 tokens"),
        ({"partition": ((8, ()),)}, "has no work; it needs at least one sequence"),
        (
            {"partition": ((3, (16,)), (4, (16,)))},
            "parallel.partition hold 7 sequences, but every data-parallel rank has 8",
        ),
        (
            {"partition": ((8, (16,)),), "replicas": 2},
            "parallel.partition hold 8 sequences, but every data-parallel rank has 4",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_gets_one_sentence(parallel, sentence):
    with pytest.raises(PlanError, match=sentence):
        plan_of(config(**parallel), num_layers=4)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"stages": 0}, "a plan with 0 stages runs nothing; give at least 1"),
        ({"shards": 0}, "a plan with 0 shards runs nothing"),
        ({"replicas": -1}, "a plan with -1 replicas runs nothing"),
        ({"order": "zigzag"}, "no order 'zigzag'; there are: fill_drain, one_forward_one_backward"),
        ({"partition": ()}, "a plan without micro-batches runs nothing"),
        ({"partition": (MicroBatch(1, (2,)), MicroBatch(1, (3,)))}, r"found \[\[2\], \[3\]\]"),
        ({"layers": ((0, 2), (2, 4))}, "layers are given for 2 stages, but there are 1"),
        ({"stages": 2, "layers": ((0, 2), (3, 4))}, "must begin where the stage before ends"),
        ({"stages": 2, "layers": ((0, 2), (2, 2))}, "every stage needs at least one layer"),
        ({"stages": 2, "layers": ((1, 2), (2, 4))}, "the first at 0"),
    ],
)
def test_a_plan_that_does_not_fit_together_gets_one_sentence(parts, sentence):
    with pytest.raises(PlanError, match=sentence):
        Plan(**({"partition": MIXED} | parts))


def test_a_plan_survives_its_file(tmp_path):
    plan = Plan(
        stages=2, shards=3, replicas=2, order="fill_drain", partition=MIXED, layers=((0, 3), (3, 4))
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "its format is not 'terashard-plan' version 1"),
        ({"version": 2}, "its format is not 'terashard-plan' version 1"),
        ({"partition": None}, "is no plan that can be read"),
        ({"lanes": 3}, "is no plan that can be read"),
        ({"stages": 0}, "a plan with 0 stages runs nothing"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, change, sentence):
    path = tmp_path / "plan.json"
    Plan(partition=MIXED).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanError, match=sentence):
        Plan.load(path)


def test_a_plan_file_that_is_missing_or_broken_is_named(tmp_path):
    with pytest.raises(PlanError, match=r"cannot read the plan .*plan\.json: No such file"):
        Plan.load(tmp_path / "plan.json")
    for text in ("{", "[]", "\xff"):
        (tmp_path / "plan.json").write_text(text, "latin-1")
        with pytest.raises(PlanError, match=r"plan\.json is no plan that can be read"):
            Plan.load(tmp_path / "plan.json")


def test_layers_are_spread_evenly_the_first_stages_get_the_rest():
    assert spread_layers(4, 4) == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert spread_layers(7, 3) == ((0, 3), (3, 5), (5, 7))
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            sizes = [last - first for first, last in spread_layers(layers, stages)]
            assert sum(sizes) == layers
            assert max(sizes) - min(sizes) <= 1


def test_equal_slices_differ_by_one_token_at_most():
    assert equal_slices(16, 4) == (4, 4, 4, 4)
    assert equal_slices(10, 4) == (3, 3, 2, 2)
    assert equal_slices(3, 3) == (1, 1, 1)


def test_units_of_a_decoder_are_its_layers_between_embedding_and_head():
    plan = Plan(stages=2, partition=MIXED, layers=spread_layers(4, 2))
    names = [[unit.name for unit in stage] for stage in stage_units(spec(), plan)]
    assert names == [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "head"]]
    assert [unit.head for unit in stage_units(spec(), plan)[1]] == [False, False, True]
    assert {u.reductions for s in stage_units(spec(), plan) for u in s} == {("shard",)}


def test_tied_ends_are_summed_over_both_stages_and_replicas_over_all():
    plan = Plan(stages=2, replicas=2, partition=MIXED, layers=spread_layers(4, 2))
    stages = stage_units(spec(tied=True), plan)
    sums = {unit.name: unit.reductions for stage in stages for unit in stage}
    assert sums["embed"] == sums["head"] == ("shard", "replica", "tie")
    assert sums["layers.1"] == ("shard", "replica")
    alone = stage_units(spec(tied=True), Plan(partition=MIXED, layers=((0, 4),)))
    assert {unit.reductions for unit in alone[0]} == {("shard",)}


def test_a_tied_head_on_the_stage_of_the_embedding_borrows_its_weight():
    alone = Plan(partition=MIXED, layers=((0, 4),))
    assert [unit.borrows for unit in stage_units(spec(tied=True), alone)[0]][-1] == ("embed",)
    apart = Plan(stages=2, partition=MIXED, layers=spread_layers(4, 2))
    for plan, tied in ((alone, False), (apart, True), (apart, False)):
        units = stage_units(spec(tied=tied), plan)
        assert not any(unit.borrows for stage in units for unit in stage)


def test_units_of_another_model_are_refused():
    for layers in ((), ((0, 3),)):
        with pytest.raises(PlanError, match="but the model has 4; make the plan for this model"):
            stage_units(spec(num_layers=4), Plan(partition=MIXED, layers=layers))


@pytest.mark.parametrize("order", ["fill_drain", "one_forward_one_backward"])
@pytest.mark.parametrize("ranks", [{}, {"shards": 2}, {"shards": 2, "replicas": 2}])
def test_schedules_of_a_plan_are_right(order, ranks):
    plan = Plan(stages=2, order=order, partition=MIXED, layers=spread_layers(4, 2), **ranks)
    units = stage_units(spec(tied=True), plan)
    training, evaluation = plan.schedule(units), plan.evaluation(units)
    check(training)
    check(evaluation)
    assert training.training
    assert not evaluation.training
    assert bool(training.cuts) == bool(ranks)
    assert not any(a.paired for actions in training for a in actions if isinstance(a, Send))


def test_a_schedule_of_a_plan_can_be_paired_for_a_blocking_transport():
    plan = Plan.uniform(stages=3, sequences=4, tokens=8, micro_batches=4, slices=2)
    with pytest.raises(ScheduleError, match="with blocking sends this schedule never ends"):
        check(plan.schedule(), sends="blocking")
    paired = fuse_pairs(plan.schedule())
    check(paired, sends="blocking")
    assert any(a.paired for actions in paired for a in actions if isinstance(a, Send))


def test_a_uniform_plan_has_equal_micro_batches_and_slices():
    plan = Plan.uniform(sequences=4, tokens=10, micro_batches=2, slices=4)
    assert plan.partition == (MicroBatch(2, (3, 3, 2, 2)),) * 2
