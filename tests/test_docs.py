"""The commands that a reader is told to type are typed here, in the order of the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def commands(page: str) -> list[str]:
    """The bash blocks of a page."""
    return re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def type_them(blocks: list[str], folder: Path) -> None:
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


@pytest.mark.processes
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    type_them(commands("docs/tutorial.md"), tmp_path)
    records = (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()
    assert len(records) == 50


@pytest.mark.processes
def test_the_first_run_of_the_readme_does_what_it_says(tmp_path: Path) -> None:
    (install, first_run) = commands("README.md")
    assert install.splitlines()[0].startswith("make demo")
    for name in ("README.md", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    type_them([first_run.replace(". .venv/bin/activate\n", "")], tmp_path)
    assert len((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()) == 80


def test_the_picture_of_the_readme_is_drawn_by_the_product() -> None:
    example = ROOT / "examples/01_draw_a_schedule.py"
    drawn = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    picture = re.search(r"```\n(One sequence.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert picture is not None
    assert picture[1] in drawn


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_every_example_runs_and_is_short(example: Path) -> None:
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(example.read_text().splitlines()) < 100


@pytest.mark.parametrize(
    "page",
    sorted(
        p.relative_to(ROOT).as_posix()
        for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    ),
)
def test_every_link_leads_somewhere(page: str) -> None:
    broken = [
        link
        for link in LINK.findall((ROOT / page).read_text())
        if not ((ROOT / page).parent / link).exists()
    ]
    assert broken == []


def test_the_reference_of_the_run_file_is_the_schema() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import write_reference
    finally:
        sys.path.pop(0)
    written = write_reference.PAGE.read_text()
    assert written == write_reference.page(), "run: python scripts/write_reference.py"
