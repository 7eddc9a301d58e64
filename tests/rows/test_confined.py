"""`source.confined`: a stranger's manifest reads nothing outside of its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay import cli
from forebay.config import SourceConfig
from forebay.errors import BuildError, CacheMismatchError, CacheNotFoundError, ManifestError
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import recipe_of
from forebay.store.lookup import failures_of, find_cache, require
from forebay.train.select import make_loader
from tests.preprocess.corpus import Corpus, flac, tone
from tests.rows.helpers import read_rows
from tests.rows.pictures import picture, read_conversations


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a clip and a picture, and the same outside of it."""
    inside = tmp_path / "inside"
    inside.mkdir()
    for place in (inside, tmp_path):
        (place / "a.flac").write_bytes(flac(tone(1, duration_s=0.1)))
        (place / "a.png").write_bytes(picture(1))
    (inside / "link.flac").symlink_to(tmp_path / "a.flac")
    (inside / "link.png").symlink_to(tmp_path / "a.png")
    return inside


def listed(folder: Path, name: str, *, confined: bool) -> Any:
    if name.endswith(".png"):
        row: dict[str, Any] = {"image": name, "question": "q", "answer": "a"}
        read: Any = read_conversations
    else:
        row, read = {"audio": name, "text": "t"}, read_rows
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    source = SourceConfig(kind="jsonl", manifest=str(folder / "train.jsonl"), confined=confined)
    return read(source, cache_root=folder / "caches").rows


@pytest.mark.parametrize("end", ["flac", "png"])
@pytest.mark.parametrize("where", ["../a", "link", "sub/../../a", "ABSOLUTE"])
def test_a_name_that_leads_out_is_refused(folder: Path, where: str, end: str) -> None:
    name = f"{folder.parent}/a.{end}" if where == "ABSOLUTE" else f"{where}.{end}"
    (folder / "sub").mkdir()
    assert len(listed(folder, name, confined=False)) == 1
    with pytest.raises(
        ManifestError, match=r"train\.jsonl names .*a\.(flac|png)' and not below .*inside.*source\.confined"
    ):
        listed(folder, name, confined=True)


@pytest.mark.parametrize("name", ["a.flac", "a.png", "./a.png", "sub/../a.flac"])
def test_what_lies_inside_is_read(folder: Path, name: str) -> None:
    (folder / "sub").mkdir()
    assert len(listed(folder, name, confined=True)) == 1


CONFINED = "source.confined=true"
QUIET = Options(progress=False)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Two tars in the manifest's own folder."""
    (tmp_path / "stranger").mkdir()
    corpus = Corpus(tmp_path / "stranger")
    corpus.add_tar("a.tar", ["a1", "a2", "a3"])
    corpus.add_tar("b.tar", ["b1", "b2"])
    return corpus


def lead_out(path: Path) -> None:
    """Puts a link in the place of a file: what it leads to lies beside the folder."""
    outside = path.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("jsonl", "train.jsonl"), ("text", "train.jsonl"), ("filelist", "train.tsv"), ("webdataset", "a.tar")],
)
@pytest.mark.parametrize("how", ["named", "in its folder"])
def test_a_manifest_that_is_a_link_is_refused(kind: Any, name: str, how: str, folder: Path) -> None:
    (folder / name).write_text("{}\n")
    lead_out(folder / name)
    entry = folder / name if how == "named" else folder
    source = SourceConfig(kind=kind, manifest=str(entry), confined=True)
    with pytest.raises(
        ManifestError, match=rf"names .*{name}', which is .*outside-{name}' and not below .*source.confined"
    ):
        read_rows(source, cache_root=folder / "caches")


@pytest.mark.parametrize("name", ["a.tar", "train.parquet"])
def test_a_link_in_the_folder_stops_the_build(corpus: Corpus, name: str) -> None:
    corpus.config()
    lead_out(corpus.folder / name)
    with pytest.raises(ManifestError, match=rf"{name}', which is .*outside-{name}' and not below"):
        build(corpus.config(CONFINED), QUIET)
    assert not list(corpus.root.glob("*-train-*"))


