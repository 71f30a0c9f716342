"""Which rows of a tensor belong to which member of a group.

The cut is the one of ``torch.chunk`` and of DTensor's ``Shard(0)``: every member gets
``ceil(rows / members)`` rows until none are left, so the last members may hold fewer, or none.
"""


def row_range(rows: int, members: int, member: int) -> tuple[int, int]:
    """Half-open range of the rows that ``member`` of ``members`` holds of a tensor of ``rows``."""
    chunk = -(-rows // members)
    start = min(member * chunk, rows)
    return start, min(start + chunk, rows)


def row_counts(rows: int, members: int) -> list[int]:
    """How many of ``rows`` every member holds."""
    ranges = (row_range(rows, members, member) for member in range(members))
    return [stop - start for start, stop in ranges]
