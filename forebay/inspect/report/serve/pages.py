"""What is answered to a path: pages, rows and media of samples, each named by its index."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs

from forebay.errors import CacheError
from forebay.inspect.report.card_page import card_element
from forebay.inspect.report.cards import SERVED_COLUMNS, Card, Reading, linked, served_image
from forebay.inspect.report.choose import Chosen
from forebay.inspect.report.markup import Html, page, policy, tag
from forebay.inspect.report.overview import Overview
from forebay.inspect.report.serve.search import Query, Search
from forebay.inspect.report.sound import wav_head
from forebay.inspect.report.write import body_of, columns_json, frame
from forebay.steps.text.pace import PACE
from forebay.store.metadata import foreign_values

_NUMBER = "([0-9]{1,12})"
_MAX_QUERY = 2_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What is sent. parts: the body, end to end; content_policy: what a page may load."""

    status: int
    media_type: str
    parts: Sequence[bytes | memoryview]
    content_policy: str = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; sandbox"
    has_ranges: bool = False

    @property
    def size(self) -> int:
        """Bytes of the body."""
        return sum(memoryview(part).nbytes for part in self.parts)


def plain(status: int, text: str) -> Answer:
    """Returns an answer of plain text."""
    return Answer(status=status, media_type="text/plain; charset=utf-8", parts=[f"{text}\n".encode()])


class Pages:
    """Answers paths below a root of one cache. Threads share it.

    What a path names is looked up by a table of patterns: there is no path on disk in any of them.
    """

    def __init__(self, overview: Overview, *, root: str) -> None:
        """root: `/TOKEN`, without a slash at its end."""
        self.overview, self.root = overview, root
        self._search = Search(rows=overview.rows)
        self._first: bytes | None = None
        self._lock = threading.Lock()
        routes: list[tuple[str, Callable[..., Answer]]] = [
            ("/?", self._home),
            (f"/sample/{_NUMBER}", self._sample),
            (f"/audio/{_NUMBER}\\.wav", self._audio),
            (f"/spectrum/{_NUMBER}\\.png", self._spectrum),
            (f"/image/{_NUMBER}/([0-9]{{1,4}})\\.webp", self._image),
        ]
        self._routes = [(re.compile(pattern), make) for pattern, make in routes]

    def answer(self, path: str, query: str) -> Answer:
        """Returns what stands at a path below the root: 404 where nothing does, 500 where a sample is damaged."""
        try:
            with foreign_values(self.overview.columns.cache.folder):
                if path == "/rows":
                    return self._rows(query)
                for pattern, make in self._routes:
                    if found := pattern.fullmatch(path):
                        return make(*map(int, found.groups()))
        except CacheError as err:
            return plain(500, f"it cannot be read: {err}")
        return plain(404, "there is nothing at this address")

    def _home(self) -> Answer:
        with self._lock:
            if self._first is None:
                self._first = self._made_home().encode("utf-8")
        return self._page(self._first)

    def _made_home(self) -> str:
        overview = self.overview
        cards = [card_element(self._card(chosen), link=self._where(chosen.index)) for chosen in overview.chosen]
        body = body_of(overview, cards, link=self._link, note=f"All {len(overview.columns):,}.")
        data = {
            "columns": columns_json(overview),
            "languages": overview.columns.languages[0][:500],
            "root": self.root,
            "far": PACE.deviations,
        }
        return page(f"{overview.facts['name']}: forebay", body, data=data, origin="'self'")

    def _page(self, data: bytes) -> Answer:
        rules = f"{policy(origin=_ORIGIN)}; frame-ancestors 'none'"
        return Answer(status=200, media_type="text/html; charset=utf-8", parts=[data], content_policy=rules)

    def _where(self, index: int) -> str:
        return f"{self.root}/sample/{index}"

    def _link(self, index: int) -> Html:
        return tag("a", tag("code", self.overview.columns.ids[index].as_py()[:80]), href=self._where(index))

    def _card(self, chosen: Chosen) -> Card:
        reading = self.overview.reader.read(chosen)
        return linked(reading, root=self.root, rate_hz=self.overview.rate_hz)

    def _sample(self, index: int) -> Answer:
        count = len(self.overview.columns)
        if index >= count:
            return plain(404, f"there is no sample {index:,}: the cache has {count:,}")
        near = {"previous": self._where(index - 1)} if index else {}
        near |= {"next": self._where(index + 1)} if index + 1 < count else {}
        links = [(f"{self.root}/", "All samples"), *((where, name.capitalize()) for name, where in near.items())]
        card = card_element(self._card(Chosen(index=index)))
        content = tag(
            "section",
            tag("h1", f"Sample {index:,} of {count:,}", class_="plain"),
            tag("div", card, class_="single"),
            id="samples",
        )
        body = frame([content], home=f"{self.root}/", links=links)
        text = page(f"sample {index}: forebay", body, data={"root": self.root, "neighbours": near}, origin=_ORIGIN)
        return self._page(text.encode("utf-8"))

    def _reading(self, index: int) -> Reading | None:
        if index >= len(self.overview.columns):
            return None
        reading = self.overview.reader.read(Chosen(index=index))
        if reading.card.problem:
            raise CacheError(reading.card.problem)
        return reading

    def _audio(self, index: int) -> Answer:
        reading = self._reading(index)
        if reading is None or reading.waveform is None:
            return plain(404, "there is no such sound")
        # The values go from the mapping to the socket: an hour of sound takes no memory here.
        head = wav_head(reading.waveform, self.overview.rate_hz)
        values = reading.waveform.data.cast("B")
        return Answer(status=200, media_type="audio/wav", parts=[head, values], has_ranges=True)

    def _spectrum(self, index: int) -> Answer:
        reading = self._reading(index)
        if reading is None or not reading.tensors:
            return plain(404, "there is no such picture")
        made = reading.picture(rate_hz=self.overview.rate_hz, columns=SERVED_COLUMNS)
        return plain(404, "nothing to draw") if made is None else _media("image/png", made[0])

    def _image(self, index: int, place: int) -> Answer:
        reading = self._reading(index)
        if reading is None or place >= len(reading.pictures):
            return plain(404, "there is no such image")
        return _media("image/webp", served_image(reading.pictures[place]))

    def _rows(self, query: str) -> Answer:
        languages = len(self.overview.columns.languages[0])
        try:
            given = parse_qs(query[:_MAX_QUERY], keep_blank_values=True, max_num_fields=10, errors="strict")
        except ValueError:
            given = {"first": ["?"]}
        wanted = Query.of(given, columns=len(self.overview.rows.shown), languages=languages)
        if wanted is None:
            return plain(400, "these are no rows that a page asks for")
        body = json.dumps(self._search.answer(wanted), allow_nan=False).encode("ascii")
        return _media("application/json", body)


_ORIGIN = "'self'"


def _media(media_type: str, data: bytes) -> Answer:
    return Answer(status=200, media_type=media_type, parts=[data])
