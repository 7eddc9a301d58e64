"""`forebay inspect` of a cache of images: counts and bytes beside float32, for every codec; damage; refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from forebay import cli
from forebay.inspect.facts import INTERFACE, cache_facts
from forebay.inspect.inspect_lines import report_lines
from forebay.store.cache import open_cache
from forebay.store.image.codec import Codec
from forebay.terminal import WIDEST
from tests.commands import inspect
from tests.inspect.conftest import Built, image_hashes
from tests.store.trees import flip, tree

PATCH_BYTES, FLOAT32_PATCH_BYTES = 768, 1536 * 4


def facts_of(folder: Path) -> dict[str, Any]:
    facts = cache_facts(open_cache(folder), plan_roots=[folder.parent])
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    return facts


def stored_images(folder: Path, field: str) -> list[tuple[int, int]]:
    """Patches and stored bytes of every image that is whole."""
    cache, found = open_cache(folder), []
    for number in range(cache.unit_count("image")):
        rows = [cache.shard("image", number).row(row) for row in range(len(image_hashes(cache, number)))]
        found += [(int(row["image_grid_thw"].prod()), row[field].nbytes) for row in rows if len(row["image_grid_thw"])]
    return found


@pytest.mark.parametrize("codec", ["raw", "zstd", "webp", "source"])
def test_an_image_takes_what_is_stored_of_it_beside_float32(photos: Built, tmp_path: Path, codec: Codec) -> None:
    folder = photos.folder if codec == "raw" else photos.with_codec(tmp_path, codec)
    fields = {"raw": "patches", "zstd": "patches_zstd", "webp": "image_webp", "source": "image_file"}
    images = stored_images(folder, fields[codec])
    facts = facts_of(folder)
    assert facts["codec"] == codec
    # Whatever shards of text name them: the source file's images are stored once.
    assert facts["images"]["stored"] == len(images) == 3
    assert facts["bytes_per_image"] == pytest.approx(sum(size for _, size in images) / len(images))
    wanted = sum(patches for patches, _ in images) * FLOAT32_PATCH_BYTES / len(images)
    assert facts["float32_bytes_per_image"] == pytest.approx(wanted)
    ratio = facts["float32_bytes_per_image"] / facts["bytes_per_image"]
    assert ratio == pytest.approx(8) if codec == "raw" else ratio > 8
    line = next(line for line in report_lines(facts) if line.startswith("  an image"))
    assert line.endswith(f"{ratio:.3g} times as much")


def test_counts_are_those_of_samples_and_speech_fields_say_nothing(photos: Built) -> None:
    cache, facts = open_cache(photos.folder), facts_of(photos.folder)
    assert list(facts)[: len(INTERFACE)] == list(INTERFACE)
    assert (facts["num_samples"], facts["hours"], facts["languages"]) == (8, 0.0, {})
    assert (facts["histogram"], facts["bytes_per_hour"]) == (None, None)
    assert facts["images"]["used"] == sum(len(cache.read(i)["patches"]) for i in range(8)) == 8
    assert facts["num_tokens"] == sum(len(cache.read(i)["input_ids"]) for i in range(8))
    for name in ("tokens", "patches"):
        assert sum(facts["histograms"][name]["samples"]) == 8
        assert facts["histograms"][name]["edges"][-1] >= cache.lengths[f"num_{name}"].max()
    assert facts["fields"]["patches"]["shape"] == ["n", PATCH_BYTES]
    assert facts["failed"] == {"unreadable_image": 1}


def test_a_pack_takes_its_share_of_the_cache_beside_the_float32_of_its_images(photos: Built) -> None:
    cache, facts = open_cache(photos.folder), facts_of(photos.folder)
    (plan,) = facts["plans"]
    assert plan["bytes_per_pack"] == facts["size_bytes"] / plan["num_packs"]
    patches = int(cache.lengths["num_patches"].sum())
    assert plan["float32_bytes_per_pack"] == pytest.approx(patches * FLOAT32_PATCH_BYTES / plan["num_packs"], rel=1e-5)


def test_the_report_fits_a_terminal_and_speaks_of_no_hours(photos: Built, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(photos.folder)
    code, out, err = inspect(capsys, photos.folder)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in lines if len(line) > WIDEST and str(photos.corpus.root) not in line] == []
    heads = ["\nimages\n", "\nfields ", "tokens a sample", "patches a sample", "\nplans\n", "\nskipped\n", "\nrecipe\n"]
    positions = [out.index(head) for head in heads]
    assert positions == sorted(positions)
    report = out[: out.index("\nrecipe\n")]
    assert all(word not in report for word in ("hours", "languages", "duration", "no audio"))
    assert "    a pack: " in out
    assert tree(photos.folder) == before


def test_the_cache_dir_option_and_the_config_name_the_same_cache(
    photos: Built, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.inspect_cache(["--cache-dir", str(photos.folder), "--json"]) == 0
    by_folder = capsys.readouterr().out
    code, by_config, _ = inspect(capsys, photos.config, "--json")
    assert code == 0
    assert json.loads(by_config) == json.loads(by_folder)


def test_the_row_table_is_exported(photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.parquet"
    assert inspect(capsys, photos.folder, "--export", path) == (0, f"wrote {path}\n", "")
    table = pq.read_table(path)
    assert table.equals(open_cache(photos.folder).samples)
    assert json.loads(table["images"][table["sample_id"].to_pylist().index("both")].as_py()) == ["dogs.jpg", "bird.jpg"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sample", "0", "--wav", "a.wav"], "has no audio (its fields: input_ids, label_mask"),
        (["--bucket-manifests", "buckets"], "buckets are ranges of seconds, and"),
        (["--png", "a.png"], "--png needs --sample I"),
    ],
)
def test_what_is_of_speech_alone_is_refused(
    photos: Built,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = inspect(capsys, photos.config, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_image_is_found_by_verifying_and_when_it_is_shown(
    photos: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(photos.folder, tmp_path / photos.folder.name))
    patches = open_cache(folder).read(0)["patches"][0].tobytes()
    flip(folder / "image" / "00000.tdz", (folder / "image" / "00000.tdz").read_bytes().index(patches) + 1000)
    code, out, err = inspect(capsys, folder, "--verify", "--no-progress")
    assert (code, err) == (1, "")
    assert "verify: 1 problems" in out
    assert "\nimages\n" in out
    code, out, err = inspect(capsys, folder, "--sample", 0)
    assert (code, out) == (1, "")
    assert "stored xxh3-64" in err


def test_a_shard_that_is_not_there_leaves_the_float32_bytes_open(
    photos: Built, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = photos.with_codec(tmp_path, "webp")
    (folder / "image" / "00000.tdz").unlink()
    facts = facts_of(folder)
    assert facts["float32_bytes_per_image"] is None
    assert facts["bytes_per_image"] > 0
    assert "00000.tdz is missing" in caplog.text
    assert any("the grids cannot be read" in line for line in report_lines(facts))


def test_a_cache_without_samples_has_a_report(photos: Built) -> None:
    facts = facts_of(photos.folder)
    empty = {**facts, "num_samples": 0, "bytes_per_image": None, "images": {"stored": 0, "distinct": 0, "used": 0}}
    lines = list(report_lines(empty))
    assert "  used        0 times in 0 samples" in lines
    assert not any(line.startswith("  an image") for line in lines)
