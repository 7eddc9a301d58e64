"""The request for a build, and the report of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from forebay.store.layout import Group
from forebay.store.lookup import Sealed
from forebay.store.remote.carry.tally import TransferReport
from forebay.terminal import CommandReport, human_hours
from forebay.visible import from_here, human_bytes

COUNTS = ("num_samples", "excluded", "failed", "longer", "unused_fields")
"""What a report says as a cache's metadata does."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to build; none of it changes a byte of the result.

    verify: re-hash a sealed cache and make its damaged shards again. rebuild: make every shard again and swap the
    cache. part: (i, n), only every n-th shard from the i-th on, and no seal before all are there. seal_only: make no
    shard, and seal what all parts have made. stage: the URL below which finished shards stand until the cache is
    sealed; None: a folder that all parts share. key: the first digits of the key that the build must have. runner: who
    makes the shards. address: of the Ray cluster, HOST:PORT; None: see `forebay.preprocess.runner.ray`. progress: show
    bars.
    """

    rebuild: bool = False
    verify: bool = False
    dry_run: bool = False
    part: tuple[int, int] | None = None
    seal_only: bool = False
    stage: str | None = None
    key: str | None = None
    runner: Literal["local", "ray"] = "local"
    address: str | None = None
    progress: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """The cost of a model over the rows that are still to be made; fields are those of the JSON of a dry run.

    ms_a_sample: of the model. prepare_ms_a_sample: of what stands before it. hours: on the processes and devices of
    this machine. break_even_bytes_s: a storage that reads faster than this gives values sooner than the model does.
    batch: the samples that it is given at once. ms_by_batch: of the longest samples, by the batches that fit.
    """

    model: Group
    samples_tried: int
    samples: int
    bytes_a_sample: float
    total_bytes: int
    ms_a_sample: float
    prepare_ms_a_sample: float
    hours: float
    break_even_bytes_s: float
    batch: int
    ms_by_batch: Mapping[int, float]
    device: str

    @property
    def proposed_batch(self) -> int:
        """The smallest batch that is within a twentieth of the fastest; the present one where that is."""
        enough = 1.05 * min(self.ms_by_batch.values(), default=0.0)
        good = [size for size, ms in self.ms_by_batch.items() if ms <= enough]
        return self.batch if self.batch in good or not good else min(good)

    def lines(self) -> Iterator[str]:
        """Yields what a dry run prints."""
        yield (
            f"model.{self.model}: {self.samples_tried} samples tried on {self.device}: "
            f"{human_bytes(self.bytes_a_sample)} a sample, {human_bytes(self.total_bytes)} for {self.samples}; "
            f"{self.ms_a_sample:.3g} ms of the model and {self.prepare_ms_a_sample:.3g} ms before it, "
            f"{human_hours(self.hours)} hours here"
        )
        yield (
            f"model.{self.model}: reading {human_bytes(self.bytes_a_sample)} is faster than the model where storage "
            f"gives more than {human_bytes(self.break_even_bytes_s)}/s"
        )
        speeds = ", ".join(f"{size}: {ms:.3g}" for size, ms in self.ms_by_batch.items())
        proposal = f"batch = {self.proposed_batch} in its section is fastest, under another key of its shards"
        yield (
            f"model.{self.model}: ms of its longest samples in batches of {speeds}; "
            + (f"{self.batch}, as it is, is as good as any" if self.proposed_batch == self.batch else proposal)
        )


@dataclass(frozen=True, kw_only=True)
class CodecCost:
    """The cost of images under a codec, by some of them; fields are those of the JSON of a dry run.

    ms_an_image, ms_a_pack: to read what is stored, on one thread, out of memory; a pack is one full of images.
    total_bytes: of all images, each once. is_own: whether the config has this codec.
    """

    group: Group
    codec: str
    images_tried: int
    bytes_an_image: float
    ms_an_image: float
    ms_a_pack: float | None
    total_bytes: int
    is_own: bool

    def line(self) -> str:
        """Returns what a dry run prints."""
        a_pack = "" if self.ms_a_pack is None else f", {self.ms_a_pack:.3g} ms a pack of images"
        own = " (this config)" if self.is_own else ""
        return (
            f"{self.group}, codec {self.codec}{own}: {human_bytes(self.bytes_an_image)} an image, "
            f"{human_bytes(self.total_bytes)} for all; {self.ms_an_image:.3g} ms to read one{a_pack}"
        )


@dataclass(frozen=True, kw_only=True)
class BuildReport(CommandReport):
    """The report of a build; its fields are those of `forebay preprocess --json`.

    excluded, failed: rows left out, by reason. longer: samples that are longer than their manifest says, kept.
    cache: the folder of the cache, or its URL. pushed: how it got there, as `forebay cache push --json` says it; None:
    this build did not push it.
    models, codecs: of a dry run, what each model will cost, and images under each codec.
    plan: one line on the plan of a sealed cache; plan_folder: where the plan is kept, None where it is not.
    """

    key: str
    cache: str
    num_samples: int = 0
    excluded: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    longer: int = 0
    unused_fields: dict[str, int] = field(default_factory=dict)
    shards_written: int = 0
    shards_linked: int = 0
    shards_kept: int = 0
    seconds: float = 0.0
    sealed: bool = True
    already_sealed: bool = False
    estimated_bytes: int | None = None
    models: tuple[ModelCost, ...] = ()
    codecs: tuple[CodecCost, ...] = ()
    pushed: TransferReport | None = None
    plan: str | None = None
    plan_folder: str | None = None

    @classmethod
    def of_standing(cls, standing: Sealed, *, seconds: float) -> BuildReport:
        """Returns the report of a cache that was sealed already; seconds: what looking at it took."""
        metadata = standing.metadata
        return cls(
            key=standing.key,
            cache=standing.place,
            **{name: metadata[name] for name in COUNTS},
            shards_kept=sum(shape["num_shards"] for shape in metadata["groups"].values()),
            seconds=seconds,
            already_sealed=True,
        )

    def lines(self) -> Iterator[str]:
        """Yields what `forebay preprocess` prints of a build, or of a dry run, which alone has an estimate."""
        cache = from_here(self.cache)
        if self.estimated_bytes is not None:
            yield (
                f"would make {cache}: {self.num_samples} samples, about {human_bytes(self.estimated_bytes)}; shards: "
                f"{self.shards_written} to make, {self.shards_linked} to link, {self.shards_kept} finished"
            )
            for cost in self.models:
                yield from cost.lines()
            if self.codecs:
                yield f"{self.codecs[0].images_tried} images stored and read under each codec:"
                yield from (f"  {cost.line()}" for cost in self.codecs)
            yield from self._left_out()
            return
        if not self.sealed:
            made = f"{self.shards_written} shards made, {self.shards_kept} were there"
            yield f"not sealed yet: {made}; run the other parts"
            return
        state, kept = ("already sealed", " kept") if self.already_sealed else ("sealed", "")
        state += "" if self.num_samples else " without a sample"
        yield f"{state}: {cache} ({self.num_samples} samples{kept}, {self.seconds:.1f} s)"
        if not self.already_sealed:
            yield f"shards: {self.shards_written} made, {self.shards_linked} linked, {self.shards_kept} kept"
        if self.pushed is not None:
            yield from self.pushed.lines()
        yield from self._left_out()
        if self.longer:
            yield f"longer: {self.longer} kept, of more audio than their manifest says"
        if not self.num_samples:
            yield "no sample is left: mend what was excluded or failed, or change the filters of [source]"
        if self.plan:
            yield self.plan + (f": {from_here(self.plan_folder)}" if self.plan_folder else "")

    def nothing_left(self) -> str:
        """Returns what to say of a cache without samples: where it is, what was left out, and what to do."""
        left_out = "; ".join(self._left_out()) or "its sources have no rows"
        return (
            f"{from_here(self.cache)} has 0 samples ({left_out}); mend what was excluded or failed, or change the "
            "filters of [source]"
        )

    def _left_out(self) -> Iterator[str]:
        for kind, counts in (("excluded", self.excluded), ("failed", self.failed)):
            if counts:
                yield f"{kind}: " + ", ".join(f"{reason} {n}" for reason, n in counts.items())
