import errno
import io
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from terashard.checkpoint import blocks
from terashard.checkpoint.load import Checkpoint, find_latest
from terashard.checkpoint.save import Piece, save
from terashard.comm.alone import AloneGroup
from terashard.comm.threads import ThreadWorld, run_threads
from terashard.errors import CheckpointError
from tests.checkpoint.cuts import Part, evenly, pieces_of, same, sample, save_alone, save_on

DTYPES = st.sampled_from([torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_what_any_number_of_ranks_saved_any_number_reads(
    tmp_path: Path, members: int, readers: int
) -> None:
    tensors = sample()
    checkpoint = Checkpoint.open(save_on(tmp_path, members, tensors))
    assert checkpoint.names() == tuple(sorted(tensors))
    assert checkpoint.step == 1
    assert checkpoint.extra == {"members": members}
    for part in evenly(tensors, readers):
        whole = tensors[part.name]
        rows = checkpoint.read_rows(part.name, part.start, part.stop, shape=tuple(whole.shape))
        assert same(rows, whole[part.start : part.stop] if whole.ndim else whole), part
        assert checkpoint.dtype(part.name) == whole.dtype


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, dict[str, Tensor], list[Part]]:
    """Ranks, tensors of any names, and who holds which rows, in any order."""
    members = draw(st.integers(1, 3))
    tensors, parts = {}, []
    for name in draw(st.lists(st.text(max_size=6), max_size=3, unique=True)):
        shape = draw(st.lists(st.integers(0, 6), max_size=3))
        bits = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        numbers = torch.randint(0, 2, tuple(shape), generator=bits)
        tensors[name] = numbers.to(draw(DTYPES))
        rows = shape[0] if shape else 1
        inner = draw(st.lists(st.integers(0, rows), max_size=4)) if shape else []
        cuts = sorted([0, *inner, rows])
        for start, stop in itertools.pairwise(cuts):
            if shape or start < stop:
                parts.append(Part(name, draw(st.integers(0, members - 1)), start, stop))
    return members, tensors, draw(st.permutations(parts))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(layout=layouts(), data=st.data(), block=st.sampled_from([1, 8, 1 << 22]))
def test_random_layouts_are_read_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[int, dict[str, Tensor], list[Part]],
    data: st.DataObject,
    block: int,
) -> None:
    members, tensors, parts = layout
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(blocks, "BLOCK_BYTES", block)
        path = save_on(tmp_path_factory.mktemp("root"), members, tensors, parts)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.names() == tuple(sorted(tensors))
    for name, whole in tensors.items():
        assert same(checkpoint.read(name), whole)
        if whole.ndim:
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
            assert same(checkpoint.read_rows(name, start, stop), whole[start:stop])


def test_every_file_is_plain_aligned_safetensors(tmp_path: Path) -> None:
    tensors = sample()
    path = save_on(tmp_path, 2, tensors)
    for rank in (0, 1):
        file = path / f"rank-{rank:05d}.safetensors"
        expected = {p.key: p.rows for p in pieces_of(tensors, evenly(tensors, 2), rank)}
        read = load_file(file)
        assert read.keys() == {key for key, rows in expected.items() if rows.shape[:1] != (0,)}
        assert all(same(rows, expected[key]) for key, rows in read.items())
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8 : 8 + size]).items():
            assert (8 + size + entry["data_offsets"][0]) % expected[key].element_size() == 0


def test_views_of_one_storage_and_strided_rows_are_saved(tmp_path: Path) -> None:
    buffer = torch.arange(24.0).requires_grad_().reshape(4, 6)
    pieces = [
        Piece(name="row", rows=buffer[1:2], shape=(1, 6)),
        Piece(name="columns", rows=buffer[:, 2:4], shape=(4, 2)),
        Piece(name="turned", rows=buffer.t(), shape=(6, 4)),
    ]
    checkpoint = Checkpoint.open(save(tmp_path, 0, pieces, {}, group=AloneGroup(0), keep=1))
    for piece in pieces:
        assert same(checkpoint.read(piece.name), piece.rows.detach().contiguous())


