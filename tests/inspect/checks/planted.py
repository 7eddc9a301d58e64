"""The demo's recordings, copied, with faults that a test plants; and what lint finds in them."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from forebay.config.tree import Config
from forebay.inspect.checks.limits import Limits
from forebay.inspect.checks.lint import LintOptions, LintReport, Target, lint
from forebay.inspect.checks.measured import Finding
from forebay.steps.recipe import load_config
from tests.preprocess.corpus import write_tar

DEMO = Path(__file__).resolve().parents[3] / "demo" / "speech"
RATE_HZ = 16_000
Samples = np.ndarray[Any, np.dtype[np.int16]]


@functools.cache
def _demo() -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    rows = pq.read_table(DEMO / "train.parquet").to_pylist()
    members = {}
    for path in sorted(DEMO.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for info in tar:
                file = tar.extractfile(info)
                assert file is not None
                members[info.name] = file.read()
    return rows, members


def encoded(samples: Samples, *, rate_hz: int = RATE_HZ, form: str = "FLAC") -> bytes:
    """Returns a clip as a file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate_hz, format=form, subtype="VORBIS" if form == "OGG" else "PCM_16")
    return buffer.getvalue()


@dataclass
class Planted:
    """The demo's clips in one tar with a parquet manifest, and a config beside them; `config` writes them."""

    folder: Path
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of_demo(cls, folder: Path) -> Planted:
        """Returns the clean recordings."""
        rows, members = _demo()
        planted = cls(folder)
        for row in rows:
            planted.rows[row["sample_id"]] = dict(row)
            planted.data[row["sample_id"]] = members[row["tar_member_name"]]
        return planted

    def samples(self, name: str) -> Samples:
        """Returns the samples of a clip."""
        found, rate_hz = soundfile.read(io.BytesIO(self.data[name]), dtype="int16")
        assert rate_hz == RATE_HZ
        return np.asarray(found)

    def put(self, name: str, samples: Samples, **how: Any) -> None:
        """Makes a clip's file one of these samples."""
        self.data[name] = encoded(samples, **how)

    def add(self, name: str, like: str, *, data: bytes | None = None, **columns: Any) -> None:
        """Adds a clip that is like another one."""
        self.rows[name] = {**self.rows[like], "sample_id": name, **columns}
        self.data[name] = self.data[like] if data is None else data

    def keep(self, *names: str) -> None:
        """Leaves these clips alone."""
        self.rows = {name: self.rows[name] for name in names}
        self.data = {name: self.data[name] for name in names}

    def config(self, *overrides: str, text: bool = False) -> Config:
        """Writes the corpus, and returns its config; with a tokenizer where `text` says so."""
        self.folder.mkdir(exist_ok=True)
        rows = [{**row, "tar_path": "train.tar", "tar_member_name": f"{name}.audio"} for name, row in self.rows.items()]
        write_tar(self.folder / "train.tar", {f"{name}.audio": self.data[name] for name in self.rows})
        pq.write_table(pa.Table.from_pylist(rows), self.folder / "train.parquet")
        section = f'[text]\ntokenizer = "{DEMO / "model"}"\nprompt = "whisper"\n' if text else ""
        path = self.folder / "config.toml"
        path.write_text(
            'name = "planted"\n[source]\nkind = "tar"\nmanifest = "train.parquet"\n'
            f'[audio]\nfeatures = "waveform"\n{section}'
            "[plan]\nbatch_size = 4\nedges_s = [5, 10]\n"
            '[run]\ncache_root = "caches"\nnum_workers = 2\nmax_failed_share = 1.0\n'
        )
        return load_config(path, overrides=overrides)


def linted(
    *configs: Config, against: tuple[Config, ...] = (), limits: Limits | None = None, **options: Any
) -> LintReport:
    """Returns what lint finds in configs."""
    wanted = LintOptions(limits=limits or Limits(), progress=False, **options)
    return lint([Target(config=each) for each in configs], [Target(config=each) for each in against], wanted)


def found(report: LintReport) -> set[tuple[str, str]]:
    """Returns check and id of every finding."""
    return {(each.check, each.sample_id) for each in report.findings}


def of_check(report: LintReport, check: str) -> Iterator[Finding]:
    """Yields the findings of a check."""
    yield from (each for each in report.findings if each.check == check)


def one(report: LintReport) -> Finding:
    """Returns the only finding."""
    assert len(report.findings) == 1, json.dumps([asdict(each) for each in report.findings], indent=1)
    return report.findings[0]
