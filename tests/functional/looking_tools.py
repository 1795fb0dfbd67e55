"""A tool that returns pictures, for runs of the environment `tools`."""

from typing import Any

import numpy as np
from PIL import Image

from nemo_rl.data.datasets.rows.shapes import draw_boxes
from nemo_rl.kits.tools.interfaces import EpisodeTools

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system' }}{% for tool in tools %}"
    "{{ '\\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content or [] %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{{ '[' }}{% for call in message.tool_calls %}"
    "{{ (', ' if not loop.first else '') + call.function.name + '(' }}"
    "{% for name, value in call.function.arguments.items() %}"
    "{{ (', ' if not loop.first else '') + name + '=' + value | tojson }}{% endfor %}{{ ')' }}"
    "{% endfor %}{{ ']' }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The template of tiny-vision, with the tools and calls of tiny-tools."""


class Look(EpisodeTools):
    """Pictures with as many boxes as the answer says."""

    def __init__(self) -> None:
        self.count = 1
        self.num_shown = 0

    def open(self, metadata: Any) -> None:
        """Remember the answer."""
        self.count = int(metadata["ground_truth"])

    def look(self) -> list[Any]:
        """Show the boxes once more."""
        self.num_shown += 1
        pixels = draw_boxes(np.random.default_rng(self.count + 10 * self.num_shown), self.count)
        return [Image.fromarray(pixels), "Once more."]
