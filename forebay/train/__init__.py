"""A cache to a step: select, uncached fallback, plan, order, loader, collate, loop."""
