"""What this node keeps of stores, as far as `forebay cache du` says it: it has a bound, and makes room by itself."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from forebay.caches.files import contents_of, sizes_of
from forebay.caches.root import FOLDER
from forebay.config.remote import RemoteConfig
from forebay.store.remote.node.holdings import MIRRORS


def node_usage(settings: RemoteConfig) -> tuple[str, int] | None:
    """Returns the folder of what this node keeps of stores, and its bytes; None where there is none."""
    folder = Path(os.path.realpath(settings.folder / MIRRORS))
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, FOLDER)
        try:
            found = contents_of(descriptor, device=os.fstat(descriptor).st_dev)
        finally:
            os.close(descriptor)
        return str(folder), sizes_of(found.files).size_bytes
    return None
