from __future__ import annotations

import io
import logging
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from forebay.config import Config
from forebay.errors import (
    CacheCorruptError,
    CacheIncompleteError,
    CacheMismatchError,
    CacheNotFoundError,
    ConfigError,
)
from forebay.steps import table as tables
from forebay.steps.recipe import recipe_of
from forebay.store import lookup as lookup_module
from forebay.store import memo as memo_module
from forebay.store import source_files
from forebay.store.cache import open_cache
from forebay.store.files import hash_file, hash_opened
from forebay.store.key import ABSENT, SourceDigest, cache_key, differences, folder_name
from forebay.store.lookup import Lookup, find_cache, not_found_message, require, sealed_caches
from forebay.store.memo import Memo
from forebay.store.metadata import read_metadata, write_metadata
from forebay.store.source_files import SourceFile
from tests.store.sealed import DEMO_MODEL, DEMO_VISION, build, config_of, contents_of, raw_data
from tests.store.trees import flip, tree


def find(config: Config, **options: Any) -> Lookup:
    """Returns what is found of a config by its own recipe."""
    return find_cache(config, recipe_of(config), **options)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    raw_data(tmp_path / "data")
    return config_of(tmp_path)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets files that a test has just written count as old."""
    monkeypatch.setattr(memo_module, "_RACY_NS", -(10**15))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content was read."""
    names: list[str] = []

    def noted(file: io.FileIO) -> str:
        names.append(Path(os.fsdecode(file.name)).name)
        return hash_opened(file)

    monkeypatch.setattr(memo_module, "hash_opened", noted)
    return names


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(memo_module, "hash_now", refuse)


