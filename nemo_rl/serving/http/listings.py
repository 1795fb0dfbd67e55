"""Define the routes that list and change what is stored: runs, checkpoints, sessions, and files of archives.

Invariant: links to files are signed, so they need no key, and end after an hour.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from nemo_rl.serving.http.requests import error_response
from nemo_rl.serving.http.routes import TrainingRoutes
from nemo_rl.serving.interfaces import RequestError
from nemo_rl.serving.limits import RefusedError
from nemo_rl.serving.service import Service
from nemo_rl.serving.store.checkpoints import KINDS, CheckpointPath, CheckpointRecord, checked_name
from nemo_rl.serving.store.sessions import ClientSession
from nemo_rl.serving.store.storage import storing
from nemo_rl.serving.store.tenants import Tenant
from nemo_rl.serving.wire.bodies import SearchBody, TtlBody, WeightsInfoBody, read_body

_LINK_S = 3600
_MOST_LISTED = 1000
_SECRET_BYTES = 32
_RUN, _CHECKPOINT = "training_runs/{run}", "training_runs/{run}/checkpoints/{kind}/{name}"


class ListingRoutes:
    """Handlers of the routes about what is stored.

    Args:
        training: the other routes, which know the users.
        service: what stores.
    """

    def __init__(self, training: TrainingRoutes, service: Service) -> None:
        self._training = training
        self._service = service
        self._state = service.state
        self._secret = _secret_in(self._state.folder)

    def routes(self) -> list[Route]:
        """Return the routes."""
        route = self._training.route
        return [
            route("get_server_capabilities", self._capabilities, "GET"),
            route("weights_info", self._weights_info, "POST"),
            route("samplers/{sampler}", self._sampler, "GET"),
            route("training_runs", self._runs, "GET"),
            route(_RUN, self._run, "GET"),
            route(f"{_RUN}/checkpoints", self._run_checkpoints, "GET"),
            route("checkpoints", self._checkpoints, "GET"),
            route(_CHECKPOINT, self._delete, "DELETE"),
            route(f"{_CHECKPOINT}/ttl", self._change_ttl, "PUT"),
            route(f"{_CHECKPOINT}/publish", self._publish, "POST", "DELETE"),
            route(f"{_CHECKPOINT}/external_weights_urls", self._links, "GET"),
            route("sessions", self._sessions, "GET"),
            route("sessions/search", self._search, "POST"),
            route("sessions/{session_id}", self._session, "GET"),
            Route("/api/v1/files/{signature}/{until}/{run}/{kind}/{name}/{file:path}", self._file, methods=["GET"]),
        ]

    async def _capabilities(self, request: Request, user: str) -> Response:
        most = self._service.models.limits.max_context
        what = {"max_context_length": most, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{"model_name": name, **what} for name in self._service.names]})

    async def _weights_info(self, request: Request, user: str) -> Response:
        given = read_body(WeightsInfoBody, await self._training.json(request))
        record = self._state.checkpoint(user, given.tinker_path)
        parts = {key: record.spec[key] for key in ("train_unembed", "train_mlp", "train_attn")}
        base = {"base_model": record.base_model, "optimizer_config": {"type": "adamw"}, "is_lora": True}
        return JSONResponse({**base, "lora_rank": record.spec["rank"], **parts})

    async def _sampler(self, request: Request, user: str) -> Response:
        sampler = self._state.sampler(user, request.path_params["sampler"])
        path = sampler.model_path if (sampler.model_path or "").startswith("tinker://") else None
        return JSONResponse({"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": path})

    async def _runs(self, request: Request, user: str) -> Response:
        tenants = self._state.tenants.of(user)
        part, cursor = _page(request, tenants)
        return JSONResponse({"training_runs": [self._described_run(tenant) for tenant in part], "cursor": cursor})

    async def _run(self, request: Request, user: str) -> Response:
        return JSONResponse(self._described_run(self._state.tenant(user, request.path_params["run"])))

    async def _run_checkpoints(self, request: Request, user: str) -> Response:
        tenant = self._state.tenant(user, request.path_params["run"])
        found = self._state.checkpoints.of(lambda record: record.run == tenant.id)
        return JSONResponse({"checkpoints": [_described(record) for record in found], "cursor": None})

    async def _checkpoints(self, request: Request, user: str) -> Response:
        found = list(self._state.checkpoints.of(lambda record: record.owner == user))
        part, cursor = _page(request, found)
        return JSONResponse({"checkpoints": [_described(record) for record in part], "cursor": cursor})

    async def _delete(self, request: Request, user: str) -> Response:
        self._state.checkpoints.delete(self._record(request, user).path)
        return Response(status_code=204)

    async def _change_ttl(self, request: Request, user: str) -> Response:
        given = read_body(TtlBody, await self._training.json(request))
        expires_at = None if given.ttl_seconds is None else time.time() + given.ttl_seconds
        self._state.checkpoints.change_expiry(self._record(request, user), expires_at)
        return Response(status_code=204)

    async def _publish(self, request: Request, user: str) -> Response:
        raise RefusedError(403, "This service does not publish checkpoints. Give others the files of an archive.")

    async def _links(self, request: Request, user: str) -> Response:
        record = self._record(request, user)
        if record.kind != "external_weights":
            raise RequestError("Only checkpoints of save_weights_external have links to files.")
        until = int(time.time()) + _LINK_S
        base = (self._service.config.public_url or str(request.base_url)).rstrip("/")
        folder = self._state.checkpoints.files_of(record)
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        place = f"{record.run}/{record.kind}/{record.name}"
        links = {name: f"{base}/api/v1/files/{self._sign(place, until)}/{until}/{place}/{name}" for name in names}
        return JSONResponse({"urls": links, "expires": _time(until)})

    async def _file(self, request: Request) -> Response:
        """Send a file whose link is signed."""
        given = request.path_params
        place = f"{given['run']}/{given['kind']}/{given['name']}"
        until = int(given["until"]) if given["until"].isdecimal() and len(given["until"]) < 16 else 0
        if not hmac.compare_digest(given["signature"].encode(), self._sign(place, until).encode()):
            return error_response(403, "The signature of this link is wrong.")
        if until < time.time():
            return error_response(403, "The time of this link is over; ask for a new one.")
        record = self._state.checkpoints.find(CheckpointPath(given["run"], given["kind"], given["name"]))
        folder = None if record is None else self._state.checkpoints.files_of(record).resolve()
        file = None if folder is None else (folder / given["file"]).resolve()
        if folder is None or file is None or not file.is_relative_to(folder) or not file.is_file():
            return error_response(404, "There is no such file.")
        return FileResponse(file)

    async def _sessions(self, request: Request, user: str) -> Response:
        sessions = self._state.sessions.of(user)
        part, cursor = _page(request, sessions)
        return JSONResponse({"sessions": [session.id for session in part], "cursor": cursor})

    async def _session(self, request: Request, user: str) -> Response:
        session = self._state.session(user, request.path_params["session_id"])
        runs = [tenant.id for tenant in self._state.tenants.of(user) if tenant.session_id == session.id]
        answer = {"training_run_ids": runs, "sampler_ids": [sampler.id for sampler in session.samplers.values()]}
        return JSONResponse({**answer, "user_metadata": _texts(session), "display_name": _name(session)})

    async def _search(self, request: Request, user: str) -> Response:
        given = read_body(SearchBody, await self._training.json(request))
        found = [session for session in self._state.sessions.of(user) if _matches(session, given)]
        after = (given.cursor or {}).get("last_session_id")
        ids = [session.id for session in found]
        first = ids.index(after) + 1 if after in ids else 0
        part = found[first : first + given.limit]
        more = first + given.limit < len(found)
        cursor = {"last_created_at": _time(part[-1].created_at), "last_session_id": part[-1].id} if more else None
        return JSONResponse({"sessions": [self._summary(session) for session in part], "next_cursor": cursor})

    def _summary(self, session: ClientSession) -> dict[str, Any]:
        runs = {tenant.id for tenant in self._state.tenants.all() if tenant.session_id == session.id}
        saved = list(self._state.checkpoints.of(lambda record: record.run in runs))
        return {
            "session_id": session.id,
            "created_at": _time(session.created_at),
            "owner": session.owner,
            "project_id": session.details.get("project_id") or "default",
            "status": _status(session),
            "checkpoints_count": len(saved),
            "checkpoint_storage_bytes": sum(record.size_bytes for record in saved),
            "display_name": _name(session),
            "user_metadata": _texts(session),
        }

    def _described_run(self, tenant: Tenant) -> dict[str, Any]:
        saved = list(self._state.checkpoints.of(lambda record: record.run == tenant.id))
        last = {kind: next((_described(each) for each in saved if each.kind == kind), None) for kind in KINDS}
        session = self._state.sessions.get(tenant.session_id)
        metadata = tenant.details.user_metadata
        return {
            "training_run_id": tenant.id,
            "base_model": tenant.details.base_model,
            "model_owner": tenant.details.owner,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": tenant.spec.rank,
            "last_request_time": _time(tenant.details.created_at if session is None else session.seen_at),
            "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": None if metadata is None else {key: str(value) for key, value in metadata.items()},
        }

    def _record(self, request: Request, user: str) -> CheckpointRecord:
        """Return the checkpoint that a path names."""
        given = request.path_params
        tenant = self._state.tenant(user, given["run"])
        if given["kind"] not in KINDS:
            raise RefusedError(404, f"There is no kind of checkpoint {given['kind'][:80]!r}.")
        path = CheckpointPath(tenant.id, given["kind"], checked_name(given["name"]))
        record = self._state.checkpoints.find(path)
        if record is None:
            raise RefusedError(404, f"There is no checkpoint {path}.")
        return record

    def _sign(self, place: str, until: int) -> str:
        return hmac.new(self._secret, f"{until}/{place}".encode(), hashlib.sha256).hexdigest()


def _secret_in(folder: Path) -> bytes:
    """Return the secret of a folder, which is made once."""
    file = folder / "links.secret"
    if not file.exists():
        partial = folder / "links.secret.partial"
        with storing(folder, _SECRET_BYTES):
            partial.write_bytes(secrets.token_bytes(_SECRET_BYTES))
            partial.chmod(0o600)
            partial.rename(file)
    return file.read_bytes()


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page[T](request: Request, found: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
    """Return the part of a list that a request asks for, and its cursor."""
    numbers = {}
    for name, default in (("limit", 20), ("offset", 0)):
        text = request.query_params.get(name, str(default))
        if not text.isdecimal() or len(text) > 9:
            raise RequestError(f"{name} is {text[:40]!r}; it must be a whole number.")
        numbers[name] = int(text)
    limit, offset = min(numbers["limit"], _MOST_LISTED), numbers["offset"]
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _described(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{record.kind}/{record.name}",
        "checkpoint_type": KINDS[record.kind],
        "time": _time(record.created_at),
        "tinker_path": str(record.path),
        "size_bytes": record.size_bytes,
        "public": False,
        "user_metadata": record.user_metadata,
        "expires_at": None if record.expires_at is None else _time(record.expires_at),
    }


def _name(session: ClientSession) -> str | None:
    name: str | None = session.details.get("display_name")
    return name


def _texts(session: ClientSession) -> dict[str, str] | None:
    metadata = session.details.get("user_metadata")
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}


def _status(session: ClientSession) -> dict[str, Any]:
    if session.finished is None:
        return {"type": "active"}
    reason = session.finished["reason"] or {"type": "success"}
    return {"type": "client_finished", "reason": reason, "detail": session.finished["detail"]}


def _matches(session: ClientSession, wanted: SearchBody) -> bool:
    """Return whether a search finds a session."""
    if wanted.statuses and _status(session)["type"] not in {each.get("type") for each in wanted.statuses}:
        return False
    metadata = _texts(session) or {}
    if any(metadata.get(key) != value for key, value in wanted.user_metadata.items()):
        return False
    named = []
    if wanted.session_id is not None:
        named.append(session.id == wanted.session_id)
    if wanted.display_name is not None:
        name = (_name(session) or "").lower()
        named.append(all(word in name for word in wanted.display_name.lower().split()))
    return not named or any(named)