def test_contiguous_host_tensors_are_written_without_a_copy() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    data = torch.frombuffer(blocks.byte_view(rows), dtype=torch.uint8)
    assert data.data_ptr() == rows.data_ptr()
    assert len(data) == 48


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([(0, 0, 3), (1, 4, 7)], "rows 3 to 3 are in no file"),
        ([(0, 1, 7)], "rows 0 to 0 are in no file"),
        ([(1, 0, 5)], "rows 5 to 6 are in no file"),
        ([(0, 0, 0)], "rows 0 to 6 are in no file"),
        ([(0, 0, 4), (1, 3, 7)], "row 3 comes twice, in rank-00000.safetensors and rank-00001"),
        ([(0, 0, 7), (1, 0, 7)], "row 0 comes twice"),
        ([(0, 0, 7), (0, 0, 7)], "row 0 comes twice"),
        ([(0, 0, 7), (1, 2, 3)], "row 2 comes twice"),
    ],
)
def test_holes_and_overlaps_are_refused_on_every_rank(
    tmp_path: Path, parts: list[tuple[int, int, int]], found: str
) -> None:
    tensors = {"w": torch.zeros(7, 2)}
    for sentence in refusals(tmp_path, tensors, [Part("w", *part) for part in parts]):
        assert "rank 0 could not save: tensor 'w'" in sentence
        assert found in sentence
    assert list(tmp_path.iterdir()) == []


def refusals(root: Path, tensors: dict[str, Tensor], parts: list[Part]) -> list[str]:
    """What each of two ranks says when they save."""

    def rank_saves(world: ThreadWorld, rank: int) -> str:
        group = world.group(rank, range(2), "all")
        with pytest.raises(CheckpointError) as refusal:
            save(root, 1, pieces_of(tensors, parts, rank), {}, group=group, keep=2)
        return str(refusal.value)

    return run_threads(2, rank_saves)


@pytest.mark.parametrize("other", [torch.zeros(2, dtype=torch.float64), torch.zeros(3)])
def test_pieces_that_disagree_about_their_tensor_are_refused(tmp_path: Path, other: Tensor) -> None:
    pieces = [
        Piece(name="w", rows=torch.zeros(2), shape=(2,)),
        Piece(name="w", rows=other[:0], shape=tuple(other.shape)),
    ]
    with pytest.raises(CheckpointError, match=r"tensor 'w' is .* in one piece and .* in another"):
        save(tmp_path, 1, pieces, {}, group=AloneGroup(0), keep=1)


@pytest.mark.parametrize(
    ("local", "shape", "first"),
    [
        ((2, 3), (4, 2), 0),
        ((2,), (4, 2), 0),
        ((2, 3), (4, 3), 3),
        ((2, 3), (4, 3), -1),
        ((), (), 1),
    ],
)
def test_rows_outside_their_tensor_are_no_piece(
    local: tuple[int, ...], shape: tuple[int, ...], first: int
) -> None:
    with pytest.raises(CheckpointError, match=r"'w': shape .* is no part of shape"):
        Piece(name="w", rows=torch.zeros(local), shape=shape, first_row=first)


@pytest.mark.parametrize(
    ("pieces", "extra", "cause"),
    [
        (
            [Piece(name="c", rows=torch.zeros(1, dtype=torch.complex64), shape=(1,))],
            {},
            "complex64",
        ),
        ([Piece(name="\ud800", rows=torch.zeros(1), shape=(1,))], {}, "surrogates not allowed"),
        ([], {"random": torch.zeros(1)}, "not JSON serializable"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused(
    tmp_path: Path, pieces: list[Piece], extra: dict[str, None], cause: str
) -> None:
    save_alone(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"rank 0 could not save: .*{cause}"):
        save(tmp_path, 2, pieces, extra, group=AloneGroup(0), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_a_full_disk_on_one_rank_is_told_by_all_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sample()
    before = save_on(tmp_path, 2, tensors)
    really_open = io.open

    def open_full(file: Path, *arguments: object) -> object:
        full = Path(file).name == "rank-00001.safetensors"
        return really_open("/dev/full" if full else file, *arguments)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", open_full)
    for sentence in refusals(tmp_path, tensors, evenly(tensors, 2)):
        assert sentence == (
            "rank 1 could not save: [Errno 28] No space left on device;"
            " earlier checkpoints are intact"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]
    assert find_latest(tmp_path) == before
    assert same(Checkpoint.open(before).read("data/order"), tensors["data/order"])


def test_a_failure_while_pieces_are_made_reaches_every_rank(tmp_path: Path) -> None:
    def pieces(rank: int) -> Iterator[Piece]:
        yield Piece(name=f"w{rank}", rows=torch.zeros(2), shape=(2,))
        if rank == 1:
            raise OSError(errno.EIO, "the device is gone")

    def rank_saves(world: ThreadWorld, rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"rank 1 could not save: .*the device is gone"):
            save(tmp_path, 1, pieces(rank), {}, group=world.group(rank, [0, 1], "all"), keep=2)

    run_threads(2, rank_saves)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_do_not_share_the_folder_are_told_so(tmp_path: Path) -> None:
    def rank_saves(world: ThreadWorld, rank: int) -> None:
        group = world.group(rank, [0, 1], "all")
        with pytest.raises(CheckpointError, match=r"rank 1 could .* where every rank sees them"):
            save(tmp_path / str(rank), 1, [], {}, group=group, keep=2)

    run_threads(2, rank_saves)