def test_a_sealed_cache_is_found_with_a_stat_a_file(
    config: Config, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(config)
    never(monkeypatch)
    found = find(config)
    assert (found.found is not None and found.found.folder, found.state) == (folder, "same")
    assert require(config, found).key == open_cache(folder).key


def test_looking_changes_nothing_where_all_is_known(config: Config, settled: None, tmp_path: Path) -> None:
    build(config)
    before = tree(tmp_path)
    find(config)
    assert tree(tmp_path) == before


def test_an_empty_or_absent_root_gives_nothing_and_hashes_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    never(monkeypatch)
    assert find(config) == Lookup(recipe=recipe_of(config))
    config.cache_root.mkdir()
    assert find(config) == Lookup(recipe=recipe_of(config))
    assert sealed_caches(config.cache_root) == []


def test_a_miss_by_recipe_hashes_nothing_and_names_the_field(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(config_of(tmp_path, audio={"features": "log_mel", "n_mels": 128}))
    never(monkeypatch)
    wanted = config_of(tmp_path, audio={"features": "log_mel", "n_mels": 80})
    found = find(wanted)
    assert found.found is None
    assert found.differs == [{"field": "audio.n_mels", "wanted": 80, "stored": 128}]
    message = not_found_message(wanted, found)
    assert (
        f"no cache for recipe {recipe_of(wanted).key[:16]} in {wanted.cache_root}; nearest is made_up-train-" in message
    )
    assert message.endswith(f"audio.n_mels differs (80 wanted, 128 stored); run: forebay preprocess {wanted.named}")
    with pytest.raises(CacheNotFoundError, match=r"audio\.n_mels differs \(80 wanted, 128 stored\)"):
        require(wanted, found)


def test_the_nearest_cache_is_of_the_same_name_and_then_of_the_fewest_differences(tmp_path: Path) -> None:
    raw_data(tmp_path / "data")
    build(config_of(tmp_path, source={"split": "test", "max_samples": 3}))
    near = build(config_of(tmp_path, source={"max_samples": 3}))
    build(replace(config_of(tmp_path), name="other"))
    found = find(config_of(tmp_path, source={"max_samples": 4}))
    assert found.nearest is not None
    assert found.nearest.folder == near
    assert found.differs == [{"field": "source.max_samples", "wanted": 4, "stored": 3}]


def test_changed_content_of_the_same_size_and_time_never_hits(config: Config, settled: None, tmp_path: Path) -> None:
    build(config)
    path = tmp_path / "data" / "00001.tar"
    before = os.stat(path)
    with open(path, "r+b") as file:  # the same inode
        file.write(b"TAR")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(path)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    found = find(config)
    assert (found.found, found.state) == (None, "changed")
    (difference,) = found.differs
    assert difference["field"] == "sources.00001.tar"
    assert difference["wanted"] == hash_file(path) != difference["stored"]
    assert "sources.00001.tar differs" in not_found_message(config, found)
    path.write_bytes(b"tar 1")
    assert find(config).state == "same"


def test_changed_content_within_the_tick_of_its_hashing_never_hits(config: Config, hashed: list[str]) -> None:
    """Nothing is `settled` here: every file is too young to be believed."""
    build(config)
    hashed.clear()
    assert find(config).state == "same"
    assert hashed == ["00000.tar", "00001.tar"]


def test_a_file_of_another_size_is_not_read(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(config)
    never(monkeypatch)
    (tmp_path / "data" / "00000.tar").write_bytes(b"longer than before")
    found = find(config)
    assert (found.found, found.state) == (None, "changed")
    assert found.differs == [{"field": "sources.00000.tar", "wanted": "18 bytes", "stored": "5 bytes"}]


def test_a_moved_root_hits(config: Config, tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(config)
    (tmp_path / "else").mkdir()
    os.rename(tmp_path / "data", tmp_path / "else" / "data")
    os.rename(tmp_path / "caches", tmp_path / "else" / "kept")
    never(monkeypatch)  # the same inodes
    moved = config_of(tmp_path / "else", run={"cache_root": "kept"})
    found = find(moved)
    assert found.state == "same"
    assert found.found is not None
    assert found.found.folder == tmp_path / "else" / "kept" / folder.name


def test_a_copied_root_hits_after_one_hashing(config: Config, tmp_path: Path, settled: None, hashed: list[str]) -> None:
    build(config)
    for name in ("data", "caches"):
        shutil.copytree(tmp_path / name, tmp_path / "copy" / name)
    hashed.clear()
    for _ in range(2):
        assert find(config_of(tmp_path / "copy")).state == "same"
    assert hashed == ["00000.tar", "00001.tar"]


def test_may_hash_false_says_unknown_instead_of_reading(
    config: Config, tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(config)
    (tmp_path / "data" / "00000.tar").touch()
    never(monkeypatch)
    found = find(config, may_hash=False)
    assert (found.found, found.state) == (None, "unknown")
    assert found.nearest is not None
    assert found.differs == [{"field": "sources", "wanted": "not hashed", "stored": found.nearest.key[:16]}]


def test_absent_raw_data_lets_the_newest_cache_serve(config: Config, tmp_path: Path, settled: None) -> None:
    first = build(config)
    raw_data(tmp_path / "data", num_tars=3)
    second = build(config, seed=1)
    os.utime(first / "metadata.json", ns=(1, 1))
    shutil.rmtree(tmp_path / "data")
    for number in range(4):  # nothing at all, then links alone whose disk is not mounted here
        found = find(config)
        assert found.state == "absent"
        assert found.found is not None
        assert found.found.folder == second
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{number:05d}.tar").symlink_to(tmp_path / "elsewhere")


def test_absent_manifests_of_one_folder_never_serve_for_each_other(tmp_path: Path, settled: None) -> None:
    raw_data(tmp_path / "data", num_tars=3)
    test, train, spread = (
        config_of(tmp_path, source={"manifest": manifest})
        for manifest in ("data/00000.tar", "data/00001.tar", ["data/00001.tar", "data/00002.tar"])
    )
    (of_test, of_train) = build(test), build(train, seed=1)
    shutil.rmtree(tmp_path / "data")
    assert [require(config, find(config)).folder for config in (test, train)] == [of_test, of_train]
    assert find(spread).state == "changed"
    third = find(config_of(tmp_path, source={"manifest": "data/00003.tar"}))
    assert (third.found, third.state) == (None, "changed")


def test_of_absent_folders_the_cache_of_the_configs_name_serves(tmp_path: Path, settled: None) -> None:
    folders = {}
    for seed, name in enumerate(("test", "train")):
        raw_data(tmp_path / name, num_tars=seed + 1)
        config = replace(config_of(tmp_path, source={"manifest": name}), name=name)
        folders[build(config, seed=seed)] = config
        shutil.rmtree(tmp_path / name)
    assert [require(config, find(config)).folder for config in folders.values()] == [*folders]


def test_of_two_caches_of_a_recipe_the_one_of_these_sources_is_found(
    config: Config, tmp_path: Path, settled: None
) -> None:
    first = build(config)
    raw_data(tmp_path / "data", num_tars=3)
    second = build(config, seed=1)
    os.utime(first / "metadata.json", ns=(1, 1))
    assert require(config, find(config)).folder == second
    (tmp_path / "data" / "00002.tar").unlink()
    assert require(config, find(config)).folder == first


@pytest.mark.parametrize(
    ("change", "field"),
    [("one more", "sources.00002.tar"), ("one less", "sources.00001.tar"), ("renamed", "sources.00001.tar")],
)
def test_another_listing_misses_and_hashes_nothing(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, field: str
) -> None:
    build(config)
    never(monkeypatch)
    data = tmp_path / "data"
    if change == "one more":
        raw_data(data, num_tars=3)
    elif change == "one less":
        (data / "00001.tar").unlink()
    else:
        os.rename(data / "00001.tar", data / "renamed.tar")
    found = find(config)
    assert (found.found, found.state) == (None, "changed")
    assert field in [difference["field"] for difference in found.differs]
    assert not_found_message(config, found).endswith(f"run: forebay preprocess {config.named}")


def test_a_folder_that_gained_many_files_is_listed_a_few_times(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    build(config)
    raw_data(Path(config.source.manifests[0]), num_tars=40)
    listings = Mock(side_effect=source_files.entry_files)
    monkeypatch.setattr(source_files, "entry_files", listings)
    found = find(config)
    assert [row["field"] for row in found.differs] == [f"sources.{number:05d}.tar" for number in range(2, 40)]
    assert "00005.tar differs ('5 bytes' wanted, None stored); and 34 more; run: " in not_found_message(config, found)
    assert listings.call_count < 4


def test_another_manifest_of_one_folder_is_told_by_its_own_files(tmp_path: Path) -> None:
    raw_data(tmp_path / "data", num_tars=3)
    zero, one, two = (f"data/{number:05d}.tar" for number in range(3))
    build(config_of(tmp_path, source={"manifest": [zero, one, two]}))
    found = find(config_of(tmp_path, source={"manifest": two}))
    assert [row["field"] for row in found.differs] == ["sources.00000.tar", "sources.00001.tar"]
    assert [row["wanted"] for row in found.differs] == [None, None]  # the files are there, and not asked for
    (order,) = find(config_of(tmp_path, source={"manifest": [two, one, zero]})).differs
    assert order == {"field": "source.manifest", "wanted": "its files in this order", "stored": "another order"}


def test_the_order_of_manifests_is_in_the_key(config: Config, tmp_path: Path) -> None:
    raw_data(tmp_path / "more", num_tars=1)
    build(config_of(tmp_path, source={"manifest": ["data", "more"]}))
    assert find(config_of(tmp_path, source={"manifest": ["data", "more"]})).state == "same"
    assert find(config_of(tmp_path, source={"manifest": ["more", "data"]})).state == "changed"


def test_files_that_a_manifest_names_are_compared_too(config: Config, tmp_path: Path, settled: None) -> None:
    named = tmp_path / "data" / "named.bin"
    named.write_bytes(b"named")
    source = SourceFile("named.bin", named, 0, listed=False)
    build(config, named=[source])
    assert find(config).state == "same"
    named.write_bytes(b"NAMED")
    assert find(config).state == "changed"
    named.unlink()  # the listing is here, and what it names is not
    assert find(config).state == "absent"
    (tmp_path / "data" / "00000.tar").write_bytes(b"TAR 0")
    assert find(config).state == "changed"


def test_loose_files_are_looked_at_once_each(
    config: Config, tmp_path: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"loose/{number}.wav" for number in range(5)]
    (tmp_path / "data" / "loose").mkdir()
    for name in names:
        (tmp_path / "data" / name).write_bytes(name.encode())
    build(config, named=[SourceFile(name, tmp_path / "data" / name, 0, listed=False) for name in names])
    looked: list[str] = []
    real = os.stat

    def noted(path: Any, *args: Any, **options: Any) -> os.stat_result:
        looked.append(str(path))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", noted)
        assert find(config).state == "same"
    assert [looked.count(str(tmp_path / "data" / name)) for name in names] == [1] * len(names)


def test_a_file_that_was_not_there_at_the_build_changes_the_data_when_it_comes(
    config: Config, tmp_path: Path, settled: None
) -> None:
    named = tmp_path / "data" / "named.bin"
    build(config, named=[SourceFile("named.bin", named, 0, listed=False)])
    assert find(config).state == "same"
    for content in (b"", b"here now"):
        named.write_bytes(content)
        assert find(config).state == "changed"


def test_layout_and_run_time_sections_still_hit(config: Config, tmp_path: Path, settled: None) -> None:
    build(config)
    other = config_of(
        tmp_path,
        layout={"rows_per_shard": 7},
        plan={"batch_size": 3},
        loader={"seed": 5, "num_threads": 0},
        run={"num_workers": 9},
    )
    assert find(other).state == "same"
    assert find(replace(config, name="renamed")).state == "same"


def test_a_cache_named_outright_is_compared_all_the_same(config: Config, tmp_path: Path, settled: None) -> None:
    folder = build(config)
    os.rename(folder, tmp_path / "named")
    named = config_of(tmp_path, loader={"cache_dir": "named"})
    assert require(named, find(named)).folder == tmp_path / "named"
    assert find(config).found is None
    (tmp_path / "data" / "00000.tar").write_bytes(b"TAR 0")
    assert find(named).state == "changed"
    shutil.rmtree(tmp_path / "data")
    assert find(named).state == "absent"


def test_a_cache_of_another_recipe_named_outright_is_an_error(config: Config, tmp_path: Path) -> None:
    folder = build(config)
    other = config_of(tmp_path, loader={"cache_dir": str(folder)}, source={"max_samples": 2})
    with pytest.raises(
        CacheMismatchError, match=r"source\.max_samples is None in the cache, 2 in the config; change the config"
    ):
        find(other)


def test_a_cache_whose_key_was_made_in_another_way_is_named_by_recipe_key(config: Config, tmp_path: Path) -> None:
    folder = build(config)
    document = read_metadata(folder)
    write_metadata(folder, {**document, "recipe_key": "0" * 64})
    with pytest.raises(CacheMismatchError, match=r"recipe_key is '0000000000000000' in the cache"):
        find(config_of(tmp_path, loader={"cache_dir": str(folder)}))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gone", CacheNotFoundError, r"loader\.cache_dir .*gone is not a folder; run: forebay preprocess"),
        ("empty", CacheIncompleteError, "it is not sealed"),
        ("plan", CacheMismatchError, r"loader\.cache_dir .*plan is not a cache"),
    ],
)
def test_a_folder_named_outright_that_is_no_cache_is_an_error(
    config: Config, tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "plan").mkdir()
    write_metadata(tmp_path / "plan", {"format_version": 1, "key": "0"})
    with pytest.raises(error, match=message):
        find(config_of(tmp_path, loader={"cache_dir": name}))


def test_what_cannot_be_read_is_logged_and_left_out(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build(config)
    for name in ("flipped", "newer", "other.tmp-0123456789ab", ".building"):
        shutil.copytree(folder, config.cache_root / name)
    flip(config.cache_root / "flipped" / "metadata.json", 77)
    write_metadata(config.cache_root / "newer", {"format_version": 99})
    (config.cache_root / "plans").mkdir()
    (config.cache_root / "file").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert [sealed.folder for sealed in sealed_caches(config.cache_root)] == [folder]
    assert len(caplog.messages) == 2
    assert "flipped" in caplog.text
    assert "format_version is 99" in caplog.text


def test_a_cache_whose_sources_are_damaged_is_left_out_so_that_it_is_made_again(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build(config)
    flip(folder / "sources.parquet", 40)
    with caplog.at_level(logging.WARNING):
        found = find(config)
    assert (found.found, found.differs) == (None, [])
    assert found.nearest is not None
    assert found.nearest.folder == folder
    assert "leaving out" in caplog.text
    assert "sources.parquet: stored xxh3-128" in caplog.text
    with pytest.raises(CacheCorruptError, match=r"sources\.parquet: stored xxh3-128"):
        find(config_of(tmp_path, loader={"cache_dir": str(folder)}))


def test_a_memo_that_came_with_a_cache_is_used(config: Config, settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    build(config)
    (config.cache_root / memo_module.FILE_NAME).unlink()
    never(monkeypatch)
    assert find(config).state == "same"


def test_a_memo_that_is_handed_in_is_used(config: Config, settled: None, hashed: list[str]) -> None:
    folder = build(config)
    for path in (config.cache_root / memo_module.FILE_NAME, folder / memo_module.FILE_NAME):
        path.unlink()
    memo = Memo(config.cache_root)
    hashed.clear()
    assert find(config, memo=memo).state == "same"
    assert find(config, memo=memo).state == "same"
    assert len(hashed) == 2


# Keys


TEXT_COLUMNS = ("text", "language", "id", "prompt")
TEXT_SOURCES: list[dict[str, Any]] = [{}, {"rows": "0:10"}, *({"columns": {name: "x"}} for name in TEXT_COLUMNS)]

KEY_CHANGES: list[tuple[str, str, Any]] = [
    ("source", "split", "test"),
    ("source", "min_duration_s", 0.5),
    ("source", "max_duration_s", 20.0),
    ("source", "duration_tolerance", 1.0),
    ("source", "languages", ["en"]),
    ("source", "max_samples", 3),
    ("source", "exclude", ["a"]),
    ("source", "max_sample_bytes", 1000),
    ("source", "kind", "tar"),
    ("source", "keep_columns", ["speaker"]),
    ("audio", "sample_rate_hz", 8000),
    ("audio", "features", "w2v_bert"),
    ("audio", "dtype", "float32"),
    ("text", "prompt", "whisper"),
    ("text", "language_tag_mode", "none"),
    ("text", "normalize", "none"),
    ("text", "end_token", False),
    ("text", "normalize", ["nfkc", "lower"]),
    ("text", "language", "detect"),
    ("text", "max_label_tokens", 7),
]
TEXT = {"tokenizer": str(DEMO_MODEL)}


@pytest.mark.parametrize(("section", "field", "value"), KEY_CHANGES)
def test_every_field_that_changes_values_changes_the_key_and_is_named(
    tmp_path: Path, section: str, field: str, value: Any
) -> None:
    base = recipe_of(config_of(tmp_path, text=TEXT))
    sections: dict[str, dict[str, Any]] = {"text": dict(TEXT)}
    sections[section] = {**sections.get(section, {}), field: value}
    other = recipe_of(config_of(tmp_path, **sections))
    assert other.key != base.key
    named = [difference["field"] for difference in differences(other.document, base.document)]
    assert f"{section}.{field}" in named


def test_fields_that_need_others_change_the_key(tmp_path: Path) -> None:
    variants = [
        config_of(tmp_path),
        config_of(tmp_path, text=TEXT),
        config_of(tmp_path, text={"tokenizer": str(DEMO_MODEL.parent / "qwen3_asr_model")}),
        *(config_of(tmp_path, source={"max_duration_s": 9.0, "overlong": o}) for o in ("keep", "clip", "drop")),
        *(config_of(tmp_path, audio={"features": "log_mel", "n_mels": n}) for n in (80, 128)),
        config_of(tmp_path, audio={"features": "log_mel", "keep_waveform": True}),
        config_of(tmp_path, audio={"features": "qwen3_asr"}),
        *(
            config_of(tmp_path, source={"kind": "hf", "columns": {name: "x"}})
            for name in ("audio", "text", "language", "id", "duration")
        ),
        *(
            config_of(tmp_path, source={"kind": "folder", "languages_from_folders": is_named})
            for is_named in (True, False)
        ),
        config_of(tmp_path, source={"keep_columns": ["speaker", "snr"]}),
        *(
            config_of(tmp_path, text=TEXT, audio={"features": "none"}, source={"kind": "text", **more})
            for more in TEXT_SOURCES
        ),
        *(
            config_of(tmp_path, text={**TEXT, "language": mode, **more})
            for mode in ("detect", "detect_missing")
            for more in ({}, {"languages": ["en", "hi"]}, {"min_confidence": 0.7})
        ),
    ]
    assert len({recipe_of(config).key for config in variants}) == len(variants)


def test_columns_at_their_defaults_are_in_no_key_of_texts(tmp_path: Path) -> None:
    config = config_of(tmp_path, text=TEXT, audio={"features": "none"}, source={"kind": "text"})
    assert not [name for name in recipe_of(config).document["source"] if name.endswith("_column")]


VISION = {"processor": str(DEMO_VISION)}

VISION_CHANGES: list[tuple[str, str, Any, str]] = [
    ("source", "rows", "0:10", "source.rows"),
    ("source", "max_samples", 3, "source.max_samples"),
    ("source", "exclude", ["a"], "source.exclude"),
    ("source", "max_sample_bytes", 1000, "vision.max_sample_bytes"),
    ("source", "max_pixels", 1000, "vision.max_pixels"),
    ("source", "split", "test", "source.split"),
    ("source", "kind", "jsonl", "source.kind"),
    ("vision", "backend", "torchvision", "vision.backend"),
    ("vision", "alpha", "drop", "vision.alpha"),
]


@pytest.mark.parametrize(("section", "field", "value", "name"), VISION_CHANGES)
def test_every_field_that_changes_the_values_of_images_changes_the_key(
    tmp_path: Path, section: str, field: str, value: Any, name: str
) -> None:
    base = recipe_of(config_of(tmp_path, vision=VISION))
    sections: dict[str, dict[str, Any]] = {"vision": dict(VISION)}
    sections[section] = {**sections.get(section, {}), field: value}
    other = recipe_of(config_of(tmp_path, **sections))
    assert other.key != base.key
    assert name in [difference["field"] for difference in differences(other.document, base.document)]


PROCESSED_CHANGES: list[tuple[str, Any]] = [("alpha", "drop"), ("table", False), ("leave_out", ["image_grid_thw"])]


@pytest.mark.parametrize(("field", "value"), PROCESSED_CHANGES)
def test_every_setting_of_a_processor_changes_the_key(tmp_path: Path, field: str, value: Any) -> None:
    processed = {**VISION, "images": "processor"}
    base = recipe_of(config_of(tmp_path, vision=processed))
    other = recipe_of(config_of(tmp_path, vision={**processed, field: value}))
    assert [difference["field"] for difference in differences(other.document, base.document)] == [f"vision.{field}"]


@pytest.mark.parametrize(("name", "value"), [("learn_through", "newline"), ("train_on", "last"), ("strip_text", True)])
def test_what_is_learnt_changes_the_key_of_conversations(tmp_path: Path, name: str, value: str) -> None:
    chat = {"tokenizer": str(DEMO_VISION), "prompt": "chat"}
    base = recipe_of(config_of(tmp_path, vision=VISION, text=chat))
    assert recipe_of(config_of(tmp_path, vision=VISION)).key == base.key
    other = recipe_of(config_of(tmp_path, vision=VISION, text={**chat, name: value}))
    assert [difference["field"] for difference in differences(other.document, base.document)] == [f"text.{name}"]
    refused = f'text.{name}: unknown field of prompt = "plain"; it is only for prompt = "chat"'
    with pytest.raises(ConfigError, match=refused):
        recipe_of(config_of(tmp_path, text={**TEXT, name: value}))


def test_files_of_processor_and_tokenizer_change_the_key_of_images(tmp_path: Path) -> None:
    keys = set()
    for name in ("same", "processor", "template"):
        shutil.copytree(DEMO_VISION, tmp_path / name)
    (tmp_path / "processor" / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Qwen2VLImageProcessor"}'
    )
    (tmp_path / "template" / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("same", "processor", "template"):
        keys.add(recipe_of(config_of(tmp_path, vision={"processor": str(tmp_path / name)})).key)
    assert len(keys) == 3
    assert recipe_of(config_of(tmp_path, vision=VISION)).key in keys


def test_the_codec_is_in_the_folder_and_not_in_the_key(tmp_path: Path) -> None:
    configs = {
        codec: config_of(tmp_path, vision={**VISION, "codec": codec}) for codec in ("raw", "zstd", "webp", "source")
    }
    assert len({recipe_of(config).key for config in configs.values()}) == 1
    names = {codec: folder_name(config, "0123456789abcdef99") for codec, config in configs.items()}
    assert names["raw"].endswith("-0123456789abcdef")
    assert [names[codec].rpartition(".")[2] for codec in ("zstd", "webp", "source")] == ["zstd", "webp", "source"]


def test_columns_of_an_hf_source_are_in_the_key_of_images(tmp_path: Path) -> None:
    columns = ("image", "question", "answer", "messages", "id")
    configs = [config_of(tmp_path, vision=VISION, source={"kind": "hf", "columns": {name: "x"}}) for name in columns]
    assert len({recipe_of(config).key for config in configs}) == len(columns)


WINDOW_CHANGES = (("timestamps", True), ("previous_text", 0.5), ("no_speech", 0.5))


def test_every_setting_of_windows_changes_the_key(tmp_path: Path) -> None:
    segments, text = {"kind": "kaldi", "window_s": 30.0}, {**TEXT, "prompt": "whisper"}
    wanted = [
        config_of(tmp_path, source={**segments, **source}, text={**text, **more})
        for source, more in (
            *(({}, {}), ({"window_s": 20.0}, {})),
            *(({}, {name: value}) for name, value in WINDOW_CHANGES),
        )
    ]
    assert len({recipe_of(config).key for config in wanted}) == len(wanted)


def test_every_field_of_the_keyed_sections_is_tried(tmp_path: Path) -> None:
    """A new field of the config tree or of a step is added to the lists above, or to those that change no value."""
    tried = {(section, field) for section, field, _ in KEY_CHANGES}
    tried |= {("source", "overlong"), ("audio", "n_mels"), ("audio", "keep_waveform"), ("text", "tokenizer")}
    tried |= {("columns", name) for name in TEXT_COLUMNS}
    tried |= {("columns", name) for name in ("audio", "text", "language", "id", "duration", "features", "labels")}
    tried |= {("source", "languages_from_folders")}
    tried |= {("columns", name) for name in ("image", "question", "answer", "messages")}
    tried |= {("columns", "label")}  # tests/rows/test_images_labels.py
    tried |= {(section, field) for section, field, _, _ in VISION_CHANGES} | {
        ("text", "learn_through"),
        *(("text", "train_on"), ("text", "strip_text")),
        ("text", "pairs"),  # tests/train/test_pairs.py
        ("text", "boxes"),  # tests/images/test_boxes.py
    }
    tried |= {("vision", field) for field, _ in PROCESSED_CHANGES}
    tried |= {("text", "languages"), ("text", "min_confidence")}
    tried |= {("audio", name) for name in tables.settings_of("audio", "mel")}  # tests/steps/audio/test_mel.py
    tried |= {("audio", name) for name in tables.settings_of("audio", "extractor")}  # .../test_extractor.py
    tried |= {("audio", "energy"), ("audio", "pitch"), ("audio", "speeds")}  # tests/train/augment/test_variants.py
    tried |= {("columns", name) for name in ("start", "end", "channel")}  # tests/rows/test_segments.py
    tried |= {("source", "window_s"), *(("text", name) for name, _ in WINDOW_CHANGES)}
    tried |= {("text", name) for name in ("blank_token", "add_bos", "add_eos")}  # tests/steps/text/test_tts.py
    tried |= {("text", name) for name in ("speaker_column", "speakers", "language_codes")}
    tried |= {("source", "captions")}  # tests/steps/model/test_captions.py
    tried |= {("source", "more_images")}  # tests/preprocess/vision/test_more_images.py
    tried |= {("source", "meaning")}  # tests/config/test_meaning.py
    tried |= {("text", name) for name in ("classes", "max_length", "padding", "truncation")}  # tests/images
    tried |= {("vision", "fps"), ("vision", "max_frames"), ("source", "max_video_s")}  # tests/images/test_videos.py
    tried |= {("vision", "crops"), ("vision", "crop_share")}  # tests/images/test_image_windows.py
    tried |= {("vision", "sound")}  # tests/images/test_sound_of_videos.py
    tried |= {("text", "phones")}  # tests/steps/text/normal/
    config = config_of(tmp_path, text=TEXT)
    assert config.audio is not None
    assert config.text is not None
    known = {
        (section, field.name)
        for section, part in (
            *(("source", config.source), ("columns", config.source.columns)),
            *(("audio", config.audio), ("text", config.text)),
        )
        for field in fields(part)
        if field.name != "settings"
    }
    for section, group in (("audio", "audio"), ("text", "text"), ("vision", "image")):
        known |= {(section, setting) for name in tables.STEPS[group] for setting in tables.settings_of(group, name)}
    unkeyed = {
        ("source", name)
        for name in ("manifest", "columns", "audio_dir", "image_dir", "texts", "confined", "remote_identity")
    }
    assert known - tried == unkeyed


def test_paths_and_run_time_sections_never_change_the_key(tmp_path: Path) -> None:
    base = recipe_of(config_of(tmp_path, text=TEXT)).key
    shutil.copytree(DEMO_MODEL, tmp_path / "elsewhere" / "tokenizer")
    others = [
        config_of(tmp_path / "elsewhere", text={"tokenizer": "tokenizer"}),
        config_of(tmp_path, text=TEXT, source={"manifest": ["a", "/b"]}),
        config_of(tmp_path, text=TEXT, layout={"rows_per_shard": 3}),
        config_of(tmp_path, text=TEXT, source={"confined": True}),
        config_of(tmp_path, text=TEXT, source={"keep_columns": []}),
        config_of(tmp_path, text=TEXT, plan={"batch_seconds": 3, "edges_s": [1, 2], "lockstep": 2, "tail": "drop"}),
        config_of(
            tmp_path,
            text=TEXT,
            loader={"seed": 3, "cache": "off"},
            train={"model": "m", "max_steps": 5, "output_dir": "o"},
        ),
        config_of(tmp_path, text=TEXT, run={"num_workers": 7, "max_failed_share": 0.5, "max_open_tars": 3}),
        replace(config_of(tmp_path, text=TEXT), name="other"),
        config_of(tmp_path, text=TEXT, audio={"dtype": "int16"}),  # the default written out
    ]
    assert [recipe_of(config).key for config in others] == [base] * len(others)


def test_filters_that_let_the_same_rows_through_have_one_key(tmp_path: Path) -> None:
    def key(**source: Any) -> str:
        return recipe_of(config_of(tmp_path, source=source)).key

    assert key(max_duration_s=20) == key(max_duration_s=20.0)
    assert key(languages=["en", "fr"]) == key(languages=["FR", "en", "fr"]) != key(languages=["en"])
    assert key(exclude=["a", "b"]) == key(exclude=["b", "a", "a"]) != key(exclude=["A", "b"])
    config = config_of(tmp_path, source={"max_duration_s": 20.0, "min_duration_s": 0})
    in_code = replace(config, source=replace(config.source, max_duration_s=20, min_duration_s=0))
    assert recipe_of(in_code).key == recipe_of(config).key


def test_the_key_is_of_names_contents_and_order_of_the_sources() -> None:
    a, b = SourceDigest(name="a", xxh3_128="0"), SourceDigest(name="b", xxh3_128="1")
    swapped = [SourceDigest(name="a", xxh3_128="1"), SourceDigest(name="b", xxh3_128="0")]
    variants = [
        cache_key("r", [a, b]),
        cache_key("r", [b, a]),
        cache_key("r", swapped),
        cache_key("r", [a]),
        cache_key("s", [a, b]),
    ]
    assert len(set(variants)) == 5
    assert cache_key("r", [a, b]) == variants[0]
    assert all(len(key) == 64 for key in variants)


def test_a_folder_is_named_by_config_split_and_key(tmp_path: Path) -> None:
    assert (
        folder_name(config_of(tmp_path, source={"split": "dev"}), "0123456789abcdef99")
        == "made_up-dev-0123456789abcdef"
    )


def test_differences_know_types_and_sections() -> None:
    wanted = {"a": {"x": 1, "y": [1], "same": (1, 2)}, "text": None, "new": 3, "none": None}
    stored = {"a": {"x": 1.0, "y": [True], "same": [1, 2]}, "text": {"t": 1}}
    assert differences(wanted, stored) == [
        {"field": "a.x", "wanted": 1, "stored": 1.0},
        {"field": "a.y", "wanted": [1], "stored": [True]},
        {"field": "new", "wanted": 3, "stored": ABSENT},
        {"field": "none", "wanted": None, "stored": ABSENT},
        {"field": "text", "wanted": None, "stored": {"t": 1}},
    ]
    assert differences(stored, stored) == []


def test_the_document_survives_the_metadata(config: Config) -> None:
    stored = read_metadata(build(config))["recipe"]
    assert differences(recipe_of(config).document, stored) == []


def test_the_made_up_caches_of_these_tests_open(config: Config, tmp_path: Path) -> None:
    cache = open_cache(build(config))
    expected = contents_of(tmp_path / "again").arrays["lengths.npy"]
    np.testing.assert_array_equal(cache.lengths["num_audio_samples"], expected[0])
    assert lookup_module.SOURCES_NAME in cache.metadata["files"]


def test_a_mistyped_manifest_is_no_absent_raw_data(config: Config, tmp_path: Path, settled: None) -> None:
    build(config_of(tmp_path, source={"manifest": "data/00000.tar"}))
    mistyped = config_of(tmp_path, source={"manifest": "data/0000.tar"})
    found = find(mistyped)
    assert (found.found, found.state) == (None, "changed")
    assert [difference["field"] for difference in found.differs] == ["sources.00000.tar"]
