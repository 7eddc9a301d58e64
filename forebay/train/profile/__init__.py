"""Where the time of a step goes: `forebay train --profile`."""
