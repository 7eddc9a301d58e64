"""The vision line where it is code of its own: killed builds, images that crash what looks at or decodes them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import BuildError, ConfigError
from forebay.rows import listed_media as conversation_images
from forebay.steps.image import qwen2_vl as pixels
from tests.faults.building import NUM_WORKERS, build_here, check_caches, check_settled, finished_shards
from tests.faults.row import Row, dice
from tests.faults.shim import Fault
from tests.faults.vision import VisionSite, vision_site
from tests.preprocess.vision.corpus import DEMO

_ASKED = {"p0.jpg": ["q0-0", "q0-1", "q0-2"], "p1.jpg": ["q1-0", "q1-1", "q1-2", "both"]}
_UNSTEADY = ("{{ strftime_now('%d %b %Y') }}", "{% set day = strftime_now('%j') %}", "{{ [1, 2]|random }}")
_CRASHES = {"header": (conversation_images, "image_size"), "decode": (pixels, "decode_image")}


def killed(place: VisionSite, number: int, folder: Path) -> str:
    root = folder / "caches"
    at = dice("vision_kill", number).randrange(place.num_calls)
    ended = place.build(root, Fault(at=at, what="SIGKILL"))
    assert ended.error is None, ended.error
    assert ended.signal == signal.SIGKILL
    caches = check_caches(root, place.wanted)
    finished = finished_shards(root)
    assert len(list(root.glob(".building/*/*/*.tdz"))) - finished <= NUM_WORKERS
    again = place.build(root)
    assert again.error is None, again.error
    check_settled(root, place.wanted)
    if caches:
        return "sealed before the kill"
    assert again.value["shards_kept"] >= finished
    return "went on from the finished shards" if finished else "began again"


def crashes(place: VisionSite, number: int, folder: Path) -> str:
    """Twice the same image; then without what the error says, and what is left is built."""
    root = folder / "caches"
    stage, image = list(_CRASHES)[number % 2], list(_ASKED)[number // 2 % 2]
    ended = place.children.run(_crashing, place.config, root, stage, image)
    assert not ended.signal
    assert isinstance(ended.error, BuildError), repr(ended.error)
    said = str(ended.error)
    for part in ("signal SIGSEGV", f"image '{image}'", "[source] exclude = ["):
        assert part in said, said
    names = said.split("exclude = [")[1].split("]")[0]
    assert sorted(names.replace('"', "").split(", ")) == sorted(_ASKED[image]), said
    check_caches(root, place.wanted)
    again = place.children.run(_crashing, place.config, root, stage, image, f"source.exclude=[{names}]")
    assert again.error is None, again.error
    assert again.value["num_samples"] == 13 - len(_ASKED[image])
    return f"{stage}: stopped with the image and the line that excludes its samples"


def _crashing(config: Path, root: Path, stage: str, image: str, *overrides: str) -> dict[str, Any]:
    module, function = _CRASHES[stage]
    real = getattr(module, function)

    def crash(data: bytes, *, sample_id: str, **rest: Any) -> Any:
        if sample_id == image:
            os.kill(os.getpid(), signal.SIGSEGV)
        return real(data, sample_id=sample_id, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, crash)
        return build_here(config, root, Fault(), {}, *overrides)


def dated(place: VisionSite, number: int, folder: Path) -> str:
    """A template that writes the day, at a place of its own: in it, in a branch, or by another filter of chance."""
    model = folder / "model"
    shutil.copytree(DEMO / "model", model)
    lines = (model / "chat_template.jinja").read_text().splitlines(keepends=True)
    at = dice("vision_dated", number).randrange(len(lines) + 1)
    lines.insert(
        at, ("{{ strftime_now('%d %b %Y') }}", "{% set day = strftime_now('%j') %}", "{{ [1, 2]|random }}")[number % 3]
    )
    (model / "chat_template.jinja").write_text("".join(lines))
    ended = place.children.run(
        build_here, place.config, folder / "caches", Fault(), {}, f'text={{tokenizer="{model}",prompt="chat"}}'
    )
    assert isinstance(ended.error, ConfigError), repr(ended.error)
    assert "asks for the date of the day" in str(ended.error), ended.error
    check_caches(folder / "caches", place.wanted)
    return "refused by name"


ROWS: list[Row[Any]] = [
    Row(
        name="vision_kill",
        fault="kill -9 of a build of images",
        outcome="never opens wrong; resumes; at most one shard a worker redone; bytes equal an uninterrupted build",
        prepared=vision_site,
        trial=killed,
        short=2,
        long=100,
    ),
    Row(
        name="vision_worker",
        fault="an image whose header or pixels crash the process",
        outcome="retried, then the build stops and names the image and the config line that excludes its samples",
        prepared=vision_site,
        trial=crashes,
        short=2,
        long=4,
    ),
    Row(
        name="vision_dated",
        fault="a chat template that asks for the date of the day, or for chance, at any line",
        outcome="refused by name before anything is built",
        prepared=vision_site,
        trial=dated,
        short=3,
        long=60,
    ),
]


def test_a_killed_build_of_images_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    assert sum(ROWS[0].check(tmp_path).values()) == ROWS[0].short


def test_an_image_that_crashes_its_worker_is_named_with_its_samples(tmp_path: Path) -> None:
    row = ROWS[1]
    with row.prepared(tmp_path) as shared:
        assert [row.once(shared, number, tmp_path) for number in (0, 3)] == [
            f"{stage}: stopped with the image and the line that excludes its samples" for stage in _CRASHES
        ]


def test_a_template_that_asks_for_the_date_is_refused_by_name(tmp_path: Path) -> None:
    assert ROWS[2].check(tmp_path) == {"refused by name": 3}
