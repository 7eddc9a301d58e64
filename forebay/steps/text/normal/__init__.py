"""The named steps of `text.normalize`, one file a family."""
