"""Keep models of clients as logs of commands with a state from which the log can be continued.

    models/<id>/model.json       adapter, user and base model
               /log.jsonl        a line for each accepted command, and one for each result
               /bodies/<seq>     body of a command that the stored state does not contain yet
               /results/<seq>    result that the client may still ask for
               /state.json       number of the last command in the stored state, and its folder
               /state-<seq>/     adapter and optimizer after that command

A command is deterministic, so the state of a model is its stored state and the commands after it. This continues a
model after the end of the process, and after its memory was needed by others. Invariants: a body is written before the
line of its command, and a result before its line. Gradients are in no stored state, so a state is stored only where
there are none.
"""

import asyncio
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.serving.store.journal import Journal, read_json_file, write_json
from nemo_rl.serving.store.storage import store_bytes, storing

CHANGES_STATE = ("forward_backward", "optim_step")
"""Kinds of commands that are executed again to continue from a stored state."""


@dataclass(eq=False)
class Command:
    """Request that changes or reads a model."""

    seq_id: int
    """Number of the request within its model."""
    kind: str
    """Route of the request, or "forward" for a pass without gradients."""
    digest: str
    """Hash of the body."""
    is_done: bool = False
    """Whether its result is stored."""
    has_failed: bool = False
    """Whether its result is an error."""
    num_bytes: int = 0
    """Size of the body."""


@dataclass(frozen=True)
class TenantDetails:
    """Properties of a model that never change."""

    id: str
    """Id, `<session>:train:<n>`."""
    owner: str
    """Name of the user."""
    base_model: str
    """Name of the base model, as the client wrote it."""
    created_at: float
    """Time of its creation in seconds since 1970."""
    spec: dict[str, Any]
    """Fields of its `AdapterShape`."""
    user_metadata: dict[str, Any] | None = None
    """Data of the user."""


