"""`[source]`: which samples there are; kinds of source, and meanings of their rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

STRICT = {"extra": "forbid", "strict": True}
"""Read by pydantic when a file is loaded: unknown fields are refused, types are not coerced."""


def at_least(settings: object, least: int, *names: str) -> None:
    """Raises ValueError for a setting that is less, or holds a number that is; one that is left out passes."""
    for name in names:
        value = getattr(settings, name)
        if any(number is not None and number < least for number in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{name} is {value}, wanted {least} or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceKind:
    """Facts about a kind of source before any data is read. reader: the reader. holds: the meanings that rows may have.

    files: those of a folder that are manifests. else_files: those of a folder that has none of these, one group of
    names after the other. has_columns: it reads `[source.columns]`, which are then in the key. meaning: of its rows,
    where nothing else says it. has_splits: a folder may hold several splits, of which `source.split` is read. keeps:
    the kinds of data whose samples may have `keep_columns`. is_deep: the files lie below the folder at any depth, and
    are samples themselves. needs_text: a sample without text is left out as `no_text`. has_segments: its rows are
    stretches of recordings, whatever `[source.columns]` says. names: what it reads of `[source.columns]`, where it has
    no columns. images: those of a folder whose rows are images, where these are others than `files`.
    """

    reader: str
    holds: tuple[str, ...] = ("speech",)
    files: tuple[str, ...] = ("*",)
    else_files: tuple[tuple[str, ...], ...] = ()
    has_columns: bool = False
    meaning: str = "recordings"
    has_splits: bool = False
    keeps: tuple[str, ...] = ()
    is_deep: bool = False
    needs_text: bool = False
    has_segments: bool = False
    names: tuple[str, ...] = ()
    images: tuple[str, ...] = ()

    def files_of(self, meaning: str) -> tuple[str, ...]:
        """Returns which files of a folder are manifests, for rows of a meaning; a class may have all."""
        facts = MEANINGS.get(meaning)
        if not self.images or (facts is not None and "image" not in facts.groups):
            return self.files
        has_texts = facts is None or "text" in facts.columns
        return (*self.images, *(f"*{ending}" for ending in TEXT_OF_IMAGE if has_texts))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeaningFacts:
    """Facts about a meaning of rows before any data is read. target: the module and the class that read rows so.

    columns: the names of `[source.columns]` that kinds of source read by name. groups: those that a row has items of.
    lists: those of them whose items a row lists; of any other one it is an item itself. prompt: the `text.prompt` that
    means this where a config names no meaning. has_videos: images may be videos. has_sound: the sound of these is a
    clip beside them.
    """

    name: str
    target: str
    columns: tuple[str, ...]
    groups: tuple[str, ...]
    prompt: str = ""
    lists: tuple[str, ...] = ("image",)
    has_videos: bool = False
    has_sound: bool = False

    def of_groups(self, given: Collection[str]) -> MeaningFacts:
        """Returns the facts where rows have items of these groups alone: only what is listed may be left out."""
        left_out = {*self.lists} - {*given} if len(self.lists) > 1 and given else set()
        columns = tuple(name for name in self.columns if name not in left_out)
        return replace(self, columns=columns, groups=tuple(name for name in self.groups if name not in left_out))


SEGMENTS = ("start", "end", "channel")
"""The names of `[source.columns]` that say where in a recording a row lies."""
MEANINGS: Mapping[str, MeaningFacts] = {
    name: MeaningFacts(
        name=name,
        target=f"forebay.rows.meanings.{target}",
        columns=tuple(columns.split()),
        groups=tuple(groups.split()),
        prompt=prompt,
        lists=("audio", "image") if name == "conversations" else ("image",),
    )
    for name, target, columns, groups, prompt in (
        (
            "recordings",
            "recordings:Recorded",
            "audio text language id duration features labels start end channel",
            "audio",
            "",
        ),
        ("texts", "recordings:TextOnly", "text language id prompt", "", ""),
        (
            "conversations",
            "canonical_chat:Conversations",
            "audio image question answer messages id",
            "audio image",
            "chat",
        ),
        ("labels", "image_class:Labelled", "image label id", "image", "label"),
        ("captions", "image_class:Captioned", "image text id", "image", "plain"),
        ("images", "image_class:OneImage", "image id", "image", "none"),
    )
}
"""By `source.meaning`. The class is imported when rows are read."""

_READERS = "forebay.rows.readers"
BOTH = ("speech", "vision")
_HF_FILES = ("state.json", "dataset_info.json", "*.arrow", "*.parquet")
TABLE_FILES = ("*.csv", "*.tsv", "*.parquet", "*.jsonl", "*.arrow")
"""The forms of `kind = "table"`, by the ends of their names."""
RECORDINGS = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".aif")
"""The files that `kind = "folder"` looks for, in any case of letters."""
UNREAD = (".m4a", ".webm", ".aac", ".wma", ".amr")
"""Recordings that it lists and cannot read, if no other of their name is there: they fail, and do not vanish."""
TEXTS_BESIDE = (".txt", ".lab")
"""The files that may hold their transcripts; `.normalized.txt` and `.trans.txt` are such too."""
SUBTITLES = (".srt", ".vtt", ".textgrid")
"""The files that `kind = "subtitles"` reads beside recordings, in any case of letters."""
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""The files that `kind = "folder"` looks for under `[vision]`, in any case of letters."""
TEXT_OF_IMAGE = (".txt",)
"""The files that hold their texts."""

