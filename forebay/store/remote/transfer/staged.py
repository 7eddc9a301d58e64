"""Objects of a bucket that a push into the same bucket copies, so that no byte of them passes here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from forebay.config.remote import RemoteConfig
from forebay.config.url import Url
from forebay.store.files import write_all, write_aside
from forebay.store.remote.bucket.bucket import MAX_COPY, Bucket
from forebay.store.remote.node.node import Wanted
from forebay.store.remote.transfer.proof import Proof, pieces_of
from forebay.visible import human_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """An object with the bytes of a file that is pushed.

    proof: of these bytes. etag: of the object, when they were proven. None, empty: nothing is known but the size.
    """

    url: Url
    proof: Proof | None
    etag: str

    def is_copied(self, etag: str) -> bool | None:
        """Returns whether an object of this etag, and of the same size, is a copy; None where etags do not say so."""
        if self.proof is None or not self.proof.holds(self.etag):
            return None
        return self.proof.holds(etag)


NOTHING_STAGED: Mapping[str, Staged] = MappingProxyType({})


def download_staged(staged: Staged, wanted: Wanted, path: Path, settings: RemoteConfig) -> None:
    """Makes a file the whole of a staged object, which is larger than what a store copies at once."""
    logger.warning(
        "%s has %s, and stores copy no more than %s at once: it goes through this machine; a smaller "
        "layout.rows_per_shard makes smaller shards",
        staged.url,
        human_bytes(wanted.size_bytes),
        human_bytes(MAX_COPY),
    )
    with write_aside(path) as whole:
        for piece in pieces_of(Bucket(staged.url.parent, settings), replace(wanted, name=staged.url.name)):
            write_all(whole, piece)
