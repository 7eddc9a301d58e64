"""Numbers and names as a terminal shows them."""

from __future__ import annotations

import math


def human_bytes(size_bytes: float) -> str:
    """Returns a size in decimal units, three digits: `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 999.5:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB" if size_bytes < 999.5 else f"{size_bytes:,.0f} TB"


def human_hours(hours: float) -> str:
    """Returns hours with as many places as tell something: `12,345.6`, `1.23`, `0.0123`."""
    if hours >= 100:
        return f"{hours:,.1f}"
    return f"{hours:.2f}" if hours >= 1 else f"{hours:.4f}"


def human_share(share: float) -> str:
    """Returns a share of 1 in percent: `12.3 %`."""
    return f"{100 * share:.1f} %"


def human_number(value: float | None) -> str:
    """Returns an integer whole, another number in four digits; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if math.isfinite(value) else str(value)
