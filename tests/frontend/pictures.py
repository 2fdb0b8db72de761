"""Files of images, and how requests have them."""

from __future__ import annotations

import base64
import io

from PIL import Image


def picture(width: int = 56, height: int = 84, kind: str = "PNG", shade: int = 90) -> bytes:
    """The file of an image."""
    image = Image.linear_gradient("L").resize((width, height)).point(lambda value: value ^ shade)
    file = io.BytesIO()
    image.convert("RGB").save(file, kind)
    return file.getvalue()


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def url_of(file: bytes) -> str:
    return f"data:image/png;base64,{encoded(file)}"
