"""Measurements of this machine: `forebay doctor`, `compare`, `calibrate` and `train --profile`."""
