"""Accept the requests of clients, and run what they ask for.

    HTTP routes ─► Service ─┬─► training: commands of a model in order ─► turns ─► AdapterModels
                            └─► sampling: requests side by side ──────────────────┘

Invariant: a request is accepted once. The same request again gives the same promise, and another request of the same
number is an error of the user.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl.config.schema.service import ServiceConfig
from nemo_rl.models.adapters.tensors import AdapterShape
from nemo_rl.serving.interfaces import PROCESS_LOSSES, AdapterModels, RequestError
from nemo_rl.serving.limits import RefusedError, UserLimits
from nemo_rl.serving.promises import UNASKED_S, Promise, RequestOutcome
from nemo_rl.serving.samplers import SamplerPool
from nemo_rl.serving.sampling import SampleRunner
from nemo_rl.serving.state import ServiceState
from nemo_rl.serving.store.journal import link_tree
from nemo_rl.serving.store.sessions import ClientSession, SamplingSession, sampler_id
from nemo_rl.serving.store.storage import StorageError
from nemo_rl.serving.store.tenants import Command, Tenant, TenantDetails, digest_of
from nemo_rl.serving.training import CommandRunner
from nemo_rl.serving.turns import TurnTable
from nemo_rl.serving.wire.bodies import CreateModelBody, CreateSamplerBody, LoadWeightsBody, LoraBody, OptimizerBody
from nemo_rl.utils.errors import NemoRLError
from nemo_rl.utils.seed import derive_seed

logger = logging.getLogger(__name__)

_FARTHEST_AHEAD = 100_000
"""Largest distance of the number of a request from that of the next one."""
_SWEEP_S = 5.0
_PAUSE_AFTER_ERROR_S = 1.0
_STOP_S = 30.0


class Service:
    """Training and sampling of all users.

    Args:
        models: adapters on the base model.
        config: section `service`.
        names: names of the base model that clients may use, the first one for lists.
        on_loss: function that is called if the models have lost a process. Requests without results keep none, so that
            the next process of the service executes them.
    """

    def __init__(
        self,
        models: AdapterModels,
        config: ServiceConfig,
        names: list[str],
        on_loss: Callable[[NemoRLError], None] = lambda error: None,
    ) -> None:
        self.on_loss = on_loss
        self.models = models
        self.config = config
        self.names = names
        self.state = ServiceState(Path(config.state_dir), config.keep_results_s)
        self.limits = UserLimits(config, self.state.sessions, self.state.tenants, self.state.checkpoints)
        self.samplers = SamplerPool(models, config.max_resident_samplers)
        self.trainer = CommandRunner(models, self.state, self.samplers, self.limits)
        self.sampling = SampleRunner(models, self.state, self.samplers, self.limits, self._note_loss)
        self._turns = TurnTable()
        self._tasks: list[asyncio.Task[None]] = []
        self._removed: set[str] = set()
        """Ended sessions whose models and samplers were removed."""

    def start(self) -> None:
        """Start to execute commands, first those that an earlier process has left."""
        for tenant in self.state.tenants.all():
            for seq_id, stored_at in list(tenant.stored_results()):
                if time.time() - stored_at > UNASKED_S:
                    tenant.forget_result(seq_id)
            self._turns.announce(tenant)
        work = [self._train() for _ in range(self.config.fused_models)]
        self._tasks = [asyncio.create_task(each) for each in (*work, self._sweep())]

    async def stop(self) -> None:
        """End the work. A later process continues from the files."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        await self.sampling.close()
        self.state.release()

    def checked_base(self, name: str | None) -> str:
        """Return the name of the base model that a client has given, or the first one.

        Raises:
            RequestError: there is no such model.
        """
        if name is not None and name not in self.names:
            raise RequestError(f"There is no base model {name[:200]!r}. This service has {', '.join(self.names)}.")
        return self.names[0] if name is None else name

    def create_model(self, owner: str, given: CreateModelBody, raw: bytes) -> Promise:
        """Make a model.

        Raises:
            RequestError: a value is wrong or not allowed.
        """
        session = self.state.session(owner, given.session_id)
        session.require_open()
        model_id = f"{session.id}:train:{given.model_seq_id}"
        known = self.state.tenants.get(model_id)
        if known is None or 0 not in known.commands:
            base = self.checked_base(given.base_model)
            _check_optimizer(given.optimizer_config)
            lora = given.lora_config or LoraBody()
            self.limits.check_rank(lora.rank)
            self.limits.check_new_model(owner)
            if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
                raise RequestError("train_attn, train_mlp and train_unembed are all false; set one of them to true.")
            seed = derive_seed(self.config.seed, "adapter", model_id) if lora.seed is None else lora.seed
            spec = AdapterShape(**lora.model_dump() | {"seed": seed})
            known = self._new_tenant(model_id, owner, base, spec, given.user_metadata)
        return self.submit(known, 0, "create_model", raw)

    def load_model(self, owner: str, given: LoadWeightsBody, raw: bytes) -> Promise:
        """Make a model from a checkpoint, or load a checkpoint into a model.

        Raises:
            RequestError: a value is wrong or not allowed.
        """
        if given.weights_access_token is not None:
            raise RequestError("weights_access_token is for accounts, which this service does not have.")
        if given.model_id is not None:
            tenant = self.state.tenant(owner, given.model_id)
            return self.submit(tenant, _number(given.seq_id, "seq_id"), "load_weights", raw)
        if given.session_id is None:
            raise RequestError("Give session_id and model_seq_id for a new model, or model_id and seq_id for a model.")
        session = self.state.session(owner, given.session_id)
        session.require_open()
        model_id = f"{session.id}:train:{_number(given.model_seq_id, 'model_seq_id')}"
        known = self.state.tenants.get(model_id)
        if known is None or 0 not in known.commands:
            record = self.state.checkpoint(owner, given.path)
            base = self.checked_base(given.base_model or record.base_model)
            if given.optimizer_config is not None:
                _check_optimizer(given.optimizer_config)
            self.limits.check_new_model(owner)
            if given.optimizer and record.kind != "weights":
                raise RequestError(f"{given.path} has no state of an optimizer; only paths with /weights/ have one.")
            metadata = given.user_metadata if given.user_metadata is not None else record.run_metadata
            known = self._new_tenant(model_id, owner, base, AdapterShape(**record.spec), metadata)
        return self.submit(known, 0, "load_weights", raw)

    def submit(self, tenant: Tenant, seq_id: int, kind: str, raw: bytes, canonical: bytes | None = None) -> Promise:
        """Accept a command of a model, or return the promise of the same command.

        Args:
            seq_id: number of the command.
            kind: of the command.
            raw: its body.
            canonical: bytes that are equal for equal bodies, if the body itself may differ.

        Raises:
            RequestError: another command has the same number, or the session has ended.
            BusyError: too many commands of the user wait.
            StorageError: the command cannot be stored, and is not accepted.
        """
        digest, request_id = digest_of(kind, canonical or raw), f"{tenant.id}:{seq_id}"
        known = tenant.commands.get(seq_id)
        if known is not None:
            if known.digest != digest:
                raise RequestError(f"The request {seq_id} of the model {tenant.id} was sent before with another body.")
            return self.promise_of(tenant, seq_id) or Promise(request_id, digest)
        self._require_session(tenant)
        if not max(tenant.done_seq, 0) <= seq_id <= tenant.done_seq + _FARTHEST_AHEAD:
            raise RequestError(f"seq_id is {seq_id}; the next request of this model has {tenant.done_seq + 1}.")
        self.limits.check_queue(tenant.details.owner, len(raw))
        tenant.accept(Command(seq_id, kind, digest), raw)
        promise = self.state.promises.add(Promise(request_id, digest))
        self._turns.announce(tenant)
        return promise

    def failed(self, error: RequestError) -> Promise:
        """Return the promise of a request that is refused."""
        promise = Promise(f"refused:{secrets.token_hex(16)}", "")
        promise.resolve(RequestOutcome.failed(str(error), "user"))
        return self.state.promises.add(promise)

    def promise_of(self, tenant: Tenant, seq_id: int) -> Promise | None:
        """Return the promise of a command, or None if its result is not kept any more."""
        command, request_id = tenant.commands.get(seq_id), f"{tenant.id}:{seq_id}"
        known = self.state.promises.get(request_id)
        if known is not None or command is None:
            return known
        promise = Promise(request_id, command.digest)
        if command.is_done:
            stored = tenant.result_of(seq_id)
            if stored is None:
                return None
            promise.resolve(RequestOutcome.unpacked(stored))
        return self.state.promises.add(promise)

    def find_promise(self, owner: str, request_id: str) -> Promise:
        """Return the promise of a request of a user.

        Raises:
            RefusedError: there is none, or it is another user's.
        """
        if request_id.startswith("refused:"):
            promise = self.state.promises.get(request_id)
        else:
            of, _, number = request_id.rpartition(":")
            if not number.isdecimal() or len(number) > 19:
                raise RefusedError(404, f"There is no request {request_id[:80]!r}.")
            if ":sample:" in of:
                sampler = self.state.sampler(owner, of)
                promise = self.state.promises.get(request_id) or self.sampling.resume(owner, sampler, int(number))
            else:
                promise = self.promise_of(self.state.tenant(owner, of), int(number))
        if promise is None:
            raise RefusedError(410, f"The result of the request {request_id[:300]} is not kept any more.")
        return promise

    def why_waiting(self, request_id: str) -> str:
        """Return for the user what an unfinished request waits for."""
        of, _, number = request_id.rpartition(":")
        tenant = self.state.tenants.get(of)
        if self.waits_for_space(request_id):
            return f"a result is there and cannot be stored. {self.trainer.storage.last}"
        if tenant is None or int(number) == tenant.done_seq + 1:
            return "it is being executed, or other users have their turn"
        waited_for = range(tenant.done_seq + 1, int(number))
        missing = next((seq_id for seq_id in waited_for if seq_id not in tenant.commands), None)
        if missing is None:
            return "earlier requests of the model are executed first"
        return f"the request {missing} of the model has not arrived"

    def waits_for_space(self, request_id: str) -> bool:
        """Return whether an unfinished request waits for space on the disk."""
        return request_id.rpartition(":")[0] in self.trainer.unstored

    def create_sampler(self, owner: str, given: CreateSamplerBody) -> SamplingSession:
        """Make a sampling session.

        Raises:
            RequestError: a value is wrong, or the number has other weights.
        """
        session = self.state.session(owner, given.session_id)
        session.require_open()
        known = session.samplers.get(given.sampling_session_seq_id)
        if known is not None:
            if known.model_path != given.model_path:
                raise RequestError(
                    f"The sampling session {given.sampling_session_seq_id} exists already, with other weights."
                )
            return known
        number = given.sampling_session_seq_id
        if given.model_path is None:
            base = self.checked_base(given.base_model or "")
            new = SamplingSession(sampler_id(session.id, number), number, base)
        else:
            record = self.state.checkpoint(owner, given.model_path)
            new = SamplingSession(
                sampler_id(session.id, number), number, record.base_model, given.model_path, has_folder=True
            )
            link_tree(self.state.checkpoints.files_of(record), self.state.new_sampler_folder(new))
        self.state.sessions.add_sampler(session, new)
        return new

    def finish_session(self, session: ClientSession, reason: dict[str, Any]) -> None:
        """End a session. What it has queued is executed, and then its models and samplers are removed."""
        self.state.sessions.finish(session, reason)

    def _new_tenant(
        self, model_id: str, owner: str, base: str, spec: AdapterShape, metadata: dict[str, Any] | None
    ) -> Tenant:
        details = TenantDetails(model_id, owner, base, time.time(), asdict(spec), metadata)
        return self.state.tenants.create(details)

    def _require_session(self, tenant: Tenant) -> None:
        session = self.state.sessions.get(tenant.session_id)
        if session is not None:
            session.require_open()

    async def _train(self) -> None:
        """Execute commands, one turn after another."""
        while True:
            tenant = await self._turns.take()
            if error := await self._without_end(self._turns.play(tenant, self.trainer.execute)):
                # The command has no stored result yet, and is tried again.
                if not isinstance(error, StorageError):
                    tenant.adapter = None
                self._turns.announce(tenant)

    async def _without_end(self, work: Coroutine[Any, Any, None]) -> BaseException | None:
        """Wait for work, and log and return its error."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            raise
        error = task.exception()
        if error is not None:
            if isinstance(error, StorageError):
                self.trainer.storage.tell(error)
            elif not isinstance(error, PROCESS_LOSSES):
                logger.error("The service will try again", exc_info=error)
            self._note_loss(error)
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
        return error

    async def _tidy(self) -> None:
        """Move unused models to the disk, and remove models and samplers of sessions that have ended."""
        now = time.monotonic()
        for tenant in self.state.tenants.all():
            if tenant.adapter is not None and not tenant.in_use.locked() and now - tenant.used_at > self.config.idle_s:
                await self.trainer.evict(tenant)
        for session in self.state.sessions.all():
            if session.finished is not None and session.id not in self._removed:
                await self._remove(session)

    async def _remove(self, session: ClientSession) -> None:
        """Remove the models and samplers of an ended session, unless they have requests without results."""
        tenants = [tenant for tenant in self.state.tenants.all() if tenant.session_id == session.id]
        is_sampling = self.state.promises.unresolved(lambda promise: promise.id.startswith(f"{session.id}:sample:"))
        if any(tenant.has_work for tenant in tenants) or any(is_sampling):
            return
        for tenant in tenants:
            await self.trainer.close(tenant)
        await self.samplers.forget(self.state.folder / "samplers" / session.id)
        self.state.remove_samplers(session)
        self._removed.add(session.id)

    def _note_loss(self, error: BaseException) -> None:
        """Tell the program that the models have lost a process, so that they are started again."""
        if isinstance(error, PROCESS_LOSSES):
            self.on_loss(error)

    async def _sweep(self) -> None:
        """Remove results, checkpoints, samplers and models whose time is over."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self._without_end(self._remove_over())
            await self._without_end(self._tidy())

    async def _remove_over(self) -> None:
        for promise in self.state.promises.remove_over():
            self._forget_files(promise.id)
        self.state.checkpoints.delete_expired()

    def _forget_files(self, request_id: str) -> None:
        """Remove what is stored about a request whose result is not kept any more."""
        of, _, number = request_id.rpartition(":")
        tenant = self.state.tenants.get(of)
        if tenant is not None:
            tenant.forget_result(int(number))
        elif ":sample:" in of:
            session = self.state.sessions.get(of.split(":")[0])
            sampler = None if session is None else session.samplers.get(int(of.rsplit(":", 1)[1]))
            if sampler is not None:
                self.state.sample_file(sampler, int(number)).unlink(missing_ok=True)


def _number(value: int | None, name: str) -> int:
    if value is None:
        raise RequestError(f"{name} is missing.")
    return value


def _check_optimizer(given: OptimizerBody) -> None:
    if given.type != "adamw":
        raise RequestError(f"The optimizer {given.type!r} is not served; use adamw.")
