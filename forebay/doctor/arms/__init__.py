"""What `forebay doctor` measures, an arm a file."""
