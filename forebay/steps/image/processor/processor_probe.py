"""Finds the form of what an image processor gives, and the tables of its fields, by asking it.

Images are of several sizes, alone and together. No list of classes is kept: transformers changes them with each
release, and a folder's settings change what a class gives. A form is what was seen, and the promise says how far our
batches equal the processor's own. A table says which few values each channel takes, and along which axis channels lie.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.errors import ConfigError
from forebay.steps.form import BatchForm, FieldForm, Join, Table
from forebay.steps.image.processor.codes import Encoder, Floats, blocks, different, even_first
from forebay.steps.image.processor.processor_call import (
    NoArrayError,
    Output,
    RaggedOutput,
    UnstorableError,
    array_of,
    ask,
    needs_package,
    refuse_reaching,
)
from forebay.steps.image.processor.together import Seen, as_mask, padded, promise_of
from forebay.store.layout import Array

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_VALUES = 1 << 16
"""A channel takes at most so many: codes are uint16."""
_SAMPLE = 1 << 16
"""Values of a channel that are sorted to begin with. Where a quarter of them differ, there is no table."""
_SMALL = 1024
"""Arrays below this have no table: nothing is won, and a scale that was 1 for all images of a probe is no constant."""
_LARGE = 1 << 19
"""Arrays are thinned to about so many values."""
_QUIET = 2
"""So many arrays in a row bring nothing new before a table is believed."""
_ROUNDS = 6
"""More arrays that are asked for where the first ones did not come to rest."""
_RARE = (64, 256)
"""Where a channel has so many values, others that no image showed are looked for with flat ones: small outputs show few
at once. Behind these a channel of pixels has all its values, one for padding among them, and the table is believed."""
FLAT = 1000
"""Images from this number on are flat, sixteen values each."""
Layout = tuple[int, int, int]
"""(axis, inner, channels)."""


def table_of(
    arrays: Sequence[Floats], shape: Sequence[int | None], *, more: Callable[[int], Floats | None]
) -> Table | None:
    """Returns the table of a field, None where its values are too many or do not come to rest.

    arrays: of different images. shape: of the field. more: returns the array of another image, by a number.
    """
    if max(array.size for array in arrays) < _SMALL:
        return None
    arrays = [_thinned(array) for array in arrays if array.size]
    best: Table | None = None
    for layout in sorted(_layouts(shape), key=lambda layout: _few(arrays[0], layout)):
        found = _learned(arrays, layout, more=more)
        if found is not None and (best is None or _bytes(found) < _bytes(best)):
            best = found
        if best is None or best.values.shape[1] <= 256:
            break
    return best


def _thinned(array: Floats) -> Floats:
    """Returns some rows of a large array: a probe shall take no seconds, and what is stored is compared anyway."""
    if array.ndim < 2 or array.shape[-2] <= 4 or array.size <= _LARGE:
        return array
    return array[..., :: max(1, min(array.shape[-2] // 8, array.size // _LARGE)), :]


def _bytes(table: Table) -> tuple[int, int, int]:
    """The order by which tables are chosen: bytes of a code, then values of a channel, then those of the table."""
    count = table.values.shape[1]
    return (1 if count <= 256 else 2), count, table.values.size


def _layouts(shape: Sequence[int | None]) -> Iterator[Layout]:
    yield 0, 1, 1
    for axis, length in enumerate(shape):
        if length is not None and 2 <= length <= 4:
            yield axis, 1, length
    last = shape[-1] if shape else None
    if last is not None and last > 4 and last % 3 == 0:  # rows of patches
        yield len(shape) - 1, last // 3, 3
        yield len(shape) - 1, 1, 3


def _few(array: Floats, layout: Layout) -> tuple[int, int]:
    """The order of layouts: those of codes of one byte first, one channel before several."""
    count = max(map(len, _sampled(array, layout)))
    return (0 if count <= 256 else 1), (layout[2] if count <= 256 else count)


def _sampled(array: Floats, layout: Layout) -> list[Floats]:
    """Returns the different values of a part of each channel."""
    axis, inner, channels = layout
    shape = (1, 1, array.size) if channels == 1 else blocks(array.shape, axis, channels=channels, inner=inner)
    parts = np.ascontiguousarray(array).reshape(shape)
    flat = [parts[:, channel].reshape(-1) for channel in range(channels)]
    # An odd step, so that no power of two of a shape makes it hit the same columns.
    return [different(part[:: part.size // _SAMPLE * 2 + 1]) for part in flat]


def _learned(arrays: Sequence[Floats], layout: Layout, *, more: Callable[[int], Floats | None]) -> Table | None:
    sampled = _sampled(arrays[0], layout)
    if max(map(len, sampled)) > _SAMPLE // 4:
        return None
    table = _table(sampled, layout)
    quiet, number, waiting = 0, 0, list(arrays)
    while waiting:
        grown = _with(table, waiting.pop(0), layout)
        if grown is None or grown.values.shape[1] > MAX_VALUES:
            return None
        quiet = quiet + 1 if grown is table else 0
        table = grown
        is_settled = quiet >= _QUIET or number == _ROUNDS
        if not waiting and is_settled and number < FLAT and _is_rare(table):
            number = FLAT
            waiting = [array for array in map(more, range(FLAT, FLAT + 16)) if array is not None]
        if not waiting and quiet < _QUIET and number < _ROUNDS and table.values.shape[1] <= 2 * 256:
            another = more(number)
            number += 1
            if another is not None and another.size:
                waiting.append(_thinned(another))
    return table if quiet >= _QUIET or (number >= FLAT and table.values.shape[1] <= _RARE[1] + 1) else None


def _is_rare(table: Table) -> bool:
    """Returns whether a channel may take values that no image showed, and none has more than pixels can have."""
    counts = [len(different(row)) for row in table.values]
    return max(counts) <= _RARE[1] + 1 and any(_RARE[0] <= count < _RARE[1] for count in counts)


def _with(table: Table, array: Floats, layout: Layout) -> Table | None:
    """Returns the table with the values of an array, itself where they are all in it, None where they are no few."""
    missing = Encoder(table).missing(array)
    if not any(map(len, missing)):
        return table
    if max(map(len, missing)) > MAX_VALUES:
        return None
    return _table([different(np.concatenate(pair)) for pair in zip(table.values, missing, strict=True)], layout)


def _table(channels: Sequence[Floats], layout: Layout) -> Table:
    longest = max(map(len, channels))
    channels = [even_first(row) for row in channels]
    values = np.stack([np.append(row, np.repeat(row[-1:], longest - len(row))) for row in channels])
    return Table(axis=layout[0], values=values, inner=layout[1])


SIZES = (
    *((90, 60), (70, 120), (400, 90), (90, 400), (1400, 900), (900, 1300), (300, 300)),
    *((24, 16), (150, 200), (640, 480)),
)
"""(width, height) of the images: small and large ones, wide and high ones, so that every axis that can grow does, and
whatever stands where an image does not reach is seen."""
_TOGETHER = (0, 1)
"""Those of which batches are made, if they show what there is to see: small ones of two shapes."""


def probe(processor: Any, *, leave_out: Sequence[str] = (), table: bool = True) -> BatchForm:
    """Returns the form of what an image processor of transformers gives of one image, and its promise.

    leave_out: outputs that are not stored. table: whether floats become codes where their values are few.

    Raises ConfigError, which names the class, for a processor that cannot be asked for one image, lacks a package, or
    has an output that no batch can hold and that `leave_out` does not name.
    """
    name = type(processor).__name__
    refuse_reaching(type(processor), getattr(processor, "__dict__", {}), "the folder")
    with quiet():
        seen = _seen(processor, name, leave_out)
        fields = [_field(seen, output, table=table) for output in seen.names]
        fields = [as_mask(seen, field, fields) for field in fields]
        return BatchForm(made_by=name, fields=tuple(fields), promise=promise_of(seen, fields))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Foreign classes warn of nothing in this block: a probe asks what no user asked."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def picture(size: tuple[int, int], number: int) -> Image:
    """Returns an RGB image: blocks of one colour each, every value in every channel, and noise beside them.

    Blocks are so large that some of their pixels keep their colour when the image is made smaller.
    """
    from PIL import Image as Images

    width, height = size
    rng = np.random.default_rng(number)
    side = max(1, min(width, height) // 16)
    rows, columns = -(-height // side), -(-width // side)
    colours = rng.permuted(np.resize(np.arange(256, dtype=np.uint8), (3, rows * columns)), axis=1)
    pixels = colours.T.reshape(rows, columns, 3).repeat(side, axis=0).repeat(side, axis=1)[:height, :width]
    noisy = pixels[:: 2 * side]
    pixels[:: 2 * side] = rng.integers(0, 256, noisy.shape, dtype=np.uint8)
    return Images.fromarray(np.ascontiguousarray(pixels))


def flat_picture(number: int) -> Image:
    """Returns a grey image of sixteen large blocks, of the values from 16 * number: none is lost where it shrinks.

    Dark ones stand at all edges: Nougat cuts bright edges off.
    """
    from PIL import Image as Images

    values = np.roll(np.arange(16 * number, 16 * number + 16, dtype=np.uint8), 8).reshape(4, 4)
    pixels = values.repeat(32, axis=0).repeat(32, axis=1)
    return Images.fromarray(np.ascontiguousarray(np.stack([pixels] * 3, axis=-1)))


def _seen(processor: Any, name: str, leave_out: Sequence[str]) -> Seen:
    images, answers = _asked_alone(processor, name)
    names = _kept(name, answers, leave_out)
    alone = [_with_empty(names, answer, answers) for answer in answers]
    pair = _pair(alone)
    chosen = [images[index] for index in pair]
    flat = _together(processor, chosen, names)
    several = _together(processor, [chosen[:1], chosen[::-1]], names)
    is_nested = not isinstance(flat, str) and any(
        isinstance(found, np.ndarray) and found.ndim and len(found) == 1 for found in flat.values()
    )
    ones = _together(processor, [[image] for image in chosen], names) if is_nested else flat
    return Seen(processor, names, alone, [alone[index] for index in pair], flat=flat, ones=ones, several=several)


def _pair(alone: Sequence[Mapping[str, Array]]) -> tuple[int, int]:
    """Returns two images whose arrays differ along every axis that differs among all, as far as there are such two."""

    def differing(first: int, second: int) -> int:
        return sum(
            one != other
            for name, array in alone[first].items()
            for one, other in zip(array.shape, alone[second][name].shape, strict=True)
        )

    pairs = [_TOGETHER, *((first, second) for second in range(len(alone)) for first in range(second))]
    return max(pairs, key=lambda pair: differing(*pair))


def _with_empty(
    names: Sequence[str], answer: Mapping[str, Output | NoArrayError], answers: Sequence[Mapping[str, Any]]
) -> dict[str, Array]:
    """Returns an answer's arrays; of an output that the processor gives of some images alone an empty one."""
    found: dict[str, Array] = {}
    for name in names:
        value = answer.get(name)
        like = next(other[name] for other in answers if name in other)
        found[name] = value if isinstance(value, np.ndarray) else np.empty((0, *like.shape[1:]), like.dtype)
    return found


