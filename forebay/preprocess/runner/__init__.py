"""Who runs the parts of a build: this process, Ray or Slurm; and what the parts say of themselves."""
