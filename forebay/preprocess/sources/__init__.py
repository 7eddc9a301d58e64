"""Manifests of seven kinds to one table of candidate samples, in two stages: listed at once, located a file at a time.

Those of conversations over images, of three kinds, in `conversations`.
"""

from forebay.preprocess.sources.eligible import apply_filters
from forebay.preprocess.sources.media import MediaReader
from forebay.preprocess.sources.rows import (
    CONVERSATION_SCHEMA,
    IMAGE_SCHEMA,
    REJECTED_SCHEMA,
    ROW_SCHEMA,
    WHOLE_FILE,
    Manifest,
)
from forebay.preprocess.sources.speech.listing import locate_file, locate_tasks, read_manifest, read_rows
from forebay.preprocess.sources.speech.task import Located, LocateTask
from forebay.preprocess.sources.vision.listing import read_conversations

__all__ = [
    "CONVERSATION_SCHEMA",
    "IMAGE_SCHEMA",
    "REJECTED_SCHEMA",
    "ROW_SCHEMA",
    "WHOLE_FILE",
    "LocateTask",
    "Located",
    "Manifest",
    "MediaReader",
    "apply_filters",
    "locate_file",
    "locate_tasks",
    "read_conversations",
    "read_manifest",
    "read_rows",
]
