"""The page of models, `docs/models.md`: rows of foreign classes as tables, and what a test holds them against."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import transformers

from benchmarks.zoo.classes import Known
from benchmarks.zoo.rows import ONE_SIZE, Row

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """# Any model

If transformers has a preprocessor for your model, forebay caches what that preprocessor gives. A folder with its
`preprocessor_config.json` is all that is needed, three lines in a config:

```toml
[audio]                          # sound: any class of AutoFeatureExtractor
features = "extractor"
extractor = "path/to/model"
```

```toml
[vision]                         # images: any class of AutoImageProcessor
processor = "path/to/model"
```

```toml
[train]                          # what takes the batch's names and returns a loss trains
model = "path/to/model"
```

`python -m benchmarks.models` wrote this page with transformers {version}, from a plain call of each class beside what
forebay stores of the same clips or images.

- **stored**: what is on disk of one clip or image, in the class's own order of axes; n is a length that differs. "table
  of 256" is one byte a value, and the float32 value of each byte and channel, so batches have the class's own bits.
- **bytes**: on disk for one byte of the class's own output with floats as float32, for one clip or image.
- **alone**: a batch of one clip or image beside the class's own call with it.
- **batch**: a batch of three of different lengths or sizes beside the class's own call with the three.
- **CPU**: of calling the class on data that is decoded, for one second of reading the same values from a cache with
  their checksums and making the batch; one digit, it moves with the machine.

float64 is stored as float32, and one number for all images of a call as one for each; both are compared so.

Both comparisons are with `audio.dtype = "float32"`, the default; float16 is these rounded once.
"""

_NATIVE = """With the settings of these rows forebay makes the values itself, faster, and says so in its log. Patches
are for conversations of the Qwen-VL family. The rows above are of the class's own values:"""

_COLUMNS = "| class | used by | stored | bytes | alone | batch | CPU |\n|---|---|---|---|---|---|---|"


def page(extractor_rows: Sequence[Row], processor_rows: Sequence[Row], *, chat: str = "") -> str:
    """Returns the page. chat: what it says of conversations, if that is known."""
    parts = [
        _HEAD.format(version=transformers.__version__).rstrip(),
        _section("Feature extractors", extractor_rows),
        _section("Image processors", processor_rows),
        *([chat.rstrip()] if chat else []),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, rows: Sequence[Row]) -> str:
    used = [row for row in rows if not row.cannot]
    parts = [f"## {title}", _summary(rows), "\n".join([_COLUMNS, *map(line, used)])]
    if reasons := list(map(_reason, filter(has_reason, used))):
        parts += ["Where the batch is not the class's own, or something of its output is left out:", "\n".join(reasons)]
    if native := _grouped((row.native, row) for row in used if row.native):
        parts += [_NATIVE, native]
    if absent := _absent(rows):
        parts += ["Not used here:", absent]
    return "\n\n".join(parts)


def _summary(rows: Sequence[Row]) -> str:
    used = [row for row in rows if not row.cannot]
    names = {row.known.name for row in used}
    tables = {row.known.name for row in used if re.search(r"table of \d\d", row.stored)}
    alone = {row.known.name for row in used if row.alone.is_exact}
    both = {row.known.name for row in used if row.alone.is_exact and row.batch is not None and row.batch.is_exact}
    text = f"{len({row.known.name for row in rows})} classes, {len(names)} run here"
    if tables:
        text += f"; {len(tables)} are stored as codes and a table"
    return f"{text}. {len(alone)} are exact for a clip or image alone, {len(both)} of these also in a batch."


def line(row: Row) -> str:
    """Returns the row of the table, CPU last."""
    cells = [*_cells(row), f"{row.cpu_times:.1g}" if 0 < row.cpu_times < 1 else f"{_digit(row.cpu_times):g}"]
    return f"| {' | '.join(cells)} |"


def _digit(value: float) -> float:
    return float(f"{value:.1g}")


def _cells(row: Row) -> list[str]:
    batch = "its own call makes none" if row.batch is None else str(row.batch)
    if row.batch_note == ONE_SIZE:
        batch += ", of one size"
    return [
        f"`{row.known.name}`" + (f" ({row.known.note})" if row.known.note else ""),
        _families(row.known),
        row.stored,
        f"{row.bytes_share:.2f}",
        str(row.alone),
        batch,
    ]


def fixed(text: str) -> str:
    """Returns a line of a table as a test holds it: without CPU, and tolerances without their size."""
    cells = [re.sub(r"within \d+e-\d+", "within", cell.strip()) for cell in text.strip().strip("|").split(" | ")]
    return " | ".join(cells[:-1])


def _families(known: Known) -> str:
    shown = ", ".join(known.families[:3])
    return f"{shown} and {len(known.families) - 3} more" if len(known.families) > 3 else shown


def has_reason(row: Row) -> bool:
    """Whether the page says more of a class than its row."""
    exact = row.alone.is_exact and row.batch is not None and row.batch.is_exact
    return not exact or bool(row.left_out) or bool(row.batch_note) or bool(row.promise and row.promise.why)


def _reason(row: Row) -> str:
    parts = []
    if not row.alone.is_exact:
        parts.append(f"alone: {row.alone.why}")
    if row.batch is None:
        parts.append(f"its own call makes no batch: {row.batch_note}")
    elif not row.batch.is_exact:
        parts.append(f"batch: {row.batch.why}")
    if row.batch is not None and row.batch_note:
        parts.append(f"batch {row.batch_note}")
    if row.left_out:
        parts.append(f"left out: {', '.join(f'`{name}`' for name in row.left_out)}")
    if row.promise is not None and str(row.promise) != "exact":
        parts.append(f"forebay says: {row.promise}")
    return f"- `{row.known.name}`: {'; '.join(parts)}"


def _absent(rows: Iterable[Row]) -> str:
    """Returns a line for each reason, with the classes that it holds for."""
    return _grouped((row.cannot, row) for row in rows if row.cannot)


def _grouped(said: Iterable[tuple[str, Row]]) -> str:
    """Returns a line for each different text, with the classes that it is said of."""
    names: dict[str, dict[str, None]] = {}
    for text, row in said:
        names.setdefault(text, {})[f"`{row.known.name}`"] = None
    return "\n".join(f"- {text}: {', '.join(found)}" for text, found in sorted(names.items()))


def disagreement(row: Row) -> str:
    """Returns what forebay promised of a class and the oracle did not find; "" where they agree."""
    if row.cannot:
        return ""
    if not row.alone.is_exact:
        return f"{row.known.label}: alone {row.alone}: {row.alone.why}"
    if row.batch is None or row.promise is None:
        return ""
    allowed = {"exact": 0.0, "within": row.promise.limit}.get(row.promise.kind, math.inf)
    limit = 0.0 if row.batch.where and f"where {row.batch.where} is 1" in row.promise.why else row.batch.limit
    if limit > allowed:
        return f"{row.known.label}: promised {row.promise}, its batch {row.batch}: {row.batch.why}"
    if row.promise.kind == "alone" and row.batch.is_exact and not row.batch_note:
        return f"{row.known.label}: promised {row.promise}, and its batch is exact"
    return ""
