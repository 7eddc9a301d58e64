"""Where the time of a config's data goes on this machine, and what to change: `forebay doctor`."""
