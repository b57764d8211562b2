"""A vLLM server whose tokens carry the policy step that sampled them.

vLLM labels every sampled token with the weight version that it was told last; what it does not do
is tie that word to the weights. The routes here do: an update names its version, the weights are
loaded first, and only a load that succeeded is labelled. So a label is never newer than the
weights, and a load that failed leaves the old weights under their old label.

    POST /update_weights      {"weight_dir": DIR, "weight_version": "7"}
    POST /load_lora_adapter?weight_version=7      {"lora_name": NAME, "lora_path": DIR}
    POST /pause               requests in flight are frozen, and go on at /resume
    POST /resume
    GET  /weight_info         {"weight_version", "weight_dir", "adapters", "paused"}

Run it as `python -m traceage.capture.engine --model DIR --policies-root DIR`; every flag of vLLM's
own server passes through. Errors are answered as `{"error": reason}`: 422 an update that does not
say what it is, 403 a directory outside the policies root, 404 one that is not there, 400 a
checkpoint that does not fit the model, 500 a load that failed. After each of them the engine
serves what it served before.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from safetensors import SafetensorError, safe_open

from traceage.capture import UPDATE_PATHS, UpdatePath

HEAD_FILE = "traceage-lm-head.safetensors"


class UpdateError(Exception):
    """An update that was refused or failed; `status` is the HTTP status that answers it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class PolicyEngine:
    """The weights an engine serves, their label, and the one way to change both.

    `client` is vLLM's engine client and `models` its table of adapters. `loaded` is the directory
    of the policy that is served: the model's own until the first update.
    """

    def __init__(self, client: Any, models: Any, model_dir: Path, policies_root: Path | None):
        self.client = client
        self.models = models
        self.model_dir = model_dir
        self.policies_root = policies_root
        self.loaded = model_dir
        self.adapters: dict[str, Path] = {}
        self.broken = ""
        self._lock = asyncio.Lock()

    def allowed(self, directory: str) -> Path:
        """The real path of a directory that may be loaded.

        Raises:
            UpdateError: 403 when it lies outside the policies root, 404 when it is not there.
        """
        path = Path(directory).resolve()
        roots = [root for root in (self.policies_root, self.model_dir) if root is not None]
        if not any(path.is_relative_to(root) for root in roots):
            raise UpdateError(
                403,
                f"{directory} lies outside the policies root ({self.policies_root}); start the "
                "engine with the --policies-root that holds it",
            )
        if not path.is_dir():
            raise UpdateError(404, f"{directory} is no directory")
        return path

    async def update_weights(self, directory: str, version: str | None) -> None:
        """Load a checkpoint into every worker, then label; a `version` of None labels nothing."""
        path = self.allowed(directory)
        async with self._lock:
            check_checkpoint(path, self.model_dir)

            async def load() -> None:
                await self._reload(path)

            async def put_back() -> None:
                await self._reload(self.loaded)

            await self._replace(load, put_back, version)
            self.loaded = path

    async def load_adapter(self, name: str, directory: str, version: str) -> None:
        """Load an adapter in place under a fixed name, then label."""
        path = self.allowed(directory)
        async with self._lock:
            check_adapter(path, self.model_dir)

            async def load() -> None:
                await self._add_adapter(name, path)

            async def put_back() -> None:
                if name in self.adapters:
                    await self._add_adapter(name, self.adapters[name])

            await self._replace(load, put_back, version)
            self.adapters[name] = path

    async def _replace(
        self,
        load: Callable[[], Awaitable[None]],
        put_back: Callable[[], Awaitable[None]],
        version: str | None,
    ) -> None:
        """Load while nothing is sampled, then label.

        Tokens sampled between the load and the label would carry the wrong version, so generation
        is paused here where the caller has not done it.
        """
        if self.broken:
            raise UpdateError(500, self.broken)
        paused = await self.client.is_paused()
        if not paused:
            await self.client.pause_generation(mode="keep", clear_cache=False)
        try:
            try:
                await load()
            except UpdateError:
                raise  # refused before the workers were asked
            except Exception as error:
                await self._undo(put_back, error)
            # What requests to come find cached was computed with the weights that are gone.
            # Requests in flight keep their blocks.
            await self.client.reset_prefix_cache()
            if version is not None:
                await self.client.update_weight_version(version)
        finally:
            if not paused and not self.broken:
                await self.client.resume_generation()

    async def _undo(self, put_back: Callable[[], Awaitable[None]], error: Exception) -> None:
        """After a failed load: the old weights again, or no engine at all."""
        try:
            await put_back()
        except Exception as second:
            # vLLM cannot go back once it has begun to replace layers. Weights of two policies under
            # one label would be worse than no engine: it stays paused, answers this, and stops.
            self.broken = (
                f"the load failed ({_reason(error)}) and so did putting the old weights back "
                f"({_reason(second)}); the engine stops"
            )
            asyncio.get_running_loop().call_later(1.0, os.kill, os.getpid(), signal.SIGTERM)
            raise UpdateError(500, self.broken) from error
        raise UpdateError(
            500, f"the load failed, the old weights stay: {_reason(error)}"
        ) from error

    async def _reload(self, path: Path) -> None:
        with with_head(path, self.model_dir) as whole:
            await self.client.collective_rpc("reload_weights", kwargs={"weights_path": str(whole)})

    async def _add_adapter(self, name: str, path: Path) -> None:
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

        answer = await self.models.load_lora_adapter(
            LoadLoRAAdapterRequest(
                lora_name=name, lora_path=str(path), load_inplace=name in self.models.lora_requests
            )
        )
        if isinstance(answer, ErrorResponse):
            raise RuntimeError(answer.error.message)
        # vLLM keeps this request for every generation to come; one that still says "load in
        # place" would read the adapter from disk at each.
        self.models.lora_requests[name].load_inplace = False