SOURCE_KINDS = {
    "tar": SourceKind(
        reader=f"{_READERS}.tar_lists:READER", holds=BOTH, files=("*.parquet",), keeps=BOTH, names=SEGMENTS
    ),
    "filelist": SourceKind(reader=f"{_READERS}.tar_lists:FILELIST_READER", files=("*.tsv",)),
    "webdataset": SourceKind(reader=f"{_READERS}.tar_records:READER", holds=BOTH, files=("*.tar",), keeps=BOTH),
    "jsonl": SourceKind(
        reader=f"{_READERS}.table_records:JSONL_READER",
        holds=BOTH,
        files=("*.jsonl",),
        keeps=BOTH,
        names=SEGMENTS,
    ),
    "hf": SourceKind(
        reader=f"{_READERS}.table_files:HF_READER",
        holds=BOTH,
        files=_HF_FILES,
        has_columns=True,
        has_splits=True,
        keeps=BOTH,
    ),
    "table": SourceKind(
        reader=f"{_READERS}.table_files:READER",
        holds=BOTH,
        files=TABLE_FILES,
        has_columns=True,
        keeps=BOTH,
        needs_text=True,
    ),
    "folder": SourceKind(
        reader=f"{_READERS}.media_folders:READER",
        holds=BOTH,
        images=tuple(f"*{ending}" for ending in PICTURES),
        files=tuple(f"*{ending}" for ending in (*RECORDINGS, *UNREAD, *TEXTS_BESIDE)),
        has_columns=True,
        keeps=("speech",),
        is_deep=True,
        needs_text=True,
    ),
    "python": SourceKind(
        reader=f"{_READERS}.python_inputs:READER", holds=BOTH, files=("*.py",), keeps=BOTH, names=SEGMENTS
    ),
    "subtitles": SourceKind(
        reader=f"{_READERS}.subtitles:READER",
        files=tuple(f"*{ending}" for ending in (*RECORDINGS, *UNREAD, *SUBTITLES)),
        names=("text",),
        keeps=("speech",),
        is_deep=True,
        needs_text=True,
        has_segments=True,
    ),
    "kaldi": SourceKind(
        reader=f"{_READERS}.speech_sets:KALDI_READER",
        files=("wav.scp", "segments", "text", "utt2spk", "utt2lang", "reco2file_and_channel"),
        keeps=("speech",),
        needs_text=True,
        has_segments=True,
    ),
    "nemo": SourceKind(
        reader=f"{_READERS}.speech_sets:NEMO_READER",
        files=("*.json", "*.jsonl"),
        keeps=("speech",),
        needs_text=True,
        has_segments=True,
    ),
    "lhotse": SourceKind(
        reader=f"{_READERS}.speech_sets:LHOTSE_READER",
        files=("*cuts*.jsonl", "*cuts*.jsonl.gz"),
        else_files=(("*recordings*.jsonl*", "*supervisions*.jsonl*"),),
        keeps=("speech",),
        needs_text=True,
        has_segments=True,
    ),
    "ljspeech": SourceKind(reader=f"{_READERS}.table_files:LJSPEECH_READER", files=("metadata.csv",)),
    "text": SourceKind(
        reader=f"{_READERS}.text_files:READER",
        files=("*.jsonl",),
        else_files=(("*.txt",), ("*.jsonl.gz", "*.jsonl.zst"), ("*.parquet",), ("*.txt.gz", "*.txt.zst")),
        has_columns=True,
        meaning="texts",
        keeps=("speech",),
    ),
}
"""By `source.kind`. What reads a kind is imported when that is asked for."""

