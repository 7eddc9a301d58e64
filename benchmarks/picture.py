"""Draws `docs/images/gains.svg`, the picture of the README, from the tables of the result pages (`make images`).

The script holds no figure of its own. A panel names its page, its table, its column and its rows. Rows in which another
program is faster than forebay are among them.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/benchmarks"
PICTURE = ROOT / "docs/images/gains.svg"

_PANEL_WIDTH, _ROW_HEIGHT, _LABEL_WIDTH, _BAR_WIDTH = 500, 20, 200, 210
_OURS, _OTHERS = "#c2410c", "#9aa5b1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One bar chart. `rows` maps the first cell of a row of the table to the label of its bar."""

    title: str
    better: str
    page: str
    heading: str
    columns: slice
    rows: dict[str, str]


PANELS = (
    Panel(
        title="Sound to features: CPU seconds an hour of audio",
        better="shorter is better",
        page="preprocess_2core_202611.md",
        heading="CPU of one process, steady state",
        columns=slice(1, 4),
        rows={
            "plain: random batches of 32, padded to 30 s, nothing stored, no tokens": "HF extractor, batches of 32",
            "plain, clip by clip, without padding": "HF extractor, clip by clip",
            "forebay: shards of media and text, hashed, fsynced": "forebay, with its writing",
            "bare: pread, soundfile, our features": "the same, nothing stored",
        },
    ),
    Panel(
        title="Shuffled speech batches, one thread: samples a second",
        better="longer is better",
        page="read_2core_202611.md",
        heading="Batches of 32, workload A, the last run",
        columns=slice(1, 2),
        rows={
            "`np.copyto`, one buffer": "bare copies, nothing padded",
            "forebay, ragged": "forebay, ragged: padded on a device",
            "`np.copyto`, two buffers and padding": "bare copies and padding",
            "Arrow, zero-copy by hand, reused buffers": "Arrow by hand, two buffers in turn",
            "Arrow, zero-copy by hand": "Arrow, written by hand",
            "TensorDict folder per sample": "TensorDict folders, mapped",
            "forebay": "forebay, padded, with checks and masks",
            "HF datasets (Arrow)": "HF datasets",
            "MosaicML Streaming (MDS)": "MosaicML Streaming",
            "ArrayRecord (grain)": "ArrayRecord",
            "WebDataset + wids": "WebDataset",
        },
    ),
    Panel(
        title="A pack of 27 images: CPU milliseconds",
        better="shorter is better",
        page="vision_2core_202611.md",
        heading="A pack of 8192 tokens",
        columns=slice(1, 2),
        rows={
            "online: Pillow, HF processor (PIL), HF tokenizer": "HF processor at every step",
            "forebay uncached, uint8": "forebay without a cache",
            "cache `raw`, float32 by the loader": "forebay, float32 on the host",
            "float32 memmap a pack, into one buffer": "memmap of 8 times the bytes",
            "cache `raw`, uint8": "forebay, uint8",
        },
    ),
    Panel(
        title="Padding of a batch of 240 s: per cent",
        better="shorter is better",
        page="plans_2core_202611.md",
        heading="Padding, 1 M samples",
        columns=slice(1, 2),
        rows={
            "random order": "random order",
            "seven edges": "forebay, seven buckets",
            "lhotse's DynamicBucketingSampler, 30 buckets, on 100,000 samples": "lhotse, 30 buckets",
            "window of 32 batches (target: at most 5 %)": "forebay, sorted windows",
            "64 optimal edges (target: at most 2 %, cv at most 0.05)": "forebay, 64 buckets",
        },
    ),
)


def bars(panel: Panel) -> list[tuple[str, float]]:
    """Returns label and value of every bar; the value is the median of the figures in the row's cells."""
    text = (PAGES / panel.page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {panel.heading}")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    cells = {line[0].strip(): " ".join(line[panel.columns]) for line in lines}
    return [(label, _median(cells[name])) for name, label in panel.rows.items()]


def _median(cell: str) -> float:
    return statistics.median(float(figure.replace(",", "")) for figure in re.findall(r"\d[\d,]*(?:\.\d+)?\b", cell))


def picture() -> str:
    """Returns the SVG: two panels beside each other, two rows of them."""
    heights = [max(len(panel.rows) for panel in PANELS[row : row + 2]) * _ROW_HEIGHT + 50 for row in (0, 2)]
    size = (2 * _PANEL_WIDTH, sum(heights))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
        f' viewBox="0 0 {size[0]} {size[1]}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        "<!-- Made by `make images` from docs/benchmarks/. Do not edit. -->",
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
    ]
    for number, panel in enumerate(PANELS):
        parts += _panel(panel, x=number % 2 * _PANEL_WIDTH + 12, y=number // 2 * heights[0] + 24)
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, *, x: int, y: int) -> list[str]:
    found = bars(panel)
    largest = max(value for _, value in found)
    parts = [
        f'<text x="{x}" y="{y}" font-size="14" font-weight="bold">{escape(panel.title)}</text>',
        f'<text x="{x}" y="{y + 15}" fill="#52606d">{panel.better} · {panel.page.removesuffix(".md")}</text>',
    ]
    for number, (label, value) in enumerate(found):
        top = y + 26 + number * _ROW_HEIGHT
        color = _OURS if label.startswith("forebay") else _OTHERS
        end = x + _LABEL_WIDTH + max(1, round(value / largest * _BAR_WIDTH))
        begin = x + _LABEL_WIDTH
        parts += [
            f'<text x="{begin - 6}" y="{top + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{begin}" y="{top}" width="{end - begin}" height="15" fill="{color}"/>',
            f'<text x="{end + 5}" y="{top + 12}">{_shown(value)}</text>',
        ]
    return parts


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:g}"


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), encoding="utf-8")
