"""From a folder or a table to a config that builds: `forebay.init.write_config` is the way through."""
