from __future__ import annotations

import json
from typing import Any

import pytest

from forebay.measure.diagnosis import MeasuredArms
from forebay.measure.doctor_report import DoctorReport, advice
from forebay.measure.predict import Reads
from forebay.visible import json_text
from tests.measure.doctor.figures import demo, measured, sealed


def report(found: MeasuredArms, **more: Any) -> DoctorReport:
    config = demo()
    return DoctorReport(config=config.path, seconds=12.3, found=found, advice=advice(found, config), **more)


FOUND = {
    "whole": measured(raw_read=Reads(warm_ms=0.1, cold_ms=None, mean_bytes=9.0, samples=3, why_not_cold="it is tmpfs")),
    "sealed": sealed(),
    "without a step": measured(steps=None),
    "nothing": MeasuredArms(cores=2, prefetch=4, num_threads=2, num_workers=0, not_measured={"find": "it hangs"}),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = report(FOUND[name]).lines()
    assert lines
    assert max(map(len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()]


def test_the_bottleneck_stands_above_the_table_and_the_advice_below() -> None:
    text = "\n".join(report(FOUND["whole"]).lines())
    places = [
        text.index(part)
        for part in ("bottleneck: decode", "from raw data", "uncached, loader, 2", "1. build the cache")
    ]
    assert places == sorted(places)
    assert "raw read from the disk: not measured, it is tmpfs" in text
    assert "a build: " in text


def test_what_was_not_measured_is_named() -> None:
    text = "\n".join(report(FOUND["nothing"]).lines())
    assert "not measured: find: it hangs" in text
    assert "nothing could be measured, so nothing is said of what to change" in text
    assert FOUND["nothing"].is_empty
    assert not FOUND["whole"].is_empty
    assert "--step-s" in "\n".join(report(FOUND["without a step"]).lines())


@pytest.mark.parametrize("name", FOUND)
def test_the_document_is_json(name: str) -> None:
    document = json.loads(json_text(report(FOUND[name]).to_json()))
    assert {"bottleneck", "stages", "predictions", "advice", "measured", "build_s", "size_bytes"} <= document.keys()
    assert "batches" not in (document["measured"]["plan"] or {})


def test_whether_a_file_was_written_is_said() -> None:
    assert "written: tuned.toml" in report(FOUND["sealed"], applied="tuned.toml").lines()
    assert "nothing is written" in "\n".join(report(FOUND["sealed"], wants_file=True).lines())
