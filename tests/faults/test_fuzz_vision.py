"""Foreign bytes of the vision line: conversations and their images, packs, caches of images, kept listings."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from hypothesis import strategies as st

from forebay.config import PackConfig
from forebay.config.data import MEANINGS
from forebay.errors import SampleError
from forebay.plan.disk import load_plan, save_plan
from forebay.plan.pack.pack_plan import pack_plan
from forebay.plan.statistics import pack_statistics
from forebay.preprocess.groups import Groups
from forebay.rows.list_rows import list_rows
from forebay.rows.manifest import Manifest, meaning_named
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.files import hash_file
from forebay.store.image.codec import decode_image
from forebay.store.key import canonical_json
from forebay.store.layout import ListedItems
from forebay.store.metadata import write_metadata
from forebay.store.seal import seal, verify_folder
from forebay.store.shard import shard_fields, write_shard
from forebay.train.uncached import kept_listing as listing
from forebay.train.uncached.kept_listing import Rejected
from tests.faults.children import Children
from tests.faults.fuzzing import PER_TRIAL, WICKED, Fuzz, npy
from tests.faults.row import Row, made
from tests.golden import make_v4_patches as golden
from tests.rows.pictures import asked, picture, read_conversations, source_of, write_lines, write_picture
from tests.store.sealed import DEMO_VISION, config_of
from tests.strategies import changed_bytes, changed_documents

_PACKS = PackConfig(seq_len=64, max_patches=40, buffer_size=8)
_KEY = "ab" * 32
_CONFIG = config_of(Path("fuzz"), vision={"processor": str(DEMO_VISION)}, source={"kind": "jsonl"})
_GROUPS = Groups.of(_CONFIG, recipe_of(_CONFIG))
_NUMBERS = st.one_of(st.integers(-4, 6), st.integers(-(2**31), 2**31 - 1))
_SLOTS = st.builds(lambda shard, row: shard << 32 | row, st.integers(-1, 2), st.integers(0, 4))


def conversation_lines(folder: Path, data: st.DataObject) -> None:
    path = folder / "raw" / "list.jsonl"
    rows = data.draw(changed_documents([_turns(["a.png"]), asked(["a.png", "b.jpg"], id="b"), asked("b.jpg", id="c")]))
    lines = "\n".join(json.dumps(row) for row in rows if isinstance(rows, list)).encode()
    path.write_bytes(data.draw(st.one_of(st.just(lines), changed_bytes(lines, WICKED))))
    _converse(folder, "jsonl", path)


def conversation_forms(folder: Path, data: st.DataObject) -> None:
    """Rows that ask for something of their items, with boxes and tools."""
    asked_of = {"type": "image", "image": "a.png", "min_pixels": 300, "max_pixels": 900, "frame": 0}
    frames = {"type": "video", "video": ["a.png", "a.png"], "sample_fps": 2, "total_pixels": 900}
    tools = [{"type": "function", "function": {"name": "zoom", "parameters": {"type": "object", "properties": {}}}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "zoom", "arguments": {"by": 2}}}]}
    messages = [{"role": "user", "content": [asked_of, frames]}, call, {"role": "tool", "content": "larger"}]
    boxes = {"ref": ["cup"], "bbox": [[1, 2, 3, 4]], "bbox_type": "real", "image_id": [0]}
    boxed = {"id": "b", "image": "b.jpg", "query": "<image>Where is the <ref-object>?", "response": "<bbox>"}
    rows = [{"id": "a", "tools": tools, "messages": messages}, {**boxed, "objects": boxes}]
    drawn = data.draw(changed_documents(rows))
    path = folder / "raw" / "list.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in drawn if isinstance(drawn, list)))
    _converse(folder, "jsonl", path)


def conversation_tar(folder: Path, data: st.DataObject) -> None:
    document = json.dumps(data.draw(changed_documents(_turns([]))), ensure_ascii=True).encode()
    with tarfile.open(folder / "raw" / "a.tar", "w") as tar:
        for name, content in (("a.json", document), ("a.png", picture(1)), ("b.json", b"{}"), ("b.png", picture(2))):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    path = folder / "raw" / "a.tar"
    path.write_bytes(data.draw(st.one_of(st.just(path.read_bytes()), changed_bytes(path.read_bytes()[:6144], WICKED))))
    _converse(folder, "webdataset", path)


def conversation_parquet(folder: Path, data: st.DataObject) -> None:
    path = folder / "raw" / "data.parquet"
    path.write_bytes(data.draw(changed_bytes(path.read_bytes(), WICKED)))
    _converse(folder, "hf", path)


def image(folder: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]))
    encoded = data.draw(changed_bytes(picture(1, width=40, height=30, kind=kind), WICKED))
    try:
        size = decode_image(encoded, max_pixels=10_000, sample_id="a").size
    except SampleError:
        return
    assert size[0] * size[1] <= 10_000


def vision_metadata_signed(folder: Path, data: st.DataObject) -> None:
    cache = folder / "caches" / data.draw(st.sampled_from([golden.name(codec) for codec in golden.CODECS]))
    document = {k: v for k, v in json.loads((cache / "metadata.json").read_bytes()).items() if k != "checksum"}
    write_metadata(cache, data.draw(changed_documents(document)))
    _read_cache(cache, data)


def images_signed(folder: Path, data: st.DataObject) -> None:
    """Samples that list images which are not there, and grids and bytes that are none of an image's."""
    codec = data.draw(st.sampled_from(golden.CODECS))
    contents = golden.contents(made(folder / "aside"), codec)
    texts = [golden.text_row(sample) for sample in range(len(golden.IMAGES))]
    images = [golden.image_row(number, codec) for number in range(len(golden.GRIDS))]
    items, slots = contents.items["image"], st.lists(st.one_of(_NUMBERS, _SLOTS), min_size=6, max_size=6)
    offsets = data.draw(st.one_of(st.just(items.offsets.tolist()), st.lists(_NUMBERS, min_size=5, max_size=5)))
    listed = ListedItems(np.array(offsets, np.int64), np.array(data.draw(slots), np.int64))
    if data.draw(st.booleans()):
        images[0]["image_grid_thw"] = np.array(data.draw(st.lists(_NUMBERS, min_size=3, max_size=3)), np.int32)[None]
    if codec == "zstd" and data.draw(st.booleans()):
        changed = data.draw(changed_bytes(images[0]["patches_zstd"].tobytes(), WICKED))
        images[0]["patches_zstd"] = np.frombuffer(changed, np.uint8)
    for group, rows in (("image", images), ("text", texts)):
        path = contents.shards[group][0][0]
        fields = shard_fields(contents.fields, group)
        contents.shards[group][0] = (path, write_shard(path, fields, rows, key=_KEY))  # type: ignore[index]
    seal(folder / "signed", replace(contents, items={"image": listed}), scratch=folder / "aside", replace=False)
    _read_cache(folder / "signed", data)


