"""`kind = "folder"` of images: classes by folder as torchvision's ImageFolder has them, texts beside images."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError, ManifestError
from forebay.rows.meanings.image_class import labels_of
from forebay.rows.media_reader import MediaReader
from forebay.store.source_files import listed_files
from tests.preprocess.vision.corpus import DEMO
from tests.rows.pictures import picture, write_picture
from tests.rows.test_images_labels import config_of, rows_of, texts_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Photos of three classes, one of them deeper, one in no class, and what is no image."""
    for name, place in {
        "dogs.jpg": "dog/dogs.jpg",
        "cat.png": "cat/deep/er/cat.PNG",
        "coffee.webp": "cat/coffee.webp",
        "bird.jpg": "10/bird.JPEG",
        "nuthatch.jpg": "9/nuthatch.jpg",
        "brook.jpg": "loose.jpg",
    }.items():
        (tmp_path / "set" / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DEMO / "photos" / name, tmp_path / "set" / place)
    for place, text in {
        "dog/dogs.txt": "two dogs\n",
        "cat/deep/er/cat.txt": "\ufeffa cat",
        "cat/coffee.TXT": "",
        "dog/else.txt": "nobody's",
        "dog/.hidden.jpg": "x",
        ".git/x.jpg": "x",
        "notes.md": "x",
    }.items():
        (tmp_path / "set" / place).parent.mkdir(exist_ok=True)
        (tmp_path / "set" / place).write_text(text, encoding="utf-8")
    return tmp_path / "set"


