"""An object store on this machine, and a link in front of it that is as slow and as faulty as one asks."""
