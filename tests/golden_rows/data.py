"""Raw data of the cases: small sounds, pictures and texts by integer arithmetic, in every form that forebay reads."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from PIL import Image

Row = dict[str, Any]

TEXTS = (
    ("en", "Twenty-two birds sat on the wire at 7 o'clock."),
    ("fr", "Le chat dort, et la maison est calme."),
    ("es", "No sé qué hora es"),
    ("en", "Yes."),
    ("it", "La strada è lunga ma bella, così disse il vecchio signore alla fermata."),
    ("en", "A second  line\twith   white space and ﬁne ligatures"),
)


def noise(seed: int, count: int) -> np.ndarray[Any, Any]:
    """Returns `count` integers of 0 to 65535 that look like chance, the same on every machine."""
    x = np.arange(count, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed * 97 + 13)
    x = (x ^ (x >> np.uint64(15))) * np.uint64(2246822519) & np.uint64(0xFFFFFFFF)
    x = (x ^ (x >> np.uint64(13))) * np.uint64(3266489917) & np.uint64(0xFFFFFFFF)
    found: np.ndarray[Any, Any] = (x >> np.uint64(16)).astype(np.int64)
    return found


def wave(seed: int, seconds: float, rate: int = 16_000) -> np.ndarray[Any, Any]:
    """Returns int16: a triangle of its own pitch under noise, which falls silent now and then."""
    count = round(seconds * rate)
    at = np.arange(count, dtype=np.int64)
    period = rate // (90 + 17 * (seed % 11))
    triangle = np.abs(at % period * 2 - period) * 16_000 // period - 8_000
    loud = np.where(at // (rate // 10) % 4 == 3, 0, 1)
    found: np.ndarray[Any, Any] = ((triangle + noise(seed, count) // 32 - 1_000) * loud).astype(np.int16)
    return found


def encoded(samples: np.ndarray[Any, Any], rate: int = 16_000, form: str = "FLAC") -> bytes:
    """Returns the bytes of a sound file."""
    sink = io.BytesIO()
    soundfile.write(sink, samples, rate, format=form, subtype="PCM_16")
    return sink.getvalue()


def clips(count: int = 14, *, rate: int = 16_000, form: str = "FLAC") -> list[Row]:
    """Returns recordings: id, bytes, text, language, seconds, and columns to keep."""
    return [clip(n, seconds=0.2 + 0.09 * (n * 5 % 16), rate=rate, form=form) for n in range(count)]


def clip(n: int, *, seconds: float, rate: int = 16_000, form: str = "FLAC", **other: Any) -> Row:
    """Returns one recording; `other` says what differs."""
    language, text = TEXTS[n % len(TEXTS)]
    row: Row = {
        "id": f"c{n:02}",
        "bytes": encoded(wave(n, seconds, rate), rate, form),
        "text": text,
        "language": language,
    }
    row |= {"seconds": round(seconds, 4), "speaker": f"s{n % 3}", "snr": None if n == 2 else n * 1.25, "takes": n % 4}
    return row | other


def spoken(count: int) -> list[Row]:
    """Returns recordings at 22,050 Hz that say words of the lexicon of demo/ljspeech."""
    words = ("oh", "Hello.", "twelfth", "four papa", "eleventh")
    rows = [clip(n, seconds=0.3 + 0.05 * n, rate=22_050, form="WAV", language="en") for n in range(count)]
    return [row | {"text": words[n % 5]} for n, row in enumerate(rows)]


def texts(count: int = 24) -> list[Row]:
    """Returns texts without sound."""
    rows = [{**clip(n, seconds=0.01), "bytes": None, "prompt": "" if n % 3 else "Say:"} for n in range(count)]
    return [row | {"text": f"{row['text']} {n * 37}"} for n, row in enumerate(rows)]


def bad_clips() -> list[Row]:
    """Returns recordings that are bad in a way each; None for bytes: the file is not there."""
    good = encoded(wave(90, 0.5))
    return [
        clip(20, seconds=0.5, id="torn", bytes=good[: len(good) // 2]),
        clip(21, seconds=0.5, id="nothing", bytes=b""),
        clip(22, seconds=0.5, id="noise", bytes=b"no sound at all, but long enough to be one" * 9),
        clip(23, seconds=0.5, id="missing", bytes=None),
        clip(24, seconds=0.5, id="silent_text", text=""),
        clip(25, seconds=0.5, id="blank_text", text=" \t "),
        clip(26, seconds=2.6, id="long"),
        clip(27, seconds=0.02, id="short"),
        clip(28, seconds=0.5, id="liar") | {"seconds": 9.0},
        clip(29, seconds=1.6, id="shy") | {"seconds": 0.4},
        clip(30, seconds=0.5, id="c01"),
        clip(31, seconds=0.5, id="stereo", bytes=encoded(np.stack([wave(1, 0.5), wave(2, 0.5)], 1))),
        clip(32, seconds=0.5, id="eight", bytes=encoded(wave(3, 0.5, 8_000), 8_000)),
        clip(33, seconds=0.5, id="unsaid", language=None),
        clip(34, seconds=0.5, id="german", language="de"),
        clip(35, seconds=0.5, id="control", text="to <|endoftext|> be"),
        clip(36, seconds=0.5, id="wordy", text="many words " * 60),
    ]


def tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Writes a tar."""
    with tarfile.open(path, "w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def lines(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> None:
    """Writes JSON lines; text as it is."""
    texts = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")


def table(path: Path, rows: Sequence[Row]) -> None:
    """Writes a table in the form that the name says."""
    match path.suffix:
        case ".csv" | ".tsv":
            with open(path, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=5)
        case ".arrow":
            made = pa.Table.from_pylist(list(rows))
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, made.schema) as out:
                out.write_table(made)
        case _:
            lines(path, rows)


