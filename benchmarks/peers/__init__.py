"""forebay and other ways to keep tensors on disk, on the same data: `python -m benchmarks.formats`. One module a peer."""
