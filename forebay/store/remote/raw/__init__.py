"""Raw data that lies in a store."""
