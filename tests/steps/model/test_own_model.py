"""A class of the user as a model: what it declares is what is stored, its file is in the key, and code needs leave."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from forebay import Config, cli, load_config
from forebay.errors import ConfigError, ForebayError
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.train import make_loader
from tests.preprocess.corpus import shard_bytes
from tests.preprocess.here_pool import build_here
from tests.steps.model.test_families import PHOTOS, SPEECH, TEXTS, Corpus, of_sample, section

CODE = """
from pathlib import Path
import numpy as np

class Own:
    version = 1
    files = ["scale.txt"]
    fields = {
        "frames": {"dtype": "float32", "shape": [None, 2], "pad": 0.0},
        "frames_mask": {"dtype": "int64", "mask_of": "frames"},
        "word": {"dtype": "int64", "shape": [None]},
        "loud": {"dtype": "float32", "shape": []},
        "size": {"dtype": "int64", "shape": []},
    }

    def __init__(self, hop=160, sample_rate_hz=16000):
        self.hop, self.scale = hop, float(Path(__file__).with_name("scale.txt").read_text())

    def prepare(self, sample):
        (values,) = sample.values()
        if isinstance(values, str):
            if values == "two words":
                raise ValueError("these words are refused")
            values = np.frombuffer(values.encode(), np.uint8)
        return np.asarray(values, np.float32).reshape(-1)

    def forward(self, batch):
        frames = [np.stack([clip[:: self.hop] * self.scale, clip[:: self.hop]], axis=1) for clip in batch]
        return {
            "frames": frames,
            "word": [np.arange(len(clip) % 7) for clip in batch],
            "loud": np.array([abs(clip).max() for clip in batch], np.float32),
            "size": [np.int64(len(clip)) for clip in batch],
        }
"""
SCORE = """
class Own:
    version = 1
    fields = {"wide": {"dtype": "int64", "shape": []}}

    def prepare(self, sample):
        return sample["image"].shape[1]

    def forward(self, batch):
        return {"wide": batch}
"""
PLACED = """
import os
from dataclasses import dataclass
import numpy as np

@dataclass
class Heard:
    states: np.ndarray
    back: np.ndarray

class Own:
    version = 1
    fields = {"frames": {"dtype": "float32", "shape": [None, 2]}, "sum": {"dtype": "float32", "shape": []}}

    def __init__(self, *, notes, device):
        self.notes, self.device = notes, device

    def note(self, what):
        os.close(os.open(f"{self.notes}/{what}-{self.device}-{os.getpid()}", os.O_CREAT))

    def prepare(self, sample):
        self.note("prepare")
        return Heard(sample["hubert"], sample["hubert"][::-1])

    def forward(self, batch):
        self.note("forward")
        if len(batch[0].states) == 104 and os.path.lexists(f"{self.notes}/kill"):  # the third recording
            os.unlink(f"{self.notes}/kill")
            os.kill(os.getpid(), 9)
        frames = [np.stack([one.states[:, 0], one.back[:, 1]], axis=1).astype(np.float32) for one in batch]
        return {"frames": frames, "sum": [each.sum() for each in frames]}
