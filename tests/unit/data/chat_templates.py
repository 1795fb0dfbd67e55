"""Chat templates in the documented forms of model families, and tokenizers of each kind, for tests of tokens.

The templates are written after the families' public descriptions, and kept short.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CALLS_JSON = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_TOOLS_JSON = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"

CHATML = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS_JSON + "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS_JSON + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    + _TOOLS_JSON
    + "<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | tojson }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] {% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}{{ eos_token }}'
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% if tools %}<|im_start|>system\n" + _TOOLS_JSON + "<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'assistant' %}"
    "{% set think = m.reasoning_content or '' %}{% set said = m.content %}"
    "{% if '</think>' in said %}{% set think = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or think) %}<think>\n{{ think.strip('\n') }}\n</think>\n\n{{ said }}"
    "{% else %}{{ said }}{% endif %}" + _CALLS_JSON + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
QWEN3_NO_THINKING = QWEN3.replace("enable_thinking is defined and enable_thinking is false", "true")
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n" + _TOOLS_JSON + "{% endif %}"
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | "
    "tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% if tools %}## Tools\n" + _TOOLS_JSON + "{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<|User|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|tool_output|>{{ m.content }}<|tool_end|>"
    "{% else %}<|Assistant|>{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function.name + '\n' + c.function.arguments + '<|call_end|>' }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
KIMI = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_{{ 'system' if m.role in ('system', 'tool') else m.role }}|>{{ m.name or m.role }}"
    "<|im_middle|>{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}<|call|>{{ c.id }}<|arguments|>{{ c.function.name }} "
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}<|call_end|>"
    "{% endfor %}<|calls_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ (first if loop.first else '') + m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PLAIN_HEADERS = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}{{ eos_token if m.role == 'assistant' else '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
"""Headers of ordinary text, so that tokens can cross the place where an answer begins."""

TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen3": QWEN3,
    "qwen3_no_thinking": QWEN3_NO_THINKING,
    "glm": GLM,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "gemma": GEMMA,
    "plain_headers": PLAIN_HEADERS,
}
REWRITES = frozenset(("qwen3", "qwen3_no_thinking"))
"""Templates that render a turn differently once later turns follow."""
WITHOUT_TOOLS = frozenset(("gemma", "plain_headers"))

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[gMASK]", "<sop>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|User|>", "<|Assistant|>", "<|tool_output|>",
    "<|tool_end|>", "<|call|>", "<|call_end|>", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>",
    "<|calls|>", "<|calls_end|>", "<|arguments|>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip
_CORPUS = [
    "Rome is a city. The river Tiber is near: it flows through Rome, and into the sea.\n\nYes, I say so: 12 and 345.",
    "### user:\nName a city.\n\n### assistant:\nWhat is 2+2? It is 4.\n\nsystem\nuser\nassistant\nmodel\ntool\n",
    '<think>\nBecause of that.\n</think>\n\n{"name": "find", "arguments": {"query": "a river", "count": 3}}',
    "<b>bold</b>\n- one\n- two\n\n\n  indented   text\there\n",
    '{"type": "function", "function": {"name": "find", "description": "Finds things."}}',
]  # fmt: skip


def _byte_bpe(prefix_space=False):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(_CORPUS * 8, trainer)
    return core


def _sentencepiece_bpe(scheme):
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()])
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    core.train_from_iterator(_CORPUS * 8, trainers.BpeTrainer(vocab_size=700, special_tokens=names))
    return core


def _legacy_llama():
    """Make the older form of Llama 2: a normalizer, and no pre-tokenizer, puts the word mark before each text."""
    made = _sentencepiece_bpe("first")
    made.pre_tokenizer = None
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def _unigram():
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>")
    core.train_from_iterator(_CORPUS * 8, trainer)
    return core


def _wordpiece():
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    core.decoder = decoders.WordPiece()
    core.train_from_iterator(_CORPUS * 8, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"]))
    return core


KINDS = {
    "byte_bpe": _byte_bpe,
    "byte_bpe_prefix_space": lambda: _byte_bpe(prefix_space=True),
    "sentencepiece_first": lambda: _sentencepiece_bpe("first"),
    "sentencepiece_always": lambda: _sentencepiece_bpe("always"),
    "sentencepiece_never": lambda: _sentencepiece_bpe("never"),
    "legacy_llama": _legacy_llama,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}


def make_tokenizer(kind, template):
    """Make a tokenizer of a kind with a chat template; the markers of all templates are special tokens."""
    core = KINDS[kind]()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>", *SPECIAL)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    if core.token_to_id("<unk>") is not None:
        made.unk_token = "<unk>"
    made.chat_template = TEMPLATES[template]
    return made
