r"""Every claim is guarded: a patch in this folder breaks one, and the test it names goes red.

::

    # breaks: one sentence
    # caught by: tests/package/test_module.py::test_claim …
    --- a/src/terashard/…                          a unified diff of a few lines
    +++ b/src/terashard/…

Source and tests are copied to a temporary folder, and the patch is applied there. A named test is
run by itself, at first without the patch, where it must pass; then with it, where it must fail in
its own lines: neither a test that cannot be collected nor one that is not there counts.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COPIED = ("src", "tests", "examples")
SECONDS = 120

# The copy must be what is tested, not an installed terashard: otherwise pytest ends with code 4.
CONFTEST = """
from pathlib import Path
import terashard
assert Path(terashard.__file__).is_relative_to(Path(__file__).parent / "src"), terashard.__file__
"""


@dataclass(frozen=True)
class Mutant:
    """One patch, and what it says of itself."""

    path: Path
    catchers: tuple[str, ...]
    breaks: str

    @classmethod
    def read(cls, path: Path) -> "Mutant":
        head = dict(re.findall(r"^# (breaks|caught by): (.+)$", path.read_text("utf-8"), re.M))
        return cls(path, tuple(head["caught by"].split()), head["breaks"])

    def __str__(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Run:
    """How pytest ended."""

    code: int
    text: str
    summary: str
    """Its last line: ``1 failed, 3 passed in 0.12s``."""

    @property
    def is_green(self) -> bool:
        return self.code == 0

    @property
    def is_red(self) -> bool:
        """Whether a test failed; fixtures and imports that fail are errors, and do not count."""
        return self.code == 1 and "failed" in self.summary and "error" not in self.summary


MUTANTS = [Mutant.read(path) for path in sorted(HERE.glob("*.patch"))]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _copy(tmp_path_factory.mktemp("original"))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(8 * SECONDS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_the_named_tests_catch_it(mutant: Mutant, original: Path, tmp_path: Path) -> None:
    mutated = _copy(tmp_path)
    _apply(mutant, mutated)
    for catcher in mutant.catchers:
        sound = _run_sound(original, catcher)
        assert sound.is_green, f"{catcher} fails without any patch:\n{sound.text}"
        broken = _run(mutated, catcher)
        assert broken.is_red, (
            f"{mutant.breaks}\nbut {catcher} did not fail (exit code {broken.code}):\n{broken.text}"
        )


def test_every_patch_applies_and_names_tests_that_exist() -> None:
    for mutant in MUTANTS:
        _apply(mutant, ROOT, "--check")
        for catcher in mutant.catchers:
            file, _, name = catcher.partition("::")
            assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8"), (mutant, catcher)


def test_every_patch_is_small_and_numbered_once() -> None:
    numbers = [mutant.path.name.partition("-")[0] for mutant in MUTANTS]
    assert len(set(numbers)) == len(numbers)
    for mutant in MUTANTS:
        text = mutant.path.read_text("utf-8")
        lines = re.findall(r"^[-+](?![-+]{2} [ab]/).*$", text, re.M)
        assert 1 <= len(lines) <= 10, mutant
        assert set(re.findall(r"^(?:---|\+\+\+) [ab]/(\w+)/", text, re.M)) == {"src"}, mutant


def _copy(folder: Path) -> Path:
    for name in COPIED:
        # Compiled files come along: they are found by the time and size of their source.
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("mutants"))
    shutil.copy2(ROOT / "pyproject.toml", folder)
    (folder / "conftest.py").write_text(CONFTEST)
    return folder


def _apply(mutant: Mutant, folder: Path, *options: str) -> None:
    done = subprocess.run(
        ["git", "apply", "--verbose", *options, str(mutant.path)],
        cwd=folder,
        # A folder inside a work tree would have git skip what it does not track.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (
        f"{mutant.path.name} no longer applies to the source: make it again\n{done.stderr}"
    )


def _run(folder: Path, catcher: str) -> Run:
    """Run one test in ``folder``, up to its first failure."""
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*words, f"--timeout={SECONDS}", catcher],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
    )
    summary = done.stdout.strip().splitlines()[-1:]
    return Run(done.returncode, done.stdout[-4000:] + done.stderr[-2000:], "".join(summary))


@cache
def _run_sound(original: Path, catcher: str) -> Run:
    return _run(original, catcher)