def image_folder(root: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """Returns the classes and samples of torchvision.datasets.ImageFolder, by its documented rules."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    samples = []
    for number, name in enumerate(classes):
        for base, _, files in sorted(os.walk(root / name)):
            found = [file for file in sorted(files) if file.lower().endswith((".jpg", ".jpeg", ".png", ".webp"))]
            samples += [(f"{base}/{file}", number) for file in found if not file.startswith(".")]
    return classes, samples


def test_the_first_folder_is_the_class(folder: Path) -> None:
    config = config_of(folder, "folder")
    found = rows_of(config)
    classes, samples = image_folder(folder)
    labels = labels_of(found.rows)
    assert labels is not None
    assert labels.names == tuple(classes) == ("10", "9", "cat", "dog")
    expected = {Path(path).relative_to(folder).with_suffix("").as_posix(): classes[n] for path, n in samples}
    assert texts_of(found) == expected
    assert found.counts() == {"excluded": {"no_label": 1}, "failed": {}}
    assert found.unused == {"(hidden files)": 2, "(files that are no images)": 5}
    # Only the images are sources, and lookup lists the same.
    listed = [file.name for file in listed_files(config.source, meaning=config.meaning)]
    assert [file.name for file in found.files] == listed
    assert {Path(name).suffix.lower() for name in listed} == {".jpg", ".jpeg", ".png", ".webp"}
    with MediaReader(found.files, max_open=2) as read:
        for place in found.items["image"].to_pylist():
            data = read(place["file"], place["offset"], place["size"])
            assert data == found.files[place["file"]].path.read_bytes()


def test_texts_stand_beside_images(folder: Path) -> None:
    found = rows_of(config_of(folder, "folder", prompt="plain"))
    assert texts_of(found) == {"dog/dogs": "two dogs", "cat/deep/er/cat": "a cat"}
    assert found.counts()["excluded"] == {"no_text": 4}
    assert found.unused == {"(hidden files)": 2, "(files that are no images)": 1, "(texts without an image)": 1}
    assert "dog/dogs.txt" in [file.name for file in found.files]
    (folder / "dog" / "dogs.txt").write_bytes(b"\xff\xfe")
    assert rows_of(config_of(folder, "folder", prompt="plain")).counts()["failed"] == {"bad_text": 1}
    (folder / "dog" / "dogs.txt").write_bytes(b"x" * (1 << 21))
    assert rows_of(config_of(folder, "folder", prompt="plain")).counts()["failed"] == {"too_large": 1}
    (folder / "dog" / "dogs.txt").unlink()
    (folder / "dog" / "dogs.txt").symlink_to("gone.txt")
    assert rows_of(config_of(folder, "folder", prompt="plain")).counts()["failed"] == {"missing_file": 1}


def test_images_alone(folder: Path) -> None:
    found = rows_of(config_of(folder, "folder", prompt="none", max_samples=3))
    assert list(texts_of(found).values()) == [""] * 3


def test_a_bad_image_is_named_by_its_file(folder: Path) -> None:
    (folder / "dog" / "dogs.jpg").write_bytes(b"")
    (folder / "dog" / "link.jpg").symlink_to("gone.jpg")
    failed = [*rows_of(config_of(folder, "folder")).failed()]
    wanted = [("dog/dogs", "empty_file"), ("dog/link", "missing_file")]
    assert [(sample, reason) for sample, reason, _ in failed] == wanted
    assert failed[0][2].startswith("image dog/dogs.jpg: ")


def test_several_folders_are_one_source(tmp_path: Path) -> None:
    write_picture(tmp_path / "one" / "a" / "x.png", 1)
    write_picture(tmp_path / "two" / "b" / "x.png", 2)
    write_picture(tmp_path / "two" / "b" / "x.jpg", 3)
    config = config_of(tmp_path / "one", "folder")
    both = (str(tmp_path / "one"), str(tmp_path / "two"))
    found = rows_of(dataclasses.replace(config, source=dataclasses.replace(config.source, manifest=both)))
    assert list(texts_of(found).values()) == ["a", "b", "b"]
    assert len({*texts_of(found)}) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError, match=r"empty holds no manifest of kind folder"):
        rows_of(config_of(tmp_path / "empty", "folder"))


@pytest.mark.parametrize(
    ("source", "prompt", "message"),
    [
        ({"languages_from_folders": True}, "label", "source.languages_from_folders is for recordings"),
        ({"keep_columns": ["x"]}, "label", 'captions.column are not read from source.kind = "folder"'),
        ({"columns": {"label": "x"}}, "label", "for vision reads no columns by name"),
    ],
)
def test_settings_of_other_folders_are_refused(source: dict[str, Any], prompt: str, message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(folder, "folder", prompt=prompt, **source)


@given(
    names=st.lists(
        st.text(st.characters(exclude_characters="/\0", exclude_categories=()), min_size=1, max_size=6), max_size=5
    )
)
def test_any_names_are_classes(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("any")
    wanted = set()
    for number, name in enumerate(names):
        try:
            (root / name).mkdir()
            (root / name / f"{name}.png").write_bytes(picture(number))
        except (OSError, UnicodeEncodeError):
            continue
        if not name.startswith("."):
            wanted.add(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))
    if not wanted:
        return
    found = rows_of(config_of(root, "folder"))
    labels = labels_of(found.rows)
    assert labels is not None
    assert labels.names == tuple(sorted(wanted))
    assert len(found.rows) == len(wanted)


def test_an_image_whose_id_is_taken_has_its_file_s_name(tmp_path: Path) -> None:
    places = ["cat/1.jpg", "cat/1.png", "cat/2.webp", "dog/1.jpg", "dog/1.webp"]
    for seed, place in enumerate(places):
        write_picture(tmp_path / "set" / place, seed)
    config = config_of(tmp_path / "set", "folder")
    assert rows_of(config).rows["sample_id"].to_pylist() == ["cat/1", "cat/1.png", "cat/2", "dog/1", "dog/1.webp"]
    write_picture(tmp_path / "set" / "cat" / "0.jpg", 9)
    assert {"cat/1.png", "dog/1.webp"} < set(rows_of(config).rows["sample_id"].to_pylist())


def test_a_class_that_is_a_link_is_a_class_and_circles_end(folder: Path) -> None:
    before = texts_of(rows_of(config_of(folder, "folder")))
    shutil.move(folder / "cat", folder.parent / "far")
    os.symlink("../far", folder / "cat")
    os.symlink(folder.parent / "far" / "deep", folder / "9" / "twice")
    links: dict[str, str | Path] = {"loop": ".", "cat/up": "..", "9/top": folder.parent, "gone": "nowhere"}
    for name, target in links.items():
        os.symlink(target, folder / name)
    found = texts_of(rows_of(config_of(folder, "folder")))
    assert {name: found.pop(name) for name in before} == before
    assert [*found] == ["9/twice/er/cat"]
    with pytest.raises(ManifestError, match=r"9/twice/er/cat\.PNG', which is .*far/deep.* and not below"):
        rows_of(config_of(folder, "folder", confined=True))