KEPT = ("speaker", "snr", "takes")


def speech(kind: str, raw: Path, rows: Sequence[Row], *, form: str = "") -> None:
    """Writes recordings as a kind of source reads them; form: the suffix of its table."""
    raw.mkdir()
    {
        **dict.fromkeys(("tar", "filelist", "webdataset"), _tars),
        **dict.fromkeys(("jsonl", "table", "folder", "ljspeech"), _files),
        "hf": _parquet,
        "text": _texts,
    }[kind](kind, raw, rows, form)


def _tars(kind: str, raw: Path, rows: Sequence[Row], form: str) -> None:
    """Two tars, with a document beside each recording, or a manifest that names them."""
    half = (len(rows) + 1) // 2
    listed = []
    for name, part in {"a.tar": rows[:half], "b.tar": rows[half:]}.items():
        members = []
        for row in part:
            if row["bytes"] is not None:
                members.append((f"{row['id']}.flac", row["bytes"]))
            if kind != "tar":
                text = "transcription" if kind == "filelist" else "text"
                document = picked(row, "id", "language", *KEPT, duration="seconds", **{text: "text"})
                members.append((f"{row['id']}.json", json.dumps(document).encode()))
            names = {"sample_id": "id", "transcript": "text", "duration_s": "seconds"}
            listed.append(
                {"tar_path": name, "tar_member_name": f"{row['id']}.flac", **picked(row, "language", *KEPT, **names)}
            )
        tar(raw / name, members)
    if kind == "tar":
        table(raw / "train.parquet", listed)
    elif kind == "filelist":
        columns = [(r["tar_path"], r["sample_id"], r["language"] or "", str(r["duration_s"])) for r in listed]
        (raw / "train.tsv").write_text("".join("\t".join(line) + "\n" for line in columns))


def _files(kind: str, raw: Path, rows: Sequence[Row], form: str) -> None:
    """A file a recording, and a table of them or a text beside each."""
    suffix = ".wav" if kind == "ljspeech" else ".flac"
    for row in rows:
        path = raw / {"folder": str(row["language"]), "ljspeech": "wavs"}.get(kind, "") / (row["id"] + suffix)
        path.parent.mkdir(exist_ok=True)
        if row["bytes"] is not None:
            path.write_bytes(row["bytes"])
        if kind == "folder" and row["text"] is not None:
            path.with_suffix(".txt").write_text(row["text"], encoding="utf-8")
    if kind == "ljspeech":
        (raw / "metadata.csv").write_text(
            "".join(f"{r['id']}|{r['text']}|{r['text'].lower()}\n" for r in rows if "|" not in r["text"])
        )
    elif kind != "folder":
        audio, seconds = ("audio", "duration_s") if kind == "jsonl" else ("path", "length")
        found = [picked(row, "id", "text", "language", *KEPT, **{seconds: "seconds"}) for row in rows]
        for row in found[2::4] if kind == "jsonl" else []:
            row["prompt"] = f"Before {row['id']}."
        table(raw / f"train{form or '.jsonl'}", [{audio: f"{row['id']}.flac", **row} for row in found])


