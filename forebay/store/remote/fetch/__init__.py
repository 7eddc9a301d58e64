"""Objects of a store, or the files of a manifest, as files of a folder of this machine."""
