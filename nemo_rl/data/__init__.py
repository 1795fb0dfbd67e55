"""From rows of text to batches of prompts: tokenizers, message logs, processors, data sets, packing.

Neighbours: `config` says which data, `experience` and `algorithms` consume it.
Law: token ids of a prompt are made once, here, and never re-tokenised.
"""
