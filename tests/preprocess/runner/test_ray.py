"""Builds on a Ray cluster of two nodes on this machine: the bytes of one process, whatever is lost on the way."""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.objects.server import Bucket
from forebay import load_config
from forebay.errors import BuildError, ConfigError, MissingExtraError
from forebay.preprocess import pipeline
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.preprocess.runner import ray as runner_ray
from forebay.preprocess.runner.ray import Ray, address_of, imported
from forebay.task_map import WorkerDied
from tests.commands import run
from tests.faults.building import finished_shards
from tests.preprocess.corpus import Corpus, shard_bytes, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.preprocess.runner import shards
from tests.preprocess.runner.nodes import add_node, on_ray, two_nodes
from tests.preprocess.test_pool import die_at, die_once
from tests.remote.conftest import bucket, environment, proxy, server
from tests.text_corpus import text_config

__all__ = ["bucket", "environment", "proxy", "server"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each. They and the workers of one driver cost 8 s of CPU, which the tests here share."""
    pytest.importorskip("ray")
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[Ray]:
    """A driver: the builds of the tests stay with its workers."""
    with Ray(cluster.address) as ray:
        yield ray


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards that one process makes of the corpus."""
    return shard_bytes(Path(build_here(speech_corpus(tmp_path_factory.mktemp("one")).config()).cache))


@pytest.mark.usefixtures("connected")
def test_shards_are_those_of_one_process(corpus: Corpus, wanted: dict[str, bytes]) -> None:
    report = on_ray(corpus.config())
    assert (report.sealed, report.num_samples, report.shards_written) == (True, 17, 10)
    assert shard_bytes(Path(report.cache)) == wanted
    assert not (corpus.root / ".building").exists()


def test_tasks_are_taken_as_there_is_room_for_them(connected: Ray) -> None:
    taken: list[int] = []
    done = 0
    for _ in connected.run(abs, _noted(range(40), taken)):
        assert len(taken) - done <= 2 * 2
        done += 1
    assert done == len(taken) == 40


def _noted(tasks: range, taken: list[int]) -> Iterator[int]:
    for task in tasks:
        taken.append(task)
        yield task


def test_an_error_of_a_task_is_the_error_of_the_driver(connected: Ray) -> None:
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        list(connected.run(math.sqrt, [-1.0]))
    assert list(connected.run(math.sqrt, [4.0])) == [(4.0, 2.0)]


def test_a_child_that_dies_twice_is_reported_with_its_task_and_row(connected: Ray, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match=r"died twice over one task .signal SIGKILL") as caught:
        list(connected.run(die_at, [7]))
    assert (caught.value.task, caught.value.position) == (7, 7)
    assert list(connected.run(die_once, [str(tmp_path / "once")])) == [(str(tmp_path / "once"), "second try")]


@pytest.mark.usefixtures("connected")
@pytest.mark.wide
def test_a_sample_that_kills_its_worker_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.preprocess.build_run.make_shard", shards.crashing_make_shard)
    with pytest.raises(BuildError, match=r'signal SIGSEGV.*sample .a6. .*exclude = \["a6"\]') as caught:
        on_ray(corpus.config())
    assert "finished shards are kept" in str(caught.value)
    assert on_ray(corpus.config('source.exclude=["a6"]')).num_samples == 16


@pytest.mark.usefixtures("connected")
def test_nodes_of_other_numerics_are_refused(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline._measured

    def other(*args: Any, **named: Any) -> Any:
        probe, constants = real(*args, **named)
        return {**probe, "audio": "0" * 32}, constants

    monkeypatch.setattr(pipeline, "_measured", other)
    here = socket.gethostname()
    with pytest.raises(
        BuildError,
        match=rf"audio steps give other values on node {here} \(probe \w+\) than on {here} \(probe 0+\).*--runner ray",
    ):
        on_ray(corpus.config())


@pytest.mark.usefixtures("connected")
def test_a_node_without_the_raw_data_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = corpus.folder / "hidden"

    def hide(*args: Any, **kwargs: Any) -> Any:
        (corpus.folder / "b.tar").rename(hidden)
        return ()

    monkeypatch.setattr("forebay.preprocess.build_run.stores_of", hide)
    with pytest.raises(
        BuildError, match=rf"b\.tar is not there on node {socket.gethostname()}.*mount the raw data.*at the same path"
    ):
        on_ray(corpus.config())
    hidden.rename(corpus.folder / "b.tar")
    monkeypatch.undo()
    assert on_ray(corpus.config()).shards_kept > 0


@pytest.mark.usefixtures("connected")
def test_a_cache_root_that_nodes_do_not_share_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.preprocess.build_run.sole_driver", _unwritten)
    with pytest.raises(BuildError, match=r"\.building/\w+ on node .* is not the folder .* --stage s3://"):
        on_ray(corpus.config())


class _unwritten:  # noqa: N801  a context in the place of a function
    def __init__(self, folder: Path, *, config: str) -> None: ...

    def __enter__(self) -> str:
        return "never written"

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.usefixtures("connected")
@pytest.mark.usefixtures("connected")
def test_texts_alone_are_made_there_too(tmp_path: Path) -> None:
    """8 s of CPU: two workers and this process load a tokenizer of transformers."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    report = on_ray(text_config(there))
    assert (report.num_samples, report.shards_written) == (52, 4)
    assert shard_bytes(Path(report.cache)) == shard_bytes(Path(build_here(text_config(here)).cache))


@pytest.mark.usefixtures("connected", "environment")
def test_nodes_that_share_no_folder_stage_their_shards(
    corpus: Corpus, bucket: Bucket, wanted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    monkeypatch.setattr("forebay.preprocess.build_run.make_shard", shards.Within(said))
    stores = (f"run.cache_root={bucket.url}/caches", f"remote.shard_dir={tmp_path / 'node'}", "remote.retries=0")
    report = on_ray(corpus.config(*stores), stage=f"{bucket.url}/stage")
    assert report.sealed
    names = [name for name in bucket.names("caches") if name.endswith(".tdz")]
    assert {name.split("/", 2)[2]: bucket.get(name) for name in names} == wanted


@pytest.mark.wide
@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("name", ["demo_speech", "demo_vision"])
def test_the_demo_caches_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """20 s of CPU: two workers on Ray load transformers for each."""
    path = Path(__file__).parents[3] / "configs" / f"{name}.toml"
    caches = [
        make(load_config(path, overrides=[f'run.cache_root="{tmp_path / make.__name__}"'])).cache
        for make in (build_here, on_ray)
    ]
    assert shard_bytes(Path(caches[0])) == shard_bytes(Path(caches[1]))


def test_a_node_that_is_lost_costs_what_it_was_making(cluster: Any, connected: Ray) -> None:
    """6 s of CPU: one node more, and its workers."""
    node = add_node(cluster, num_cpus=2)
    connected._looked_s = 0.0
    done = []
    for task, _ in connected.run(shards.pause, [0.4 + 0.001 * i for i in range(16)]):
        done.append(task)
        if len(done) == 4:
            cluster.remove_node(node, allow_graceful=False)
    assert len(set(done)) == 16


@pytest.mark.wide
def test_interrupted_and_killed_drivers_leave_what_was_finished(
    cluster: Any, connected: Ray, corpus: Corpus, wanted: dict[str, bytes]
) -> None:
    """12 s of CPU: two drivers of their own, each with its workers."""
    corpus.config()
    first = _driver(corpus, cluster.address, signal.SIGINT, after=1)
    assert first.returncode == 130, first.stderr
    assert "what was finished is kept, run the command again" in first.stderr
    kept = finished_shards(corpus.root)
    assert kept >= 1
    second = _driver(corpus, cluster.address, signal.SIGKILL, after=kept + 1)
    assert second.returncode == -signal.SIGKILL
    report = on_ray(corpus.config())
    assert report.shards_kept > kept
    assert report.shards_kept + report.shards_written == 10
    assert shard_bytes(Path(report.cache)) == wanted


def _driver(corpus: Corpus, address: str, number: int, *, after: int) -> Any:
    """Returns how `forebay preprocess --runner ray` ended, which got a signal when some shards were finished."""
    code = (
        "import sys; from forebay.preprocess import build_run; from tests.preprocess.runner import shards\n"
        "build_run.make_shard = shards.slow_make_shard\n"
        "from forebay import cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    config = str(corpus.folder / "config.toml")
    arguments = ["preprocess", config, "--runner", "ray", "--address", address, "--no-progress"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    deadline_s = time.monotonic() + 120
    while finished_shards(corpus.root) < after and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(arguments, process.returncode, stderr=stderr)


@pytest.mark.parametrize("says", ["nothing", b"SSH-2.0-OpenSSH_9\r\n", "closed", "no port"])
def test_an_address_without_a_cluster_is_refused_at_once(
    corpus: Corpus, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, says: Any
) -> None:
    monkeypatch.setattr("forebay.preprocess.runner.ray.ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}" if says != "no port" else "head"
        if says == "closed":
            server.close()
        thread = threading.Thread(target=_say, args=(server, says), daemon=True)
        thread.start()
        corpus.config()
        config = corpus.folder / "config.toml"
        code, out, err = run(capsys, "preprocess", config, "--runner", "ray", "--address", address)
    assert (code, out) == (2, "")
    assert f"--address {address}: " in err
    assert "ray start" in err


def test_a_cluster_that_was_stopped_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        last = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: last)
    assert address_of(imported(), None) == "local"
    assert f"started here last, at {last}, is gone (Connection refused)" in caplog.text
    monkeypatch.setenv("RAY_ADDRESS", last)
    with pytest.raises(ConfigError, match=rf"RAY_ADDRESS={last}: no Ray cluster there .Connection refused"):
        address_of(imported(), None)
    assert address_of(imported(), "local") == "local"


def test_a_head_node_that_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would end the process, and name nobody."""
    monkeypatch.setattr(runner_ray, "_LOST_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray = Ray()
        ray._head = server.getsockname()[:2]
        assert ray._answers()
    with pytest.raises(BuildError, match=r"head node .* not answered at 127.0.0.1:\d+ for .*finished shards are kept"):
        ray._answers()


def _say(server: socket.socket, what: Any) -> None:
    try:
        connection, _ = server.accept()
    except OSError:
        return
    with connection:
        if isinstance(what, bytes):
            connection.sendall(what)
        time.sleep(2)


def test_an_interrupt_that_nobody_caught_is_not_lost() -> None:
    seen: list[int] = []
    with runner_ray._interrupts(seen):
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_address_needs_its_runner(corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    corpus.config()
    code, _, err = run(capsys, "preprocess", corpus.folder / "config.toml", "--address", "head:6379")
    assert code == 2
    assert "--address is of a Ray cluster: give --runner ray" in err


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forebay\[ray\]'"), Ray():
        pass


def test_a_cache_root_in_a_store_is_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"--runner ray: the cache root is s3://bucket/caches"):
        build(corpus.config('run.cache_root="s3://bucket/caches"'), Options(runner="ray"))


def test_a_node_with_another_forebay_or_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_node = runner_ray._by_value()
    host, kind, error = pickle.loads(on_node("0.0.9", b""))  # noqa: S301
    assert (host, kind) == (socket.gethostname(), "raised")
    assert "has forebay 0.2.0, and the driver has 0.0.9: install one version" in str(error)
    monkeypatch.setitem(sys.modules, "forebay.preprocess.runner.slurm", None)
    monkeypatch.delattr("forebay.preprocess.runner.slurm")
    with pytest.raises(RuntimeError, match=rf"cannot be imported on node {host} by .*python"):
        on_node("0.2.0", b"")


def test_an_error_that_no_pickle_gives_back_is_told() -> None:
    from forebay.preprocess.runner.slurm import _as_sent

    class LocalError(Exception): ...

    sent = _as_sent(LocalError("of a library"))
    assert isinstance(sent, BuildError)
    assert "LocalError: of a library" in str(sent)
    kept = BuildError("as it is")
    kept.add_note("on node7")
    assert pickle.loads(pickle.dumps(_as_sent(kept))).__notes__ == ["on node7"]  # noqa: S301
