"""From a folder or a table to a config that builds: `forebay.init.command` is the way through."""
