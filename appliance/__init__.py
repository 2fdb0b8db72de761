"""One daemon that owns every GPU of a box and serves dozens of models from them at once."""

__version__ = "0.1.0"
