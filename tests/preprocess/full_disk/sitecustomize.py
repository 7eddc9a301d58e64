"""Loaded by Python at the start of a worker whose PYTHONPATH names this folder: its disk is full after a few shards."""

import errno
import os

AFTER = os.environ.get("FOREBAY_TEST_NO_SPACE_AFTER")

if AFTER is not None:
    import forebay.store.files as files

    real_write_all = files.write_all
    left = int(AFTER)

    def write_all(file, data):  # type: ignore[no-untyped-def]
        global left
        if len(data) > 1000:
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        real_write_all(file, data)

    files.write_all = write_all