def _reason(error: Exception) -> str:
    """The last line of an error; workers send whole tracebacks as its text."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a directory's safetensors files, from their headers.

    Raises:
        UpdateError: 400 for a file that is not whole.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise UpdateError(400, f"{file} cannot be read: {error}") from error
    return shapes


def check_checkpoint(directory: Path, model_dir: Path) -> None:
    """Refuse a checkpoint that does not hold the model's tensors, before anything is loaded.

    Raises:
        UpdateError: 400, naming the tensors.
    """
    expected = tensor_shapes(model_dir)
    if not expected:
        return  # a model in another format: its loader has to tell
    found = tensor_shapes(directory)
    if not found:
        raise UpdateError(400, f"{directory} holds no .safetensors file")
    # Whether a checkpoint of tied embeddings repeats them differs from writer to writer.
    optional = {"lm_head.weight"} if _ties_embeddings(model_dir) else set()
    for names, what in (
        (expected.keys() - found.keys(), "lacks"),
        (found.keys() - expected.keys(), "has, unlike the model,"),
    ):
        if names - optional:
            first = min(names - optional)
            raise UpdateError(400, f"{directory} {what} {len(names)} tensors, first {first}")
    for name in sorted(expected.keys() & found.keys()):
        if expected[name] != found[name]:
            raise UpdateError(
                400,
                f"{directory}: {name} has shape {list(found[name])}, the model's has "
                f"{list(expected[name])}",
            )


def check_adapter(directory: Path, model_dir: Path) -> None:
    """Refuse an adapter that does not fit the model's modules, before anything is loaded.

    Raises:
        UpdateError: 400, naming the tensor.
    """
    if not (directory / "adapter_config.json").is_file():
        raise UpdateError(400, f"{directory} holds no adapter_config.json")
    found = tensor_shapes(directory)
    if not found:
        raise UpdateError(400, f"{directory} holds no .safetensors file")
    modules = tensor_shapes(model_dir)
    for name, shape in sorted(found.items()):
        module, _, side = name.removeprefix("base_model.model.").partition(".lora_")
        of_module = modules.get(f"{module}.weight")
        if of_module is None or len(of_module) != 2 or len(shape) != 2:
            continue  # not a linear layer of the checkpoint: vLLM has to tell
        at = 1 if side.startswith("A") else 0
        if shape[at] != of_module[at]:
            raise UpdateError(
                400,
                f"{directory}: {name} has shape {list(shape)}, and {module}.weight has "
                f"{list(of_module)}",
            )


@contextmanager
def with_head(directory: Path, model_dir: Path) -> Iterator[Path]:
    """The checkpoint, with `lm_head.weight` written out where vLLM would leave an old one.

    On CPU vLLM 0.32 keeps a packed copy of the output head, and a reload renews it from
    `lm_head.weight` alone. A checkpoint of tied embeddings may leave that out, and tokens would be
    sampled by the head of another policy. (On a GPU the head is the embedding.)

    Raises:
        UpdateError: 400 when it cannot be told which tensor is the embedding.
    """
    from vllm.platforms import current_platform

    names = tensor_shapes(directory)
    has_head = any(name.endswith("lm_head.weight") for name in names)
    if has_head or not names or not _ties_embeddings(model_dir) or not current_platform.is_cpu():
        yield directory
        return
    from safetensors.torch import save_file

    embeddings = [name for name in names if name.endswith("model.embed_tokens.weight")]
    if len(embeddings) != 1:
        raise UpdateError(
            400, f"{directory} ties its embeddings and does not say which: write lm_head.weight too"
        )
    head = embeddings[0].removesuffix("model.embed_tokens.weight") + "lm_head.weight"
    with tempfile.TemporaryDirectory(prefix="traceage-head-") as scratch:
        whole = Path(scratch)
        for file in directory.iterdir():
            (whole / file.name).symlink_to(file)
        for file in directory.glob("*.safetensors"):
            with safe_open(file, framework="pt") as tensors:
                if embeddings[0] in tensors.keys():  # noqa: SIM118 - no mapping
                    save_file({head: tensors.get_tensor(embeddings[0])}, whole / HEAD_FILE)
        index = directory / "model.safetensors.index.json"
        if index.exists():
            listed = json.loads(index.read_text(encoding="utf-8"))
            listed["weight_map"][head] = HEAD_FILE
            (whole / index.name).unlink()
            (whole / index.name).write_text(json.dumps(listed), encoding="utf-8")
        yield whole


def _ties_embeddings(model_dir: Path) -> bool:
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("tie_word_embeddings"))


def routes(engine: PolicyEngine, update_path: UpdatePath) -> APIRouter:
    """The admin routes of an engine."""

    async def pause(mode: str = "keep") -> JSONResponse:
        if mode != "keep":
            return _error(422, f"mode {mode!r}: this engine pauses with mode=keep alone")
        await engine.client.pause_generation(mode="keep", clear_cache=False)
        return JSONResponse({"paused": True})

    async def resume() -> JSONResponse:
        await engine.client.resume_generation()
        return JSONResponse({"paused": False})

    async def weight_info() -> JSONResponse:
        return JSONResponse(
            {
                "weight_version": await engine.client.get_weight_version(),
                "weight_dir": str(engine.loaded),
                "adapters": {name: str(path) for name, path in engine.adapters.items()},
                "paused": await engine.client.is_paused(),
            }
        )

    async def update_weights(request: Request) -> JSONResponse:
        async def update() -> None:
            body = await _body(request)
            version = _version(body.get("weight_version"))
            await engine.update_weights(_text(body, "weight_dir"), version)

        return await _answer(update, {"updated": True})

    async def load_lora_adapter(request: Request) -> JSONResponse:
        async def update() -> None:
            body = await _body(request)
            version = _version(request.query_params.get("weight_version"))
            await engine.load_adapter(_text(body, "lora_name"), _text(body, "lora_path"), version)

        return await _answer(update, {"updated": True})

    async def collective_rpc(request: Request) -> JSONResponse:
        async def update() -> None:
            body = await _body(request)
            if body.get("method") != "reload_weights":
                raise UpdateError(403, "reload_weights is the one method that can be called")
            arguments = body.get("kwargs")
            if not isinstance(arguments, dict) or set(arguments) != {"weights_path"}:
                raise UpdateError(422, 'kwargs has to be {"weights_path": DIR}')
            await engine.update_weights(_text(arguments, "weights_path"), None)

        return await _answer(update, {"results": [None]})

    router = APIRouter()
    router.add_api_route("/pause", pause, methods=["POST"])
    router.add_api_route("/resume", resume, methods=["POST"])
    router.add_api_route("/weight_info", weight_info, methods=["GET"])
    if update_path == "collective-rpc":
        router.add_api_route("/collective_rpc", collective_rpc, methods=["POST"])
    else:
        router.add_api_route("/update_weights", update_weights, methods=["POST"])
        router.add_api_route("/load_lora_adapter", load_lora_adapter, methods=["POST"])
    return router


async def _answer(update: Callable[[], Awaitable[None]], content: dict[str, Any]) -> JSONResponse:
    try:
        await update()
    except UpdateError as error:
        return _error(error.status, str(error))
    return JSONResponse(content)


def _error(status: int, reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, status_code=status)


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise UpdateError(422, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise UpdateError(422, "the body has to be a JSON object")
    return body


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise UpdateError(422, f"{key} is missing; it has to be a string")
    return value


def _version(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        raise UpdateError(422, "weight_version is missing: tokens would carry the wrong label")
    return value


class KeyGuard:
    """ASGI middleware that asks for an API key everywhere but at `/health`.

    vLLM's own asks at some of its routes alone, and at none of those added here.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, scope: Any, receive: Any, send: Any) -> Any:
        """Pass a request on, or answer 401."""
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            return self.app(scope, receive, send)
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, given = header.partition(b" ")
        # Each key is compared, in constant time, so that the answer's delay tells nothing.
        keys = api_keys(scope["app"].state.args)
        matches = [hmac.compare_digest(given, key.encode()) for key in keys]
        if scheme.lower() == b"bearer" and any(matches):
            return self.app(scope, receive, send)
        refusal = _error(401, "an API key is needed: Authorization: Bearer KEY")
        return refusal(scope, receive, send)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of vLLM's server and this module's; ends the process on wrong usage."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog="python -m traceage.capture.engine",
        description="vLLM's API server, with routes that load a policy and label its tokens.",
    )
    parser.add_argument(
        "--policies-root",
        type=Path,
        metavar="DIR",
        help="policies are loaded from under this directory alone (and from --model)",
    )
    parser.add_argument(
        "--update-path",
        choices=UPDATE_PATHS,
        default="update-weights",
        help="collective-rpc: weights are reloaded through /collective_rpc and never labelled, as "
        "deployments behind Dynamo do (default: update-weights)",
    )
    parser.add_argument(
        "--stop-with-parent",
        action="store_true",
        help="stop when standard input is closed, so that no engine outlives what started it",
    )
    parser = make_arg_parser(parser)
    parser.set_defaults(host="127.0.0.1", enable_scale_out=True)
    options: argparse.Namespace = parser.parse_args(arguments)
    validate_parsed_serve_args(options)
    if not Path(options.model).is_dir():
        parser.error(f"--model {options.model}: no such directory; policies are checked against it")
    if not options.uds and not _is_loopback(options.host) and not api_keys(options):
        parser.error(
            f"--host {options.host} is reachable from other machines: give an --api-key, or set "
            "VLLM_API_KEY"
        )
    if api_keys(options):
        options.middleware = [*options.middleware, f"traceage.capture.engine.{KeyGuard.__name__}"]
    return options


