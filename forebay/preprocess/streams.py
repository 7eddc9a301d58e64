"""Whether encoded bytes are one whole stream: what a decoder would shorten without a word."""

from __future__ import annotations

from forebay.preprocess.mp3 import measured
from forebay.preprocess.ogg import ogg_problem


def one_stream(data: bytes) -> tuple[bytes, tuple[str, str] | None]:
    """Returns the bytes to decode, and reason and description where they are not one whole stream, else None.

    Reasons: `truncated_audio` (Ogg without its end), `chained_audio` (Ogg or MP3 behind Ogg or MP3 of its kind). The bytes are
    those that were given; of an MP3 that does not say how long it is they begin with a frame that does.
    """
    problem = ogg_problem(data)
    return (data, problem) if problem is not None else measured(data)
