"""Pages of a list of objects that do not exist."""

from __future__ import annotations

from xml.sax.saxutils import escape

_OBJECT = (
    "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    "<ETag>&quot;{index:032x}&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
)


def name(prefix: str, index: int) -> str:
    """Returns the key of one object of the list. Keys sort as their numbers do."""
    return f"{prefix}{index:09d}"


def page(query: dict[str, str], *, bucket: str, count: int, size: int) -> bytes:
    """Returns what S3 answers to ListObjectsV2 with this query, if `count` objects lie under its prefix.

    The token of the next page is its first number. `start-after` and `delimiter` are not looked at.
    """
    prefix = query.get("prefix", "")
    begin = int(query.get("continuation-token", 0))
    end = min(count, begin + int(query.get("max-keys", 1000)))
    token = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < count else ""
    key = escape(prefix)
    objects = "".join(_OBJECT.format(key=name(key, index), index=index, size=size) for index in range(begin, end))
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{bucket}</Name><Prefix>{key}</Prefix><KeyCount>{end - begin}</KeyCount><MaxKeys>1000</MaxKeys>"
        f"<IsTruncated>{str(end < count).lower()}</IsTruncated>{token}{objects}</ListBucketResult>"
    ).encode()