OWN_COLUMNS = frozenset(
    (
        *("index", "sample_id", "text", "language", "prompt", "source", "duration_s", "audios", "images"),
        *("image_hash", "audio_hash", "failure"),
        *("num_audio_samples", "num_frames", "num_tokens", "num_patches", "num_images", "num_audios"),
        *("input_features", "pad_value", "waveform", "input_ids", "prefix_len", "label_mask", "labels"),
        *("fbanks", "valid_frames", "audio_index", "patches", "image_grid_thw", "image_rows", "shard", "shard_row"),
    )
)
"""Names of columns and fields that caches have anyway; no kept column has one of them."""
SEGMENT_FIELDS = ("recording", "start_s", "end_s", "channel")
"""Those of caches of segments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceColumns:
    """The names of columns of a source of kind `table` or `hf`, and of the fields of kind `text`.

    A column by another name than its default must be there.
    """

    __pydantic_config__ = STRICT

    audio: str = "audio"
    """Column of the sound: bytes, a path, or both."""
    text: str = "text"
    """Column of the transcript; with `[vision]` and `text.prompt = "plain"` of the image's text."""
    language: str = "language"
    """Column of the language's code."""
    features: str | None = None
    """With `audio.features = "given"`: column of features [n_mels, 3000], read instead of sound."""
    labels: str | None = None
    """With `text.prompt = "given"`: column of token ids, read instead of a transcript."""
    id: str | None = None
    """Column of the sample's id. Left out: `sample_id`, else `id`, else a name made of the file's and the row's."""
    duration: str | None = None
    """Column of the recording's seconds. Left out: of `hf` the column `duration_s`, else `duration`; of `table` none,
    the recordings' own headers say it."""
    start: str | None = None
    """Column of where in its recording a row begins, in seconds: the row is that stretch, and `duration` is its own."""
    end: str | None = None
    """Column of where it ends. Left out: `duration` behind `start`, else the end of the recording."""
    channel: str | None = None
    """Column of the channel that a row is of, counted from 0; null, or left out: the mean of all."""
    image: str = "image"
    """With `[vision]`: column of one image or of a list of images."""
    question: str = "question"
    """With `[vision]`: column of the question, where there are no messages."""
    answer: str = "answer"
    """With `[vision]`: column of the answer, where there are no messages."""
    prompt: str | None = None
    """Of `kind = "text"`: column of what stands before the text in a prompt. Left out: `prompt`, where there is one."""
    messages: str = "messages"
    """With `[vision]`: column of the conversation, a list or its JSON. `conversations` is found too."""
    label: str = "label"
    """With `[vision]` and `text.prompt = "label"`: column of the image's class, a name or an integer, or of a list of
    them where an image has several."""

    @property
    def has_segments(self) -> bool:
        """Whether rows are stretches of recordings."""
        return any(column is not None for column in (self.start, self.end, self.channel))

    @property
    def media(self) -> str:
        """The column of the sound, or of the features that stand for it."""
        return self.audio if self.features is None else self.features


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionsConfig:
    """Further texts of a row, for models that take texts (`[[model]]`). Each different text is stored once.

    Training takes one of a row's texts, anew in each epoch, see `loader.caption`. The section is in the key.
    """

    __pydantic_config__ = STRICT

    column: str | None = field(default=None, metadata={"example": '"captions"'})
    """Column or JSON field with a list of further texts of a row, or with its JSON. It stays in the row table, as
    `source.keep_columns` do. Blank texts in it are passed over and counted."""
    shuffles: int = 0
    """Further orders of the tags in each text, which commas part: so many, or as many as there are. A hash of the text
    decides which orders."""
    keep_tags: int = 0
    """Tags at the beginning that stay there in all orders."""
    empty: bool = False
    """Whether the empty text is stored too, which `loader.caption_dropout` hands out."""

    def __post_init__(self) -> None:
        at_least(self, 0, "shuffles", "keep_tags")
        if self.shuffles > 100:
            raise ValueError(f"shuffles is {self.shuffles}, wanted 100 or less: each is a text for the model")
        if self.keep_tags and not self.shuffles:
            raise ValueError("keep_tags is of tags that are shuffled; give shuffles")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """Which samples: the raw data and the filters over it."""

    __pydantic_config__ = STRICT

    kind: str
    """`table`: CSV, TSV, parquet, JSON lines or array, or arrow of a row a recording. `folder`: recordings below a
    folder, texts beside them or in `texts`. `tar`: a parquet manifest over tars. `filelist`: TSV of shard, id, language
    and seconds. `webdataset`: tars of audio and `.json` or `.txt`. `jsonl`: lines, or a JSON array, of `audio`, `text`,
    `language`?, `prompt`?. `hf`: a `save_to_disk` folder or parquet (extra `hf`), of sound or of features.
    `ljspeech`: an LJSpeech folder. `text`: texts without audio, `.txt` files of a text a line, JSON lines of `text`,
    `id`?, `language`?, `prompt`?, either as `.gz` or `.zst` too, or a column of parquet. `subtitles`: recordings below
    a folder, beside them `.srt`, `.vtt` or `.TextGrid`, whose cues are the rows (extra `segments`). `kaldi`: a data
    folder. `nemo`: lines of `audio_filepath`, `offset`?, `duration`, `text`, `lang`?. `lhotse`: cuts, or recordings and
    supervisions. `python`: an iterator of your own, see `manifest`. A config with `[vision]` takes `table`, `jsonl`,
    `hf`, `webdataset`, `folder`, `python`, or `tar` with a member or a list of them in `tar_member_name`."""
    manifest: str | tuple[str, ...] = field(metadata={"path": True, "url": True})
    """File, folder or glob, or a list of them; each may be a URL. The path is not in the key, the content is. Of
    `kind = "python"`: `"inputs.py:Clips"`, a class or function beside the config whose iteration yields dicts of `id`,
    `audio` (encoded bytes, or float32 or int16 with `sample_rate_hz`), `text`?, `language`?, `prompt`?, or with
    `[vision]` lines as of `jsonl`, whose `image` or `images` are encoded bytes in the place of paths; it runs once,
    in `forebay preprocess`, with `allow_code = true` under `[run]` in the file itself. In the key is what it
    yielded."""
    split: str = "train"
    """Part of the cache folder's name. It picks the split of an `hf` folder, by folders or by names such as
    `train-00000-of-00002.parquet`."""
    min_duration_s: float = 0.0
    """Shorter clips are left out: by the manifest's or the header's duration, and again by what was decoded."""
    max_duration_s: float | None = None
    """Longer clips are treated as `overlong` says."""
    overlong: Literal["keep", "clip", "drop"] = "keep"
    """What becomes of a clip above `max_duration_s`. `keep`: it goes to the last bucket. `clip`: its first seconds are
    taken. `drop`: it is left out. Whisper's features take the first 30 s anyway, counted."""
    duration_tolerance: float | None = None
    """Seconds by which a clip may be shorter than its manifest says before it fails as `duration_mismatch`. A clip that
    is longer by more is kept, counted and named. Left out: the larger of 0.5 s and 5 % of what the manifest says."""
    languages: tuple[str, ...] | None = None
    """Codes of the languages to keep. A code that never occurs is named. Left out: all."""
    max_samples: int | None = None
    """Only the first this many samples that pass the filters. Texts (`kind = "text"`) are read no further than that. Of
    a store no other tar, recording or image is downloaded."""
    exclude: tuple[str, ...] = ()
    """Sample ids to leave out, for example one that crashes the decoder."""
    max_sample_bytes: int = 256 * 1024 * 1024
    """A sample whose file, whose line of plain text, or whose decoded float32 waveform is larger fails as `too_large`
    instead of filling memory."""
    confined: bool = False
    """Refuse manifests, files that they name, and caches made of them that lie outside of the manifest's folder, links
    followed. For manifests of strangers, see `SECURITY.md`. In no key: the setting changes no value."""
    remote_identity: Literal["content", "etag"] = "content"
    """How a file of a store is known to be the one that a cache was made of. `content`: by its hash, which is kept by
    URL, etag and size. `etag`: a file of the same name, etag and size is trusted, also in another bucket. In no key."""
    columns: SourceColumns = SourceColumns()
    captions: CaptionsConfig | None = None
    audio_dir: str | None = field(default=None, metadata={"path": True})
    """Folder of the recordings that a `table` names, for example Common Voice's `clips`. Left out: the table's own
    folder. In no key: the content of the recordings is."""
    image_dir: str | None = field(default=None, metadata={"path": True})
    """With `[vision]`: folder of the images that a `table` or `jsonl` names, for example COCO's. Left out: the
    manifest's own folder. In no key: the content of the images is."""
    texts: str | None = field(default=None, metadata={"path": True})
    """Of `kind = "folder"`: the table of its texts, in a form of `kind = "table"` with `[source.columns]`. The audio
    column holds paths below the folder or names of files, with their extension or without. Left out: `NAME.txt`,
    `NAME.lab` or `NAME.normalized.txt` beside a recording, or its line in a `*.trans.txt` there. In no key."""
    languages_from_folders: bool = False
    """Of `kind = "folder"`: the first folder below `manifest` names the language, `wavs/hi/.../1.wav`."""
    keep_columns: tuple[str, ...] = ()
    """Columns or JSON fields that stay in the row table of the cache, as text, int64 or float64 (a truth value is 0 or
    1): `["speaker", "snr"]`. Of `table`, `folder` with `texts`, `hf`, `jsonl`, `webdataset` (the JSON beside a clip),
    `tar` and JSON lines of `text`. A list of texts stays as its JSON. The names are in the key."""
    meaning: str | None = None
    """What a row of the source is: `recordings`, `texts`, `conversations`, `labels` (an image with a class), `captions`
    (an image with a text), `images`, or a class of your own beside the config, `"rows.py:Dialogues"`, with
    `allow_code = true` under `[run]` in the file itself. Left out: recordings, with `kind = "text"` texts, with
    `[vision]` what `text.prompt` makes of them. In the key where it is another one than that."""
    window_s: float | None = None
    """Of segments: consecutive ones of a recording and channel are joined to windows of this many seconds, 30 for a
    Whisper. The next window begins where one ends, or where a segment begins that ends behind it."""
    rows: str | None = None
    """With `[vision]`, and of `kind = "text"`: the rows of the manifests to take, as a Python slice: `"0:1000"`,
    `"::10"`. Of texts no more is read than that takes."""
    more_images: tuple[Literal["avif", "jpeg2000", "16-bit", "first_frame"], ...] = ()
    """Images that are read beside the common ones: `["avif", "jpeg2000"]`; `16-bit`, whose values above 255 become
    white as in the processor; `first_frame` of animations and of several pages. The names are in the key."""
    max_pixels: int = 89_478_485
    """With `[vision]`: an image whose header says more fails as `too_many_pixels` before a pixel is decoded. The
    default is Pillow's own limit."""
    max_video_s: float = 3600.0
    """With `vision.fps`: a video whose header says more seconds fails as `video_too_long` before a frame is decoded."""

    def __post_init__(self) -> None:
        if not self.manifests or not all(self.manifests):
            raise ValueError(f"manifest is {self.manifest!r}, wanted a file, a folder or a glob, or a list of them")
        self._check_durations()
        if self.captions is not None and self.captions.column not in (None, *self.keep_columns):
            object.__setattr__(self, "keep_columns", (*self.keep_columns, self.captions.column))
        at_least(self, 1, "max_samples", "max_sample_bytes", "max_pixels", "max_video_s")
        if self.window_s is not None and not (self.has_segments and 1 <= self.window_s < math.inf):
            raise ValueError(
                f"window_s is {self.window_s}, wanted 1 or more seconds, and rows that are segments: kind subtitles, "
                "kaldi, nemo or lhotse, or source.columns.start"
            )
        if self.rows is not None:
            row_slice(self.rows)
        for name in self.keep_columns:
            if problem := _not_to_be_kept(name, self.keep_columns, SEGMENT_FIELDS if self.has_segments else ()):
                raise ValueError(f"keep_columns: {name!r:.60} {problem}")

    def _check_durations(self) -> None:
        at_least(self, 0, "min_duration_s")
        if self.max_duration_s is not None and self.max_duration_s <= self.min_duration_s:
            raise ValueError(
                f"max_duration_s ({self.max_duration_s}) is not above min_duration_s ({self.min_duration_s})"
            )
        if self.overlong != "keep" and self.max_duration_s is None:
            raise ValueError(f'overlong = "{self.overlong}" needs max_duration_s')
        if self.duration_tolerance is not None and not 0 <= self.duration_tolerance < math.inf:
            raise ValueError(
                f"duration_tolerance is {self.duration_tolerance}, wanted 0 or more seconds, for example 0.5; "
                "a day (86400) lets every clip pass"
            )

    @property
    def has_segments(self) -> bool:
        """Whether rows are stretches of recordings."""
        kind = SOURCE_KINDS.get(self.kind)
        return self.columns.has_segments or (kind is not None and kind.has_segments)

    @property
    def manifests(self) -> tuple[str, ...]:
        """The manifest entries as a tuple, also where the file names just one."""
        return (self.manifest,) if isinstance(self.manifest, str) else self.manifest

    @property
    def media_dir(self) -> str | None:
        """The folder of the recordings or images that manifests name; None: their own."""
        return self.audio_dir or self.image_dir

    @property
    def places(self) -> tuple[str, ...]:
        """The places that names of source files are relative to, by `SourceFile.entry`: entries, then `media_dir`."""
        return self.manifests if self.media_dir is None else (*self.manifests, self.media_dir)


def _not_to_be_kept(name: str, names: tuple[str, ...], own: tuple[str, ...]) -> str | None:
    if not (name.isidentifier() and name.isascii()):
        return "is no name of letters, digits and underscores, which conditions can name; rename the column"
    if name in OWN_COLUMNS or name in own:
        return "is the name of a column that caches have anyway; rename the column of the source"
    return "is named twice; name it once" if Counter(names)[name] > 1 else None


def row_slice(text: str) -> slice:
    """Returns the slice that `source.rows` says, for example "0:1000" or "::10"; ValueError for anything else."""
    parts = text.split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or (len(numbers) == 3 and (numbers[2] is not None and numbers[2] < 1)):
        raise ValueError(f'rows is {text!r}, wanted start:stop or start:stop:step with a step above 0, as "0:1000"')
    return slice(*numbers)
