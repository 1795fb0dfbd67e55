"""Float8 in scaled blocks: the number formats, and which weights of a model engines get in them."""
