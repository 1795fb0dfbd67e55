"""A tokenizer for conversations with a model whose tokenizer is not here.

Rollouts keep messages as token ids. With this tokenizer these are the bytes of the texts, so they can be decoded
exactly, but their numbers are not those of the model's tokens.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_rl.data.interfaces import TokenizerType

CHAT_TEMPLATE = """\
{%- if tools %}{{ '[tools]\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{% endif -%}
{%- for message in messages %}{{ '[' + message['role'] + ']\\n' + message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '\\n' if message['content'] or not loop.first }}
{{- '<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
{%- endfor %}{{ '\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif -%}
"""
"""For people who read the prompts of records; servers get messages."""


def text_tokenizer() -> TokenizerType:
    """Return the tokenizer; it has no special tokens, so no text can hold one."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(bytes_)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT_TEMPLATE, name_or_path="text")