def _parquet(kind: str, raw: Path, rows: Sequence[Row], form: str) -> None:
    """Two files with the recordings inside."""
    half = (len(rows) + 1) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        inside = [{"bytes": row["bytes"], "path": f"{row['id']}.flac"} for row in part]
        columns = [picked(row, "id", "text", "language", *KEPT) for row in part]
        found = [{"audio": one, **row} for one, row in zip(inside, columns, strict=True)]
        table(raw / f"train-0000{number}-of-00002.parquet", found)


def _texts(kind: str, raw: Path, rows: Sequence[Row], form: str) -> None:
    """Texts without sound, in a table or a text a line."""
    if form == ".txt":
        (raw / "texts.txt").write_text("".join(row["text"] + "\n" for row in rows), encoding="utf-8")
    else:
        table(
            raw / f"texts{form or '.jsonl'}", [picked(row, "id", "text", "language", "prompt", *KEPT) for row in rows]
        )


def picked(row: Row, *names: str, **renamed: str) -> Row:
    """Returns fields of a row, some by other names."""
    return {**{name: row[name] for name in names}, **{name: row[field] for name, field in renamed.items()}}


def picture(seed: int, *, width: int = 96, height: int = 72, mode: str = "RGB", form: str = "PNG") -> bytes:
    """Returns an image file of ramps and noise."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    y, x = np.mgrid[:height, :width]
    ramps = np.stack([(x * (c + 2) + y * (seed % 5 + 1) * 3) % 256 for c in range(channels)], -1)
    grain = noise(seed, ramps.size).reshape(ramps.shape) % 24
    pixels = np.minimum(ramps + grain, 255).astype(np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels.squeeze() if channels == 1 else pixels).save(sink, form)
    return sink.getvalue()


def pictures(count: int = 6) -> dict[str, bytes]:
    """Returns image files of several sizes and modes by name."""
    modes = ("RGB", "RGB", "RGBA", "L")
    made = {}
    for n in range(count):
        made[f"p{n}.png"] = picture(n, width=56 + 28 * (n % 4), height=84 - 14 * (n % 3), mode=modes[n % 4])
    return made


def talks(count: int = 14) -> list[Row]:
    """Returns conversations over the six pictures: id, names of images, messages, and columns to keep."""
    return [talk(n) for n in range(count)]


def talk(n: int, **other: Any) -> Row:
    """Returns one conversation: of one picture, of two, or of none; `other` says what differs."""
    names = [[f"p{n % 6}.png"], [f"p{n % 6}.png"], [f"p{n % 3}.png", f"p{3 + n % 3}.png"], []][n % 4]
    asked = "<image>" * len(names) + f"What of {n}?"
    turns = [(asked, f"It is {TEXTS[n % len(TEXTS)][1]}"), ("And now?", "Still " + "so " * (n % 5) + "it is.")]
    messages = [
        {"role": role, "content": text}
        for question, answer in turns[: 1 + n % 2]
        for role, text in (("user", question), ("assistant", answer))
    ]
    row = {
        "id": f"t{n:02}",
        "images": names,
        "messages": messages,
        "grade": n / 2,
        "place": None if n == 1 else f"at {n}",
    }
    return row | other


def vision(kind: str, raw: Path, rows: Sequence[Row], files: Mapping[str, bytes], *, form: str = "") -> None:
    """Writes conversations as a kind of source reads them; form: the suffix of its table."""
    raw.mkdir()
    if kind == "webdataset":
        half = (len(rows) + 1) // 2
        for name, part in {"a": rows[:half], "b": rows[half:]}.items():
            members = []
            for row in part:
                there = [files[image] for image in _names(row) if image in files]
                members += [(f"{row['id']}.{at}.png", content) for at, content in enumerate(there)]
                members.append((f"{row['id']}.json", json.dumps({**row, "images": None, "image": None}).encode()))
            tar(raw / f"{name}.tar", members)
    elif kind == "hf":
        inside = [[{"bytes": files[name], "path": name} for name in row["images"]] for row in rows]
        columns = [{key: part for key, part in row.items() if key != "images"} for row in rows]
        found = [{"image": images, **row} for images, row in zip(inside, columns, strict=True)]
        table(raw / "train.parquet", found)
    else:
        for name, content in files.items():
            (raw / name).write_bytes(content)
        found = list(rows)
        if kind == "table":
            found = [picked(row, "id", "grade", "place", image="images", messages="messages") for row in rows]
            for row in found:
                names = row["image"] if form != ".csv" else json.dumps(row["image"])
                row.update(image=names, messages=json.dumps(row["messages"]))
        table(raw / f"train{form or '.jsonl'}", found)


class Code:
    """Python files that configs name."""

    CLIPS = """
