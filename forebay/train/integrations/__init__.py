"""Helpers by which other frameworks take a loader, evaluate with it and resume rightly; a file a framework."""
