"""Documents of a stranger, signed: every value of the metadata in every other type, then `forebay inspect`."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import xxhash
from transformers import ViTImageProcessorPil, Wav2Vec2FeatureExtractor

from forebay import cli, load_config
from forebay.config import BucketConfig, PackConfig, PlanConfig
from forebay.plan.disk import save_plan
from forebay.plan.make_buckets import bucket_plan
from forebay.plan.pack.pack_plan import pack_plan
from forebay.plan.statistics import batch_statistics, pack_statistics
from forebay.steps.audio.extractor.extractor_probe import noise
from forebay.store.key import canonical_json
from forebay.store.seal import seal
from forebay.store.shard import shard_fields, write_shard
from tests.faults.row import Row, made
from tests.golden import make_v4_patches as golden
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import class_folders
from tests.store_factory import RATE_HZ, make_cache

VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**31,
    10**400,
    -0.5,
    1e308,
    float("nan"),
    "",
    "\x1b[2J\n\u202e",
    "x" * 300,
    [],
    [None],
    {},
    {"a": {"b": 1}},
)
"""What stands in the place of what forebay wrote."""
ABSENT = object()
_SHOWN = 8
"""Values of a list that are changed: a table has hundreds."""
_INSPECT: tuple[list[str], ...] = ([], ["--json"], ["--sample", "0"], ["--sample", "1", "--json"], ["--verify"])
QUESTIONS: tuple[list[str], ...] = (*(["inspect", *options] for options in _INSPECT), ["lint", "--json"])
_ANY_MODEL = {"label": ViTImageProcessorPil(size={"height": 20, "width": 20}), "sound": Wav2Vec2FeatureExtractor()}
_BUCKETS = BucketConfig(edges_s=(0.5, 1.0), batch_size=2)
_PACKS = PackConfig(seq_len=64, max_patches=40, buffer_size=8)


@dataclass(frozen=True)
class Shelf:
    """Folders to inspect, and every (document, place, value) to put there."""

    root: Path
    changes: tuple[tuple[str, tuple[Any, ...], Any], ...]


@contextlib.contextmanager
def shelf(folder: Path) -> Iterator[Shelf]:
    """A cache of speech with a plan of buckets, one of images with a plan of packs, and two of any model."""
    speech = make_cache(folder / "speech", num_samples=5, rows_per_shard=2, max_duration_s=0.3, keep_waveform=True)
    lengths = np.array([500, 800, 900, 2000, 700])
    plan = bucket_plan(lengths, sample_rate_hz=RATE_HZ, settings=_BUCKETS)
    _save(plan, folder / "speech", speech, _BUCKETS, batch_statistics(plan, lengths))
    vision = _images(folder)
    tokens, patches, counts = np.array([3, 5, 7, 9]), np.array([8, 16, 16, 0]), np.array([1, 2, 3, 0])
    packs = pack_plan(tokens, patches=patches, settings=_PACKS)
    found = pack_statistics(packs, tokens, patches=patches, images=counts)
    _save(packs, folder / "vision", vision, _PACKS, found)
    for name, processor in _ANY_MODEL.items():
        _any_model(made(folder / name), processor)
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("metadata.json"))]
    names += [str(path.relative_to(folder)) for path in sorted(folder.rglob("packing_stats.json"))]
    changes = [
        (name, place, value)
        for name in names
        for place in _places(_document(folder / name), ())
        for value in (*VALUES, ABSENT)
    ]
    yield Shelf(folder, tuple(changes))


def _any_model(folder: Path, processor: Any) -> None:
    """A cache of images with classes, or of clips, as their processor gives them, and nothing else in the folder."""
    with tempfile.TemporaryDirectory() as raw:
        document: dict[str, Any] = {"name": "x", "source": {"kind": "folder", "manifest": f"{raw}/set"}}
        processor.save_pretrained(raw)
        if folder.name == "label":
            class_folders(Path(raw, "set"), {"dog": ["dogs.jpg"], "cat": ["cat.png"]})
            document |= {"vision": {"processor": raw}, "text": {"prompt": "label"}}
        else:
            made(Path(raw, "set"))
            for number in range(2):
                soundfile.write(f"{raw}/set/{number}.wav", noise(4000 + 900 * number, seed=number), RATE_HZ)
            document |= {"audio": {"features": "extractor", "extractor": raw}}
        build_here(load_config({**document, "run": {"cache_root": str(folder), "num_workers": 1}}))


def _images(folder: Path) -> Path:
    """The golden cache of images with conversations for texts, and a description that is whole."""
    contents = golden.contents(made(folder / "aside"), "raw")
    part = {"type": "text", "text": "hello"}
    rows = [golden.text_row(number) for number in range(len(golden.IMAGES))]
    for row, images in zip(rows, golden.IMAGES, strict=True):
        row["text"] = json.dumps([{"role": "user", "content": [*[{"type": "image"}] * len(images), part]}])
    path = contents.shards["text"][0][0]
    entry = write_shard(path, shard_fields(contents.fields, "text"), rows, key="ab" * 16)
    whole = {**contents.document, "size_bytes": 100, "made_with": {"numpy": "2"}}
    shards = {**contents.shards, "text": [(path, entry)]}
    vision = folder / "vision" / golden.name("raw")
    seal(vision, replace(contents, shards=shards, document=whole), scratch=folder / "aside")
    shutil.rmtree(folder / "aside")
    return vision


def mistyped(place: Shelf, number: int, folder: Path) -> str:
    """Puts one value into one place, signs the document, and asks `forebay inspect` and `lint` everything."""
    # A prime step, so that a short count sees all documents and all values.
    name, at, value = place.changes[number * 7919 % len(place.changes)]
    shutil.copytree(place.root, folder / "root")
    path = folder / "root" / name
    document = _document(path)
    *owners, last = at
    owner = document
    for key in owners:
        owner = owner[key]
    if value is ABSENT:
        del owner[last]
    else:
        owner[last] = value
    _sign(path, document)
    is_plan = "plans" in path.parts
    codes = {ask([*question, str(path.parent)]) for question in QUESTIONS if not (is_plan and question[0] == "lint")}
    assert codes <= {cli.DONE, cli.FAILED, cli.BAD_CONFIG, cli.NO_CACHE}
    return (
        "shown"
        if codes == {cli.DONE}
        else "typed error"
        if cli.DONE not in codes
        else "shown in part, else typed error"
    )


def ask(arguments: list[str]) -> int:
    """Returns the exit code of a command; what it prints holds no control character, and JSON is JSON."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([*arguments, "--no-progress"])
    for text in (out.getvalue(), err.getvalue()):
        assert all(c == "\n" or c.isprintable() for c in text), text
    if "--json" in arguments and code == cli.DONE:
        json.loads(out.getvalue(), parse_constant=_refuse)
    return code


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} in JSON")


