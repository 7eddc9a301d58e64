"""Conversations that are longer than a pack: where they are cut, by turns and never inside an image."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.config.plan import PackConfig, PlanConfig
from forebay.errors import PlanError
from forebay.steps.text.chat.conversation import parse_conversation
from forebay.store.cut_samples import CutPiece, CutSamples
from forebay.store.key import digest
from forebay.store.layout import TEXT, Array, Ints
from forebay.store.source import SampleSource, length_of

logger = logging.getLogger(__name__)
CUT_VERSION = 1
"""Bumped when the same conversation and settings give other pieces."""
_TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")


def in_pieces(source: SampleSource, settings: PlanConfig | None) -> SampleSource:
    """Returns one source, no union, whose conversations above a pack are cut as `plan.overlong` says; else itself.

    The ids of these conversations alone are read, and nothing is decoded. One that cannot be cut stays as it is, and no
    pack has room for it. Raises PlanError for samples that are no conversations with images as patches, and where the
    turns of one cannot be told.
    """
    if not isinstance(settings, PackConfig) or not settings.cuts or not source.are_whole:
        return source
    budgets = {"num_tokens": settings.seq_len, "num_patches": settings.max_patches}
    given = [(name, most) for name, most in budgets.items() if most is not None]
    overlong = np.flatnonzero(np.any([length_of(source, name) > most for name, most in given], axis=0))
    if not len(overlong):
        return source
    _require_patches(source, settings)
    counts, rows, left_out = np.ones(len(source), np.int64), [], 0
    for place in overlong.tolist():
        pieces = _cut(source, place, settings)
        learnt = [piece for piece in pieces if piece.learnt]
        if learnt:
            counts[place], left_out = len(learnt), left_out + len(pieces) - len(learnt)
            rows += [(place, number, *piece) for number, piece in enumerate(learnt)]
    cut = np.array(rows, np.int64).reshape(len(rows), 2 + len(CutPiece._fields))
    firsts = np.cumsum(counts) - counts
    told = {"samples": len(np.unique(cut[:, 0])), "pieces": len(cut), "nothing_learnt": left_out}
    found = (told["samples"], len(overlong), told["pieces"])
    logger.info("%s: %d of %d overlong conversations are cut into %d", source.place, *found)
    names = ("overlong", "truncate_side", "repeat_system", "seq_len", "max_patches")
    by = {"version": CUT_VERSION, **{name: getattr(settings, name) for name in names}}
    return CutSamples(
        source,
        np.repeat(np.arange(len(source)), counts),
        np.column_stack((firsts[cut[:, 0]] + cut[:, 1], cut[:, 2:])),
        key=digest({"of": source.key, "cut": by}),
        counts=told,
    )


def _require_patches(source: SampleSource, settings: PackConfig) -> None:
    constants = source.constants
    is_chat = constants.get("prompt") == "chat" and constants.groups.keys() == {"image", TEXT}
    if is_chat and {*_TOKENS} <= {*constants} and "video_token_id" not in constants:
        return
    has = f"prompt {constants.get('prompt')!r} and {', '.join(constants.groups)}"
    raise PlanError(
        f'plan.overlong = "{settings.overlong}" is of conversations with images as patches, without videos; '
        f'{source.place} has {has}; set plan.overlong = "drop"',
        code="FB504",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Talk:
    """A conversation with the sums up to each place between two of its tokens, int64 [tokens + 1].

    is_open: bool [tokens + 1], places that lie in no image.
    """

    patches: Ints
    images: Ints
    learnt: Ints
    is_open: Array
    settings: PackConfig

    @classmethod
    def of(cls, sample: Any, constants: Any, settings: PackConfig) -> _Talk:
        ids = sample["input_ids"]
        pad, begins, ends = (_sums(ids == constants[name]) for name in _TOKENS)
        return cls(
            patches=pad * int(constants["merge_size"]) ** 2,
            images=begins,
            learnt=_sums(sample["label_mask"] != 0),
            is_open=begins == ends,
            settings=settings,
        )

    def __len__(self) -> int:
        return len(self.images) - 1

    def piece(self, start: int, end: int, head: int = 0) -> CutPiece:
        """Returns the piece from `start` to below `end`, behind the first `head` tokens."""
        first, stop, own = (int(self.images[place]) for place in (start, end, head))
        patches, learnt = (int(s[head] + s[end] - s[start]) for s in (self.patches, self.learnt))
        return CutPiece(head, start, end, own, first, stop, patches, learnt)

    def fits(self, piece: CutPiece) -> bool:
        """Whether a pack has room for a piece."""
        most = self.settings.max_patches
        return piece.num_tokens <= self.settings.seq_len and (most is None or piece.patches <= most)

    def truncated(self, head: int) -> Iterator[CutPiece]:
        """Yields the longest beginning, or behind `head` the longest end, that a pack has room for."""
        places, most = np.arange(len(self) + 1), self.settings.max_patches
        is_left = self.settings.truncate_side == "left"
        tokens, patches = places, self.patches
        if is_left:
            tokens, patches = len(self) - places + head, patches[-1] - patches + patches[head]
        fits = self.is_open & (tokens <= self.settings.seq_len)
        fits &= True if most is None else patches <= most
        if len(found := places[fits]):
            yield self.piece(int(found[0]), len(self), head) if is_left else self.piece(0, int(found[-1]))

    def split(self, starts: Sequence[int], head: int) -> Iterator[CutPiece]:
        """Yields pieces that end where another exchange begins, each as long as a pack has room for."""
        bounds = [0, *starts, len(self)]
        at = 0
        while at < len(bounds) - 1:
            own = head if at else 0
            stop = at + 1
            while stop + 1 < len(bounds) and self.fits(self.piece(bounds[at], bounds[stop + 1], own)):
                stop += 1
            yield self.piece(bounds[at], bounds[stop], own)
            at = stop


def _cut(source: SampleSource, place: int, settings: PackConfig) -> list[CutPiece]:
    """Returns the pieces of a sample; none, or one without targets, where it cannot be cut."""
    sample, text = source.text_of(place)
    talk = _Talk.of(sample, source.constants, settings)
    if settings.overlong == "truncate" and not settings.repeat_system:
        return list(talk.truncated(0))
    sample_id = source.sample_id(place)
    roles = [message["role"] for message in parse_conversation(text, sample_id=sample_id)]
    starts, roles = _turns(sample["input_ids"], roles, f"{source.place}: sample {place} ({sample_id})")
    head = int(starts[1]) if settings.repeat_system and roles[0] == "system" and len(starts) > 1 else 0
    if settings.overlong == "truncate":
        return list(talk.truncated(head))
    exchanges = [n for n in range(1, len(roles)) if roles[n] == "user" and "assistant" in roles[:n]]
    found = list(talk.split([int(starts[n]) for n in exchanges if roles[n - 1] != "user"], head))
    return found if len(found) > 1 else []


def _turns(ids: Array, roles: Sequence[str], name: str) -> tuple[Ints, list[str]]:
    """Returns where the turns of a conversation begin, int64 [turns], and whose they are.

    ids: what the template wrote, whose first token begins every turn, as no message can. roles: of the messages. A
    template may put a system's turn first, and write what several tools say as one turn of the user. Raises PlanError
    where turns and messages do not agree.
    """
    starts = np.flatnonzero(ids == ids[0])
    written = ids[np.minimum(starts + 1, len(ids) - 1)].tolist()
    merged = [role for before, role in zip(["", *roles], roles, strict=False) if (before, role) != ("tool", "tool")]
    for wanted in (list(roles), ["system", *roles], merged, ["system", *merged]):
        said = dict(zip(wanted, written, strict=False))
        own = [said[role] for role in said if role != "tool"]
        if len(wanted) != len(written) or [said[role] for role in wanted] != written:
            continue
        if len({*own}) == len(own) and said.get("tool") != said.get("assistant", -1):
            return starts, wanted
    raise PlanError(
        f"{name} has the messages {', '.join(roles)}, and its template wrote {len(starts)} turns that are not these; "
        'set plan.overlong = "truncate" or "drop"',
        code="FB504",
    )


def _sums(values: Array) -> Ints:
    return np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