def _asked_alone(processor: Any, name: str) -> tuple[list[Image], list[dict[str, Output | NoArrayError]]]:
    """Returns the images that a processor takes by themselves, and its answers; at least two, of different sizes."""
    images, answers, problem = [], [], None
    for number, size in enumerate(SIZES):
        image = picture(size, number)
        try:
            answers.append(ask(processor, [image]))
        except ImportError as err:
            raise needs_package("the folder", name, err) from err
        except Exception as err:  # noqa: BLE001  whatever a foreign class raises of an image
            problem = err
            continue
        images.append(image)
    if len(images) >= 2:
        return images, answers
    said = " ".join(str(problem).split())
    raise ConfigError(
        f"vision.processor: {name} takes no image by itself: {type(problem).__name__}: {said:.300}; point "
        "vision.processor at a processor that takes single images",
        code="FB124",
    ) from problem


def _kept(
    name: str, answers: Sequence[Mapping[str, Output | NoArrayError]], leave_out: Sequence[str]
) -> tuple[str, ...]:
    """Returns the outputs that are stored. Raises ConfigError for others that `leave_out` does not name."""
    names = tuple(dict.fromkeys(output for answer in answers for output in answer))
    problems = []
    for output in names:
        if output in leave_out:
            continue
        found = [value for answer in answers if (value := answer.get(output)) is not None]
        if failed := [value for value in found if isinstance(value, NoArrayError)]:
            problems.append(f"{output} is no array: {failed[0]}")
        elif any(isinstance(value, np.ndarray) and not value.ndim for value in found):
            problems.append(f"{output} is one number for a whole batch of images")
        elif any(isinstance(value, RaggedOutput) for value in found):
            problems.append(f"{output} is a list of arrays of different shapes")
        elif len({(value.dtype, value.ndim) for value in found if isinstance(value, np.ndarray)}) > 1:
            problems.append(f"{output} has another dtype or rank from image to image")
    if problems:
        listed = sorted({*leave_out, *(problem.split(" ")[0] for problem in problems)})
        raise UnstorableError(
            f"vision.processor: {name} gives what cannot be stored: {'; '.join(problems)}. If the model does not need "
            f"it, leave it out: leave_out = {listed} under [vision]".replace("'", '"'),
            tuple(listed),
        )
    if unknown := sorted({*leave_out} - {*names}):
        raise ConfigError(
            f"vision.leave_out names {', '.join(unknown)}, {name} gives {', '.join(names)}; take it out of "
            "vision.leave_out",
            code="FB124",
        )
    kept = tuple(output for output in names if output not in leave_out)
    if not kept:
        raise ConfigError(
            f"vision.leave_out names all that {name} gives: {', '.join(names)}; keep what the model reads", code="FB124"
        )
    return kept


