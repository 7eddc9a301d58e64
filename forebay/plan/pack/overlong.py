"""Conversations that are longer than a pack: where they are cut, by turns and never inside an item."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from forebay.config.plan import PackConfig, PlanConfig
from forebay.errors import PlanError
from forebay.plan.pack.alike_packs import reserved_tokens
from forebay.steps.text.chat.conversation import parse_conversation
from forebay.store.cut_samples import CutPiece, CutSamples, ItemKind
from forebay.store.key import digest
from forebay.store.layout import TEXT, Array, Ints
from forebay.store.source import SECONDS, SampleSource, length_of

logger = logging.getLogger(__name__)
_SIZES = ("num_tokens", "num_patches", "num_frames")
CUT_VERSION = 2
"""Bumped when the same conversation and settings give other pieces."""


def in_pieces(source: SampleSource, settings: PlanConfig | None) -> SampleSource:
    """Returns one source, no union, whose conversations above a pack are cut as `plan.overlong` says; else itself.

    The ids of these conversations alone are read, with the features of clips. One that cannot be cut stays as it is,
    and no pack has room for it. Raises PlanError for samples that are no conversations, or whose items have no known
    tokens, and where the turns of one cannot be told.
    """
    if not isinstance(settings, PackConfig) or not settings.cuts or not source.are_whole:
        return source
    room = _Room.of(source, settings)
    overlong = np.flatnonzero(room.exceeded(np.stack([length_of(source, name) for name in _SIZES], axis=1)))
    if not len(overlong):
        return source
    pads = _pads(source, settings)
    counts, rows, left_out = np.ones(len(source), np.int64), [], 0
    for place in overlong.tolist():
        pieces = _cut(source, place, pads, room, settings)
        learnt = [piece for piece in pieces if piece.learnt]
        if learnt:
            counts[place], left_out = len(learnt), left_out + len(pieces) - len(learnt)
            rows += [(place, number, *piece) for number, piece in enumerate(learnt)]
    cut = np.array(rows, np.int64).reshape(len(rows), 2 + len(CutPiece._fields))
    firsts = np.cumsum(counts) - counts
    told = {"samples": len(np.unique(cut[:, 0])), "pieces": len(cut), "nothing_learnt": left_out}
    found = (told["samples"], len(overlong), told["pieces"])
    logger.info("%s: %d of %d overlong conversations are cut into %d", source.place, *found)
    names = ("overlong", "truncate_side", "repeat_system", "seq_len", "max_patches", "max_frames", "shapes")
    by = {"version": CUT_VERSION, **{name: getattr(settings, name) for name in names}}
    return CutSamples(
        source,
        np.repeat(np.arange(len(source)), counts),
        np.column_stack((firsts[cut[:, 0]] + cut[:, 1], cut[:, 2:])),
        key=digest({"of": source.key, "cut": by}),
        counts=told,
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """The room of a pack, of fixed shapes one a shape. unit: the patches of a token.

    most: float64 [shapes, 4], of tokens, patches, frames, and tokens that are of no image.
    """

    most: Array
    unit: int

    @classmethod
    def of(cls, source: SampleSource, settings: PackConfig) -> _Room:
        """Returns that of a plan to be. Of shapes those of texts alone, and of the most images of a whole sample.

        `best_shapes` tries both, and takes none that leave out more.
        """
        given = (settings.seq_len, settings.max_patches, settings.max_frames, None)
        most = np.array([[np.inf if each is None else each for each in given]])
        if not settings.has_shapes or not (unit := _patches_of_token(source)):
            return cls(most, 1)
        length = settings.seq_len - reserved_tokens(source.constants)
        patches = length_of(source, "num_patches")[length_of(source, "num_tokens") <= length]
        shapes = np.unique(np.clip([1, int(patches.max(initial=0)) // unit], 1, max(length - 1, 1)))
        most = np.repeat(most, len(shapes), axis=0)
        most[:, 0], most[:, 3] = length, length - shapes
        most[:, 1] = np.minimum(most[:, 1], shapes * unit)
        return cls(most, unit)

    def exceeded(self, sizes: Array) -> Array:
        """Returns which samples no pack has room for. sizes: [..., 3], see `CutPiece.sizes`."""
        return np.asarray(np.any(sizes > self.most.max(axis=0)[:-1], axis=-1))

    def holds(self, sizes: Array) -> Array:
        """Returns which pieces a pack has room for. sizes: [..., 3], see `CutPiece.sizes`."""
        held = np.concatenate([sizes, sizes[..., :1] - sizes[..., 1:2] // self.unit], axis=-1)
        return np.asarray((held[..., None, :] <= self.most).all(axis=-1).any(axis=-1))


def _patches_of_token(source: SampleSource) -> int:
    constants = source.constants
    return int((constants.get("mrope") or constants).get("merge_size", 0)) ** 2


def _pads(source: SampleSource, settings: PackConfig) -> dict[int, ItemKind]:
    """Returns the tokens that stand for items, with the kind of each."""
    constants = source.constants
    named: dict[ItemKind, Any] = {
        "image": constants.get("image_token_id", constants.get("mrope", {}).get("token")),
        "video": constants.get("video_token_id"),
        "audio": constants.get("clip_token"),
    }
    pads = {int(token): kind for kind, token in named.items() if token is not None}
    if constants.get("prompt") == "chat" and {*constants.groups} - {TEXT} <= {*pads.values()}:
        return pads
    has = f"prompt {constants.get('prompt')!r} and {', '.join(constants.groups)}"
    raise PlanError(
        f'plan.overlong = "{settings.overlong}" is of conversations, with items whose tokens are known; {source.place} '
        f'has {has}; set plan.overlong = "drop", or build the cache again',
        code="FB504",
    )


def _spans(ids: Array, pads: Array, marks: Sequence[Any]) -> tuple[Ints, Ints]:
    """Returns where items begin and end, int64, their marks with them.

    marks: the tokens that begin and end one; those of frames may stand inside of those of a video. None: what stands
    around a run of one pad, as the processors whose clips stand in packs write it.
    """
    if None not in marks:
        opened, closed = (np.cumsum(ids == mark) for mark in marks)
        inside = np.concatenate(([0], opened - closed)) > 0
        return np.flatnonzero(~inside[:-1] & inside[1:]), np.flatnonzero(inside[:-1] & ~inside[1:]) + 1
    own = np.concatenate(([-1], np.where(np.isin(ids, pads), ids, -1), [-1]))
    borders = own[1:] != own[:-1]
    return np.flatnonzero(borders & (own[1:] >= 0)) - 1, np.flatnonzero(borders & (own[:-1] >= 0)) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class _Talk:
    """A conversation with the sums up to each place between two of its tokens, int64 [tokens + 1].

    items: int64 [kinds, tokens + 1]. numbers: patches, frames and samples of clips, learnt tokens. is_open: bool
    [tokens + 1], places that lie in no item.
    """

    items: Ints
    numbers: Ints
    is_open: Array

    @classmethod
    def of(cls, source: SampleSource, place: int, sample: Any, pads: Mapping[int, ItemKind]) -> _Talk:
        """Returns that of a sample of a source. sample: its text."""
        ids, constants = sample["input_ids"], source.constants
        tokens, kinds = np.array([*pads], np.int64), get_args(ItemKind)
        starts, ends = _spans(ids, tokens, [constants.get(f"vision_{name}_token_id") for name in ("start", "end")])
        is_item, is_clip = (np.isin(ids, each) for each in (tokens, [t for t, kind in pads.items() if kind == "audio"]))
        places = np.flatnonzero(is_item)
        of_kinds = [kinds.index(pads[int(token)]) for token in ids[places[np.searchsorted(places, starts)]]]
        began, ended = np.zeros((len(kinds), len(ids)), np.int64), np.zeros(len(ids), np.int64)
        began[of_kinds, starts], ended[ends - 1] = 1, 1
        frames = began[kinds.index("audio")].copy()
        if frames.any():
            frames[frames > 0] = _clip_frames(source, place)
        patches = (is_item & ~is_clip) * _patches_of_token(source)
        numbers = _sums([patches, frames, is_clip, sample["label_mask"] != 0])
        # A part of the clips has its share by tokens.
        numbers[2] = numbers[2] * int(length_of(source, SECONDS)[place]) // max(int(is_clip.sum()), 1)
        return cls(items=_sums(began), numbers=numbers, is_open=_sums(began.sum(axis=0)) == _sums(ended))

    def __len__(self) -> int:
        return len(self.is_open) - 1

    def piece(self, start: int, end: int, head: int = 0) -> CutPiece:
        """Returns the piece from `start` to below `end`, behind the first `head` tokens."""
        items = self.items[:, [head, start, end]].reshape(-1).tolist()
        numbers = self.numbers[:, head] + self.numbers[:, end] - self.numbers[:, start]
        return CutPiece(head, start, end, *items, *numbers.tolist())

    def truncated(self, head: int, room: _Room, *, is_left: bool) -> Iterator[CutPiece]:
        """Yields the longest beginning, or behind `head` the longest end, that a pack has room for."""
        places = np.arange(len(self) + 1)
        sizes = np.stack([places, *self.numbers[:2]])
        if is_left:
            sizes = sizes[:, -1:] - sizes + sizes[:, [head]]
        found = places[self.is_open & room.holds(sizes.T)]
        if len(found):
            yield self.piece(int(found[0]), len(self), head) if is_left else self.piece(0, int(found[-1]))

    def split(self, starts: Sequence[int], head: int, room: _Room) -> Iterator[CutPiece]:
        """Yields pieces that end where another exchange begins, each as long as a pack has room for."""
        bounds = [0, *starts, len(self)]
        at = 0
        while at < len(bounds) - 1:
            own = head if at else 0
            stop = at + 1
            while stop + 1 < len(bounds) and room.holds(self.piece(bounds[at], bounds[stop + 1], own).sizes):
                stop += 1
            yield self.piece(bounds[at], bounds[stop], own)
            at = stop


def _clip_frames(source: SampleSource, place: int) -> list[int]:
    """Returns how long the features of each clip of a sample are."""
    tensors = (spec.name for spec in source.fields.values() if (spec.group, spec.role) == ("audio", "tensor"))
    return [len(clip) for clip in source.read(place)[next(tensors)]]


def _cut(
    source: SampleSource, place: int, pads: Mapping[int, ItemKind], room: _Room, settings: PackConfig
) -> list[CutPiece]:
    """Returns the pieces of a sample; none, or one without targets, where it cannot be cut."""
    sample, text = source.text_of(place)
    talk, is_left = _Talk.of(source, place, sample, pads), settings.truncate_side == "left"
    if settings.overlong == "truncate" and not settings.repeat_system:
        return list(talk.truncated(0, room, is_left=is_left))
    sample_id = source.sample_id(place)
    roles = [message["role"] for message in parse_conversation(text, sample_id=sample_id)]
    starts, roles = _turns(sample["input_ids"], roles, f"{source.place}: sample {place} ({sample_id})")
    head = int(starts[1]) if settings.repeat_system and roles[0] == "system" and len(starts) > 1 else 0
    if settings.overlong == "truncate":
        return list(talk.truncated(head, room, is_left=is_left))
    exchanges = [n for n in range(1, len(roles)) if roles[n] == "user" and "assistant" in roles[:n]]
    found = list(talk.split([int(starts[n]) for n in exchanges if roles[n - 1] != "user"], head, room))
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


def _sums(values: Any) -> Ints:
    """Returns the sums along the last axis up to each place, 0 the first."""
    sums = np.cumsum(values, axis=-1, dtype=np.int64)
    return np.concatenate((np.zeros_like(sums[..., :1]), sums), axis=-1)
