"""uvimg: upload an image once, get any size of it, fast, from one small service."""

__version__ = "0.1.0"
