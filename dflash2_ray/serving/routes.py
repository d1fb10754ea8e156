"""Which path leads where, and the OpenAI shape of errors that no route raised. Built inside each ingress replica."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from ray import serve
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from dflash2_ray import __version__
from dflash2_ray.serving.api_keys import ApiKeys
from dflash2_ray.serving.body_limit import BodyLimit
from dflash2_ray.serving.early_refusal import EarlyRefusal
from dflash2_ray.serving.failures import CatchAll
from dflash2_ray.serving.head_requests import HeadAsGet
from dflash2_ray.serving.ingress import Ingress
from dflash2_ray.serving.key_digests import CurrentKeys, KeyDigests
from dflash2_ray.serving.openai_api import plain_error
from dflash2_ray.serving.openapi import body_of, responses
from dflash2_ray.serving.options import request_schema
from dflash2_ray.serving.processing_time import ProcessingTime
from dflash2_ray.serving.token_routes import DETOKENIZE_SCHEMA, TOKENIZE_SCHEMA


def _this_replica() -> Any:
    return serve.get_replica_context().servable_object


GENERATING_PATHS = ("/v1/completions", "/v1/chat/completions")
_INGRESS = Depends(_this_replica)


@dataclass(frozen=True)
class Guards:
    """What stands before the routes. keys: none means that no key is asked for; cors_origins: none means closed."""

    keys: KeyDigests = field(default_factory=KeyDigests)
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024


def api_builder(guards: Guards) -> Callable[[], FastAPI]:
    """What Serve calls inside a replica: it takes a plain function for a builder, and anything else for the application itself."""

    def build() -> FastAPI:
        return build_api(guards)

    return build


def build_api(guards: Guards = Guards()) -> FastAPI:
    """The ASGI application of an ingress replica. Plain functions: no route depends on how Serve binds methods."""
    api = FastAPI(title="dflash2_ray", version=__version__, docs_url=None, redoc_url=None, responses=responses())
    servable = lambda: api.dependency_overrides.get(_this_replica, _this_replica)()  # noqa: E731  (whom the routes would ask)
    api.add_middleware(EarlyRefusal, paths=GENERATING_PATHS, refusal=lambda: _ingress(servable()).refusal())
    api.add_middleware(CatchAll)
    api.add_middleware(
        BodyLimit, max_bytes=guards.max_body_bytes
    )  # the one that is added last is the first to see a request
    if guards.keys.all():
        api.add_middleware(ApiKeys, keys=CurrentKeys(guards.keys))
    if guards.cors_origins:
        api.add_middleware(
            CORSMiddleware, allow_origins=list(guards.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    api.add_middleware(ProcessingTime)
    api.add_middleware(HeadAsGet)
    api.add_exception_handler(HTTPException, _http_exception)  # type: ignore[arg-type]

    completions_path, chat_path = GENERATING_PATHS

    @api.post(completions_path, openapi_extra=body_of(request_schema(chat=False)))
    async def completions(request: Request, ingress: Any = _INGRESS) -> Response:
        """Complete one prompt or several."""
        return await _ingress(ingress).generate(request, chat=False)

    @api.post(chat_path, openapi_extra=body_of(request_schema(chat=True)))
    async def chat_completions(request: Request, ingress: Any = _INGRESS) -> Response:
        """Answer a conversation."""
        return await _ingress(ingress).generate(request, chat=True)

    @api.post("/tokenize", openapi_extra=body_of(TOKENIZE_SCHEMA))
    async def tokenize(request: Request, ingress: Any = _INGRESS) -> Any:
        """Token ids of a text, or of messages in the chat template."""
        return await _ingress(ingress).tokenize(request)

    @api.post("/detokenize", openapi_extra=body_of(DETOKENIZE_SCHEMA))
    async def detokenize(request: Request, ingress: Any = _INGRESS) -> Any:
        """The text of token ids."""
        return await _ingress(ingress).detokenize(request)

    @api.get("/v1/models")
    async def models(ingress: Any = _INGRESS) -> Any:
        """The one model that is served."""
        return await _ingress(ingress).models()

    @api.get("/v1/models/{name:path}")
    async def model(name: str, ingress: Any = _INGRESS) -> Any:
        """One model by its name."""
        return await _ingress(ingress).model(name)

    @api.get("/health", response_class=Response)
    async def health() -> Response:
        """This front is alive."""
        return Response(status_code=200)

    @api.get("/ready")
    async def ready(ingress: Any = _INGRESS) -> Response:
        """A unit would take a request now."""
        return await _ingress(ingress).ready()

    @api.get("/server_info")
    async def server_info(ingress: Any = _INGRESS) -> Any:
        """The resolved configuration and how full the engine is."""
        return await _ingress(ingress).server_info()

    @api.get("/status")
    async def status(ingress: Any = _INGRESS) -> Any:
        """All units with their processes, what is missing, and how full they are."""
        return await _ingress(ingress).status()

    @api.get("/metrics", response_class=PlainTextResponse)
    async def metrics(ingress: Any = _INGRESS) -> Response:
        """Counters and gauges for Prometheus."""
        return await _ingress(ingress).metrics()

    return api


def _ingress(servable: Any) -> Ingress:
    assert isinstance(servable, Ingress), "routes run inside an ingress replica"
    return servable


async def _http_exception(request: Request, error: HTTPException) -> Response:
    """Unknown routes and methods."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(plain_error(message, "invalid_request_error"), error.status_code, headers=error.headers)