def packs(folder: Path, data: st.DataObject) -> None:
    path = folder / "plan" / "metadata.json"
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(changed_bytes(path.read_bytes(), WICKED)))
    else:
        _sign_plan(path, data.draw(changed_documents(_plan_document(path))))
    _read_packs(folder)


def packs_signed(folder: Path, data: st.DataObject) -> None:
    """Members and offsets with other numbers in them, and other arrays in their place."""
    path = folder / "plan" / "metadata.json"
    document = _plan_document(path)
    name = data.draw(st.sampled_from(sorted(document["arrays"])))
    array = np.load(folder / "plan" / f"{name}.npy")
    if len(array) and data.draw(st.booleans()):
        number = st.one_of(_NUMBERS, st.sampled_from([-(2**63), 2**63 - 1]))
        array = array.astype(np.int64)
        array[data.draw(st.integers(0, len(array) - 1))] = data.draw(number)
    else:
        array = data.draw(st.sampled_from([array[:0], array[::-1], array.astype(np.float64), array[None], array[:1]]))
    content = npy(np.ascontiguousarray(array))
    (folder / "plan" / f"{name}.npy").write_bytes(content)
    entry = {"dtype": array.dtype.str, "shape": list(array.shape), "size_bytes": len(content)}
    document["arrays"][name] = {**entry, "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    _sign_plan(path, document)
    _read_packs(folder)


def kept_listing(folder: Path, data: st.DataObject) -> None:
    """A damaged listing is made again: nothing is raised, and whatever is taken holds together."""
    place = folder / "listing"
    name = data.draw(st.sampled_from(["listing.json", "rows.arrow", "images.arrow"]))
    path = place / name
    document = json.loads((place / "listing.json").read_bytes())
    if name == "listing.json" and data.draw(st.booleans()):
        path.write_text(json.dumps(data.draw(changed_documents(document))))
    else:
        path.write_bytes(data.draw(changed_bytes(path.read_bytes(), WICKED)))
        if name != "listing.json":  # with its checksum
            document["files"][name] = {"size_bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
            (place / "listing.json").write_text(json.dumps(document))
    found = listing._load(place, _GROUPS)
    if found is not None and found.manifest.items["image"] is not None:
        images = np.concatenate([[0], *found.rows["images"].to_numpy(zero_copy_only=False)])
        assert (images >= 0).all()
        assert (images < len(found.manifest.items["image"])).all()
        assert set(found.rows["group"].to_pylist() + found.manifest.items["image"]["file"].to_pylist()) <= set(
            range(len(found.files))
        )
        assert all(isinstance(count, int) for count in found.rejected.failed.values())
        found.rows.to_pylist()


def _turns(names: list[str]) -> dict[str, Any]:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "This."}]
    return {"id": "a", "image": names, "conversations": turns} if names else {"id": "a", "conversations": turns}


