"""The files in examples/ for engines that place processes: what each one runs, and when again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bench.testbed.source_tree import PYTHONPATH

EXAMPLES = Path(__file__).parents[2] / "examples"
BIN = Path(sys.executable).parent


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / path).read_text()))


def kubernetes(name: str) -> dict[str, Any]:
    """The Job in a file."""
    return next(d for d in documents(f"kubernetes/{name}.yaml") if d["kind"] == "Job")


def container(name: str) -> dict[str, Any]:
    found: dict[str, Any] = kubernetes(name)["spec"]["template"]["spec"]["containers"][0]
    return found


@dataclass(frozen=True)
class Part:
    """What an engine runs of a file: a command, with its environment."""

    command: list[str]
    environment: Mapping[str, str]
    runs_again: Callable[[int], bool]  # the engine, after this exit code

    def start(self, folder: Path, **instead: str) -> subprocess.Popen[str]:
        """Run it here. Variables that the file has get other values, and no others."""
        known = {name: value for name, value in instead.items() if name in self.environment}
        return subprocess.Popen(
            self.command,
            cwd=folder,
            env={
                **os.environ,
                **self.environment,
                **known,
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "PYTHONPATH": PYTHONPATH,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def kubernetes_part(name: str) -> Part:
    found = container(name)
    env = {entry["name"]: entry["value"] for entry in found["env"]}
    # Without `completions`, a Job replaces Pods until one succeeds.
    assert "completions" not in kubernetes(name)["spec"]
    return Part([*found["command"], *found["args"]], env, lambda code: code != 0)


def skypilot_part(name: str) -> Part:
    (task,) = documents(f"skypilot/{name}.yaml")
    env = {k: v or "" for k, v in {**task["envs"], **task["secrets"]}.items()}
    again = task["resources"].get("job_recovery", {}).get("recover_on_exit_codes", [])
    return Part(["bash", "-c", task["run"]], env, lambda code: code in again)


def dstack_part(name: str) -> Part:
    (task,) = documents(f"dstack/{name}.dstack.yml")
    env = dict(f"{entry}=".split("=")[:2] for entry in task["env"])
    commands = [c for c in task["commands"] if not c.startswith("pip install")]
    again = "error" in task["retry"]["on_events"]
    return Part(["bash", "-c", " && ".join(commands)], env, lambda code: code != 0 and again)


PARTS: dict[str, tuple[Part, Part]] = {
    "kubernetes": (kubernetes_part("coordinator"), kubernetes_part("workers")),
    "skypilot": (skypilot_part("coordinator"), skypilot_part("worker")),
    "dstack": (dstack_part("coordinator"), dstack_part("worker")),
}
