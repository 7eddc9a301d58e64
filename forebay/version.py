"""The version, where everything can import it without the rooms."""

__version__ = "0.2.0"