"""
LEAVE = "[run]\nallow_code = true\n"


class Owned(Corpus):
    """A corpus beside whose config the class lies."""

    def __init__(self, folder: Path, *groups: str) -> None:
        super().__init__(folder, *groups)
        (folder / "own.py").write_text(CODE)
        (folder / "scale.txt").write_text("3.0")

    def write(self, text: str, *, leave: str = LEAVE) -> Config:
        path = self.folder / "config.toml"
        path.write_text(f'{text}\n{leave or "[run]"}\ncache_root = "caches"\nnum_workers = 1\nmax_failed_share = 0.5\n')
        return load_config(path)


def own(takes: str, *more: str) -> str:
    return section("own", takes, *more).replace('folder = "own"', 'folder = "own.py:Own"')


def test_a_class_of_the_user_gives_fields_and_columns(tmp_path: Path) -> None:
    corpus = Owned(tmp_path)
    cache = open_cache(build_here(corpus.write(SPEECH + own("audio", "args = {hop = 100}", "batch = 2"))).cache)
    rows = cache.table(["sample_id", "loud", "size"]).to_pylist()
    for index, row in enumerate(rows):
        clip = corpus.clips[int(row["sample_id"])]
        np.testing.assert_array_equal(of_sample(cache, "frames", index)[:, 0], clip[::100] * np.float32(3))
        assert len(of_sample(cache, "word", index)) == len(clip) % 7
        assert (row["loud"], row["size"]) == (np.abs(clip).max(), len(clip))
    assert cache.constants.of("own")["model"] == "equal in batches of 2"


def test_texts_and_images_come_as_they_are_and_a_sample_that_raises_is_counted(tmp_path: Path) -> None:
    corpus = Owned(tmp_path, "siglip")
    report = build_here(corpus.write(SPEECH + own("text", "args = {hop = 1}")))
    cache = open_cache(report.cache)
    assert report.failed == {"step_failed": 1}
    for index in range(len(cache)):
        text = TEXTS[int(cache.sample_id(index))]
        assert bytes(of_sample(cache, "frames", index)[:, 1].astype(np.uint8)).decode() == text
    cache = open_cache(build_here(corpus.write(PHOTOS + own("image", "args = {hop = 10000}"))).cache)
    assert cache.groups == ("own", "text")
    (tmp_path / "own.py").write_text(SCORE)
    config = corpus.write(PHOTOS + own("image"))
    build_here(config)
    with pytest.raises(ConfigError, match="its samples have columns alone, and a batch holds none"):
        make_loader(config)
    assert min(cache.table(["size"])["size"].to_pylist()) > 10_000


def test_the_key_is_the_file_its_version_its_files_and_its_arguments(tmp_path: Path) -> None:
    corpus = Owned(tmp_path)
    path, scale = tmp_path / "own.py", tmp_path / "scale.txt"

    def digest() -> str:
        return recipe_of(corpus.write(SPEECH + own("audio"))).models[0].step.digest

    first = digest()
    path.write_text(CODE + "# a comment\n")
    second = digest()
    path.write_text(CODE)
    scale.write_text("4.0")
    assert len({first, second, digest()}) == 3
    scale.write_text("3.0")
    assert digest() == first


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[None, 2]", "[None, 3]", r"gave frames as float32 \[\d+, 2\], declared float32 \[n, 3\]"),
        ('"dtype": "int64", "shape": [None]', '"dtype": "int32", "shape": [None]', "gave word as int64"),
        (
            '            "loud": np',
            '            "noisy": np',
            "gave .*'noisy': 1.* by field, wanted .*'loud': 1",
        ),
        ("for clip in batch], np.float32)", "for clip in batch[1:]], np.float32)", "'loud': 0.*'loud': 1"),
        ("frames = [np", "raise KeyError('no weights'); frames = [np", "forward raised KeyError: 'no weights'"),
        (
            "frames = [np",
            "raise RuntimeError('CUDA out of memory'); frames = [np",
            "MemoryError.*: CUDA.*make batch smaller",
        ),
        ('"shape": []', '"shape": 3', "see docs/model-steps.md"),
        ("hop=160, ", "", r"made with args = .* it raised TypeError: .*hop"),
        ('files = ["scale.txt"]', "files = []", "Own of model.own reads .*scale.txt, which it does not list"),
        ("version = 1", "version = one()", "written|plain values"),
        ("class Own", "class Other", "has no class Own; its classes: Other"),
        ("import numpy as np", "import nothing_like_it", "importing it raised ModuleNotFoundError"),
    ],
)
def test_what_is_not_as_it_was_declared_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    corpus = Owned(tmp_path)
    (tmp_path / "own.py").write_text(CODE.replace(old, new))
    with pytest.raises(ForebayError, match=message):
        build_here(corpus.write(SPEECH + own("audio", "args = {hop = 100}")))


def test_code_needs_leave_in_the_file_and_lies_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = Owned(tmp_path)
    with pytest.raises(ConfigError, match=r"is code, and run\.allow_code is false"):
        recipe_of(corpus.write(SPEECH + own("audio"), leave=""))
    with pytest.raises(ConfigError, match=r"model\.own\.keep is of a folder"):
        recipe_of(corpus.write(SPEECH + own("audio", 'keep = {x = {output = "frames"}}')))
    shutil.copy(tmp_path / "own.py", tmp_path.parent / "outside.py")
    text = SPEECH + own("audio").replace("own.py", "../outside.py")
    with pytest.raises(ConfigError, match="leads out of the config's folder"):
        recipe_of(corpus.write(text))
    (tmp_path / "linked.py").symlink_to(tmp_path / "own.py")
    with pytest.raises(ConfigError, match="is a link"):
        recipe_of(corpus.write(SPEECH + own("audio").replace("own.py", "linked.py")))
    (tmp_path / "own.py").write_text("raise SystemExit(3)\n" + CODE)
    config = corpus.write(SPEECH + own("audio"))
    for command in ("key", "lint"):  # they look, and run nothing
        assert cli.main([command, config.path]) == 0
    (tmp_path / "own.py").write_text(CODE)
    config = corpus.write(SPEECH + own("audio"))
    build_here(config)
    (tmp_path / "own.py").unlink()
    with pytest.raises(ConfigError, match=r"own\.py:Own is no folder"):
        recipe_of(config)
    assert cli.main(["inspect", str(next((tmp_path / "caches").glob("tiny-*")))]) == 0
    assert "own" in capsys.readouterr().out


def test_a_class_that_asks_for_its_device_runs_in_the_process_of_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus, notes = Owned(tmp_path, "hubert"), tmp_path_factory.mktemp("notes")
    (tmp_path / "own.py").write_text(PLACED)
    text = SPEECH + section("hubert", "audio") + own("hubert", f'args = {{notes = "{notes}"}}', "batch = 2")
    config = corpus.write(text + "[layout]\nrows_per_shard = 2\n")
    caches = [open_cache(build_here(config).cache)]
    assert {path.name for path in notes.iterdir()} == {f"{what}-cpu-{os.getpid()}" for what in ("prepare", "forward")}
    (notes / "kill").touch()
    changed = [f'run.cache_root="{tmp_path / "others"}"', 'run.devices=["cpu", "cpu"]', "run.num_workers=2"]
    config = load_config(config.path, overrides=changed)
    caches.append(open_cache(build(config, Options(progress=False)).cache))
    found = [(shard_bytes(Path(cache.place)), cache.constants, cache.metadata["made_with"]) for cache in caches]
    assert found[0] == found[1]
    prepare, forward = ({path.name[12:] for path in notes.glob(f"{what}-cpu-*")} for what in ("prepare", "forward"))
    assert prepare & forward == {str(os.getpid())}
    assert len(forward) == 4  # this one, two of devices, and the one in the place of that which was killed
    assert not (notes / "kill").exists()


@pytest.mark.parametrize(
    ("args", "answer", "message"),
    [
        ('device = "cpu"', "0", "device is in args, and .run. devices says it: leave it out"),
        (
            "",
            "lambda: 0",
            r"Own.prepare gives what no other process can be given \(arrays .*lambda.*; correct the class",
        ),
        ("", "self.lock", "gives what no other process can be given .*: cannot pickle"),
        ("", "open(__file__[:-6] + 'rows.jsonl').close()", "Own of model.own reads .*rows.jsonl, which it does not"),
    ],
)
def test_what_no_device_can_be_given_is_refused(
    tmp_path: Path, args: str, answer: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, told = (
        Owned(tmp_path),
        "def __init__(self, device):\n        import _thread as t; self.lock = t.allocate_lock()",
    )
    code = SCORE.replace("def prepare", f"{told}\n\n    def prepare").replace('sample["image"].shape[1]', answer)
    (tmp_path / "own.py").write_text(code)
    monkeypatch.setattr("forebay.preprocess.device_process.device", lambda: "/no/socket")
    with pytest.raises(ForebayError, match=message):
        build_here(corpus.write(SPEECH + own("audio", f"args = {{{args}}}")))
