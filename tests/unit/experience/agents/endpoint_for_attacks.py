"""Serve sessions on an endpoint in a process of its own, which hostile clients attack.

    python endpoint_for_attacks.py MOST_FILES

It prints the address and two keys as JSON. For each line of its input it prints its number of open files, and whether
it can open one more.
"""

import asyncio
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from random_model import RandomModelEngine
from transformers import AutoTokenizer

from nemo_rl.agents.endpoint.answers import AnswerReader
from nemo_rl.agents.endpoint.server import AgentEndpoint
from nemo_rl.agents.endpoint.session import AgentSession, CallParts, SessionSettings
from nemo_rl.config.schema.agents import AgentEndpointConfig
from nemo_rl.data.messages.content import TextRules
from nemo_rl.experience.trajectory import RolloutLimits
from nemo_rl.models.generation.interfaces import SamplingParams

TOKENIZER = Path(__file__).parents[3] / "assets/tokenizers/qwen3"


def session_of(tokenizer: Any) -> AgentSession:
    """Return a session of a model that answers at random."""
    limits = RolloutLimits(max_sequence_length=4000, max_turns=1, timeout_s=600.0)
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(tokenizer.eos_token_id,))
    parts = CallParts(RandomModelEngine(tokenizer, []), tokenizer, TextRules(), limits, sampling, trains=False)
    settings = SessionSettings(AnswerReader(tokenizer), max_calls=100_000)
    return AgentSession(parts, settings, lambda *_: 1)


async def main(most_files: int) -> None:
    """Serve until the input ends."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    endpoint = AgentEndpoint(AgentEndpointConfig())
    await endpoint.start()
    keys = [endpoint.open(session_of(tokenizer)) for _ in range(2)]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, hard))
    sys.stdout.write(json.dumps({"address": endpoint.address, "keys": keys}) + "\n")
    sys.stdout.flush()
    while await asyncio.to_thread(sys.stdin.readline):
        try:
            with open(os.devnull, "rb"):
                can_open = True
        except OSError:
            can_open = False
        files = len(os.listdir("/proc/self/fd")) if can_open else most_files
        sys.stdout.write(json.dumps({"files": files, "can_open": can_open}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
