"""Names of a draft model's tensors: in the module, in published folders, and in the stream of weights to engines."""

PREFIX = "draft."
"""Marks the tensors of the draft model in a stream of weights."""
_MODULE, _PUBLISHED = "layers.0.", "midlayer."


def published(name: str, num_layers: int) -> str:
    """Return the name of a tensor in folders of EAGLE-3 heads, which call a single layer `midlayer`."""
    if num_layers == 1 and name.startswith(_MODULE):
        return _PUBLISHED + name.removeprefix(_MODULE)
    return name


def in_module(name: str) -> str:
    """Return the module's name of a tensor of a published folder."""
    name = name.removeprefix("model.")
    return _MODULE + name.removeprefix(_PUBLISHED) if name.startswith(_PUBLISHED) else name
