"""What a check says of a sample, as a finding."""

from __future__ import annotations

from forebay.lint.limits import BY_NAME
from forebay.lint.measured import Finding, Measured


def finding(
    found: Measured,
    row: int,
    check: str,
    message: str,
    *,
    value: float | str | None = None,
    limit: float | str | None = None,
    other: str | None = None,
    other_set: str | None = None,
) -> Finding:
    """Returns a finding of a check about a sample of a set."""
    return Finding(
        check=check,
        severity=BY_NAME[check].severity,
        set=found.name,
        sample_id=found.sample_id(row),
        row=int(found.places[row]),
        source=found.file(row),
        message=message,
        value=round(value, 4) if isinstance(value, float) else value,
        limit=limit,
        other=other,
        other_set=other_set,
    )


def set_finding(
    found: Measured, check: str, message: str, *, value: float | str | None = None, limit: float | None = None
) -> Finding:
    """Returns a finding of a check about a set as a whole, which is of no sample."""
    severity = BY_NAME[check].severity
    return Finding(
        check=check,
        severity=severity,
        set=found.name,
        sample_id="",
        row=-1,
        source="",
        message=message,
        value=round(value, 4) if isinstance(value, float) else value,
        limit=limit,
    )
