"""The index of a tar: every member's name, offset and size, without reading the data between."""
