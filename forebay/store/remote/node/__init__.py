"""The bounded cache that all processes of a node share."""
