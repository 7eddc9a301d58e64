"""Every case comes to what its file says: samples, plans, batches, rejected rows, facts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.commands import run_json
from tests.golden_rows import EXACT, WRITE
from tests.golden_rows.cases import CASES
from tests.golden_rows.pin import differences, pin

PINNED = Path(__file__).parent / "pinned"


KEPT = frozenset(
    [
        "log-mel-whisper-tar",
        "waveform-mixtures-webdataset",
        "qwen3-asr-32-jsonl",
        "w2v-bert-16-ljspeech",
        "mel-settings-tts-table",
        "given-16-whisper-hf",
        "extractor-parakeet",
        "own-step-folder",
        "python-clips",
        "bad-jsonl",
        "text-detected-gz",
        "mixture-with-texts",
        "packs-qwen3-vl-jsonl",
        "packs-webp-table",
        "packs-source-webdataset",
        "chat-gemma3-zstd-webdataset",
        "chat-llava_onevision",
        "label-classes-bad-jsonl",
        "captions-siglip2-table",
        "images-alone-webdataset",
    ]
)
"""One case at least of each kind of source, feature, prompt and codec; the others run in `make test-wide`."""


@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.wide) for name in CASES]
)
def test_nothing_moved(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact = os.environ.get(EXACT)
    found = pin(CASES[name], tmp_path, lambda *arguments: run_json(capsys, *arguments), exact=exact is not None)
    path = (PINNED if exact is None else Path(exact)) / f"{name}.json"
    if WRITE in os.environ or (exact is not None and not path.exists()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    wanted = json.loads(path.read_text(encoding="utf-8"))
    moved = list(differences(wanted, found))
    assert not moved, f"{name}: {len(moved)} differences\n" + "\n".join(moved[:30])


def test_every_file_has_its_case() -> None:
    assert sorted(path.stem for path in PINNED.glob("*.json")) == sorted(CASES)
    assert set(CASES) >= KEPT
