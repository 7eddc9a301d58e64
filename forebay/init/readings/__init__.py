"""What the data may be read as: one file a form of data, each with the readings that it finds."""
