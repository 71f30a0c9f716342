from pathlib import Path

import pytest
import torch

from terashard.checkpoint import blocks
from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.checkpoint.save import Piece, save
from terashard.comm.alone import AloneGroup
from terashard.errors import CheckpointError
from tests.checkpoint.cuts import same, sample, save_alone

FILE = "rank-00000.safetensors"
WEIGHT = "model/layers.0.mlp.up.weight"


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("file", [FILE, "index.json"])
def test_no_damaged_byte_changes_what_is_read(tmp_path: Path, file: str) -> None:
    """Every byte of a checkpoint, one at a time: refused, or (padding, unused) without effect."""
    wanted = {"w": torch.arange(6.0).reshape(3, 2), "n": torch.tensor(3)}
    pieces = [Piece(name=n, rows=t, shape=tuple(t.shape)) for n, t in wanted.items()]
    path = save(tmp_path, 1, pieces, {"cursor": 12}, group=AloneGroup(0), keep=1)
    intact = (path / file).read_bytes()
    refused = 0
    header = 8 + int.from_bytes(intact[:8], "little") if file == FILE else 0
    for place in range(len(intact)):
        flip(path / file, place)
        try:
            checkpoint = Checkpoint.open(path)
            assert (checkpoint.step, checkpoint.extra) == (1, {"cursor": 12})
            assert all(same(checkpoint.read(name), tensor) for name, tensor in wanted.items())
        except CheckpointError as error:
            refused += file in str(error)
        (path / file).write_bytes(intact)
    assert refused >= len(intact) - intact[:header].count(b" ")


def test_damage_is_told_with_file_and_tensor(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 1)
    size = (path / FILE).stat().st_size
    header = int.from_bytes((path / FILE).read_bytes()[:8], "little")
    flip(path / FILE, 8 + header)
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(path).read(WEIGHT)
    assert str(refusal.value) == (
        f"{path / FILE} is damaged at tensor '{WEIGHT}': its bytes do not have the checksum of the"
        " index; take another checkpoint"
    )
    (path / FILE).write_bytes((path / FILE).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"'{WEIGHT}': it has {size - 1} bytes instead of"):
        Checkpoint.open(path).read(WEIGHT)
    (path / FILE).unlink()
    with pytest.raises(CheckpointError, match=rf"{FILE} is damaged at .*No such file"):
        Checkpoint.open(path).read(WEIGHT)


def test_a_file_of_another_checkpoint_is_found_out(tmp_path: Path) -> None:
    """Same size and header, other numbers; and a file whose tensors have another type."""
    group = AloneGroup(0)
    one, other, halves = (
        save(tmp_path, step, [Piece(name="w", rows=rows, shape=(4,))], {}, group=group, keep=9)
        for step, rows in enumerate(
            [torch.zeros(4), torch.ones(4), torch.zeros(4, dtype=torch.int32)]
        )
    )
    (one / FILE).write_bytes((other / FILE).read_bytes())
    with pytest.raises(CheckpointError, match="do not have the checksum"):
        Checkpoint.open(one).read("w")
    (one / FILE).write_bytes((halves / FILE).read_bytes())
    with pytest.raises(CheckpointError, match=r"it holds torch.int32 of shape \(4,\)"):
        Checkpoint.open(one).read("w")


def test_only_the_blocks_that_are_asked_for_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2 * 8)  # two rows of two float32
    whole = torch.arange(14.0).reshape(7, 2)
    pieces = [Piece(name="w", rows=whole, shape=(7, 2))]
    path = save(tmp_path, 1, pieces, {}, group=AloneGroup(0), keep=1)
    flip(path / FILE, (path / FILE).stat().st_size - 4 * 8)  # row 3
    checkpoint = Checkpoint.open(path)
    assert same(checkpoint.read_rows("w", 0, 2), whole[0:2])
    assert same(checkpoint.read_rows("w", 5, 7), whole[5:7])
    for start, stop in ((2, 3), (3, 4), (0, 7), (1, 3), (3, 6)):
        with pytest.raises(CheckpointError, match="do not have the checksum"):
            checkpoint.read_rows("w", start, stop)


def test_missing_names_and_other_shapes_are_refused(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 1)
    checkpoint = Checkpoint.open(path)
    with pytest.raises(CheckpointError, match=f"{path} holds no tensor 'head.weight'; it is of an"):
        checkpoint.read("head.weight")
    with pytest.raises(CheckpointError, match=r"shape \(7, 3\), and \(7, 4\) is wanted"):
        checkpoint.read(WEIGHT, shape=(7, 4))
    for start, stop in ((-1, 2), (5, 8), (3, 2)):
        with pytest.raises(CheckpointError, match=r"rows .* are asked for; it has rows 0 to 7"):
            checkpoint.read_rows(WEIGHT, start, stop)


def test_the_latest_is_the_named_one_else_the_newest_complete(tmp_path: Path) -> None:
    one, two, three = (save_alone(tmp_path, step, keep=9) for step in (1, 2, 3))
    (tmp_path / "latest").write_text("step-00000001\n")
    assert find_latest(tmp_path) == one
    for wrong in ("", "step-00000009", "../step-00000001", "\x00", "step-00000002.tmp"):
        (tmp_path / "latest").write_text(wrong)
        assert find_latest(tmp_path) == three
    (three / FILE).write_bytes(b"short")
    assert find_latest(tmp_path) == two
    (two / FILE).unlink()
    assert find_latest(tmp_path) == one
    one.rename(one.with_name(one.name + ".tmp"))
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no complete checkpoint; give a"):
        find_latest(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no checkpoint \(No such file .*index.json\)"):
        Checkpoint.open(tmp_path)
    (tmp_path / "index.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"index.json cannot be used: 'utf-8' codec"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        find_latest(tmp_path / "nowhere")


def test_a_checkpoint_does_not_hold_what_it_read(tmp_path: Path) -> None:
    """Rows are the reader's own: writing into them leaves the file as it was."""
    path = save_alone(tmp_path, 1)
    checkpoint = Checkpoint.open(path)
    checkpoint.read(WEIGHT).zero_()
    checkpoint.read("optimizer/step").zero_()
    assert same(checkpoint.read(WEIGHT), sample(1)[WEIGHT])
    assert same(Checkpoint.open(path).read("optimizer/step"), sample(1)["optimizer/step"])
