"""A folder or a table becomes a config that builds: `forebay.init.write_config` is the way through."""
