"""Draw one training step of a three-rank pipeline: a sequence sent through whole, then in slices.

Run it with ``python examples/01_draw_a_schedule.py``; it needs no torch and no second process.
"""

from rich import print as show

from terashard.plan.plan import Plan
from terashard.schedule.draw import Picture, Scale, draw
from terashard.schedule.schedule import Schedule

TOKENS = 1024
SLICES = 4


def schedule(slices: int) -> Schedule:
    """What three ranks do with one sequence, checked."""
    return Plan.uniform(stages=3, sequences=1, tokens=TOKENS, slices=slices).schedule()


def picture(of: Schedule) -> Picture:
    """A step of both pictures is a quarter of the sequence, so that they can be compared."""
    return draw(of, Scale(work=TOKENS // SLICES, letters=3))


def main() -> None:
    """Print both pictures, then the second one's schedule as text."""
    whole, sliced = picture(schedule(1)), picture(schedule(SLICES))

    print(f"One sequence of {TOKENS} tokens, whole: each rank waits for all of it.\n")
    show(whole)
    print(f"\n{whole.steps:g} steps; ranks compute {whole.busy:.0%} of the time.\n\n")

    print(f"The same sequence in {SLICES} token slices. A token looks back, never ahead, so rank 1")
    print("may begin with slice 0 (F0) while rank 0 goes on with slice 1.\n")
    show(sliced)
    print(f"\n{sliced.steps:g} steps; ranks compute {sliced.busy:.0%} of the time:", end=" ")
    print(f"{whole.steps / sliced.steps:.1f} times as fast.\n\n")

    print("The schedule behind the picture. R1.0.2<0 receives, from stage 0, the input of")
    print("stage 1, micro-batch 0, slice 2; S1.0.2>2 sends its output to stage 2.\n")
    print(schedule(SLICES).text())


if __name__ == "__main__":
    main()
