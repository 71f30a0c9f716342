"""Builds the sdist and the wheel, installs the wheel into a clean environment, and uses it there.

The clean environment borrows the dependencies of the one that runs this script (a ``.pth`` file
names its site-packages), so that torch is not downloaded a second time; terashard itself comes from
the wheel alone. Checked: what the wheel contains, that ``terashard --help`` and ``terashard
version`` run, and that every module of the thinking half imports without torch.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONTENTS = (
    "terashard/py.typed",
    "terashard/config/presets/demo.toml",
    "terashard/config/presets/small.toml",
    "terashard/config/presets/tiny.toml",
    ".dist-info/licenses/LICENSE",
    ".dist-info/entry_points.txt",
)
IMPORT_ALL = """
import sys
from importlib import import_module
from pkgutil import walk_packages

def below(name):
    module = import_module(name)
    yield name
    for found in walk_packages(getattr(module, "__path__", []), f"{name}."):
        import_module(found.name)
        yield found.name

names = [found for name in sys.argv[2:] for found in below(name)]
home = import_module("terashard").__file__
assert home.startswith(sys.argv[1]), f"terashard was imported from {home}"
assert "torch" not in sys.modules, "the thinking half imported torch"
print(len(names))
"""


def main() -> None:
    """Run every check; the first that fails ends the script with its message."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="terashard-wheel-") as folder:
        work = Path(folder).resolve()
        wheel = build(work / "dist")
        check_contents(wheel)
        python = install(wheel, work / "venv")
        check_commands(python, work)
        check_imports(python, work)
    say(f"all is well, {time.monotonic() - start:.0f} s")


def build(out: Path) -> Path:
    """Build the sdist, and from it the wheel; returns the wheel."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)])
    [wheel] = out.glob("*.whl")
    [sdist] = out.glob("*.tar.gz")
    say(f"built {sdist.name} ({size(sdist)}) and {wheel.name} ({size(wheel)})")
    return wheel


def check_contents(wheel: Path) -> None:
    """Every file that must be in the wheel is there, and no test is."""
    names = zipfile.ZipFile(wheel).namelist()
    lost = [want for want in CONTENTS if not any(name.endswith(want) for name in names)]
    stray = [name for name in names if not name.startswith("terashard")]
    if lost or stray:
        sys.exit(f"check_wheel: the wheel lacks {lost or 'nothing'} and should not have {stray}")
    say(f"the wheel has {len(names)} files, among them {', '.join(CONTENTS)}")


def install(wheel: Path, place: Path) -> Path:
    """A clean environment with the wheel in it; returns its interpreter."""
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)])
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = place / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    say("installed the wheel into a clean environment")
    return python


def check_commands(python: Path, folder: Path) -> None:
    """The console script answers."""
    terashard = str(python.parent / "terashard")
    help_text = run([terashard, "--help"], folder)
    if "terashard train" not in help_text:
        sys.exit(f"check_wheel: `terashard --help` printed\n{help_text}")
    version = run([terashard, "version"], folder)
    if f"terashard   {project()['project']['version']}" not in version:
        sys.exit(f"check_wheel: `terashard version` printed\n{version}")
    run([terashard, "config", "show", "--preset", "tiny"], folder)
    say("ran terashard --help, terashard version and terashard config show")


def check_imports(python: Path, folder: Path) -> None:
    """Every module that the import contract keeps free of torch imports, from the wheel."""
    contracts = project()["tool"]["importlinter"]["contracts"]
    [names] = [c["source_modules"] for c in contracts if c.get("forbidden_modules") == ["torch"]]
    place = str(python.parent.parent)
    count = run([str(python), "-c", IMPORT_ALL, place, *names], folder).strip()
    say(f"imported {count} modules without torch")


def project() -> dict[str, dict[str, dict[str, list[dict[str, list[str]]]]]]:
    """The content of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def run(words: Sequence[str], folder: Path | None = None) -> str:
    """Run a command free of this environment's Python settings; returns its output."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"check_wheel: {' '.join(words[:6])} failed\n{done.stdout}{done.stderr}")
    return done.stdout


def size(path: Path) -> str:
    """A file's size in kB."""
    return f"{path.stat().st_size / 1000:.0f} kB"


def say(what: str) -> None:
    """Print one line of progress."""
    print(f"check_wheel: {what}", flush=True)


if __name__ == "__main__":
    main()
