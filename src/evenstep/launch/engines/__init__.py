"""Launchers for engines: one engine a file, thin drivers that `launch.remote` follows."""

from __future__ import annotations

from importlib import import_module

from evenstep.errors import ConfigError
from evenstep.ports import EngineJob, Launcher, look_up

BUILT_IN = {
    "slurm": "evenstep.launch.engines.slurm:SlurmLauncher",
    "ray": "evenstep.launch.engines.ray:RayLauncher",
}


def make_launcher(name: str, job: EngineJob) -> Launcher:
    """The launcher of this name: built in, or from the entry points `evenstep.launchers`."""
    if name in BUILT_IN:  # imported here: an engine's library may take seconds
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        found = look_up("launchers", name, dict.fromkeys(("local", *BUILT_IN), object))
    made: Launcher = found(job)
    return made


def check_name(name: str) -> None:
    """ConfigError if there is no such launcher."""
    if name not in BUILT_IN:
        try:
            look_up("launchers", name, dict.fromkeys(("local", *BUILT_IN), object))
        except ConfigError as e:
            raise e.within("--on") from None