import json, os
import soundfile

RAW = os.path.join(os.path.dirname(__file__), "raw")

class Clips:
    def __iter__(self):
        for number, line in enumerate(open(os.path.join(RAW, "train.jsonl"), encoding="utf-8")):
            row = json.loads(line)
            path = os.path.join(RAW, row.pop("audio"))
            if not os.path.exists(path):
                continue
            row.pop("duration_s")
            if number % 3 or row["id"] in ("torn", "nothing", "noise"):
                yield {**row, "audio": open(path, "rb").read()}
            else:
                sound, rate = soundfile.read(path, dtype=("int16", "float32")[number % 2])
                yield {**row, "audio": sound, "sample_rate_hz": rate}
"""
    TALKS = """
import json, os

RAW = os.path.join(os.path.dirname(__file__), "raw")

def talks():
    for line in open(os.path.join(RAW, "train.jsonl"), encoding="utf-8"):
        row = json.loads(line)
        key = "images" if "images" in row else "image"
        names = row[key] if key == "images" else [row[key]]
        found = [open(os.path.join(RAW, name), "rb").read() for name in names]
        yield {**row, key: found if key == "images" else found[0]}
"""
    BANDS = """
import numpy as np

class Bands:
    version = 2
    fields = {
        "input_features": {"dtype": "float32", "shape": [None, 5], "pad": -1.5, "multiple": 4},
        "attention_mask": {"mask_of": "input_features"},
        "peak": {"dtype": "float32", "shape": []},
    }

    def __init__(self, hop: int = 160, *, sample_rate_hz: int):
        self.hop, self.rate = hop, sample_rate_hz

    def num_frames(self, num_samples):
        return num_samples // self.hop

    def compute(self, clip):
        if len(clip) == 3200:
            raise ValueError("unlucky")
        frames = np.abs(clip[: len(clip) // self.hop * self.hop].reshape(-1, 5, self.hop // 5))
        return {"input_features": frames.max(2), "peak": np.abs(clip).max().reshape(())}
"""
    WORDS = """
def shout(text: str, language: str) -> str:
    return "" if text.endswith("111") else f"{text.upper()} <{language}>"
"""


def given(path: Path, count: int = 6) -> None:
    """Writes features as Whisper's extractor makes them, padded to 3,000 frames, beside labels and texts."""
    matrices, rows = [], data_rows(count)
    for n, row in enumerate(rows):
        frames = 40 + 37 * n
        values = np.full((80, 3000), -0.5 - n / 8, np.float32)
        values[:, :frames] = (noise(n, 80 * frames).reshape(80, frames) % 512 / 256 - 0.25).astype(np.float32)
        matrices.append(values.tolist())
        row["labels"] = [1, 2, 3, *(noise(n + 50, 4 + 3 * n) % 600).tolist(), 700]
    inner = pa.list_(pa.list_(pa.float32()))
    made = pa.Table.from_pylist(rows).append_column("input_features", pa.array(matrices, inner))
    pq.write_table(made, path, row_group_size=3)


def data_rows(count: int) -> list[Row]:
    """Returns recordings without their sound."""
    return [picked(clip(n, seconds=0.01), "id", "text", "language", *KEPT) for n in range(count)]


def labelled(count: int = 12) -> list[Row]:
    """Returns single images with a class, a number, a list of classes and a text; some lack one."""
    names = ("dog", "cat", "bird")
    rows: list[Row] = []
    for n in range(count):
        row: Row = {"id": f"i{n:02}", "image": f"p{n % 6}.png", "label": names[n % 3], "grade": n / 2}
        row |= {"number": n % 4, "several": [names[n % 3], names[n * n % 3]], "text": f"a photo of the {names[n % 3]}"}
        rows.append(row | ({"label": None, "number": None, "several": None, "text": None} if n == 7 else {}))
    return rows


def _names(row: Row) -> list[str]:
    """Returns the names of a conversation's images."""
    named = row.get("images") or row.get("image") or []
    return [named] if isinstance(named, str) else list(named)


def classes(folder: Path) -> None:
    """Writes a data set as `save_to_disk` does, of images with a ClassLabel."""
    datasets.disable_progress_bars()
    rows = [row for row in labelled() if row["label"]]
    columns: dict[str, list[Any]] = {"image": [{"bytes": pictures()[r["image"]], "path": None} for r in rows]}
    columns |= {"label": [r["label"] for r in rows], "grade": [r["grade"] for r in rows]}
    kinds = {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=["cat", "fish", "dog", "bird"])}
    features = datasets.Features({**kinds, "grade": datasets.Value("float64")})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder), num_shards=2)


