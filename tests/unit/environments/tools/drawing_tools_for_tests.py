"""Tools that return images in all forms, and images that cannot be used."""

import base64
import io
from typing import Any

from PIL import Image

from nemo_rl.kits.tools.interfaces import EpisodeTools


def picture(side: int = 28) -> Image.Image:
    return Image.new("RGB", (side, side), (side, 9, 90))


def png(side: int = 28) -> bytes:
    file = io.BytesIO()
    picture(side).save(file, "PNG")
    return file.getvalue()


def encoded(side: int = 28) -> str:
    return base64.b64encode(png(side)).decode()


class Drawings(EpisodeTools):
    """One tool for each form of a result."""

    def as_picture(self) -> Any:
        """Return a picture of Pillow."""
        return picture()

    def as_block(self) -> Any:
        """Return a block of the Model Context Protocol, with line breaks in its base64."""
        return {"type": "image", "data": base64.encodebytes(png()).decode(), "mimeType": "image/png"}

    def as_part(self) -> Any:
        """Return a part with the bytes of a file."""
        return {"type": "image", "image": png()}

    def as_address(self) -> Any:
        """Return a part in OpenAI's form."""
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded()}"}}

    async def as_list(self) -> Any:
        """Return texts, images and a number."""
        return ["one", {"type": "text", "text": "two"}, picture(), picture(56), 3]

    def as_text(self) -> Any:
        """Return a list without an image."""
        return ["one", {"type": "text", "text": "two"}, {"type": "image", "place": 3}]

    def broken(self) -> Any:
        """Return a file that is no image."""
        return {"type": "image", "image": b"Hello"}

    def missing(self) -> Any:
        """Return the path of a file that does not exist."""
        return {"type": "image", "image": "/does/not/exist.png"}

    def elsewhere(self) -> Any:
        """Return an address."""
        return {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}

    def large(self) -> Any:
        """Return more pixels than allowed."""
        return picture(200)

    def heavy(self) -> Any:
        """Return larger files than allowed."""
        return [picture(), {"type": "image", "image": bytes(60_000)}]
