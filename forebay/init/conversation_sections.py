"""Conversations with clips: which columns of a table they are, and the sections of their config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forebay.errors import ConfigError
from forebay.init.candidate import Candidate, Draft, RowMeaning, Section, unlike_usual
from forebay.init.config_sections import BATCH_SIZE, buckets, kind_of, not_known
from forebay.init.folder_files import spread
from forebay.init.found_model import Model, is_talker
from forebay.init.media_headers import Sounds
from forebay.init.questions import Chooser, column_of, columns_of
from forebay.init.table_head import LikelyColumn, TableHead, clips_of_row, images_of_row, named_in
from forebay.rows.meanings.chat_fields import NAMED_BY
from forebay.rows.segments import STRETCH
from forebay.steps.audio.extractor.conversation_sound import ClipMel, ConversationSound
from forebay.steps.recipe import Recipe

_SAME = {"audios": "audio", "conversations": "messages"}
"""Fields of JSON lines that are read under these names as under those of `[source.columns]`."""


def take_talks(
    found: Candidate, table: TableHead, clips: Sequence[LikelyColumn], folders: Sequence[Path], chooser: Chooser
) -> None:
    """Takes the conversations of a table. clips: columns of paths. folders: where these may begin."""
    audio = column_of(table, "audio", clips[:1], chooser)
    columns = columns_of(table, "chat", {"audio": audio}, chooser)
    values = [value for row in table.rows for value in clips_of_row(row, audio)]
    whole = [each for each in values if not isinstance(each, dict) or not {*STRETCH[:-1]} & each.keys()]
    names = [name for value in values if (name := named_in(value))]
    own = table.path.parent
    folder = next((each for each in (own, *folders) if any((each / name).is_file() for name in names)), own)
    found.source = {} if folder == own else {"audio_dir": folder}
    is_usual = not unlike_usual({role: _SAME.get(name or "", name) for role, name in columns.items()})
    found.kind = "jsonl" if table.form == "jsonl" and folder == own and is_usual else "table"
    rows = found.take_images(table, "chat", columns)
    found.others = tuple(name for name in found.others if name not in NAMED_BY["audio"])
    found.sounds = Sounds.of(spread([folder / name for name in map(named_in, whole) if name]))
    found.images_a_row = [len(images_of_row(row)) for row in rows]


class TalkSections(RowMeaning):
    """Conversations with clips, and with images beside them or not."""

    name = "speech"
    is_alone = True

    def check(self, model: Model | None) -> None:
        if model is None or not model.audio or not model.has_tokenizer:
            given = "" if model is None else f"--model {model.folder} is {kind_of(model)}; "
            raise ConfigError(
                f"{given}clips of conversations are stored as a model's processor makes them; give --model DIR: the "
                "folder of a model that hears and talks, with its preprocessor_config.json, tokenizer.json and chat "
                "template (docs/models.md lists those that can)"
            )

    def sections(self, made: Draft) -> list[Section]:
        model, found = made.model, made.found
        assert model is not None
        folder = made.relative(model.folder)
        audio = Section("audio", [("features", "extractor", ""), ("extractor", folder, "the model's own processor")])
        audio.lines += [(name, value, "") for name, value in model.audio.items() if name == "sample_rate_hz"]
        images = [Section("vision", [("processor", folder, "")])] if any(found.images_a_row) and model.sees else []
        text = Section("text", [("tokenizer", folder, ""), ("prompt", "chat", "what the assistant says is learnt")])
        size = max(1, min(BATCH_SIZE, found.count // 4 or 1))
        room = ("batch_size", size, "conversations a batch")
        return [audio, *images, text, buckets(found, " of like length", room)]

    def try_steps(self, made: Draft, recipe: Recipe) -> bool:
        step, source = recipe.audio and recipe.audio.features, made.section("source")
        assert isinstance(step, ConversationSound | ClipMel)
        if isinstance(step, ConversationSound):
            made.note_form("audio", step.batch_form())
        recipe.text.step.opened(Path(recipe.text.folder), merge_size=None)
        limit, longest = step.longest_s, max(made.found.sounds.seconds, default=0.0)
        if limit is None or longest <= limit or any(name == "max_duration_s" for name, *_ in source.lines):
            return True
        source.add(
            "max_duration_s", limit, f"the model's processor takes no more; the longest seen has {longest:.1f} s"
        )
        source.add("overlong", "drop", "conversations with longer clips are left out, counted and listed")
        return False

    def trains(self, found: Candidate, model: Model) -> bool:  # noqa: ARG002
        return is_talker(model.model_type)

    def not_learnt(self, found: Candidate, model: Model) -> str:  # noqa: ARG002
        return not_known(model)


TALKS = TalkSections()
