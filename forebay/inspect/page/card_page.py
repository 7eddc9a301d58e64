"""A card as markup."""

from __future__ import annotations

import json
import re

from forebay.inspect.page.card_media import grid_lines
from forebay.inspect.page.cards import Card, CardSound, SeenImage
from forebay.inspect.page.markup import Html, tag
from forebay.inspect.page.words import LIMIT, MAX_TOKENS, TokenPiece, shortened

_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8}){0,3}")
_ID = 240
_MAX_TURNS = 20
_MAX_CELLS = 40


def card_element(card: Card, *, link: str | None = None) -> Html:
    """Returns a card. link: where the sample has a page of its own."""
    name = f"#{card.index}"
    number = tag("span", name, class_="number") if link is None else tag("a", name, href=link, class_="number")
    head = tag(
        "header",
        tag("h3", number, " ", tag("code", shortened(card.sample_id, _ID)), class_="name"),
        tag("p", card.why, class_="why") if card.why else None,
        tag("p", [_fact(*fact) for fact in _facts(card)], class_="facts"),
    )
    if card.problem:
        body: list[Html | None] = [
            tag("p", tag("strong", "This sample cannot be read. "), card.problem, class_="problem")
        ]
    else:
        body = [_player(card), _images(card), _spoken(card), _tokens(card), _row(card)]
    return tag(
        "article", head, body, class_="card", id=f"s{card.index}", tabindex="-1", aria_label=f"sample {card.index}"
    )


def _facts(card: Card) -> list[tuple[str, str]]:
    language = [("", card.language)] if card.language else []
    return [*language, *card.facts.items()]


def _fact(name: str, value: str) -> Html:
    if not name:
        return tag("span", value, class_="chip")
    shown = value if name == "length" else f"{value} {name}"
    return tag("span", shown, class_="fact")


def _player(card: Card) -> Html | None:
    if card.sound is None and card.spectrum is None:
        return None
    picture = None if card.spectrum is None else _spectrum(card.spectrum)
    return tag("div", _sound(card.sound), picture, class_="player")


def _sound(sound: CardSound | None) -> Html | None:
    if sound is None:
        return None
    note = tag("p", sound.note, class_="note") if sound.note else None
    if sound.url is None:
        return tag("div", note, class_="sound none")
    audio = tag("audio", controls=True, preload="metadata" if sound.url.startswith("data:") else "none", src=sound.url)
    return tag("div", audio, note, class_="sound")


def _spectrum(seen: SeenImage) -> Html:
    if seen.url is None:
        return tag("p", "its picture was left out: this file would be larger than 10 MB", class_="note")
    picture = tag("img", src=seen.url, alt=f"{seen.about}, {seen.seconds:.1f} s", class_="spectrum", loading="lazy")
    places = [tag("span", text) for text in ("0 s", f"{seen.seconds / 2:.1f}", f"{seen.seconds:.1f} s")]
    head = tag("span", class_="head", aria_hidden="true")
    scale = tag("div", picture, head, class_="scale", data_seconds=f"{seen.seconds:.3f}")
    return tag("figure", scale, tag("div", places, class_="times", aria_hidden="true"), class_="heard")


def _images(card: Card) -> Html | None:
    if not card.images:
        return None
    left = tag("p", f"and {card.more_images} more images", class_="note") if card.more_images else None
    return tag("div", [_image(place, seen) for place, seen in enumerate(card.images)], left, class_="images")


def _image(place: int, seen: SeenImage) -> Html:
    rows, columns = seen.grid
    about = [f"{columns} × {rows} patches"] if rows else list(seen.notes)
    if rows and seen.merge > 1:
        about[0] += f", {columns // seen.merge} × {rows // seen.merge} tokens"
    name = shortened(seen.about, _ID)
    lines = grid_lines(rows=rows, columns=columns, merge=seen.merge)
    if seen.url is None:
        shown = tag("p", "left out: this file would be larger than 10 MB", class_="note")
    else:
        alt = f"image {place}: {name}"
        shown = tag("img", src=seen.url, alt=alt, width=seen.size[0], height=seen.size[1], loading="lazy")
    frame = tag("div", shown, lines, class_="frame")
    return tag(
        "figure", frame, tag("figcaption", tag("code", name), [tag("span", line) for line in about]), class_="image"
    )


def _spoken(card: Card) -> Html | None:
    turns = [(shortened(role, _ID), text) for role, text in card.spoken if role or text]
    if not turns:
        return tag("p", "no text", class_="said none")
    lang = card.language if _LANGUAGE.fullmatch(card.language) else None
    limit = LIMIT // min(max(len(turns), 1), 4)
    parts = [
        tag(
            "div",
            tag("span", role, class_="role") if role else None,
            tag("p", shortened(text, limit), dir="auto", lang=lang),
        )
        for role, text in turns[:_MAX_TURNS]
    ]
    more = tag("p", f"and {len(turns) - _MAX_TURNS} more turns", class_="note") if len(turns) > _MAX_TURNS else None
    return tag("div", parts, more, class_="said" if turns[0][0] == "" else "said talk")


def _tokens(card: Card) -> Html | None:
    if not card.pieces:
        return None
    more = card.num_tokens - MAX_TOKENS
    rest = tag("span", f"and {more:,} more", class_="note") if more > 0 else None
    learnt = "" if card.num_learnt is None else f", {card.num_learnt:,} learnt"
    summary = f"{card.num_tokens:,} tokens{learnt}"
    pieces = tag("p", [_piece(piece) for piece in card.pieces], rest, class_="tokens", dir="auto")
    return tag("details", tag("summary", summary), pieces, open=True)


def _piece(piece: TokenPiece) -> Html:
    ids = " ".join(map(str, piece.ids))
    text = ids if piece.text is None else piece.text.translate(_SEEN)
    if piece.kind == "image":
        text = f"{text} × {piece.count:,}"
    return tag("span", text, class_=f"t {piece.kind}", title=f"{ids}: {_KINDS[piece.kind]}")


_SEEN = str.maketrans({" ": "·", "\n": "↵", "\t": "⇥"})
_KINDS = {"learnt": "learnt", "given": "given, not learnt", "image": "an image's places"}


def _row(card: Card) -> Html | None:
    if not card.row:
        return None
    cells = [
        tag("div", tag("dt", shortened(name, 80)), tag("dd", shortened(_cell(value), 600)))
        for name, value in list(card.row.items())[:_MAX_CELLS]
    ]
    return tag("details", tag("summary", "its row"), tag("dl", cells, class_="row"), class_="cells")


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
