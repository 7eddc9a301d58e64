"""Hundreds of real images: those of Pillow's tests, in its sdist, and of scikit-image's data; nothing is committed."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FOLDER = ROOT / "bench-data" / "real-images"
_NO_IMAGES = {
    ".bin",
    ".gpl",
    ".ggr",
    ".lut",
    ".npy",
    ".npz",
    ".txt",
    ".xml",
    ".py",
    ".pyi",
    ".icc",
    ".fits",
    ".pdf",
    ".eps",
}


def real_images() -> list[Path]:
    """Returns the files in their order, copies of an earlier call or fetched by pip in the versions of constraints.txt.

    They lie under `bench-data/`, which git ignores. Files of the same name have that of their folder in front.
    """
    if not (_FOLDER / "whole").is_file():
        _fetch()
    found = sorted(path for path in _FOLDER.rglob("*.*") if path.is_file() and path.suffix not in _NO_IMAGES)
    return [path for path in found if path.parent != _FOLDER]


def _fetch() -> None:
    _FOLDER.mkdir(parents=True, exist_ok=True)
    how = ["--no-deps", "--no-binary", "pillow", "--prefer-binary", "-c", str(ROOT / "constraints.txt")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *how]
    subprocess.run([*command, "-d", str(_FOLDER), "pillow", "scikit-image"], check=True, timeout=600)
    with tarfile.open(next(_FOLDER.glob("pillow-*.tar.gz"))) as tar:
        members = [member for member in tar if member.isfile() and "/Tests/images/" in member.name]
        tar.extractall(_FOLDER, members, filter="data")
    with zipfile.ZipFile(next(_FOLDER.glob("scikit_image-*.whl"))) as wheel:
        wheel.extractall(_FOLDER, [name for name in wheel.namelist() if name.startswith("skimage/data/")])
    (_FOLDER / "whole").touch()