def api_keys(options: argparse.Namespace) -> list[str]:
    """The keys a caller may use; the flag goes before the environment, as in vLLM."""
    return [key for key in (options.api_key or [os.environ.get("VLLM_API_KEY", "")]) if key]


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host or "").is_loopback
    except ValueError:
        return False


async def serve(options: argparse.Namespace) -> None:
    """Build vLLM's engine and application, add the routes, and serve until told to stop."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.launcher import serve_http, setup_server

    address, sock = setup_server(options, reuse_port=False)
    async with build_async_engine_client(options) as client:
        tasks = await client.get_supported_tasks()
        app = build_app(options, tasks, client.model_config)
        await init_app_state(client, app.state, options, tasks)
        root = options.policies_root
        engine = PolicyEngine(
            client,
            app.state.openai_serving_models,
            Path(options.model).resolve(),
            root.resolve() if root is not None else None,
        )
        app.include_router(routes(engine, options.update_path))
        print(f"traceage engine: serving on {address}", file=sys.stderr)
        stopped = await serve_http(
            app,
            sock=sock,
            enable_ssl_refresh=options.enable_ssl_refresh,
            host=options.host,
            port=options.port,
            log_level=options.uvicorn_log_level,
            access_log=False,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=options.ssl_cert_reqs,
        )
    try:
        await stopped
    finally:
        sock.close()


def _stop_with_parent() -> None:
    """Stop when standard input ends, which it does when the process at its other end dies."""

    def wait() -> None:
        # Not through sys.stdin, whose lock a waiting thread would hold when Python ends.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stop-with-parent", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an engine until it is told to stop."""
    # Set before vLLM is imported: its development routes let any caller run code in the workers,
    # and its own adapter route loads without a label.
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    import uvloop
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    options = parse(arguments)
    if options.stop_with_parent:
        _stop_with_parent()
    uvloop.run(serve(options))


if __name__ == "__main__":
    main()
