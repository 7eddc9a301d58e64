"""The golden caches of declared forms open for ever; a form that somebody changed is refused, or changes no value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.errors import CacheCorruptError, ConfigError
from forebay.store.cache import Cache, open_cache
from forebay.store.metadata import FILE_NAME, write_metadata
from forebay.store.seal import seal, verify_folder
from forebay.train.collate.collator import Collator
from tests.golden.make_v4_declared import AUDIO, FOLDER, IMAGES, NAMES, contents, expected, main, write_shards

Change = Callable[[dict[str, Any]], Any]
KEPT: dict[str, Any] = json.loads((FOLDER / "expected.json").read_bytes())


def batch_of(cache: Cache) -> dict[str, torch.Tensor]:
    """Returns the batch of all samples."""
    return Collator(cache)([cache.read(index) for index in range(len(cache))])


def as_kept(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Returns a batch as `expected.json` has it: dtype, shape, and of floats their bits."""
    return {
        name: [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            (tensor.contiguous().view(torch.int32) if tensor.is_floating_point() else tensor).reshape(-1).tolist(),
        ]
        for name, tensor in batch.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_and_the_batch_of_all_are_what_was_written(name: str) -> None:
    assert expected() == KEPT
    cache = open_cache(FOLDER / name, verify="open")
    assert len(cache) == len(KEPT[name]["samples"])
    for index, wanted in enumerate(KEPT[name]["samples"]):
        sample: Any = cache.read(index)
        forms = {field["name"]: field for field in cache.constants["form"]["fields"]}
        for field, values in wanted.items():
            if name == IMAGES and field in forms:
                assert [array.tolist() for array in sample[field]] == values
                assert {array.dtype for array in sample[field]} <= {np.dtype(forms[field]["stored_dtype"])}
            elif name == AUDIO and field == "energy":  # the axis that grows is the first on disk
                np.testing.assert_array_equal(sample[field], np.array(values, np.float16).T, strict=True)
            else:
                assert sample[field].tolist() == values
    assert as_kept(batch_of(cache)) == KEPT[name]["batch"]
    assert verify_folder(cache.folder).problems == []


@pytest.mark.parametrize("name", NAMES)
def test_it_would_be_made_in_the_same_bytes_today(name: str, tmp_path: Path) -> None:
    for shards in write_shards(name, tmp_path).values():
        for path, _ in shards:
            assert path.read_bytes() == (FOLDER / name / path.relative_to(tmp_path)).read_bytes()
    seal(tmp_path / name, contents(name, tmp_path / "scratch"), scratch=tmp_path / "scratch")
    assert (tmp_path / name / FILE_NAME).read_bytes() == (FOLDER / name / FILE_NAME).read_bytes()


def field(document: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = document["constants"]["form"]["fields"][number]
    return found


def shortened(document: dict[str, Any]) -> None:
    table = field(document)["table"]
    table["values"] = [row[:4] for row in table["values"]]


LIES: dict[str, dict[str, Change]] = {
    AUDIO: {
        "no form": lambda d: d["constants"].pop("form"),
        "no such field": lambda d: field(d).update(name="other"),
        "wider": lambda d: field(d).update(shape=[None, 5]),
        "fewer": lambda d: field(d).update(shape=[None, 2]),
        "another order": lambda d: field(d).update(shape=[4, None, None]),
        "fixed": lambda d: field(d).update(shape=[4, 4]),
        "other numbers": lambda d: field(d).update(stored_dtype="int16"),
        "other width": lambda d: field(d).update(stored_dtype="float32"),
        "integers": lambda d: field(d).update(dtype="int64"),
        "no number": lambda d: field(d).update(pad="0"),
        "a mask of nothing": lambda d: field(d, 1).update(mask_of="nothing"),
        "no mask": lambda d: field(d, 1).pop("mask_of"),
        "another side": lambda d: field(d, 2).update(side="middle"),
        "a field that is not read": lambda d: field(d, 2).update(colour="red"),
        "too short": lambda d: field(d).update(length=4),
        "a table": lambda d: field(d).update(table={"axis": 1, "inner": 1, "values": [[0.0, 1.0]]}),
    },
    IMAGES: {
        "no form": lambda d: d["constants"].pop("form"),
        "another rank": lambda d: field(d).update(shape=[3, None, None, None]),
        "fewer channels": lambda d: field(d).update(shape=[2, None, None]),
        "no channels": lambda d: field(d).update(shape=[None, None, None]),
        "other numbers": lambda d: field(d).update(stored_dtype="uint16"),
        "no table": lambda d: field(d).pop("table"),
        "a shorter table": shortened,
        "a channel less": lambda d: field(d)["table"]["values"].pop(),
        "another axis": lambda d: field(d)["table"].update(axis=1),
        "wider channels": lambda d: field(d)["table"].update(inner=2),
        "no numbers": lambda d: field(d)["table"].update(values=[["0.5"] * 5] * 3),
        "no float32": lambda d: field(d)["table"].update(values=[[1e39] * 5] * 3),
        "values of codes": lambda d: field(d).update(dtype="uint8"),
        "a wider row": lambda d: field(d, 2).update(shape=[None, 3]),
        "no places": lambda d: field(d, 2).update(shape=[1, 2]),
        "floats": lambda d: field(d, 2).update(dtype="float32"),
        "another join": lambda d: field(d, 2).update(join="knit"),
        "a text of pixels": lambda d: d["constants"].update(text_form=d["constants"]["form"]),
        "a text that is no form": lambda d: d["constants"].update(text_form={"fields": []}),
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_form_that_somebody_signed_ends_in_a_typed_error(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER / name, tmp_path / name))
    whole = json.loads((folder / FILE_NAME).read_bytes())
    del whole["checksum"]
    silent: dict[str, Any] = {}  # what no typed error is
    for lie, change in LIES[name].items():
        document = json.loads(json.dumps(whole))
        change(document)
        write_metadata(folder, document)
        try:
            silent[lie] = {k: v[:2] for k, v in as_kept(batch_of(open_cache(folder))).items()}
        except (CacheCorruptError, ConfigError) as err:
            assert any(said in str(err) for said in (str(folder), "cache ", "Golden")), (lie, err)  # noqa: PT017
        except Exception as err:
            silent[lie] = repr(err)
    assert silent == {}


def test_they_are_small_and_are_never_made_again() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 60_000
    with pytest.raises(FileExistsError, match="v4_declared"):
        main()
