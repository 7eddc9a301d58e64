"""Raw data to samples to a cache: manifests, decode, features, text, the pipeline and its cut, build."""