@dataclass(eq=False)
class Tenant:
    """Model of a client.

    Args:
        folder: of its files.
        details: properties that never change.
    """

    folder: Path
    """Folder of its files."""
    details: TenantDetails
    """Properties that never change."""
    spec: AdapterShape = field(init=False)
    """Form of its adapter. A load of other weights changes it."""
    commands: dict[int, Command] = field(default_factory=dict, init=False)
    """Accepted commands by number."""
    done_seq: int = field(default=-1, init=False)
    """Number of the last command in order whose result is stored."""
    state_seq: int = field(default=-1, init=False)
    """Number of the last command that the stored state contains, or -1 without a stored state."""
    num_updates: int = field(default=0, init=False)
    """Number of updates whose results are stored."""
    adapter: str | None = field(default=None, init=False)
    """Name of the adapter in memory, or None if there is none."""
    has_gradients: bool = field(default=False, init=False)
    """Whether the adapter in memory has gradients."""
    steps_since_state: int = field(default=0, init=False)
    """Number of updates since the stored state."""
    used_at: float = field(default=0.0, init=False)
    """Time of the last command in seconds, by the monotonic clock."""

    in_use: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while a command is executed, and while the model is moved to the disk."""
    _waiting: dict[int, Command] = field(default_factory=dict, init=False)
    """Commands without results by number."""

    def __post_init__(self) -> None:
        self.spec = AdapterShape(**self.details.spec)

    @property
    def id(self) -> str:
        """Id of the model."""
        return self.details.id

    @property
    def session_id(self) -> str:
        """Id of the session that made it."""
        return self.id.split(":")[0]

    @property
    def queued_bytes(self) -> int:
        """Size of the bodies of commands without results."""
        return sum(command.num_bytes for command in self._waiting.values())

    @property
    def next_command(self) -> Command | None:
        """The command whose turn it is, or None if it has not arrived."""
        return self.commands.get(self.done_seq + 1)

    @property
    def has_work(self) -> bool:
        """True if there is a command whose turn it is."""
        return self.next_command is not None

    def accept(self, command: Command, body: bytes) -> None:
        """Store a command.

        Raises:
            StorageError: it cannot be stored, and is not accepted.
        """
        store_bytes(self._body(command.seq_id), body)
        command.num_bytes = len(body)
        line = {"seq": command.seq_id, "kind": command.kind, "digest": command.digest, "bytes": len(body)}
        self._journal.append(line)
        self.commands[command.seq_id] = self._waiting[command.seq_id] = command

    def body_of(self, command: Command) -> bytes:
        """Return the body of a command."""
        return self._body(command.seq_id).read_bytes()

    def complete(self, command: Command, result: bytes, *, has_failed: bool) -> None:
        """Store the result of the command whose turn it is.

        Raises:
            StorageError: it cannot be stored. The call may be repeated.
        """
        store_bytes(self._result(command.seq_id), result)
        self._journal.append({"done": command.seq_id, "failed": has_failed})
        self._note_done(command.seq_id, has_failed)
        if not self.needs_again(command):
            self._body(command.seq_id).unlink()

    def needs_again(self, command: Command) -> bool:
        """Return whether a command with a result has to be executed again to continue from the stored state."""
        return command.seq_id > self.state_seq and command.kind in CHANGES_STATE and not command.has_failed

    def replay(self) -> Iterator[Command]:
        """Yield the commands to execute again, in order."""
        for seq_id in range(self.state_seq + 1, self.done_seq + 1):
            if self.needs_again(self.commands[seq_id]):
                yield self.commands[seq_id]

    def result_of(self, seq_id: int) -> bytes | None:
        """Return the stored result of a command, or None if there is none."""
        path = self._result(seq_id)
        return path.read_bytes() if path.exists() else None

    def forget_result(self, seq_id: int) -> None:
        """Remove the result of a command, for which no client asks any more."""
        self._result(seq_id).unlink(missing_ok=True)

    def stored_results(self) -> Iterator[tuple[int, float]]:
        """Yield the number of each command with a stored result, and the time at which it was stored."""
        for path in self._results.iterdir():
            if path.name.isdecimal():
                yield int(path.name), path.stat().st_mtime

    @property
    def state_folder(self) -> Path | None:
        """The folder of the stored state, or None if there is none."""
        return None if self.state_seq < 0 else self.folder / f"state-{self.state_seq}"

    def new_state_folder(self, seq_id: int) -> Path:
        """Return a folder that does not exist, in which the state after a command may be written."""
        assert seq_id != self.state_seq, "this state is stored already"
        folder = self.folder / f"state-{seq_id}"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def note_state(self, seq_id: int, spec: AdapterShape) -> None:
        """Make the folder `state-<seq_id>` the stored state, and remove what it makes superfluous.

        Args:
            seq_id: number of the last command that the state contains.
            spec: form of its adapter.

        Raises:
            StorageError: the older state stays.
        """
        write_json(self.folder / "state.json", {"seq": seq_id, "spec": asdict(spec)})
        self.spec, self.state_seq, self.steps_since_state = spec, seq_id, 0
        self._remove_superfluous()

    def remove_files(self) -> None:
        """Remove the stored state and the bodies of a model that is not continued."""
        for path in self.folder.glob("state-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._bodies.iterdir():
            path.unlink()

    @property
    def _journal(self) -> Journal:
        return Journal(self.folder / "log.jsonl")

    @property
    def _bodies(self) -> Path:
        return self.folder / "bodies"

    @property
    def _results(self) -> Path:
        return self.folder / "results"

    def _body(self, seq_id: int) -> Path:
        return self._bodies / str(seq_id)

    def _result(self, seq_id: int) -> Path:
        return self._results / str(seq_id)

    def _note_done(self, seq_id: int, has_failed: bool) -> None:
        command = self.commands[seq_id]
        command.is_done, command.has_failed = True, has_failed
        self.done_seq = seq_id
        self.num_updates += command.kind == "optim_step" and not has_failed
        self._waiting.pop(seq_id, None)

    def _remove_superfluous(self) -> None:
        """Remove other states, and bodies of commands that are never executed again."""
        for path in self.folder.glob("state-*"):
            if path != self.state_folder:
                shutil.rmtree(path, ignore_errors=True)
        for path in self._bodies.iterdir():
            command = self.commands.get(int(path.name)) if path.name.isdecimal() else None
            if command is None or (command.is_done and not self.needs_again(command)):
                path.unlink()

    def read_files(self) -> None:
        """Read what an earlier process has stored."""
        for record in self._journal.read():
            if "done" in record:
                self._note_done(record["done"], record["failed"])
                continue
            command = Command(record["seq"], record["kind"], record["digest"], num_bytes=record["bytes"])
            self.commands[command.seq_id] = self._waiting[command.seq_id] = command
        if (self.folder / "state.json").exists():
            state = read_json_file(self.folder / "state.json")
            self.state_seq, self.spec = state["seq"], AdapterShape(**state["spec"])
        self._remove_superfluous()


class TenantStore:
    """Models in a folder.

    Args:
        folder: made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._tenants: dict[str, Tenant] = {}
        for file in sorted(folder.glob("*/model.json")):
            tenant = Tenant(file.parent, TenantDetails(**read_json_file(file)))
            tenant.read_files()
            self._tenants[tenant.id] = tenant

    def create(self, details: TenantDetails) -> Tenant:
        """Make a model without commands."""
        folder = self._folder / details.id.replace(":", "-")
        with storing(folder):
            for part in ("bodies", "results"):
                (folder / part).mkdir(parents=True, exist_ok=True)
        write_json(folder / "model.json", asdict(details))
        tenant = Tenant(folder, details)
        self._tenants[tenant.id] = tenant
        return tenant

    def get(self, model_id: str) -> Tenant | None:
        """Return a model, or None if there is no such one."""
        return self._tenants.get(model_id)

    def all(self) -> list[Tenant]:
        """Return all models."""
        return list(self._tenants.values())

    def of(self, owner: str) -> list[Tenant]:
        """Return the models of a user, the newest first."""
        own = [tenant for tenant in self._tenants.values() if tenant.details.owner == owner]
        return sorted(own, key=lambda tenant: (tenant.details.created_at, tenant.id), reverse=True)


def digest_of(kind: str, body: bytes) -> str:
    """Return the hash by which equal requests are recognised."""
    return hashlib.blake2b(kind.encode() + b"\n" + body, digest_size=16).hexdigest()
