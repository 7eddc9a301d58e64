"""`kind = "webdataset"`: tars of clips, and of images, beside their metadata."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import ManifestError
from forebay.preprocess.group import item_names
from tests.rows.helpers import SPEECH, audio, described, ids, read, rejected, write_tar
from tests.rows.pictures import asked, converse, images_of, picture
from tests.tar.files import END, header, member


def test_demo_rows_are_those_of_a_plain_loop_over_tarfile(tmp_path: Path) -> None:
    manifest = read("webdataset", SPEECH, root=tmp_path)
    rows = iter(manifest.rows.to_pylist())
    assert len(manifest.rows) > 40
    for number, path in enumerate(sorted(SPEECH.glob("*.tar"))):
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                if not member.name.endswith(".flac"):
                    continue
                row = next(rows)
                document = tar.extractfile(member.name.replace(".flac", ".json"))
                assert document is not None
                fields = json.loads(document.read())
                assert (row["file"], row["offset"], row["size"]) == (number, member.offset_data, member.size)
                assert row["sample_id"] == fields["id"]
                assert (row["text"], row["language"]) == (fields["transcription"], fields["language"])
                assert row["duration_s"] == fields["duration"]
    assert next(rows, None) is None


@pytest.mark.parametrize("entry", ["shards", "shards/*.tar", "shards/b.tar"])
def test_a_folder_a_glob_and_a_file_name_tars(tmp_path: Path, entry: str) -> None:
    for name in "ba":
        write_tar(tmp_path / "shards" / f"{name}.tar", {f"{name}.flac": audio()})
    (tmp_path / "shards" / "notes.md").write_text("no tar")
    manifest = read("webdataset", tmp_path / entry, root=tmp_path)
    assert ids(manifest) == (["b"] if entry.endswith("b.tar") else ["a", "b"])
    assert all(file.listed for file in manifest.files)


def test_members_pair_by_key_up_to_the_first_dot(tmp_path: Path) -> None:
    members = {
        "d/x.16k.FLAC": audio(800),
        "d/x.json": described(text="x"),
        "y_1.5s.wav": audio(800, kind="WAV"),
        "y_1.5s.json": described(text="one five"),
        "y_1.7s.wav": audio(800, kind="WAV"),
        "y_1.7s.txt": b"one seven",
        "z.flac": audio(800),
    }
    write_tar(tmp_path / "a.tar", members)
    manifest = read("webdataset", tmp_path / "a.tar", root=tmp_path)
    pairs = zip(ids(manifest), manifest.rows["text"].to_pylist(), strict=True)
    assert list(pairs) == [("d/x", "x"), ("y_1.5s", "one five"), ("y_1.7s", "one seven"), ("z", None)]
    assert not len(manifest.rejected)


def test_json_gives_id_language_text_and_never_an_exact_duration(tmp_path: Path) -> None:
    members = {
        "x.flac": audio(8000),
        "x.json": described(id="first", language="hi", duration=99.0, transcription="a", text="b", source="radio"),
        "y.flac": audio(8000),
        "y.json": described(id=17, duration="99", transcript="c", language=""),
        "z.ogg": audio(8000, kind="OGG"),
        "z.json": described(duration=3),
    }
    write_tar(tmp_path / "a.tar", members)
    manifest = read("webdataset", tmp_path / "a.tar", root=tmp_path)
    rows = manifest.rows.select(["sample_id", "explicit_id", "language", "text", "duration_s"]).to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        ("first", True, "hi", "a", 0.5),
        ("17", True, None, "c", 0.5),
        ("z", False, None, None, 3.0),
    ]


def test_default_ids_of_two_tars_lose_nothing_and_given_ones_fail(tmp_path: Path) -> None:
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", {"0.flac": audio(), "1.flac": audio(), "1.json": described(id="one")})
    manifest = read("webdataset", tmp_path, root=tmp_path)
    assert ids(manifest) == ["0", "one", "b/0"]
    assert rejected(manifest) == [("one", "failed", "duplicate_id")]


def test_nothing_is_left_out_in_silence(tmp_path: Path) -> None:
    members = [
        ("x.flac", audio()),
        ("x.json", b"{"),
        ("y.flac", audio()),
        ("y.wav", audio(kind="WAV")),
        ("z.flac", b"nothing"),
        ("alone.json", described(text="no clip")),
        ("good.flac", audio()),
        ("twice.flac", audio(100)),
        ("twice.flac", audio(200)),
        ("README", b"hello"),
    ]
    write_tar(tmp_path / "a.tar", members)
    (tmp_path / "b.tar").write_bytes(b"x" * 2000)
    manifest = read("webdataset", tmp_path, root=tmp_path)
    assert ids(manifest) == ["y", "good", "twice"]
    assert manifest.rows["duration_s"].to_pylist()[-1] == 200 / 16_000
    assert rejected(manifest) == [
        ("x", "failed", "bad_metadata"),
        ("y.wav", "excluded", "extra_audio"),
        ("z", "failed", "unknown_duration"),
        ("alone", "excluded", "no_audio"),
        ("twice.flac", "excluded", "extra_audio"),
        ("b.tar", "failed", "unreadable_tar"),
    ]


def test_members_that_the_index_refuses_are_listed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{n}.flac": audio() for n in "wxyz"})
    with tarfile.open(path) as tar:
        broken, cut = tar.getmember("x.flac").offset, tar.getmember("z.flac").offset_data
    data = bytearray(path.read_bytes())
    data[broken + 110] ^= 1
    path.write_bytes(data[: cut + 100])
    manifest = read("webdataset", path, root=tmp_path)
    assert ids(manifest) == ["w", "y"]
    assert rejected(manifest) == [("x", "failed", "bad_checksum"), ("z", "failed", "truncated")]


def test_names_that_are_not_utf8_are_read_all_the_same(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {os.fsdecode(b"\xe9\xe8.flac"): audio()})
    manifest = read("webdataset", tmp_path / "a.tar", root=tmp_path)
    assert ids(manifest) == [r"\udce9\udce8"]


def test_tars_without_audio_and_entries_without_tars_are_errors(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"README": b"hello"})
    with pytest.raises(ManifestError, match=r"a\.tar: no audio in any of its files"):
        read("webdataset", tmp_path / "a.tar", root=tmp_path)
    with pytest.raises(ManifestError, match=r"source\.manifest .*gone\.tar does not exist"):
        read("webdataset", tmp_path / "gone.tar", root=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError, match="holds no manifest of kind webdataset"):
        read("webdataset", tmp_path / "empty", root=tmp_path)
    with pytest.raises(ManifestError, match=r"names .*a\.tar twice"):
        read("webdataset", tmp_path / "a.tar", tmp_path, root=tmp_path)


_stems = st.sampled_from(["a", "b", "b.x", "d/a", "c.1", "c.2", ".h"])
_endings = st.sampled_from([".flac", ".FLAC", ".wav", ".json", ".txt", ".jpg", ""])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.tuples(_stems, _endings), max_size=10), document=st.sampled_from([b"{}", b"{", b'{"id": "a"}'])
)
def test_every_clip_is_a_row_or_is_listed(tmp_path: Path, names: list[tuple[str, str]], document: bytes) -> None:
    clip, other = audio(10), audio(10, kind="WAV")
    contents = {".flac": clip, ".FLAC": clip, ".wav": other, ".json": document}
    path = tmp_path / "a.tar"
    path.unlink(missing_ok=True)
    write_tar(path, [(stem + ending, contents.get(ending, b"text")) for stem, ending in names])
    clips = sum(ending.lower() in (".flac", ".wav") for _, ending in names)
    try:
        manifest = read("webdataset", path, root=tmp_path)
    except ManifestError:
        assert not clips
        return
    left_out = [reason for _, _, reason in rejected(manifest) if reason != "no_audio"]
    assert len(manifest.rows) + len(left_out) == clips
    assert len(set(ids(manifest))) == len(manifest.rows)


def test_compressed_tars_in_a_folder_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tar(tmp_path / "a.tar", {"x.flac": audio()})
    assert ids(read("webdataset", tmp_path, root=tmp_path)) == ["x"]
    assert caplog.messages == []
    for name in ("c.tgz", "b.tar.gz"):
        (tmp_path / name).write_bytes(b"\x1f\x8b")
    assert ids(read("webdataset", tmp_path, root=tmp_path)) == ["x"]
    assert caplog.messages == [f"2 compressed tars are left out, {tmp_path / 'b.tar.gz'} first; decompress them"]


def test_samples_of_one_and_of_several_images(tmp_path: Path) -> None:
    members = {
        "a.jpg": picture(1, kind="JPEG"),
        "a.json": described(**asked()),
        "f/b.json": described(messages=[{"role": "user", "content": "<image> then <image>, <image>"}], id=9),
        "f/b.10.webp": picture(3, kind="WEBP"),
        "f/b.1.png": picture(2),
        "f/b.jpeg": picture(1, kind="JPEG"),
        "./c.v2.json": described(**asked("images/of/c.JPG", id=None)),
        "c.v2.JPG": picture(4, kind="JPEG"),
        "d.json": described(**asked()),
        "notes.txt": b"read me",
    }
    manifest = converse("webdataset", write_tar(tmp_path / "t.tar", members), root=tmp_path)
    assert images_of(manifest) == {
        "a": ["a.jpg"],
        "9": ["a.jpg", "f/b.1.png", "f/b.10.webp"],
        "c.v2": ["c.v2.JPG"],
        "d": [],
    }
    assert not manifest.rejected.num_rows
    assert manifest.rows["group"].to_pylist() == [0] * 4
    assert [file.name for file in manifest.files] == ["t.tar"]


def test_tars_share_entries_but_not_groups(tmp_path: Path) -> None:
    for name in "ab":
        pair = {
            f"{n}.{kind}": data
            for n in range(2)
            for kind, data in (("png", picture(0)), ("json", described(**asked())))
        }
        write_tar(tmp_path / f"{name}.tar", pair)
    manifest = converse("webdataset", tmp_path, root=tmp_path)
    assert ids(manifest) == ["0", "1", "b/0", "b/1"]
    assert manifest.rows["images"].to_pylist() == [[0]] * 4
    assert manifest.rows["item_group"].to_pylist() == [0, 0, 1, 1]


def test_what_a_tar_lacks_is_counted(tmp_path: Path) -> None:
    members = [
        ("good.png", picture(1)),
        ("good.json", described(**asked())),
        ("alone.png", picture(2)),
        ("tags.json", described(**asked(question="<image>"))),
        ("named.json", described(**asked("x/named.jpg"))),
        ("broken.json", b"{"),
        ("latin.json", b'{"question": "\xff"}'),
        ("nested.json", b"[" * 100_000),
        ("list.json", b"[]"),
        ("empty.json", described(**asked())),
        ("empty.jpg", b""),
        ("wrong.json", described(**asked())),
        ("wrong.jpg", b"not an image at all, but long enough"),
    ]
    manifest = converse("webdataset", write_tar(tmp_path / "t.tar", members), root=tmp_path)
    assert ids(manifest) == ["good"]
    assert rejected(manifest) == [
        ("alone", "excluded", "no_conversation"),
        ("tags", "failed", "image_count_mismatch"),
        ("named", "failed", "image_count_mismatch"),
        ("broken", "failed", "bad_conversation"),
        ("latin", "failed", "bad_conversation"),
        ("nested", "failed", "bad_conversation"),
        ("list", "failed", "bad_conversation"),
        ("empty", "failed", "empty_file"),
        ("wrong", "failed", "unreadable_image"),
    ]
    messages = dict(
        zip(manifest.rejected["sample_id"].to_pylist(), manifest.rejected["message"].to_pylist(), strict=True)
    )
    assert "member named.json: names 1 images, the tar has 0 of them" in messages["named"]
    assert "t.tar:empty.jpg" in messages["empty"]


def test_refused_members_fail_their_samples(tmp_path: Path) -> None:
    good = member(b"good.json", described(**asked()))
    link = header(b"link.png", 0, kind=b"2") + member(b"link.json", described(**asked()))
    lost = header(b"lost.json", 0, kind=b"2") + header(b"notes.txt", 0, kind=b"2")
    cut = member(b"cut.json", described(**asked())) + header(b"cut.1.png", 10_000) + bytes(512)
    (tmp_path / "t.tar").write_bytes(good + link + lost + cut)
    manifest = converse("webdataset", tmp_path / "t.tar", root=tmp_path)
    assert ids(manifest) == ["good"]
    assert rejected(manifest) == [
        ("link", "failed", "symlink"),
        ("cut", "failed", "truncated"),
        ("lost", "failed", "symlink"),
    ]


def test_a_tar_that_is_none_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", {"x.json": described(**asked())})
    real = os.open

    def forbidden(path: Any, *args: Any, **kwargs: Any) -> int:
        if os.fspath(path).endswith("b.tar"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", forbidden)
    monkeypatch.setattr(os, "access", lambda path, mode: not os.fspath(path).endswith("b.tar"))
    manifest = converse("webdataset", tmp_path, root=tmp_path)
    assert ids(manifest) == ["x"]
    assert rejected(manifest) == [("b.tar", "failed", "unreadable_tar")]
    assert manifest.absent == (1,)


def test_an_empty_tar_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.tar").write_bytes(END)
    with pytest.raises(ManifestError, match=r"t\.tar: no rows"):
        converse("webdataset", tmp_path / "t.tar", root=tmp_path)


_names = st.lists(
    st.sampled_from(["a", "a.0", "a.1", "a.0.1", "b", "b.2", ".h", "f/a", "f.x/a"]), unique=True, min_size=1, max_size=5
)


@given(jsons=_names, images=_names, question=st.sampled_from(["q", "<image>", "<image><image>"]))
def test_every_member_is_used_counted_or_excluded(
    tmp_path_factory: pytest.TempPathFactory, jsons: list[str], images: list[str], question: str
) -> None:
    folder = tmp_path_factory.mktemp("t")
    members: list[tuple[str, Any]] = [(f"{n}.json", described(**asked(question=question))) for n in jsons]
    members += [(f"{n}.png", picture(i)) for i, n in enumerate(images)]
    manifest = converse("webdataset", write_tar(folder / "t.tar", members), root=folder)
    alone = {name for name, _, reason in rejected(manifest) if reason == "no_conversation"}
    assert {*ids(manifest)} | {name for name, kind, _ in rejected(manifest) if kind == "failed"} == {*jsons}
    assert alone <= {*images}
    if question == "q":
        assert not manifest.counts()["failed"]
        assert len(alone) + len(manifest.items["image"]) == len(images)


def test_a_file_name_that_is_not_utf_8_has_one_escape(tmp_path: Path) -> None:
    members = {
        "a.png": picture(1),
        "a.json": described(**asked()),
        "b.png": b"no image",
        "b.json": described(**asked()),
    }
    path = write_tar(tmp_path / os.fsdecode(b"caf\xe9.tar"), {**members, "c.json": b"{"})
    manifest = converse("webdataset", path, root=tmp_path)
    assert item_names(manifest.items["image"], manifest.files)[:1] == [r"caf\xe9.tar:a.png"]
    found = dict(zip(manifest.rejected["sample_id"].to_pylist(), manifest.rejected["message"].to_pylist(), strict=True))
    assert found["b"].startswith(r"image caf\xe9.tar:b.png: ")
    assert found["c"].startswith(r"caf\xe9.tar: member c.json: ")