def _together(processor: Any, images: Any, names: Sequence[str]) -> dict[str, Output] | str:
    try:
        answer = ask(processor, images)
    except Exception as err:  # noqa: BLE001  whatever a foreign class raises of a batch
        return f"{type(err).__name__}: {' '.join(str(err).split()):.200}"
    return {name: value for name in names if isinstance(value := answer.get(name), np.ndarray | RaggedOutput)}


def _field(seen: Seen, name: str, *, table: bool) -> FieldForm:
    """Returns the form of one output: how images stand together, which axes grow, its table, its padding."""
    join, along = _join(seen, name)
    arrays = [array_of(found[name], join) for found in seen.alone]
    lengths = list(zip(*(array.shape for array in arrays), strict=True))
    grows = {axis for axis, found in enumerate(lengths) if len(set(found)) > 1} | ({along} if join == "cat" else set())
    shape = tuple(None if axis in grows else found[0] for axis, found in enumerate(lengths))
    dtype = arrays[0].dtype.name
    form = FieldForm(name=name, dtype=dtype, shape=shape, stored_dtype=_stored_dtype(name, arrays), join=join)
    if table and dtype == "float32":

        def more(number: int) -> Array | None:
            image = picture(SIZES[number % 2], 100 + number) if number < FLAT else flat_picture(number - FLAT)
            answer = ask(seen.processor, [image]).get(name)
            return array_of(answer, join) if isinstance(answer, np.ndarray) else None

        found = table_of(arrays, shape, more=more)
        if found is not None:
            stored = "uint8" if found.values.shape[1] <= 256 else "uint16"
            form = replace(form, table=found, stored_dtype=stored)
    return padded(seen, form)


