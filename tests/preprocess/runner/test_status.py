"""`forebay status` in every state of a build, whoever runs it; and that looking changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.here_pool import HerePool
from forebay.errors import BuildError
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import prepare
from forebay.preprocess.runner import parts as parts_module
from forebay.preprocess.runner.parts import HEARTBEAT_S, LOST_S, PartLog, read_parts
from forebay.preprocess.runner.status import status_of
from forebay.preprocess.shard_task import make_shard
from tests.commands import run, run_json
from tests.preprocess.corpus import Corpus, file_bytes, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.processes import ROOT, python

QUIET = Options(progress=False)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
    monkeypatch.setattr("forebay.store.memo._RACY_NS", 0)
    return speech_corpus(tmp_path)


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Lets builds end by an error in place of the shard of this number."""
    made = []

    def make(task: Any) -> Any:
        made.append(task)
        if len(made) > number:
            raise error
        return make_shard(task)

    monkeypatch.setattr("forebay.preprocess.build_run.make_shard", make)


def test_nothing_is_begun_and_nothing_is_made_by_looking(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.config()
    before = file_bytes(corpus.folder)
    code, out, err = run(capsys, "status", corpus.folder / "config.toml")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "not begun"
    assert out.splitlines()[1] == f"next: forebay preprocess {corpus.folder}/config.toml"
    assert file_bytes(corpus.folder) == before
    assert not corpus.root.exists()


def test_a_prepared_build(corpus: Corpus) -> None:
    config = corpus.config()
    key = prepare(config, QUIET).key
    before = file_bytes(corpus.folder)
    found = status_of(config)
    assert (found.state, found.key, found.samples, found.shards) == ("prepared", key, 17, 5)
    assert (found.finished, found.share) == ({"audio": 0, "text": 0}, 0.0)
    lines = [f"prepared: key {key[:16]}, 17 samples in 10 shards", "finished: 0 of 10 shards (0.0%): audio 0, text 0"]
    assert list(found.lines())[:2] == lines  # of all groups, as the lines of the parts are
    assert file_bytes(corpus.folder) == before
    corpus.add_tar("c.tar", ["c0"])
    assert any("train.parquet is not what it was" in note for note in status_of(config).notes)


def test_parts_that_ran_by_hand(corpus: Corpus) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    build_here(config, part=(0, 3))
    found = status_of(config)
    assert (found.state, found.finished) == ("building", {"audio": 2, "text": 2})
    assert found.share == pytest.approx(0.4)
    assert [part.state for part in found.parts] == ["done", "not started", "not started"]
    assert found.next == (f"forebay preprocess {corpus.folder}/config.toml --shards 1::3",)
    assert "parts: 1 done, 2 not started of 3" in list(found.lines())
    assert "  not started: 1-2" in list(found.lines())
    assert found.rows_a_second > 0
    assert found.seconds_left is not None
    # A shard that is gone again.
    next(corpus.root.glob(".building/*/audio/*.tdz")).unlink()
    assert status_of(config).parts[0].state == "incomplete"


def test_a_build_in_one_piece_without_a_prepared_build(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus.config()
    with monkeypatch.context() as patch:
        stop_at(patch, 4, BuildError("the disk is full\nsecond line"))
        with pytest.raises(BuildError, match="the disk is full"):
            build_here(config)
    found = status_of(config)
    assert (found.state, found.samples, found.shards, found.num_parts) == ("building", 17, 5, 0)
    assert sum(found.finished.values()) == 4
    assert found.share == pytest.approx(0.4)
    (part,) = found.parts
    assert (part.part, part.state, part.error, part.made) == (None, "failed", "the disk is full", 4)
    assert (part.pid, part.runner) == (os.getpid(), "local")
    assert found.next[-1] == f"forebay preprocess {corpus.folder}/config.toml"
    assert "this build failed" in "\n".join(found.lines())
    build_here(config)
    found = status_of(config)
    assert (found.state, found.samples, found.shards) == ("sealed", 17, 5)
    assert not (corpus.root / ".building").exists()


def test_an_interrupted_part_says_so(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    with monkeypatch.context() as patch:
        stop_at(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            build_here(config, part=(0, 2))
    found = status_of(config)
    assert [part.state for part in found.parts] == ["interrupted", "not started"]


def test_the_record_is_there_before_the_first_shard(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus.config()
    seen: list[Any] = []

    def look(task: Any) -> Any:
        seen.append(status_of(config))
        return make_shard(task)

    with monkeypatch.context() as patch:
        patch.setattr("forebay.preprocess.build_run.make_shard", look)
        build_here(config)
    first = seen[0]
    assert (first.state, first.shards, first.samples) == ("building", 5, 17)
    assert (first.parts[0].state, first.parts[0].to_make, first.parts[0].made) == ("running", 10, 0)
    assert first.next == ()


def test_a_run_that_is_killed_is_lost_and_what_it_made_is_kept(corpus: Corpus) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.preprocess.runner.held_part", str(corpus.folder / "config.toml")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert [part.state for part in status_of(config).parts] == ["running", "not started"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = status_of(config)
    assert [part.state for part in found.parts] == ["lost", "not started"]
    assert found.parts[0].pid == process.pid
    assert "part 0 lost" in "\n".join(found.lines())
    report = build_here(config, part=(0, 2))
    assert (report.shards_kept, report.shards_written) == (1, 5)
    assert [part.state for part in status_of(config).parts] == ["done", "not started"]


def test_a_silent_run_of_another_machine_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "this_place", lambda: "ffffffff")
    with PartLog(tmp_path, part=(1, 4), samples=3, shards=8):
        now = time.time()
        monkeypatch.undo()
        (record,) = read_parts(tmp_path, now=now)
        assert (record.state, record.part, record.samples, record.shards) == ("running", (1, 4), 3, 8)
        (record,) = read_parts(tmp_path, now=now + LOST_S + 5)
        assert record.state == "lost"
    (record,) = read_parts(tmp_path, now=now + LOST_S + 5)
    assert record.state == "done"
    assert 3 * HEARTBEAT_S < LOST_S


def test_a_heartbeat_is_written_while_a_shard_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_LEAST_S", 0.01)
    monkeypatch.setattr(parts_module, "HEARTBEAT_S", 0.02)
    with PartLog(tmp_path, part=None) as log:
        first = read_parts(tmp_path, now=time.time())[0].last_sign
        log.made(rows=4, by_this_run=True)
        for _ in range(200):
            time.sleep(0.01)
            (record,) = read_parts(tmp_path, now=time.time())
            if record.last_sign > first and record.rows == 4:
                break
        assert record.last_sign > first
        assert (record.made, record.rows) == (1, 4)
    assert not [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]


def test_what_is_being_made_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of thousands of clips take minutes: until the first one is done a build had made nothing."""
    monkeypatch.setattr(parts_module, "_LEAST_S", 0.01)
    monkeypatch.setattr(parts_module, "HEARTBEAT_S", 0.02)
    rows = [0]
    with PartLog(tmp_path, part=None) as log:
        log.begin(to_make=2, rows_to_make=2000, unit="clip", kept=0, linked=0, under_way=lambda: rows[0])
        rows[0] = 700
        for _ in range(200):
            time.sleep(0.01)
            (record,) = read_parts(tmp_path, now=time.time())
            if record.under_way:
                break
        assert (record.made, record.rows, record.under_way) == (0, 0, 700)
        assert record.history[-1][2] == 700  # so there is a rate, and a time that is left
    assert read_parts(tmp_path, now=time.time())[0].under_way == 0


def test_a_record_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with PartLog(tmp_path / "absent", part=None) as log:
        log.begin(to_make=1, rows_to_make=1, unit="clip", kept=0, linked=0, under_way=lambda: 0)
        log.made(rows=1, by_this_run=True)
    assert read_parts(tmp_path / "absent", now=0.0) == []


def test_a_part_that_runs_again_takes_the_place_of_its_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken"), PartLog(tmp_path, part=(0, 2)):
        raise ValueError("broken\nfurther")
    (path,) = (tmp_path / "parts").iterdir()
    path.rename(path.with_name("0-of-2.0123abcd-1.run"))
    (record,) = read_parts(tmp_path, now=time.time())
    assert (record.state, record.error) == ("failed", "broken")
    (tmp_path / "parts" / "1-of-2.x.run").write_text("{")
    with PartLog(tmp_path, part=(0, 2)):
        pass
    (record,) = read_parts(tmp_path, now=time.time())
    assert record.state == "done"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"part": 3}', '{"history": [1]}', '{"state": "running"}', "\udce9"])
def test_a_record_that_is_no_record_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "all.run").write_bytes(os.fsencode(text))
    assert read_parts(tmp_path, now=time.time()) == []


def test_a_cache_that_would_have_to_be_hashed_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = corpus.config()
    build_here(config)
    for path in corpus.folder.glob("*.tar"):
        os.utime(path)
    found = status_of(config)
    assert found.state == "sealed"
    assert "would have to be hashed" in found.notes[0]


def test_the_document_is_json(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    build_here(config, part=(1, 2))
    document = run_json(capsys, "status", corpus.folder / "config.toml")
    assert document == json.loads(json.dumps(status_of(config).to_json())) | {
        name: document[name] for name in ("rows_a_second", "shards_a_second", "seconds_left", "window_s")
    }
    assert [part["state"] for part in document["parts"]] == ["not started", "done"]


def test_nothing_heavy_is_loaded(corpus: Corpus) -> None:
    config = corpus.config()
    prepare(config, QUIET)
    build_here(config, part=(1, 2))
    code = (
        "import sys; from forebay.cli import main; code = main(['status', sys.argv[1]])\n"
        "print([name for name in ('torch', 'transformers', 'pandas', 'soundfile') if name in sys.modules], code)"
    )
    result = python("-c", code, corpus.folder / "config.toml", is_warm=False)
    assert result.stdout.splitlines()[-1] == "[] 0", result.stderr