def _converse(folder: Path, kind: str, path: Path) -> None:
    source = source_of(kind, path, max_pixels=10_000, max_sample_bytes=100_000)
    meaning = meaning_named("conversations", replace(MEANINGS["conversations"].of_groups(["image"]), has_videos=True))
    assert isinstance(list_rows(source, meaning, cache_root=folder / "root"), Manifest)


def _read_cache(folder: Path, data: st.DataObject) -> None:
    """Reads all of a cache as its reader would that trusts the disk, or that does not."""
    verify_folder(folder)
    cache = open_cache(folder, verify=data.draw(st.sampled_from(["touch", "never"])))
    assert cache.lengths is not None
    cache.will_need(range(min(len(cache), 5)))
    for index in range(min(len(cache), 5)):
        _check_sample(cache, index)
    assert cache.samples is not None


def _check_sample(cache: Cache, index: int) -> None:
    sample = cache.read(index)
    if "patches" in sample:
        assert all(part.ndim == 2 for part in sample["patches"])
        assert len(sample["image_grid_thw"]) == len(sample["patches"])


def _plan_document(path: Path) -> dict[str, Any]:
    return {k: v for k, v in json.loads(path.read_bytes()).items() if k != "checksum"}


def _sign_plan(path: Path, document: dict[str, Any]) -> None:
    document["checksum"] = xxhash.xxh3_128_hexdigest(canonical_json(document))
    path.write_text(json.dumps(document))


def _read_packs(folder: Path) -> None:
    loaded = load_plan(folder / "plan", cache_key=_KEY, settings=_PACKS, num_samples=60)
    order = loaded.order(seed=1, epoch=0)
    for batch in order.batches(np.arange(len(order))):
        assert ((batch >= 0) & (batch < 60)).all()


def _prepare(folder: Path) -> None:
    shutil.copytree(golden.FOLDER, folder / "caches")
    raw = made(folder / "raw")
    write_picture(raw / "a.png", 1)
    write_picture(raw / "b.jpg", 2)
    write_lines(raw / "list.jsonl", [asked("a.png", id="a"), asked(["a.png", "b.jpg"], id="b")])
    images = pa.array([{"bytes": picture(n), "path": None} for n in range(3)])
    table = {"image": images, "question": ["q"] * 3, "answer": ["a"] * 3, "id": ["x", "y", "z"]}
    pq.write_table(pa.table(table), raw / "data.parquet")
    draws = np.random.default_rng(3)
    tokens, patches, counts = draws.integers(1, 64, 60), 4 * draws.integers(0, 10, 60), draws.integers(0, 2, 60)
    plan = pack_plan(tokens, patches=patches, settings=_PACKS)
    found = pack_statistics(plan, tokens, patches=patches, images=counts)
    save_plan(plan, folder / "plan", cache_key=_KEY, settings=_PACKS, statistics=found)
    _keep_listing(raw, folder / "listing")


def _keep_listing(raw: Path, folder: Path) -> None:
    manifest = read_conversations(source_of("jsonl", raw / "list.jsonl"), cache_root=raw / "root")
    rows = manifest.rows
    images = manifest.items["image"]
    for name in ("grid_h", "grid_w"):
        images = images.append_column(name, pa.array([2] * len(images), pa.int32()))
    rejected = Rejected(len(rows) + 2, Counter({"bad_json": 2}), Counter())
    lengths = {name: np.full(len(rows), 4, np.int32) for name in _GROUPS.length_names}
    listing._save(
        folder, listing.Counted(manifest=replace(manifest, items={"image": images}), lengths=lengths, rejected=rejected)
    )
    assert listing._load(folder, _GROUPS) is not None


@contextlib.contextmanager
def _serving(_folder: Path) -> Iterator[Children]:
    with Children("datasets", "tests.faults.test_fuzz_vision") as children:
        yield children


FUZZ = Fuzz(
    _prepare,
    {
        conversation_lines: "raw",
        conversation_forms: "raw",
        conversation_tar: "raw",
        conversation_parquet: "raw",
        image: "raw",
        vision_metadata_signed: "caches",
        images_signed: "caches",
        packs: "plan",
        packs_signed: "plan",
        kept_listing: "listing",
    },
)

ROW: Row[Any] = Row(
    name="fuzz_vision",
    fault=f"fuzzed conversations, images, packs, caches of images, kept listings ({PER_TRIAL} inputs a run)",
    outcome="typed error; no crash, no import, no code execution, no path outside the root, memory bounded",
    prepared=_serving,
    trial=FUZZ.trial,
    short=len(FUZZ.targets),
    long=180,
)


def test_foreign_bytes_of_images_give_typed_errors(tmp_path: Path) -> None:
    with _serving(tmp_path) as children:
        numbers = range(len(FUZZ.targets))
        outcomes = [FUZZ.trial(children, number, made(tmp_path / str(number)), count=5) for number in numbers]
    assert outcomes == [f"{target.__name__} x 5" for target in FUZZ.targets]
