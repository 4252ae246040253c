"""Build the sdist and the wheel, install the wheel into a new environment, and run it there.

make wheel

The environment and the working directory are temporary and hold nothing of the source tree but
the wheel, one example and one scenario. The built files go to dist/.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL_S = 3600.0  # only a hanging process exceeds these limits
RUN_S = 900.0
END_S = 60.0  # from SIGTERM to SIGKILL

IN_SDIST = {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "src/evenstep/py.typed"}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def main() -> None:
    """Build, check, install and run."""
    with tempfile.TemporaryDirectory(prefix="evenstep-wheel-") as name:
        folder = Path(name)
        sdist, wheel = build(ROOT, folder / "built")
        check_sdist(sdist)
        check_wheel(wheel)
        check_same(wheel, wheel_of_tree(folder / "of-tree"))
        use(wheel, folder)
        (ROOT / "dist").mkdir(exist_ok=True)
        for built in (sdist, wheel):
            shutil.copy(built, ROOT / "dist")
        print(f"{wheel.name}: installed and run")


def build(tree: Path, out: Path) -> tuple[Path, Path]:
    """Build the sdist of a tree, and the wheel from that sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    run(command, ROOT, INSTALL_S)
    return only(out, "*.tar.gz"), only(out, "*.whl")


def wheel_of_tree(out: Path) -> Path:
    """Build the wheel from the tree itself."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out)]
    run([*command, str(ROOT)], ROOT, INSTALL_S)
    return only(out, "*.whl")


def check_sdist(sdist: Path) -> None:
    """The sdist has the tests and the files that people look for first, and no build products."""
    with tarfile.open(sdist) as archive:
        paths = [Path(member.name) for member in archive.getmembers() if member.isfile()]
    names = {path.relative_to(path.parts[0]).as_posix() for path in paths}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    refuse(sdist, "lacks", (IN_SDIST | tests) - names)
    left = {name for name in names if name.startswith("dist/") or name.endswith(".pyc")}
    refuse(sdist, "must not hold", left)


def check_wheel(wheel: Path) -> None:
    """The wheel has the package with py.typed, and nothing else."""
    package = (ROOT / "src" / "evenstep").rglob("*")
    files = [path for path in package if path.is_file() and "__pycache__" not in path.parts]
    name, version, *_ = wheel.name.split("-")
    wanted = {path.relative_to(ROOT / "src").as_posix() for path in files}
    wanted |= {f"{name}-{version}.dist-info/{entry}" for entry in METADATA} | {"evenstep/py.typed"}
    names = set(contents(wheel))
    refuse(wheel, "lacks", wanted - names)
    refuse(wheel, "must not hold", names - wanted)


def check_same(one: Path, other: Path) -> None:
    """The wheels of the sdist and of the tree have the same files with the same bytes."""
    differing = {name for name, _ in contents(one).items() ^ contents(other).items()}
    refuse(one, "built from the sdist and from the tree differ in", differing)


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel, with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel and run the commands of the README."""
    bin_ = folder / "venv" / "bin"
    run([sys.executable, "-m", "venv", str(folder / "venv")], folder, INSTALL_S)
    install = ["install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(wheel)]
    run([str(bin_ / "python"), "-m", "pip", *install], folder, INSTALL_S)
    run([str(bin_ / "python"), "-m", "pip", "check"], folder, INSTALL_S)

    work = folder / "work"
    work.mkdir()
    shutil.copy(ROOT / "examples" / "linear_regression.py", work / "train.py")
    shutil.copy(ROOT / "scenarios" / "two-cards.yaml", work)
    where = "import evenstep, sys; sys.exit(not evenstep.__file__.startswith(sys.prefix))"
    run([str(bin_ / "python"), "-c", where], work, RUN_S)

    script = ["train.py", "--epochs", "2", "--limit", "1024"]
    run([str(bin_ / "python"), *script, "--save", "alone.pt"], work, RUN_S)
    torchrun = [str(bin_ / "torchrun"), "--standalone", "--nproc-per-node=2"]
    run([*torchrun, *script, "--save", "torchrun.pt"], work, RUN_S)
    evenstep = str(bin_ / "evenstep")
    run([evenstep, "verify", *script], work, RUN_S)
    run([evenstep, "simulate", "two-cards.yaml", "--policy", "uniform,auto"], work, RUN_S)
    run([evenstep, "run", "--workers", "2", "--run", "a", *script, "--save", "run.pt"], work, RUN_S)
    run([evenstep, "replay", "a/journal.jsonl"], work, RUN_S)
    models = {"alone.pt", "torchrun.pt", "run.pt"}
    refuse(wheel, "trained, but did not save", models - {path.name for path in work.iterdir()})


def run(command: list[str], cwd: Path, limit_s: float) -> None:
    """Run a command without this process's Python environment; exit with its output on failure."""
    dropped = ("PYTHON", "EVENSTEP_", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env["OMP_NUM_THREADS"] = "1"
    print("$", " ".join([Path(command[0]).name, *command[1:]]), flush=True)
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as e:
        end(process)
        if isinstance(e, subprocess.TimeoutExpired):
            raise SystemExit(f"timeout after {limit_s:.0f} s: {' '.join(command)}") from None
        raise
    if process.returncode:
        raise SystemExit(f"{output}\nexit code {process.returncode}: {' '.join(command)}")


def end(process: subprocess.Popen[str]) -> None:
    """Terminate a command and its descendants; kill them if they do not exit."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.communicate(timeout=END_S)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def only(folder: Path, pattern: str) -> Path:
    """The only file that matches."""
    (found,) = folder.glob(pattern)
    return found


def refuse(built: Path, problem: str, names: Iterable[str]) -> None:
    """Exit with a message if there are names to complain about."""
    if listed := sorted(names):
        raise SystemExit(f"{built.name}: {problem} {', '.join(listed)}")


if __name__ == "__main__":
    main()