def _stored_dtype(name: str, arrays: Sequence[Array]) -> str:
    """Returns the dtype on disk: bytes for what is true or false, also where a mask says so in wider numbers."""
    dtype = arrays[0].dtype.name
    if dtype == "bool":
        return "uint8"
    is_mask = "mask" in name and dtype != "float32" and all(((array == 0) | (array == 1)).all() for array in arrays)
    return "uint8" if is_mask else dtype


def _join(seen: Seen, name: str) -> tuple[Join, int]:
    """Returns how the arrays of images stand together in the processor's batches, and for `cat` along which axis."""
    alone, flat = [found[name] for found in seen.chosen], _of(seen.flat, name)
    is_one = all(len(found[name]) == 1 for found in seen.alone if found[name].ndim)
    if alone[0].ndim == 0:
        return "stack", 0
    if not isinstance(flat, np.ndarray):
        return ("stack", 0) if is_one else ("cat", 0)
    if is_one and len(flat) == len(alone):
        return "stack", 0
    if len(flat) == sum(map(len, alone)):
        return "cat", 0
    several = _of(seen.several, name)
    if is_one and (isinstance(several, RaggedOutput) or (several is not None and len(several) == 2)):
        return "nest", 0
    for axis in range(1, flat.ndim):
        if flat.shape[axis] == sum(array.shape[axis] for array in alone):
            return "cat", axis
    return ("stack", 0) if is_one else ("cat", 0)


def _of(answer: Mapping[str, Output] | str, name: str) -> Output | None:
    return None if isinstance(answer, str) else answer.get(name)
