"""An engine that samples from a small random model, for tests of which tokens are trained."""

import random
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.models.generation.interfaces import GenerationRequest, GenerationResult, VersionSpan


class RandomModelEngine:
    """Samples random words from a small random model, and writes calls between them; one token at a time."""

    weight_version = 1
    reads_chats = False

    def __init__(self, tokenizer: Any, calls: list[str]) -> None:
        self.tokenizer = tokenizer
        config = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=4096,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = Qwen2ForCausalLM(config).double().eval()
        self.calls = calls
        self.sampled: list[tuple[list[int], list[int]]] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        rng = random.Random(request.seed)
        wanted = self._script(rng)
        generator = torch.Generator().manual_seed(request.seed % 2**31)
        ids, written, logprobs = list(request.prompt_token_ids), [], []
        cache = None
        for scripted in wanted:
            new = torch.tensor([ids if cache is None else ids[-1:]])
            with torch.no_grad():
                output = self.model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            distribution = output.logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator)) if scripted is None else scripted
            ids.append(token)
            written.append(token)
            logprobs.append(float(distribution[token]))
        self.sampled.append((list(request.prompt_token_ids), written))
        spans = [VersionSpan(0, 1)]
        return GenerationResult(np.array(written, np.int32), np.array(logprobs, np.float32), "stop", spans)

    def _script(self, rng: random.Random) -> list[int | None]:
        """Plan a turn: random tokens (None), up to three calls, and the end of the turn or not."""
        plan: list[int | None] = [None] * rng.randint(0, 5)
        for call in rng.choices(self.calls, k=rng.choice([0, 1, 1, 2, 3])) if self.calls else ():
            plan += self.tokenizer(call, add_special_tokens=False)["input_ids"]
        ends = rng.random() < 0.7
        return [*plan, *([self.tokenizer.eos_token_id] if ends or not plan else [])]

    def describe_open(self) -> str:
        return ""


@torch.no_grad()
def teacher_forced(model: Qwen2ForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the tokens at some positions, in one pass over all tokens."""
    hidden = model.model(ids[None]).last_hidden_state[0, positions - 1]
    parts = [model.lm_head(part).log_softmax(-1) for part in hidden.split(64)]
    return torch.cat(parts).gather(-1, ids[positions, None])[:, 0]
