from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ManifestError
from forebay.rows.meanings.conversation import image_names
from tests.rows.helpers import described, ids, rejected, write_tar
from tests.rows.pictures import asked, converse, images_of, picture
from tests.tar.files import END, header, member


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
    assert manifest.rows["image_group"].to_pylist() == [0, 0, 1, 1]


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
    assert manifest.images is not None
    alone = {name for name, _, reason in rejected(manifest) if reason == "no_conversation"}
    assert {*ids(manifest)} | {name for name, kind, _ in rejected(manifest) if kind == "failed"} == {*jsons}
    assert alone <= {*images}
    if question == "q":
        assert not manifest.counts()["failed"]
        assert len(alone) + len(manifest.images) == len(images)


def test_a_file_name_that_is_not_utf_8_has_one_escape(tmp_path: Path) -> None:
    members = {
        "a.png": picture(1),
        "a.json": described(**asked()),
        "b.png": b"no image",
        "b.json": described(**asked()),
    }
    path = write_tar(tmp_path / os.fsdecode(b"caf\xe9.tar"), {**members, "c.json": b"{"})
    manifest = converse("webdataset", path, root=tmp_path)
    assert image_names(manifest, [0]) == [r"caf\xe9.tar:a.png"]
    found = dict(zip(manifest.rejected["sample_id"].to_pylist(), manifest.rejected["message"].to_pylist(), strict=True))
    assert found["b"].startswith(r"image caf\xe9.tar:b.png: ")
    assert found["c"].startswith(r"caf\xe9.tar: member c.json: ")
