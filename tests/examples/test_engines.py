"""Files for Kubernetes, SkyPilot and dstack: valid by schema, and their commands run for real."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from evenstep.cli.operators import ask_coordinator
from evenstep.coordinate.client import NoAnswerError
from evenstep.errors import ConfigError
from tests.cli.test_run import LONG, SCRIPT, ended, until
from tests.examples.engine_files import EXAMPLES, PARTS, Part, container, documents

TOKEN = "51c0" * 16
KUBERNETES = "1.37"  # the version whose schemas are used


class Site:
    """An engine that runs the parts of its files as processes here."""

    def __init__(self, folder: Path, parts: tuple[Part, Part]) -> None:
        self.folder, self.run = folder, folder / "run"
        self.coordinator, self.worker = parts
        self.started: list[subprocess.Popen[str]] = []
        (folder / "token").write_text(f"{TOKEN}\n")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.instead = {
            "RUN": str(self.run),
            "HOST": "127.0.0.1",
            "PORT": port,
            "COORDINATOR": f"127.0.0.1:{port}",
            "TRAIN": f"{SCRIPT} {LONG}",
            "EVENSTEP_TOKEN_FILE": str(folder / "token"),
            "EVENSTEP_TOKEN": TOKEN,
        }

    def start(self, part: Part) -> subprocess.Popen[str]:
        self.started.append(part.start(self.folder, **self.instead))
        return self.started[-1]

    def num_training(self) -> int:
        try:
            rows = ask_coordinator(str(self.run), None, "status")["workers"]
        except (NoAnswerError, ConfigError):
            return -1
        return sum(row["state"] == "training" for row in rows)

    def finish(self) -> None:
        """Let the script come to its end."""

        def at_the_end() -> bool:
            (self.run / "steps.last").write_text(LONG)
            (self.run / "steps.last").rename(self.run / "steps")
            return all(process.poll() is not None for process in self.started)

        until(at_the_end)

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(tmp_path, PARTS[getattr(request, "param", "kubernetes")])
    yield made
    made.close()


@pytest.mark.parametrize("site", PARTS, indirect=True)
def test_a_worker_that_is_preempted_comes_back_and_all_end_with_0(site: Site) -> None:
    workers = [site.start(site.worker), site.start(site.worker)]  # before their coordinator
    coordinator = site.start(site.coordinator)
    until(lambda: site.num_training() == 2)
    workers[0].send_signal(signal.SIGTERM)
    code = ended(workers[0]).returncode
    assert code == 75
    assert site.worker.runs_again(code)
    until(lambda: site.num_training() == 1)
    last = site.start(site.worker)
    until(lambda: site.num_training() == 2)
    site.finish()
    ends = [process.returncode for process in (coordinator, workers[1], last)]
    assert ends == [0, 0, 0], [ended(process).stderr for process in site.started]
    assert not any(part.runs_again(0) for part in (site.coordinator, site.worker))


def test_a_coordinator_that_is_evicted_is_replaced_while_its_workers_train(site: Site) -> None:
    first = site.start(site.coordinator)
    worker = site.start(site.worker)
    until(lambda: site.num_training() == 1)
    first.send_signal(signal.SIGTERM)
    code = ended(first).returncode
    assert site.coordinator.runs_again(code)
    assert worker.poll() is None
    second = site.start(site.coordinator)
    until(lambda: site.num_training() == 1)
    site.finish()
    assert (worker.returncode, second.returncode) == (0, 0)


def test_workers_are_preempted_all_at_once_and_the_run_waits(site: Site) -> None:
    coordinator = site.start(site.coordinator)
    workers = [site.start(site.worker), site.start(site.worker)]
    until(lambda: site.num_training() == 2)
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    assert [ended(worker).returncode for worker in workers] == [75, 75]
    until(lambda: site.num_training() == 0)
    assert coordinator.poll() is None
    again = site.start(site.worker)
    until(lambda: site.num_training() == 1)
    site.finish()
    assert (again.returncode, coordinator.returncode) == (0, 0)


def test_a_worker_that_waits_for_its_coordinator_leaves_on_sigterm(site: Site) -> None:
    worker = site.start(site.worker)
    assert worker.stderr is not None
    assert "no coordinator listens" in worker.stderr.readline()
    worker.send_signal(signal.SIGTERM)
    assert ended(worker).returncode == 75


def test_probes_tell_a_coordinator_that_waits_from_one_whose_workers_train(site: Site) -> None:
    found = container("coordinator")

    def probe(name: str) -> int:
        command = found[name]["exec"]["command"]
        started = Part(command, site.coordinator.environment, lambda _: False)
        return ended(started.start(site.folder, **site.instead)).returncode

    assert probe("livenessProbe") != 0
    site.start(site.coordinator)
    until(lambda: probe("livenessProbe") == 0)
    assert probe("readinessProbe") == 3
    site.start(site.worker)
    until(lambda: site.num_training() == 1)
    assert (probe("livenessProbe"), probe("readinessProbe")) == (0, 0)


# Schemas.

KINDS = [
    (name, document)
    for name in ("storage", "coordinator", "workers", "network")
    for document in documents(f"kubernetes/{name}.yaml")
]


@pytest.mark.parametrize(
    "document", [d for _, d in KINDS], ids=[f"{name}-{d['kind']}" for name, d in KINDS]
)
def test_kubernetes_accepts_the_files(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_a_wrong_field_would_be_noticed() -> None:
    job = yaml.safe_load(yaml.safe_dump(KINDS[2][1]))
    job["spec"]["paralelism"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for kustomize")
def test_kustomize_makes_one_document_of_the_files(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "kubernetes", tmp_path / "kubernetes")
    (tmp_path / "kubernetes" / "token").write_text(TOKEN)
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "kubernetes"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    for document in made:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    kinds = sorted(document["kind"] for document in made)
    assert kinds == [
        *("Job", "Job", "NetworkPolicy", "PersistentVolumeClaim", "Secret", "Service"),
    ]
    assert "training-image" not in done.stdout


def test_coordinator_and_workers_run_the_same_script_from_the_same_image() -> None:
    for coordinator, worker in PARTS.values():
        assert coordinator.environment["TRAIN"] == worker.environment["TRAIN"]
    assert container("coordinator")["image"] == container("workers")["image"]


@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_skypilot_accepts_the_files(name: str) -> None:
    sky = pytest.importorskip("sky", reason="needs SkyPilot: pip install skypilot")
    (task,) = documents(f"skypilot/{name}.yaml")
    sky.Task.from_yaml_config(
        task, env_overrides={"COORDINATOR": "h:1"}, secrets_overrides={"EVENSTEP_TOKEN": TOKEN}
    )


@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_dstack_accepts_the_files(name: str) -> None:
    models = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="needs dstack: pip install dstack"
    )
    (task,) = documents(f"dstack/{name}.dstack.yml")
    assert type(models.parse_run_configuration(task)).__name__ == "TaskConfiguration"
