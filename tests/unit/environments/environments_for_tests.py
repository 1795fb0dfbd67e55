"""Environments a user might write; messages and metadata control what they do."""

import asyncio
import os
import signal
import time

import ray
import torch

from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn, EpisodeStart


class GuessTheNumber(EnvironmentInterface[dict]):
    """Several turns: says "higher" or "lower" until the guess is right; metadata counts turns.

    A guess may also be a command: raise, exit, hang, nan, "die" (kills its process), "die FILE"
    (does so once, while FILE does not exist).
    """

    def __init__(self, cfg):
        if cfg.get("broken"):
            raise RuntimeError("no such game")
        self.calls = 0

    def step(self, message_log_batch, metadata):
        self.calls += 1
        replies, new_metadata, rewards, done, answers = [], [], [], [], []
        for log, state in zip(message_log_batch, metadata, strict=True):
            assert all(set(turn) == {"role", "content"} for turn in log)
            state["turns"] += 1
            guess = self._read(log[-1]["content"])
            right = guess == state["secret"]
            word = "right" if right else "higher" if guess < state["secret"] else "lower"
            replies.append({"role": "environment", "content": word})
            new_metadata.append({**state, "calls": self.calls, "batch": len(metadata)})
            rewards.append(float("nan") if guess == 13 else float(right))
            done.append(right)
            answers.append(str(guess))
        return EnvironmentReturn(
            replies, new_metadata, [["\n"]] * len(done), torch.tensor(rewards), torch.tensor(done),
            answers,
        )  # fmt: skip

    def _read(self, guess):
        command, _, argument = guess.partition(" ")
        if command == "raise":
            raise ValueError("I do not understand")
        if command == "exit":
            raise SystemExit(3)
        if command == "cancel":
            raise asyncio.CancelledError
        if command == "hang":
            time.sleep(60)
        if command == "sleep":
            time.sleep(float(argument))
            return 0
        if command == "die":
            if argument and os.path.exists(argument):
                return 0
            if argument:
                open(argument, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return int(guess)

    def global_post_process_and_metrics(self, batch):
        return batch, {"mean_reward": batch["rewards"].mean().item(), "pid": os.getpid()}


@ray.remote(num_cpus=0.5, max_restarts=-1)
class Decorated(GuessTheNumber):
    """The same environment as NeMo RL's users declare it, with the 5 fields of its first versions."""

    def step(self, message_log_batch, metadata):
        return EnvironmentReturn(*super().step(message_log_batch, metadata)[:5])


class Slow(EnvironmentInterface[dict]):
    """A coroutine environment with reward components; a step ends once as many have started as its metadata names."""

    def __init__(self, cfg):
        self.num_started = 0

    async def step(self, message_log_batch, metadata):
        self.num_started += 1
        async with asyncio.timeout(30):
            while self.num_started < metadata[0].get("wait_for", 1):
                await asyncio.sleep(0.01)
        ones = torch.ones(len(metadata))
        return EnvironmentReturn(
            [{"role": "environment", "content": ""}] * len(metadata),
            metadata,
            [None] * len(metadata),
            {"taste": ones, "form": ones * 0.5},
            ones.bool(),
            None,
            [item.get("problem") for item in metadata],
        )


class GuessAlone(GuessTheNumber):
    """Steps each sample alone, on threads."""

    max_concurrent_steps = 16
    steps_samples_alone = True


class Tools(EnvironmentInterface[dict]):
    """A coroutine environment whose steps take as long as their metadata says; 1 is rewarded where nothing raises.

    Metadata: `wait_s`, seconds without holding up others; `block_s`, seconds in which nothing else runs; `raises`.
    """

    def __init__(self, cfg):
        self.most = self.running = 0

    def open_episode(self, metadata):
        time.sleep(metadata.get("open_s", 0.0))
        return EpisodeStart(metadata)

    async def step(self, message_log_batch, metadata):
        ((state,),) = (metadata,)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(state.get("wait_s", 0.0))
        time.sleep(state.get("block_s", 0.0))
        self.running -= 1
        if "raises" in state:
            raise ValueError(state["raises"])
        done = [{"role": "environment", "content": ""}]
        return EnvironmentReturn(done, [{**state, "most": self.most}], [None], torch.ones(1), torch.ones(1))


class Wrong(EnvironmentInterface[dict]):
    """An environment that returns one item too few for batches."""

    def __init__(self, cfg):
        pass

    def step(self, message_log_batch, metadata):
        n = max(1, len(metadata) - 1)
        return EnvironmentReturn(
            [{"role": "environment", "content": ""}] * n,
            metadata[:n],
            [None] * n,
            torch.zeros(n),
            torch.ones(n),
        )


class Sandboxes(EnvironmentInterface[dict]):
    """An environment whose episodes have a file in the folder `at` while they are open; some commands fail."""

    def __init__(self, cfg):
        pass

    async def open_episode(self, metadata):
        if metadata.get("command") == "hang":
            time.sleep(60)
        if metadata.get("command") == "raise":
            raise OSError("no sandbox is free")
        if metadata.get("command") == "wrong":
            return metadata
        path = os.path.join(metadata["at"], str(metadata["number"]))
        open(path, "w").close()
        return EpisodeStart({**metadata, "path": path}, {"role": "user", "content": "ready"})

    def step(self, message_log_batch, metadata):
        count = len(metadata)
        assert all(os.path.exists(item["path"]) for item in metadata)
        done = [{"role": "environment", "content": ""}] * count
        return EnvironmentReturn(done, metadata, [None] * count, torch.ones(count), torch.ones(count))

    def close_episode(self, metadata):
        os.remove(metadata["path"])

    def global_post_process_and_metrics(self, batch):
        batch["rewards"] *= 0.5
        if len(batch["rewards"]) > 2:
            raise ValueError("too many for me")
        return batch, {"count": len(batch["rewards"])}
