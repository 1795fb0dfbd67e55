"""From the text of a response to its calls: parsers of vLLM, checked against the chat template."""