def test_a_cache_that_was_built_without_it_is_not_handed_out(
    corpus: Corpus, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    lead_out(corpus.folder / "a.tar")
    report = build(corpus.config(), QUIET)
    config = corpus.config(CONFINED)
    assert find_cache(config, recipe_of(config)).found is None
    assert "it was made of 'a.tar', which is" in caplog.text
    with pytest.raises(CacheNotFoundError):
        require(config, find_cache(config, recipe_of(config)))
    with pytest.raises(CacheMismatchError, match=r"made of 'a.tar', which is .*outside-a.tar'; source.confined allows"):
        find_cache(
            corpus.config(CONFINED, f"loader.cache_dir={report.cache}"),
            recipe_of(corpus.config(CONFINED, f"loader.cache_dir={report.cache}")),
        )
    with pytest.raises(ManifestError, match=r"a.tar', which is .* and not below"):
        make_loader(config)
    assert cli.main(["inspect", config.path, "--set", CONFINED]) == cli.NO_CACHE
    assert "source.confined allows no place outside" in capsys.readouterr().err + caplog.text
    assert find_cache(corpus.config(), recipe_of(corpus.config())).found is not None


def test_a_cache_whose_sources_lay_inside_answers_both(corpus: Corpus) -> None:
    report = build(corpus.config(), QUIET)
    assert build(corpus.config(CONFINED), QUIET).already_sealed
    assert (
        str(
            require(
                corpus.config(CONFINED), find_cache(corpus.config(CONFINED), recipe_of(corpus.config(CONFINED)))
            ).folder
        )
        == report.cache
    )


@pytest.mark.parametrize("confined", [True, False])
def test_of_a_manifest_that_the_config_has_not_only_the_mark_tells(corpus: Corpus, *, confined: bool) -> None:
    corpus.config()
    shutil.copy(corpus.folder / "train.parquet", corpus.folder / "more.parquet")
    given = ['source.manifest=["train.parquet", "more.parquet"]', "run.max_failed_share=1"]
    report = build(corpus.config(*given, *([CONFINED] if confined else [])), QUIET)
    config = corpus.config(CONFINED, f"loader.cache_dir={report.cache}")
    message = "sources.more.parquet differs" if confined else "'more.parquet' is not here"
    with pytest.raises(CacheNotFoundError if confined else CacheMismatchError, match=message):
        require(config, find_cache(config, recipe_of(config)))


@pytest.mark.parametrize("confined", [True, False])
def test_without_its_raw_data_only_the_mark_of_its_build_tells(
    corpus: Corpus, *, confined: bool, caplog: pytest.LogCaptureFixture
) -> None:
    build(corpus.config(*([CONFINED] if confined else [])), QUIET)
    (corpus.folder / "a.tar").unlink()
    assert (find_cache(corpus.config(CONFINED), recipe_of(corpus.config(CONFINED))).found is not None) == confined
    assert ("nothing says where it lay" in caplog.text) != confined
    assert find_cache(corpus.config(), recipe_of(corpus.config())).found is not None


def test_a_cache_with_too_many_failures_is_not_handed_out_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = Corpus(tmp_path)
    corpus.add_tar("a.tar", [f"a{n}" for n in range(10)], broken={"a8": b"no audio", "a9": b""})
    many = corpus.config("run.max_failed_share=0.5")
    report = build(many, QUIET)
    assert report.failed
    assert build(many, QUIET).already_sealed
    few = corpus.config("run.max_failed_share=0.1")
    pattern = (
        r"was sealed with 2 of 10 samples bad \(.*\), and run.max_failed_share = 0.1 allows 1; .*rejected.jsonl.*--set"
    )
    with pytest.raises(BuildError, match=pattern):
        build(few, QUIET)
    found = require(few, find_cache(few, recipe_of(few)))
    assert failures_of(few, found) is not None
    assert failures_of(many, found) is None
    make_loader(few)
    assert "was sealed with 2 of 10 samples bad" in caplog.text
