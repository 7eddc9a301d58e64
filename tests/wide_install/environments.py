"""Pythons of this machine, and environments that a wheel of forebay is installed into."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from tests.processes import ROOT
from tests.test_extras import extras

VERSIONS = ("3.11", "3.12", "3.13")
NEEDS_TORCH = {"torch", "tensordict", "transformers", "accelerate", "peft"}
"""What pip brings torch along with. Where no torch without CUDA is at hand that is gigabytes for one import."""

CLEAN = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "FOREBAY_"))
} | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def ran(*command: object, cwd: Path | None = None) -> str:
    """Returns what a command printed; it must end with 0."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=1_500, check=False
    )
    assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"
    return result.stdout


@functools.cache
def pythons() -> dict[str, str]:
    """The interpreters of this machine by their version: on PATH, or those of pyenv. A shim that runs none is none."""
    found: dict[str, str] = {}
    for version in VERSIONS:
        of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
        names = [f"python{version}", *map(str, of_pyenv)]
        for name in names:
            path = shutil.which(name)
            code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
            if path is None:
                continue
            result = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
            if result.stdout.strip() == version:
                found.setdefault(version, path)
    return found


def base_requirements() -> list[str]:
    """The requirements of setup.cfg without an extra."""
    import configparser

    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return [line for line in parser["options"]["install_requires"].splitlines() if line]


def extra_requirements(extra: str) -> list[str]:
    """The requirements of setup.cfg with an extra."""
    lines = (line.partition("#")[0].strip() for line in extras()[extra].splitlines())
    return [line for line in lines if line]


def is_without_torch(requirement: str) -> bool:
    """Whether a requirement brings no torch."""
    return Requirement(requirement).name not in NEEDS_TORCH


def has_small_torch(version: str) -> bool:
    """Whether a torch of this Python without CUDA is at hand, in a folder of pip's `find-links`."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    )
    folders = [*listed.stdout.split(), *os.environ.get("PIP_FIND_LINKS", "").split()]
    return any(list(Path(folder).glob(f"torch-*cp{version.replace('.', '')}-*.whl")) for folder in folders)


@dataclass(frozen=True)
class Environment:
    """A virtual environment. is_whole: whether all of forebay's own requirements are in it, torch with them."""

    folder: Path
    version: str
    is_whole: bool

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Where its packages lie."""
        return self.folder / "lib" / f"python{self.version}" / "site-packages"

    def install(self, *what: object, has_dependencies: bool = True) -> None:
        """Installs requirements, of the versions that are tested together."""
        how: Sequence[object] = () if has_dependencies else ("--no-deps",)
        ran(self.python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *how, *what)

    def forebay(self, *arguments: object) -> str:
        """Returns what the installed command prints, run from a folder that has no forebay in it."""
        return ran(self.folder / "bin" / "forebay", *arguments, cwd=self.folder)

    def run(self, code: str) -> str:
        """Returns what code prints."""
        return ran(self.python, "-W", "error::ImportWarning", "-c", code, cwd=self.folder)


def made(folder: Path, version: str, *, is_whole: bool) -> Environment:
    """Returns a new environment of a Python."""
    ran(pythons()[version], "-m", "venv", folder)
    return Environment(folder, version, is_whole)


def over(base: Environment, folder: Path) -> Environment:
    """Returns a new environment that sees the packages of another one: torch and arrow are installed once a Python."""
    environment = made(folder, base.version, is_whole=base.is_whole)
    (environment.packages / "base.pth").write_text(f"{base.packages}\n")
    return environment


def built_wheel(folder: Path) -> Path:
    """Returns the wheel that is built of the sdist of this checkout, of a copy of its files."""
    source = folder / "source"
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(ROOT / "forebay", source / "forebay", ignore=shutil.ignore_patterns("__pycache__"))
    ran(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})", cwd=source)
    (sdist,) = folder.glob("forebay-*.tar.gz")
    ran(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sdist)
    (wheel,) = folder.glob("forebay-*.whl")
    return wheel