def single(kind: str, raw: Path, rows: Sequence[Row], files: Mapping[str, bytes], *, form: str = "") -> None:
    """Writes single images with what stands beside each, as a kind of source reads them."""
    raw.mkdir()
    if kind == "folder":
        for row in rows:
            path = raw / (row["label"] or "none") / f"{row['id']}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(files[row["image"]])
            if row["text"] is not None:
                path.with_suffix(".txt").write_text(row["text"])
    elif kind == "hf":
        table(raw / "train.parquet", [{**row, "image": {"bytes": files[row["image"]], "path": None}} for row in rows])
    elif kind == "webdataset":
        members = []
        for row in rows:
            members.append((f"{row['id']}.png", files[row["image"]]))
            if row["label"] is not None:
                members += [(f"{row['id']}.cls", row["label"].encode()), (f"{row['id']}.txt", row["text"].encode())]
        tar(raw / "a.tar", members)
    else:
        for name, content in files.items():
            (raw / name).write_bytes(content)
        table(raw / f"train{form or '.jsonl'}", rows)


def bad_pictures() -> dict[str, bytes]:
    """Returns files of images that are bad in a way each."""
    deep = io.BytesIO()
    Image.fromarray((noise(1, 60 * 60).reshape(60, 60)).astype(np.uint16)).save(deep, "PNG")
    moving = io.BytesIO()
    frames = [Image.new("RGB", (60, 60), colour) for colour in ("red", "blue")]
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    whole = picture(3)
    return {
        **{"torn.png": whole[: len(whole) // 2], "empty.png": b"", "words.png": b"no image, but long enough to be one"},
        **{"deep.png": deep.getvalue(), "moving.gif": moving.getvalue()},
        **{"wide.png": picture(1, width=2400, height=8), "huge.png": picture(1, width=500, height=420)},
    }


def bad_talks() -> list[Row | str]:
    """Returns conversations that are bad in a way each, and lines that are none."""

    def asked(name: str, **other: Any) -> Row:
        return {"id": name, "image": "p0.png", "question": "What?", "answer": "A wave."} | other

    def said(name: str, *changes: Row) -> Row:
        turns: list[Row] = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A wave."}]
        made = [{**turn, **change} for turn, change in zip(turns, changes, strict=True)]
        return {"id": name, "images": ["p1.png"], "messages": made}

    limited = [{"type": "image", "image": "p0.png", "total_pixels": 784}]
    return [
        *(asked(f"of {name}", image=name) for name in bad_pictures()),
        *(asked("gone", image="gone.png"), asked("data", image="data:image/png;base64,iVBORw0KGgo")),
        *(asked("url", image="https://example.org/p0.png"), asked("half bad", image=["p1.png", "torn.png"])),
        *(asked("tools", tools=[{"name": "look"}]), asked("thinks", thinking="h"), asked("film", videos=["v.mp4"])),
        *(asked("boxes", objects={"bbox": [[0, 0, 1, 1]]}), asked("chosen", rejected_response="No.")),
        *(asked("t01"), asked("mute", answer=""), asked("unasked", question="<image><image>What?")),
        *(asked("control", answer="it ends<|im_end|> here"), asked("long", answer="so it is " * 200)),
        *(said("weight", {}, {"weight": 0.3}), said("unlearnt", {}, {"loss": False})),
        *(said("roles", {"from": "gpt"}, {}), said("values", {}, {"value": "Else."})),
        *(said("limits", {"content": limited}, {}), said("turned", {"role": "assistant"}, {"role": "user"})),
        '{"id": "twice", "image": "p0.png", "question": "a", "answer": "b", "answer": "c"}',
    ]
