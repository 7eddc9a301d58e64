"""The cases: what is built, and what batches are made of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.golden_rows import data, folders
from tests.golden_rows.pin import ROOT, Case, merged
from tests.vlm_families import FAMILIES, write_family

Write = Callable[[Path], object]
Loads = dict[str, Mapping[str, Any]]
SPEECH, LJ = ROOT / "demo" / "speech", ROOT / "demo" / "ljspeech"
QWEN3_VL, GEMMA3 = ROOT / "demo" / "vision" / "model", ROOT / "demo" / "vision" / "gemma3_model"
WHISPER = {"tokenizer": SPEECH / "model", "prompt": "whisper", "max_label_tokens": 120}
PLAIN = {"tokenizer": SPEECH / "model", "prompt": "plain"}
QWEN_ASR = {"tokenizer": SPEECH / "qwen3_asr_model", "prompt": "qwen3_asr", "max_label_tokens": 120}
KEEP = {"keep_columns": ["speaker", "snr", "takes"]}
KEEP_IMAGES = {"keep_columns": ["grade", "place"]}
WAVE = {"features": "waveform"}
CODE: dict[str, Any] = {"run": {"allow_code": True}}


def speech(kind: str, manifest: str = "raw", **sections: Any) -> dict[str, Any]:
    """Returns a config of recordings."""
    plan = {"edges_s": [0.5, 0.9, 1.2], "batch_seconds": 3.6, "lockstep": 2}
    base = {"source": {"kind": kind, "manifest": manifest}, "layout": {"rows_per_shard": 4}, "plan": plan}
    return merged(base, sections)


def texts(manifest: str, **sections: Any) -> dict[str, Any]:
    """Returns a config of texts without sound."""
    plan = {"=": 1, "edges": [16, 24, 40], "batch_tokens": 100, "lockstep": 2}
    sections = merged({"audio": {"features": "none"}, "text": PLAIN, "layout": {"rows_per_shard": 1}}, sections)
    return speech("text", manifest, **{"plan": plan, **sections})


def packs(kind: str, manifest: str = "raw", **sections: Any) -> dict[str, Any]:
    """Returns a config of conversations whose images are patches."""
    plan = {"kind": "pack", "seq_len": 420}
    base = {"source": {"kind": kind, "manifest": manifest}, "vision": {"processor": QWEN3_VL}, "plan": plan}
    return merged({"layout": {"rows_per_shard": 5}, **base}, sections)


def images(
    kind: str, processor: Any, manifest: str = "raw", *, prompt: str = "chat", **sections: Any
) -> dict[str, Any]:
    """Returns a config of images as a processor gives them."""
    tokenizer = {"tokenizer": processor} if prompt in ("chat", "plain") else {}
    plan = {"edges": [48, 96], "batch_size": 3, "lockstep": 1} if prompt == "chat" else {"batch_size": 5, "lockstep": 1}
    base = {"source": {"kind": kind, "manifest": manifest}, "vision": {"processor": processor, "images": "processor"}}
    base |= {"text": {"prompt": prompt, **tokenizer}, "plan": plan, "layout": {"rows_per_shard": 5}}
    return merged(base, sections)


def clips(kind: str = "tar", count: int = 14, *, bad: bool = False, form: str = "", **how: Any) -> Write:
    """Returns what writes recordings."""
    return lambda folder: data.speech(
        kind, folder / "raw", [*data.clips(count, **how), *(data.bad_clips() if bad else [])], form=form
    )


def words(form: str = "") -> Write:
    """Returns what writes texts without sound."""
    return lambda folder: data.speech("text", folder / "raw", data.texts(), form=form)


def below(write: Write) -> Write:
    """Returns what makes a folder, and writes there."""

    def write_there(folder: Path) -> None:
        folder.mkdir()
        write(folder)

    return write_there


def talks(kind: str = "jsonl", count: int = 14, *, bad: bool = False, form: str = "") -> Write:
    """Returns what writes conversations over six pictures."""

    def write(folder: Path) -> None:
        files = data.pictures() | (data.bad_pictures() if bad else {})
        rows: list[Any] = [*data.talks(count), *(data.bad_talks() if bad else [])]
        data.vision(kind, folder / "raw", rows, files, form=form)

    return write


def single(kind: str = "jsonl", *, form: str = "", bad: bool = False) -> Write:
    """Returns what writes images with labels and texts."""

    def write(folder: Path) -> None:
        rows, files = data.labelled(), data.pictures() | (data.bad_pictures() if bad else {})
        odd: list[dict[str, Any]] = [
            {"id": f"of {name}", "image": name, "label": "cat", "text": "a cat"} for name in [*files, "gone.png"][6:]
        ]
        several: list[dict[str, Any]] = [
            {"id": "two", "image": "p0.png", "label": ["cat", "dog"]},
            {"id": "below", "image": "p0.png", "label": -1},
        ]
        data.single(kind, folder / "raw", [*rows, *(odd + several if bad else [])], files, form=form)

    return write


def with_files(*writes: Write, **files: Any) -> Write:
    """Returns what writes one after the other, and then files: text, or what writes a folder."""

    def write(folder: Path) -> None:
        for each in writes:
            each(folder)
        for name, content in files.items():
            path = folder / name.replace("__", ".")
            path.write_text(content) if isinstance(content, str) else content(path)

    return write


def plan(**fields: Any) -> Mapping[str, Any]:
    """Returns a load with another plan."""
    return {"plan": {"=": 1, "lockstep": 1, **fields}}


def loader(**fields: Any) -> Mapping[str, Any]:
    """Returns a load with another loader."""
    return {"loader": fields}


LIVE: Loads = {"live": loader(cache="off")}
PLANS: Loads = {
    **{f"tail-{tail}": {"plan": {"tail": tail}} for tail in ("short", "drop", "pad")},
    "window": plan(kind="window", window=2, batch_size=3, lockstep=2),
    "window-seconds": plan(kind="window", window=3, batch_seconds=2.5, tail="drop"),
    "k": plan(k=3, batch_size=3, tail="short"),
    "sizes": plan(edges_s=[0.5, 1.0], batch_size=[4, 2]),
    "tokens": plan(edges_s=[0.5, 1.0], batch_tokens=90),
    "both": plan(edges_s=[0.5, 1.0], batch_tokens=90, batch_seconds=2.5),
    "calibration": plan(edges_s=[0.5, 1.0], calibration="sizes.json"),
    "local": {"plan": {"locality": "shards:2"}},
}
FILTERS: Loads = {
    "where": {"filter": {"where": "language in ('en', 'it') and duration_s < 1.3"}},
    "ids": {"filter": {"ids": "ids.txt"}},
    "not-ids": {"filter": {"drop_ids": "ids.txt"}},
    "quota": {"filter": {"quota": {"language": 2}}},
    "nothing": {"filter": {"where": "duration_s > 100"}},
}
MIXTURES: Loads = {
    "hours": {"mixture": {"column": "language"}},
    "weights": {"mixture": {"column": "language", "weights": {"en": 1, "fr": 2, "es": 0, "it": 1}}},
    "apart": {"mixture": {"column": "language", "temperature": 0.5, "batches": "per_source"}},
    "ends": {"mixture": {"column": "language", "temperature": 0.0, "exhausted": "end"}},
    "of-source": {"mixture": {"column": "source", "batches": "per_source", "exhausted": "end"}},
}
BOTH: dict[str, Any] = {"source": [{"config": "case.toml"}, {"config": "other.toml"}]}
WEIGHED: dict[str, Any] = {"source": [{"config": "case.toml", "weight": 1}, {"config": "other.toml", "weight": 3}]}
TWO: Loads = {
    "mixed": {"mixture": BOTH},
    "apart": {"mixture": {**BOTH, "batches": "per_source"}},
    "lifted": {"mixture": {**BOTH, "temperature": 0.5}},
    "weighed": {"mixture": WEIGHED, "filter": {"where": "language != 'fr'"}},
}
EXTRACTORS: dict[str, dict[str, Any]] = {
    **{"SpeechT5": {}, "Parakeet": {"dtype": "float16"}, "Wav2Vec2": {}, "Dac": {}, "Whisper": {}}
}
PACKINGS: Loads = {
    "uint8": loader(pixels="uint8"),
    "bfloat-varlen": loader(pixels="bfloat16", varlen=True),
    "half": loader(pixels="float16"),
    "fixed": {"plan": {"shapes": "fixed", "max_patches": 900}},
    "buffer": {"plan": {"buffer_size": 64, "pack_seed": 3}},
    "small-buffer": {"plan": {"buffer_size": 4}},
    "two-budgets": {"plan": {"max_patches": 160, "tail": "drop"}},
    "both": {"plan": {"max_patches": 400, "buffer_size": 64}},
    "decreasing": {"plan": {"algorithm": "best_fit_decreasing", "tail": "pad"}},
    "short": {"plan": {"seq_len": 100, "tail": "short"}},
    "refused": {"plan": {"seq_len": 100, "overlong": "error"}},
    "where": {"filter": {"where": "num_images > 0"}},
}
SIZES = {"b_0_0.5": {"batch_size": 3, "grad_acc": 2}, "b_0.5_1": {"batch_size": 2, "grad_acc": 3}}
BAD = {
    "source": {"max_duration_s": 2.0, "overlong": "drop", "min_duration_s": 0.1, "languages": ["en", "fr", "es", "it"]}
}

CASES: dict[str, Case] = {
    # Sound: steps, prompts, kinds of sources.
    "log-mel-whisper-tar": Case(
        data=clips("tar"),
        config=speech("tar", audio={"features": "log_mel"}, text=WHISPER, source=KEEP),
        loads=LIVE | {"half": loader(dtype="float16"), "bfloat": loader(dtype="bfloat16"), "crop": loader(crop_s=0.3)},
    ),
    "log-mel-128-table-csv": Case(
        data=clips("table", form=".csv"),
        config=speech(
            "table",
            "raw/train.csv",
            source={"columns": {"audio": "path", "duration": "length"}, **KEEP},
            audio={"features": "log_mel", "n_mels": 128, "dtype": "float32"},
            text={**WHISPER, "language_tag_mode": "always"},
        ),
    ),
    "waveform-plain-filelist": Case(
        data=with_files(clips("filelist"), ids__txt="c03\nc07\nc08\nc01\nno\n", sizes__json=json.dumps(SIZES)),
        config=speech("filelist", audio=WAVE, text=PLAIN),
        loads=LIVE | PLANS | FILTERS | {"crop": loader(crop_s=0.3), "half": loader(dtype="float16")},
        exact=True,
    ),
    "waveform-mixtures-webdataset": Case(
        data=clips("webdataset", 20),
        config=speech("webdataset", audio=WAVE, text=PLAIN, source=KEEP),
        loads=MIXTURES,
        exact=True,
    ),
    "waveform-resampled-hf": Case(
        data=clips("hf", rate=8_000),
        config=speech("hf", audio={**WAVE, "dtype": "float32"}, text=PLAIN, source=KEEP),
        loads=LIVE | {"crop": loader(crop_s=0.3)},
    ),
    "qwen3-asr-webdataset": Case(
        data=clips("webdataset"),
        config=speech("webdataset", audio={"features": "qwen3_asr"}, text=QWEN_ASR, source=KEEP),
        loads=LIVE | {"crop": loader(crop_s=0.3)},
    ),
    "qwen3-asr-32-jsonl": Case(
        data=clips("jsonl"),
        config=speech(
            "jsonl",
            "raw/train.jsonl",
            audio={"features": "qwen3_asr", "dtype": "float32", "keep_waveform": True},
            text={**QWEN_ASR, "language_tag_mode": "none"},
        ),
    ),
    "w2v-bert-jsonl": Case(
        data=clips("jsonl"),
        config=speech("jsonl", "raw/train.jsonl", audio={"features": "w2v_bert", "keep_waveform": True}, source=KEEP),
        loads=LIVE | {"crop": loader(crop_s=0.3), "half": loader(dtype="float16")},
    ),
    "w2v-bert-16-ljspeech": Case(
        data=clips("ljspeech", form=""),
        config=speech("ljspeech", audio={"features": "w2v_bert", "dtype": "float16"}, text=PLAIN),
        loads={"crop": loader(crop_s=0.3)},
    ),
    "mel-tts-ljspeech": Case(
        data=lambda folder: data.speech("ljspeech", folder / "raw", data.spoken(12)),
        config=speech(
            "ljspeech",
            audio={"sample_rate_hz": 22_050, "features": "mel", "preset": "hifigan", "energy": True, "pitch": {}},
            text={
                **{
                    "tokenizer": LJ / "symbols",
                    "prompt": "tts",
                    "normalize": ["nfkc", "phones"],
                    "blank_token": "<pad>",
                },
                "phones": {"backend": "lexicon", "lexicon": LJ / "lexicon.tsv"},
            },
        ),
        loads=LIVE | {"crop": loader(crop_s=0.3)},
    ),
    "mel-settings-tts-table": Case(
        data=lambda folder: data.speech("table", folder / "raw", data.spoken(12), form=".parquet"),
        config=speech(
            "table",
            "raw/train.parquet",
            source={"columns": {"audio": "path"}, **KEEP},
            audio={
                **{
                    "features": "mel",
                    "n_fft": 512,
                    "hop_length": 200,
                    "win_length": 400,
                    "n_mels": 40,
                    "center": False,
                },
                **{"log": "db", "mel_scale": "htk", "norm": "none", "power": 2, "dtype": "float16"},
            },
            text={
                **{"tokenizer": LJ / "symbols", "prompt": "tts", "add_eos": False, "speaker_column": "speaker"},
                **{"speakers": ["s2", "s1"], "language_codes": ["en"], "normalize": ["phones"]},
                "phones": {"backend": "lexicon", "lexicon": LJ / "lexicon.tsv"},
            },
        ),
    ),
    "given-labels-hf": Case(
        data=with_files(train__parquet=data.given),
        config=speech(
            "hf",
            "train.parquet",
            source={"columns": {"features": "input_features", "labels": "labels"}},
            audio={"features": "given"},
            text={"tokenizer": SPEECH / "model", "prompt": "given", "max_label_tokens": 20},
            plan={"batch_size": 2, "batch_seconds": None},
        ),
        loads=LIVE,
        exact=True,
    ),
    "given-16-whisper-hf": Case(
        data=with_files(train__parquet=data.given),
        config=speech(
            "hf",
            "train.parquet",
            source={"columns": {"features": "input_features"}, **KEEP},
            audio={"features": "given", "dtype": "float16"},
            text=WHISPER,
        ),
        exact=True,
    ),
    **{
        f"extractor-{name.lower()}": Case(
            data=with_files(clips("jsonl", 10), model=partial(folders.extractor, name=f"{name}FeatureExtractor")),
            config=speech("jsonl", "raw/train.jsonl", audio={"features": "extractor", "extractor": "model", **more}),
            loads=LIVE | {"half": loader(dtype="float16")},
        )
        for name, more in EXTRACTORS.items()
    },
    "own-step-folder": Case(
        data=with_files(clips("folder"), own__py=data.Code.BANDS),
        config=speech(
            "folder",
            audio={"features": "own.py:Bands", "hop": 200},
            text=PLAIN,
            source={"languages_from_folders": True},
            **CODE,
        ),
        loads=LIVE | {"half": loader(dtype="float16")},
        exact=True,
    ),
    "texts-beside-folder": Case(
        data=with_files(
            clips("folder"),
            texts__csv="".join(
                f"{line}\n" for line in ("file,said,speaker", "c01,one,a", "en/c00.flac,two,b", "c04,,c", "c09,four,d")
            ),
        ),
        config=speech(
            "folder",
            source={"texts": "texts.csv", "columns": {"audio": "file", "text": "said"}, "keep_columns": ["speaker"]},
            audio=WAVE,
            text=PLAIN,
        ),
        exact=True,
    ),
    "python-clips": Case(
        data=with_files(clips("jsonl", bad=True), inputs__py=data.Code.CLIPS),
        config=speech("python", "inputs.py:Clips", audio=WAVE, text=PLAIN, source=KEEP, **CODE),
        loads=LIVE,
    ),
    # Rows that are bad, in every kind of source; what is too long or too short, in another language, excluded.
    **{
        f"bad-{kind}": Case(
            data=clips(kind, 8, bad=True, form=form),
            config=merged(speech(kind, manifest, audio=WAVE, text=WHISPER), source),
            loads=LIVE,
        )
        for kind, manifest, form, source in (
            ("tar", "raw", "", {}),
            ("filelist", "raw", "", BAD),
            ("webdataset", "raw", "", {"source": {"max_duration_s": 1.0, "overlong": "clip"}}),
            ("jsonl", "raw/train.jsonl", "", {"source": {"exclude": ["c03", "c05"], "duration_tolerance": 2.0}}),
            ("hf", "raw", "", {"source": {"max_samples": 11, "min_duration_s": 0.3}}),
            ("table", "raw/train.tsv", ".tsv", {"source": {"columns": {"audio": "path", "duration": "length"}}}),
            ("folder", "raw", "", {"source": {"max_duration_s": 1.0, "max_sample_bytes": 120_000}}),
            (
                "ljspeech",
                "raw",
                "",
                BAD | {"text": {"language_tag_mode": "none"}} | {"source": {"max_duration_s": 1.4}},
            ),
        )
    },
    # Texts without sound.
    "text-jsonl": Case(
        data=words(),
        config=texts("raw/texts.jsonl", source=KEEP),
        loads=LIVE
        | {
            "k": plan(k=3, batch_tokens=100),
            "size": plan(edges=[20, 40], batch_size=4, tail="pad"),
            "window": plan(kind="window", window=2, batch_size=5),
        },
        exact=True,
    ),
    "text-txt": Case(
        data=words(".txt"),
        config=texts("raw", source={"rows": "2:20:2"}, text={"normalize": "none", "max_label_tokens": 40}),
        loads=LIVE,
        exact=True,
    ),
    "text-parquet": Case(
        data=words(".parquet"),
        config=texts("raw/texts.parquet", text=WHISPER, source={"max_samples": 13}),
        loads=LIVE,
        exact=True,
    ),
    "text-detected-gz": Case(
        data=lambda folder: (folder / "t.txt.gz").write_bytes(
            gzip.compress("\n".join(row["text"] for row in data.texts()).encode())
        ),
        config=texts(
            "t.txt.gz",
            text={
                **WHISPER,
                "language": "detect",
                "normalize": ["nfkc", "numbers", "lower"],
                "languages": ["en", "fr", "es", "it"],
            },
            plan={"=": 1, "edges": [30, 50], "batch_tokens": 250},
        ),
        loads=LIVE | {"mixture": {"mixture": {"column": "language", "temperature": 0.0}}},
    ),
    "text-code-jsonl": Case(
        data=with_files(words(), words__py=data.Code.WORDS),
        config=texts(
            "raw/texts.jsonl",
            text={"normalize": ["nfkc", "words.py:shout"], "language": "detect_missing", "min_confidence": 0.9},
            **CODE,
        ),
        exact=True,
    ),
    # Mixtures of whole caches.
    "mixture-of-caches": Case(
        data=with_files(clips("tar"), more=below(clips("jsonl", 6))),
        config=speech("tar", audio=WAVE, text=PLAIN),
        others={"other": speech("jsonl", "more/raw/train.jsonl", name="other", audio=WAVE, text=PLAIN)},
        loads=TWO,
        exact=True,
    ),
    "mixture-with-texts": Case(
        data=with_files(clips("jsonl"), more=below(words())),
        config=speech(
            "jsonl",
            "raw/train.jsonl",
            audio={"features": "qwen3_asr"},
            text=PLAIN,
            plan={"edges": [24, 40], "batch_tokens": 200},
        ),
        others={"other": texts("more/raw/texts.jsonl", name="other", text=PLAIN)},
        loads={
            "apart": {"mixture": {**TWO["apart"]["mixture"], "asr_ratio": 0.7}},
            "mixed": TWO["mixed"],
        },
    ),
    # Images as patches, in packs.
    "packs-qwen3-vl-jsonl": Case(
        data=talks(), config=packs("jsonl", "raw/train.jsonl"), loads=LIVE | PACKINGS, exact=True
    ),
    **{
        f"packs-{codec}-{kind}": Case(
            data=talks(kind, form=form),
            config=packs(kind, f"raw/train{form}" if form else "raw", vision={"codec": codec}, source=KEEP_IMAGES),
            loads={"uint8": loader(pixels="uint8")},
            exact=True,
        )
        for codec, kind, form in (
            ("zstd", "table", ".parquet"),
            ("webp", "table", ".csv"),
            ("source", "webdataset", ""),
            ("source", "hf", ""),
        )
    },
    "packs-source-jsonl": Case(
        data=talks(), config=packs("jsonl", "raw/train.jsonl", vision={"codec": "source"}), loads=LIVE, exact=True
    ),
    "packs-python": Case(
        data=with_files(talks(), inputs__py=data.Code.TALKS),
        config=packs("python", "inputs.py:talks", source=KEEP_IMAGES, **CODE),
        loads=LIVE,
        exact=True,
    ),
    "packs-qwen2-vl-newline": Case(
        data=with_files(talks(), model=partial(write_family, FAMILIES["qwen2_vl"])),
        config=packs(
            "jsonl",
            "raw/train.jsonl",
            vision={"processor": "model", "alpha": "drop"},
            text={"tokenizer": "model", "prompt": "chat", "learn_through": "newline"},
        ),
        loads=LIVE,
        exact=True,
    ),
    "packs-shared-images": Case(
        data=talks(count=40),
        config=packs("jsonl", "raw/train.jsonl", layout={"rows_per_shard": 2}),
        loads={"buffer": {"plan": {"buffer_size": 64}}, "rows": {"source": {"rows": "3:30:2"}}},
        exact=True,
    ),
    "packs-bad-jsonl": Case(
        data=talks(bad=True, count=4),
        config=packs("jsonl", "raw/train.jsonl", source={"max_pixels": 200_000, "max_samples": 26}),
        loads=LIVE,
        exact=True,
    ),
    "packs-bad-webdataset": Case(
        data=lambda folder: data.vision(
            "webdataset",
            folder / "raw",
            [*data.talks(4), *(row for row in data.bad_talks() if isinstance(row, dict))],
            data.pictures() | data.bad_pictures(),
        ),
        config=packs("webdataset", source={"exclude": ["t02"]}),
        loads=LIVE,
        exact=True,
    ),
    # Images as their processor gives them.
    "chat-gemma3-hf": Case(
        data=talks("hf"),
        config=images("hf", GEMMA3, source=KEEP_IMAGES),
        loads=LIVE
        | {
            "bfloat": loader(dtype="bfloat16"),
            "k": plan(k=3, batch_size=2),
            "tokens": plan(edges=[60], batch_tokens=250),
        }
        | {
            "window": plan(kind="window", window=2, batch_size=4, tail="drop"),
            "where": {"filter": {"where": "grade > 2"}},
        },
        exact=True,
    ),
    "chat-gemma3-zstd-webdataset": Case(
        data=talks("webdataset"), config=images("webdataset", GEMMA3, vision={"codec": "zstd"}), exact=True
    ),
    "chat-gemma3-bad-jsonl": Case(
        data=talks(bad=True, count=4),
        config=images("jsonl", GEMMA3, "raw/train.jsonl", source={"max_pixels": 200_000}),
        loads=LIVE,
        exact=True,
    ),
    "chat-qwen3-vl-table": Case(
        data=talks("table", form=".arrow"), config=images("table", QWEN3_VL, "raw/train.arrow"), loads=LIVE, exact=True
    ),
    **{
        f"chat-{name}": Case(
            data=with_files(talks(count=10), model=partial(write_family, FAMILIES[name])),
            config=images("jsonl", "model", "raw/train.jsonl", plan={"edges": None}),
            exact=True,
        )
        for name in ("llava_onevision", "idefics3", "internvl", "pixtral")
    },
    **{
        f"label-{column}-{kind}": Case(
            data=with_files(single(kind, form=form), model=folders.vit),
            config=images(
                kind,
                "model",
                f"raw/train{form}" if form else "raw",
                prompt="label",
                source={"columns": {"label": column}},
            ),
            loads=LIVE | {"half": loader(dtype="float16")},
            exact=True,
        )
        for column, kind, form in (
            ("label", "folder", ""),
            ("number", "table", ".csv"),
            ("several", "hf", ""),
            ("label", "webdataset", ""),
        )
    },
    "label-classes-bad-jsonl": Case(
        data=with_files(single(bad=True), model=folders.vit),
        config=images("jsonl", "model", "raw/train.jsonl", prompt="label", text={"classes": ["dog", "bird", "cat"]}),
        loads=LIVE,
        exact=True,
    ),
    "label-two-bad-jsonl": Case(
        data=with_files(single(bad=True), model=folders.vit),
        config=images("jsonl", "model", "raw/train.jsonl", prompt="label"),
        exact=True,
    ),
    "label-saved-hf": Case(
        data=with_files(raw=data.classes, model=folders.vit),
        config=images("hf", "model", prompt="label", source={"keep_columns": ["grade"]}),
        exact=True,
    ),
    "label-python": Case(
        data=with_files(single(), inputs__py=data.Code.TALKS, model=folders.vit),
        config=images("python", "model", "inputs.py:talks", prompt="label", source={"keep_columns": ["grade"]}, **CODE),
        exact=True,
    ),
    "captions-clip-folder": Case(
        data=with_files(single("folder"), model=folders.clip),
        config=images("folder", "model", prompt="plain", vision={"codec": "zstd"}),
        loads=LIVE,
        exact=True,
    ),
    "captions-siglip2-table": Case(
        data=with_files(single("table", form=".parquet"), model=folders.siglip2),
        config=images("table", "model", "raw/train.parquet", prompt="plain"),
        loads=LIVE | {"max": {"text": {"padding": "longest", "truncation": True}}},
        exact=True,
    ),
    "images-alone-webdataset": Case(
        data=with_files(single("webdataset"), model=folders.vit),
        config=images("webdataset", "model", prompt="none", vision={"table": False}),
        loads=LIVE,
        exact=True,
    ),
    "mixture-of-images": Case(
        data=with_files(
            *(single("folder"), lambda folder: data.single("hf", folder / "more", data.labelled(5), data.pictures())),
            model=folders.vit,
        ),
        config=images("folder", "model", prompt="label", text={"classes": ["bird", "cat", "dog", "none"]}),
        others={
            "other": images(
                "hf", "model", "more", name="other", prompt="label", text={"classes": ["bird", "cat", "dog", "none"]}
            )
        },
        loads={name: TWO[name] for name in ("mixed", "apart")},
        exact=True,
    ),
}
