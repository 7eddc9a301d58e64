"""Builds on a Ray cluster of two nodes on this machine: the bytes of one process, whatever is lost on the way."""

from __future__ import annotations

import math
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

from forebay.config.tree import Config
from forebay.errors import BuildError, ConfigError, MissingExtraError
from forebay.preprocess import pipeline
from forebay.preprocess.pipeline import build
from forebay.preprocess.pool import WorkerDied
from forebay.preprocess.report import BuildReport, Options
from forebay.preprocess.runner import ray as runner_ray
from forebay.preprocess.runner.ray import Ray
from tests.commands import run
from tests.faults.building import finished_shards
from tests.preprocess.corpus import Corpus, shard_bytes, speech_corpus
from tests.preprocess.here_pool import HerePool, build_here
from tests.preprocess.runner import shards
from tests.preprocess.test_pool import die_at, die_once

STORE_BYTES = 80 * 2**20
ON_RAY = Options(progress=False, runner="ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each. They and the workers of one driver cost 8 s of CPU, which the tests here share."""
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in runner_ray._ENVIRONMENT.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        try:
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[Ray]:
    """A driver: the builds of the tests stay with its workers."""
    with Ray(cluster.address) as ray:
        yield ray


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


def on_ray(config: Config) -> BuildReport:
    """Returns the report of a build whose shards are made on the cluster, and all else in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "Pool", HerePool)
        return build(config, ON_RAY)


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
def test_a_sample_that_kills_its_worker_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.preprocess.run.make_shard", shards.crashing_make_shard)
    with pytest.raises(BuildError, match=r'signal SIGSEGV.*sample .a6. .*exclude = \["a6"\]') as caught:
        on_ray(corpus.config())
    assert "finished shards are kept" in str(caught.value)
    assert on_ray(corpus.config('source.exclude=["a6"]')).num_samples == 16


@pytest.mark.usefixtures("connected")
def test_nodes_of_other_numerics_are_refused(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline._measured
    monkeypatch.setattr(pipeline, "_measured", lambda *args: ({**real(*args)[0], "media": "0" * 32}, real(*args)[1]))
    here = socket.gethostname()
    with pytest.raises(
        BuildError,
        match=rf"media steps give other values on node {here} \(probe \w+\) than on {here} \(probe 0+\).*--runner ray",
    ):
        on_ray(corpus.config())


@pytest.mark.usefixtures("connected")
def test_a_node_without_the_raw_data_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = corpus.folder / "hidden"

    def hide(*args: Any, **kwargs: Any) -> Any:
        (corpus.folder / "b.tar").rename(hidden)
        return ()

    monkeypatch.setattr("forebay.preprocess.run.stores_of", hide)
    with pytest.raises(
        BuildError, match=rf"b\.tar is not there on node {socket.gethostname()}.*mount the raw data.*at the same path"
    ):
        on_ray(corpus.config())
    hidden.rename(corpus.folder / "b.tar")
    monkeypatch.undo()
    assert on_ray(corpus.config()).shards_kept > 0


@pytest.mark.usefixtures("connected")
def test_a_cache_root_that_nodes_do_not_share_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.preprocess.run.sole_driver", _unwritten)
    with pytest.raises(BuildError, match=r"\.building/\w+ on node .* is not the folder .* --stage s3://"):
        on_ray(corpus.config())


class _unwritten:  # noqa: N801  a context in the place of a function
    def __init__(self, folder: Path, *, config: str) -> None: ...

    def __enter__(self) -> str:
        return "never written"

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.usefixtures("connected")
def test_a_node_that_is_lost_costs_what_it_was_making(cluster: Any, connected: Ray) -> None:
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    connected._looked_s = 0.0
    done = []
    for task, _ in connected.run(shards.node_of, [0.4 + 0.001 * i for i in range(16)]):
        done.append(task)
        if len(done) == 4:
            cluster.remove_node(node, allow_graceful=False)
    assert len(set(done)) == 16


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
        "import sys; from forebay.preprocess import run; from tests.preprocess.runner import shards\n"
        "run.make_shard = shards.slow_make_shard\n"
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
    monkeypatch.setattr(runner_ray, "_ANSWER_S", 0.5)
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


def _say(server: socket.socket, what: Any) -> None:
    try:
        connection, _ = server.accept()
    except OSError:
        return
    with connection:
        if isinstance(what, bytes):
            connection.sendall(what)
        time.sleep(2)


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
        build(corpus.config('run.cache_root="s3://bucket/caches"'), ON_RAY)


def test_a_node_with_another_forebay_or_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    on_node = runner_ray._by_value()
    host, kind, error = pickle.loads(on_node("0.0.9", b""))  # noqa: S301
    assert (host, kind) == (socket.gethostname(), "raised")
    assert "has forebay 0.1.0, and the driver has 0.0.9: install one version" in str(error)
    monkeypatch.setitem(sys.modules, "forebay.preprocess.runner.child", None)
    monkeypatch.delattr("forebay.preprocess.runner.child")
    with pytest.raises(RuntimeError, match=rf"cannot be imported on node {host} by .*python"):
        on_node("0.1.0", b"")


def test_an_error_that_no_pickle_gives_back_is_told() -> None:
    from forebay.preprocess.runner.child import _as_sent

    class LocalError(Exception): ...

    sent = _as_sent(LocalError("of a library"))
    assert isinstance(sent, BuildError)
    assert "LocalError: of a library" in str(sent)
    kept = BuildError("as it is")
    kept.add_note("on node7")
    assert pickle.loads(pickle.dumps(_as_sent(kept))).__notes__ == ["on node7"]  # noqa: S301