def _save(plan: Any, root: Path, cache: Path, settings: PlanConfig, found: dict[str, Any]) -> None:
    key = _document(cache / "metadata.json")["key"]
    save_plan(plan, made(root / "plans") / settings.kind, cache_key=key, settings=settings, statistics=found)


def _document(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_bytes())
    return {k: v for k, v in document.items() if k != "checksum"}


def _sign(path: Path, document: dict[str, Any]) -> None:
    """Writes a document as forebay would, with its checksum; NaN has none, so that is written beside the old one."""
    if path.name == "packing_stats.json":
        content = json.dumps(document).encode()
        path.write_bytes(content)
        metadata = _document(path.with_name("metadata.json"))
        metadata["statistics_xxh3_128"] = xxhash.xxh3_128_hexdigest(content)
        _sign(path.with_name("metadata.json"), metadata)
        return
    try:
        checksum = xxhash.xxh3_128_hexdigest(canonical_json(document))
    except ValueError:
        checksum = "0" * 32
    text = json.dumps({**document, "checksum": checksum}, indent=1, sort_keys=True) + "\n"
    path.write_text(text, encoding="ascii")


def _places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value[:_SHOWN]) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _places(part, (*path, key))


ROW: Row[Any] = Row(
    name="inspect",
    fault="one value of a signed cache, plan or statistics in another type; five questions of `inspect`, one of `lint`",
    outcome="typed error or an answer; no traceback, no control character, JSON that is JSON",
    prepared=shelf,
    trial=mistyped,
    short=24,
    long=lambda place: len(place.changes),
)


def test_what_forebay_wrote_is_shown(tmp_path: Path) -> None:
    with shelf(tmp_path) as place:
        folders = {place.root / Path(name).parent for name, _, _ in place.changes}
        assert len(folders) == 6
        assert {ask([*question, str(folder)]) for folder in folders for question in QUESTIONS[:1]} == {cli.DONE}
        assert {ask(["inspect", str(folder), "--verify", "--json"]) for folder in folders} == {cli.DONE}


def test_inspect_answers_any_signed_document_or_refuses_it_by_name(tmp_path: Path) -> None:
    assert sum(ROW.check(tmp_path).values()) == ROW.short
