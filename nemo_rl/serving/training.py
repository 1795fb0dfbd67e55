"""Execute the commands of models.

    next command ─► adapter in memory? ── no ─► load the stored state, execute again what came after it
                          └─ yes ─► execute ─► store the result ─► after some updates, store the state

Invariant: a command whose result is not stored may be executed again. Passes and updates then start from the stored
state, and what was saved is found by the number of the command.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.models.adapters.training import AdamParams
from nemo_rl.serving.interfaces import PROCESS_LOSSES, AdapterModels, RequestError
from nemo_rl.serving.limits import RefusedError, UserLimits
from nemo_rl.serving.promises import RequestOutcome
from nemo_rl.serving.run_log import RunLog
from nemo_rl.serving.samplers import SamplerPool
from nemo_rl.serving.state import ServiceState
from nemo_rl.serving.store.checkpoints import CheckpointPath, CheckpointRecord, checked_name
from nemo_rl.serving.store.sessions import SamplingSession, sampler_id
from nemo_rl.serving.store.storage import StorageError, StorageWarnings
from nemo_rl.serving.store.tenants import Command, Tenant
from nemo_rl.serving.wire.bodies import (
    AdamBody,
    LoadWeightsBody,
    OptimStepBody,
    SaveExternalBody,
    SaveSamplerBody,
    SaveWeightsBody,
    read_body,
    read_json,
)
from nemo_rl.serving.wire.messages import ForwardBackwardRequest, parsed
from nemo_rl.serving.wire.passes import read_pass, write_output

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
"""Number of times that a command is tried if the server is at fault. The second time starts from the stored state."""


class CommandRunner:
    """Models of clients on one base model.

    Args:
        models: adapters.
        state: files.
        samplers: samplers in memory.
        limits: of users.
    """

    def __init__(self, models: AdapterModels, state: ServiceState, samplers: SamplerPool, limits: UserLimits) -> None:
        self._models = models
        self._state = state
        self._samplers = samplers
        self._limits = limits
        self.storage = StorageWarnings()
        """Warnings about a disk that is full."""
        self.unstored: dict[str, RequestOutcome] = {}
        """Results that could not be stored, by model. Storing them is tried again."""
        folder = limits.config.log_dir
        self._log = RunLog(None if folder is None else Path(folder))
        self._numbers = itertools.count(1)
        self._loading = asyncio.Lock()
        """Held while a model gets its place in memory, so that models do not take the same place."""
        self._kinds: Mapping[str, Callable[[Tenant, Command, bytes], Awaitable[RequestOutcome]]] = {
            "create_model": self._create,
            "forward": self._pass,
            "forward_backward": self._pass,
            "optim_step": self._update,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "load_weights": self._load,
        }

    async def execute(self, tenant: Tenant) -> str:
        """Execute the next command of a model, store its result, and return its kind.

        Raises:
            StorageError: the result cannot be stored. The next call tries it again, and does not execute again.
        """
        async with tenant.in_use:
            return await self._execute(tenant)

    async def _execute(self, tenant: Tenant) -> str:
        command = tenant.next_command
        assert command is not None, "the turn table gives models with commands only"
        outcome = self.unstored.get(tenant.id) or await self._outcome(tenant, command)
        self.unstored[tenant.id] = outcome
        tenant.complete(command, outcome.packed(), has_failed=outcome.has_failed)
        del self.unstored[tenant.id]
        tenant.used_at = time.monotonic()
        promise = self._state.promises.get(f"{tenant.id}:{command.seq_id}")
        if promise is not None:
            promise.resolve(outcome)
        if command.kind == "optim_step" and not outcome.has_failed:
            tenant.steps_since_state += 1
            if tenant.steps_since_state >= self._limits.config.state_every:
                await self._try_to_store_state(tenant)
        return command.kind

    async def evict(self, tenant: Tenant) -> None:
        """Move a model from the memory to its files."""
        async with tenant.in_use:
            if tenant.adapter is None:
                return
            # With an update whose result is not stored, the adapter is not that of `done_seq`.
            is_of_done = not tenant.has_gradients and tenant.id not in self.unstored
            if is_of_done and tenant.done_seq > tenant.state_seq:
                await self._try_to_store_state(tenant)
            await self._drop(tenant)
        logger.info("The model %s is on the disk.", tenant.id)

    async def close(self, tenant: Tenant) -> None:
        """Forget a model that is not continued."""
        async with tenant.in_use:
            if tenant.adapter is not None:
                await self._drop(tenant)
            tenant.remove_files()

    async def _outcome(self, tenant: Tenant, command: Command) -> RequestOutcome:
        """Return the result of a command. Errors of the server are logged, and tried again once.

        Raises:
            WorkerDiedError, RayDiedError: the models have lost a process, so no command can be executed.
        """
        problem = "it was not tried"
        for attempt in range(_ATTEMPTS):
            body = tenant.body_of(command)
            task = asyncio.ensure_future(self._kinds[command.kind](tenant, command, body))
            await asyncio.wait({task}, timeout=self._limits.config.command_s)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=1.0)
                problem = f"it took longer than {self._limits.config.command_s:g} s (service.command_s)"
                tenant.adapter = None
                break
            error = task.exception()
            if error is None:
                return task.result()
            if isinstance(error, RequestError | RefusedError):
                return RequestOutcome.failed(str(error), "user")
            if isinstance(error, StorageError):
                self.storage.tell(error)
                return RequestOutcome.failed(str(error), "server")
            if isinstance(error, PROCESS_LOSSES):
                raise error  # the command is executed after the next start of the models
            logger.error("%s, command %d, attempt %d", tenant.id, command.seq_id, attempt + 1, exc_info=error)
            problem = type(error).__name__
            tenant.adapter = None  # what is in memory is unknown now
        return RequestOutcome.failed(f"The server could not execute this request: {problem}.", "server")

    async def _ready(self, tenant: Tenant) -> str:
        """Return the name of a model's adapter in memory, after loading it if necessary."""
        if tenant.adapter is not None:
            return tenant.adapter
        first = tenant.commands[0]
        if first.has_failed and tenant.state_seq < 0:
            raise RequestError(f"The model {tenant.id} was not made, because its first request has failed.")
        async with self._loading:
            tenant.adapter = await self._loaded(tenant)
        return tenant.adapter

    async def _loaded(self, tenant: Tenant) -> str:
        """Load the state of a model, execute again what came after it, and return the name of its adapter."""
        await self._make_room(tenant)
        name = f"{tenant.id}@{next(self._numbers)}"
        folder = tenant.state_folder
        if folder is None:
            await self._models.create(name, tenant.spec)
        else:
            await self._models.load(name, folder, with_optimizer=True)
        tenant.has_gradients, tenant.steps_since_state = False, 0
        self._log.forget_passes(tenant)
        for command in tenant.replay():
            await self._repeat(name, tenant, command)
            tenant.steps_since_state += command.kind == "optim_step"
        return name

    async def _repeat(self, adapter: str, tenant: Tenant, command: Command) -> None:
        """Execute a pass or an update again, whose result is stored."""
        body = tenant.body_of(command)
        if command.kind == "optim_step":
            await self._models.update(adapter, _adam_params(read_json(body)))
            self._log.forget_passes(tenant)
        else:
            message, most = parsed(ForwardBackwardRequest, body), self._limits.config.max_request_tokens
            call = read_pass(message, self._models.limits, most)
            result = await self._models.run_pass(adapter, call.data, call.loss, backward=True)
            self._log.add_pass(tenant, call.data, result)
        tenant.has_gradients = command.kind != "optim_step"

    async def _make_room(self, tenant: Tenant) -> None:
        resident = [each for each in self._state.tenants.all() if each.adapter is not None and each is not tenant]
        unused = sorted((each for each in resident if not each.in_use.locked()), key=lambda each: each.used_at)
        for each in unused[: max(0, len(resident) + 1 - self._limits.config.max_resident_models)]:
            await self.evict(each)

    async def _drop(self, tenant: Tenant) -> None:
        name, tenant.adapter = tenant.adapter, None
        if name is not None:
            await self._models.drop(name)

    async def _try_to_store_state(self, tenant: Tenant) -> None:
        """Store the state of a model in memory, which has no gradients. Without space, the older state stays."""
        assert tenant.adapter is not None and not tenant.has_gradients, "gradients are not stored"
        try:
            await self._store_state(tenant, tenant.adapter, tenant.done_seq, tenant.spec)
        except StorageError as error:
            self.storage.tell(error)

    async def _store_state(self, tenant: Tenant, adapter: str, seq_id: int, spec: AdapterShape) -> None:
        """Store an adapter as the state of a model.

        Args:
            tenant: the model.
            adapter: name of an adapter without gradients.
            seq_id: number of the last command that the state contains.
            spec: form of the adapter.

        Raises:
            StorageError: the state cannot be written. The older one stays.
        """
        await _written(self._models.save(adapter, tenant.new_state_folder(seq_id), with_optimizer=True))
        tenant.note_state(seq_id, spec)

    async def _create(self, tenant: Tenant, command: Command, body: bytes) -> RequestOutcome:
        await self._ready(tenant)
        return RequestOutcome.of_json(type="create_model", model_id=tenant.id)

    async def _pass(self, tenant: Tenant, command: Command, body: bytes) -> RequestOutcome:
        message = await asyncio.to_thread(parsed, ForwardBackwardRequest, body)
        call = await asyncio.to_thread(read_pass, message, self._models.limits, self._limits.config.max_request_tokens)
        adapter = await self._ready(tenant)
        tenant.has_gradients |= call.backward
        result = await self._models.run_pass(adapter, call.data, call.loss, backward=call.backward)
        if call.backward:
            self._log.add_pass(tenant, call.data, result)
        return RequestOutcome(await asyncio.to_thread(write_output, result), is_proto=True)

    async def _update(self, tenant: Tenant, command: Command, body: bytes) -> RequestOutcome:
        params = _adam_params(read_json(body))
        metrics = await self._models.update(await self._ready(tenant), params)
        tenant.has_gradients = False
        self._log.write_update(tenant, {**metrics, "lr": params.learning_rate})
        return RequestOutcome.of_json(metrics=metrics)

    async def _save(self, tenant: Tenant, command: Command, body: bytes) -> RequestOutcome:
        given = read_body(SaveWeightsBody, read_json(body))
        path = self._path(tenant, "weights", given.path, command)
        if not given.overwrite:
            self._require_free(path, command)
        record = self._record(tenant, command, path, given.ttl_seconds, given.user_metadata)
        await self._write_checkpoint(tenant, record, with_optimizer=True)
        return RequestOutcome.of_json(type="save_weights", path=str(path))

    async def _save_external(self, tenant: Tenant, command: Command, body: bytes) -> RequestOutcome:
        given = read_body(SaveExternalBody, read_json(body))
        if given.age_encryption_recipients:
            raise RequestError("age_encryption_recipients is not served. Save without encryption.")
        path = self._path(tenant, "external_weights", given.path, command)
        self._require_free(path, command)
        record = self._record(tenant, command, path, given.ttl_seconds, None)
        await self._write_checkpoint(tenant, record, with_optimizer=False)
        return RequestOutcome.of_json(type="save_weights_external", path=str(path))

    async def _save_for_sampler(self, tenant: Tenant, command: Command, body: bytes) -> RequestOutcome:
        given = read_body(SaveSamplerBody, read_json(body))
        if given.sampling_session_seq_id is not None:
            sampler = await self._publish(tenant, given.sampling_session_seq_id, command)
            return RequestOutcome.of_json(type="save_weights_for_sampler", sampling_session_id=sampler.id)
        path = self._path(tenant, "sampler_weights", given.path, command)
        self._require_free(path, command)
        record = self._record(tenant, command, path, given.ttl_seconds, given.user_metadata)
        await self._write_checkpoint(tenant, record, with_optimizer=False)
        return RequestOutcome.of_json(type="save_weights_for_sampler", path=str(path))

    async def _publish(self, tenant: Tenant, number: int, command: Command) -> SamplingSession:
        """Make a sampling session with the current weights, which have no name."""
        session = self._state.session(tenant.details.owner, tenant.session_id)
        made_from = f"{tenant.id}#{command.seq_id}"
        known = session.samplers.get(number)
        if known is not None:
            if known.model_path != made_from:
                raise RequestError(f"The sampling session {number} exists already, with other weights.")
            return known
        new = SamplingSession(
            sampler_id(session.id, number), number, tenant.details.base_model, made_from, has_folder=True
        )
        folder, name = self._state.new_sampler_folder(new), self._samplers.new_name()
        await self._models.publish(await self._ready(tenant), name)
        try:
            await _written(self._models.save_sampler(name, folder))
            self._state.sessions.add_sampler(session, new)
        except StorageError:
            await self._models.drop_sampler(name)
            raise
        await self._samplers.adopt(folder, name)
        return new

    async def _load(self, tenant: Tenant, command: Command, body: bytes) -> RequestOutcome:
        """Replace the weights of a model by those of a checkpoint, or make a new model with them."""
        given = read_body(LoadWeightsBody, read_json(body))
        record = self._state.checkpoint(tenant.details.owner, given.path)
        if given.optimizer and record.kind != "weights":
            raise RequestError(f"{given.path} has no state of an optimizer; only paths with /weights/ have one.")
        async with self._loading:
            await self._make_room(tenant)
            name, folder = f"{tenant.id}@{next(self._numbers)}", self._state.checkpoints.files_of(record)
            await self._models.load(name, folder, with_optimizer=given.optimizer)
            try:
                if tenant.state_seq != command.seq_id:
                    await self._store_state(tenant, name, command.seq_id, AdapterShape(**record.spec))
            except StorageError:
                await self._models.drop(name)
                raise
            await self._drop(tenant)
            tenant.adapter, tenant.has_gradients = name, False
        return RequestOutcome.of_json(type="load_weights", path=given.path, model_id=tenant.id)

    def _path(self, tenant: Tenant, kind: str, name: str | None, command: Command) -> CheckpointPath:
        return CheckpointPath(tenant.id, kind, checked_name(f"seq-{command.seq_id}" if name is None else name))

    def _require_free(self, path: CheckpointPath, command: Command) -> None:
        """Refuse a name that another command has used."""
        known = self._state.checkpoints.find(path)
        if known is not None and known.seq_id != command.seq_id:
            advice = "Choose another name" + (", or save with overwrite." if path.kind == "weights" else ".")
            raise RequestError(f"{path} exists already. {advice}")

    def _record(
        self,
        tenant: Tenant,
        command: Command,
        path: CheckpointPath,
        ttl_seconds: int | None,
        user_metadata: dict[str, str] | None,
    ) -> CheckpointRecord:
        now = time.time()
        return CheckpointRecord(
            run=tenant.id,
            kind=path.kind,
            name=path.name,
            owner=tenant.details.owner,
            seq_id=command.seq_id,
            base_model=tenant.details.base_model,
            spec=asdict(tenant.spec),
            created_at=now,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
            user_metadata=user_metadata,
            run_metadata=tenant.details.user_metadata,
        )

    async def _write_checkpoint(self, tenant: Tenant, record: CheckpointRecord, *, with_optimizer: bool) -> None:
        """Save a model as a checkpoint, unless the same command has done so before the end of an earlier process."""
        known = self._state.checkpoints.find(record.path)
        if known is not None and known.seq_id == record.seq_id:
            return
        self._limits.check_stored(record.owner)
        folder = self._state.checkpoints.new_folder(record.path, record.seq_id)
        await _written(self._models.save(await self._ready(tenant), folder, with_optimizer=with_optimizer))
        self._state.checkpoints.add(record, folder)


async def _written(writing: Awaitable[None]) -> None:
    """Wait until the models have written files.

    Raises:
        StorageError: the files cannot be written.
    """
    try:
        await writing
    except RequestError as error:
        raise StorageError(f"The adapter is not saved: {error}") from error


def _adam_params(body: Mapping[str, Any]) -> AdamParams:
    """Return the parameters in the body of an update.

    Raises:
        RequestError: a value is wrong, or the optimizer is another one.
    """
    given = read_body(OptimStepBody, body)
    if given.optimizer_params is not None:
        raise RequestError(f"The optimizer {given.optimizer_params.get('type')!r} is not served; use AdamParams.")
    return AdamParams(**(given.adam_params or AdamBody()).model_dump())
