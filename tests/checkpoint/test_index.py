import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terashard.checkpoint.blocks import checksum
from terashard.checkpoint.index import Index, StoredPiece, StoredTensor, merge
from terashard.errors import CheckpointError


def part(first_row: int, rows: int, of: int) -> tuple[str, StoredTensor]:
    piece = StoredPiece(
        file="rank-00000.safetensors",
        key=f"w@{first_row}",
        first_row=first_row,
        rows=rows,
        block_rows=2,
        checksums=(0,) * -(-rows // 2),
    )
    return "w", StoredTensor(dtype="F32", shape=(of,), pieces=(piece,))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=4))
def test_pieces_are_merged_exactly_if_every_row_comes_once(cuts: list[tuple[int, int]]) -> None:
    whole = max(first + rows for first, rows in cuts)
    times = Counter(row for first, rows in cuts for row in range(first, first + rows))
    parts = [part(first, rows, whole) for first, rows in cuts]
    if all(times[row] == 1 for row in range(whole)):
        assert [p.first_row for p in merge(parts)["w"].pieces] == sorted(f for f, _ in cuts)
    else:
        with pytest.raises(CheckpointError, match="tensor 'w': row"):
            merge(parts)


def test_an_index_reads_back_what_it_says() -> None:
    index = Index(
        step=3,
        files={"rank-00000.safetensors": 10},
        tensors=merge([part(0, 3, 3)]),
        extra={"cursor": 10**30, "loss": 0.1, "text": 'ü"\n', "none": None, "list": [1, [True]]},
    )
    text = index.to_json()
    assert Index.from_json(text) == index
    assert json.loads(text)["format"] == "terashard-checkpoint"


def rewritten(**changes: object) -> str:
    """An index with members changed and its checksum made right again."""
    data = json.loads(Index(step=1, files={}, tensors={}, extra={}).to_json())
    data |= changes
    del data["checksum"]
    rest = json.dumps({key: value for key, value in data.items() if value != "gone"})[1:]
    return f'{{"checksum": {checksum(rest.encode())}, {rest}'


PIECE = {
    "file": "rank-00000.safetensors",
    "key": "w@0",
    "first_row": 0,
    "rows": 1,
    "block_rows": 1,
    "checksums": [0],
}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "it is no JSON"),
        ("[]", 'it does not say "format"'),
        (rewritten(format="other"), 'it does not say "format"'),
        (rewritten(version=2), "it is of version 2, and this terashard reads version 1"),
        (rewritten(version="gone"), "it is of version None"),
        (rewritten().replace('"step": 1', '"step": 2'), "does not have its checksum"),
        (json.dumps(json.loads(rewritten()), indent=1), "does not have its checksum"),
        (rewritten(step="gone"), "it is incomplete"),
        (rewritten(tensors=[]), "it is incomplete"),
        (rewritten(tensors={"w": {"dtype": "F32"}}), "it is incomplete"),
        (rewritten(tensors={"w": {"dtype": "X", "shape": [0], "pieces": []}}), "no element type"),
        (rewritten(tensors={"w": {"dtype": "F32", "shape": [1], "pieces": []}}), "in no file"),
        (rewritten(tensors={"w": {"dtype": "F32", "shape": [1], "pieces": [PIECE]}}), "not listed"),
        *(
            (rewritten(tensors={"w": {"dtype": "F32", "shape": [1], "pieces": [PIECE | wrong]}}), s)
            for wrong, s in (
                ({"file": "../rank-00000.safetensors"}, "no file of a checkpoint"),
                ({"checksums": []}, "has 0 checksums"),
                ({"block_rows": 0}, "has 1 checksums"),
                ({"surprise": 1}, "it is incomplete"),
            )
        ),
    ],
)
def test_what_is_no_index_is_refused(text: str, found: str) -> None:
    with pytest.raises(CheckpointError, match=found):
        Index.from_json(text)
