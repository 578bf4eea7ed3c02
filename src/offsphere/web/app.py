"""The routes of the server, with the limits of what they take and the form of what they give."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Body, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from offsphere import __version__
from offsphere.errors import OffsphereError, UsageError
from offsphere.similarity import NAMES, Similarity
from offsphere.web.guard import Guard

if TYPE_CHECKING:
    from offsphere.web.explorer import Explorer

PAGE = Path(__file__).parent / "page"
MOST_TEXTS = 256
MOST_CHARACTERS = 100_000
MOST_QUERY = 10_000
MOST_FOUND = 1000
MOST_SHOWN = 100

QueryText = Annotated[str, Field(min_length=1, max_length=MOST_QUERY, description="what to look for")]
GammaD = Annotated[
    float,
    Field(ge=-2, le=2, allow_inf_nan=False, description="how much of a document's length is removed: 0 none, 1 all"),
]


class Strict(BaseModel):
    """A request; a field that it does not have is an error, so that a typing mistake is no silent default."""

    model_config = ConfigDict(extra="forbid")


class SearchRequest(Strict):
    """A query, and what to rank under."""

    query: QueryText
    k: int = Field(10, ge=1, le=MOST_FOUND, description="how many documents")
    similarity: str | None = Field(
        None, max_length=100, description=f"{', '.join(NAMES[:4])}, or exponents such as gamma_q=0.2,gamma_d=0.9"
    )
    gamma_d: GammaD | None = Field(None, description="in place of similarity: the exponent of the document's length")
    filter: str | None = Field(
        None, max_length=1000, description="an SQL condition on id, title, text, norm and metadata, such as lang = 'en'"
    )


class FoundDocument(BaseModel):
    """A document of an answer."""

    id: str
    score: float = Field(description="the inner product of prepared query and prepared document")
    cosine: float = Field(description="of the angle between them")
    norm: float = Field(description="the length of the document's raw embedding")
    title: str
    text: str
    metadata: dict[str, Any]


class SearchAnswer(BaseModel):
    """The best documents, best first."""

    similarity: str
    gamma_q: float
    gamma_d: float
    hits: list[FoundDocument]


class EmbedRequest(Strict):
    """Texts of one side."""

    texts: list[Annotated[str, Field(max_length=MOST_CHARACTERS)]] = Field(min_length=1, max_length=MOST_TEXTS)
    side: Literal["query", "document"] = Field(description="whose prompt is put before each text")


class EmbedAnswer(BaseModel):
    """Raw embeddings, never normalised."""

    vectors: list[list[float]] = Field(description="one a text")
    norms: list[float] = Field(description="the length of each vector; 0 for an empty text")
    fingerprint: str = Field(description="of the encoder")


class ExploreRequest(Strict):
    """A query and an exponent."""

    query: QueryText
    gamma_d: GammaD
    k: int = Field(10, ge=1, le=MOST_SHOWN, description="how many documents of each ranking")


class RankedDocument(BaseModel):
    """A document of one of two rankings."""

    id: str
    rank: int = Field(description="in this ranking, from 1")
    other_rank: int = Field(description="in the other ranking, over the whole index")
    score: float
    cosine: float = Field(description="of the angle to the query; 0 where the query has no direction")
    angle: float = Field(description="in degrees")
    length: float
    longer_than: float = Field(description="the share of documents that are shorter")
    why: str = Field(description="why its place differs between the two")
    title: str
    excerpt: str = Field(description="the beginning of the text")
    characters: int = Field(description="of the whole text")


class ExploreAnswer(BaseModel):
    """One query, two rankings of the whole index."""

    query_length: float
    trained: list[RankedDocument] = Field(description="under the index's gamma_q and the gamma_d that was asked for")
    cosine: list[RankedDocument] = Field(description="by the angle alone")


class WholeDocument(BaseModel):
    """One document."""

    id: str
    title: str
    text: str
    metadata: dict[str, Any]


class Lengths(BaseModel):
    """A histogram."""

    counts: list[int]
    edges: list[float] = Field(description="one more than counts")


class IndexAnswer(BaseModel):
    """What the index holds."""

    documents: int
    without_text: int = Field(description="documents that no query finds")
    dimension: int
    model: str
    similarity: str
    gamma_q: float
    gamma_d: float
    lengths: Lengths = Field(description="of the documents; the outermost thousandth on each side is in the end bars")


class Health(BaseModel):
    """The server answers."""

    status: Literal["ok"] = "ok"


def create_app(explorer: Explorer, token: str | None = None) -> FastAPI:
    """An application that answers for one index.

    Args:
        explorer: Of the index.
        token: What every route but ``/healthz`` and the page's own files wants; None only on loopback.
    """
    app = FastAPI(
        title="offsphere",
        version=__version__,
        description="Search, raw embeddings and two rankings of one index.",
        docs_url=None,  # FastAPI's own page loads scripts from elsewhere
        redoc_url=None,
    )
    app.add_middleware(Guard, token=token)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(OffsphereError, _failed)
    app.add_exception_handler(Exception, _broken)
    app.mount("/page", StaticFiles(directory=PAGE))

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/docs", include_in_schema=False)
    def docs() -> FileResponse:
        return FileResponse(PAGE / "docs.html")

    @app.get("/healthz")
    def healthz() -> Health:
        """Say that the server answers; open without a token."""
        return Health()

    @app.get("/index")
    def index() -> IndexAnswer:
        """Say what the index holds."""
        return IndexAnswer(**explorer.describe())

    @app.get("/search")
    def search(asked: Annotated[SearchRequest, Query()]) -> SearchAnswer:
        """Find the best documents for a query, under the index's own similarity or another."""
        return answer(asked)

    @app.post("/search")
    def search_in_body(asked: Annotated[SearchRequest, Body()]) -> SearchAnswer:
        """The same with the request in a JSON body, for long queries."""
        return answer(asked)

    @app.post("/embed")
    def embed(asked: Annotated[EmbedRequest, Body()]) -> EmbedAnswer:
        """Embed texts as the index does: its encoder and prompts, nothing normalised."""
        vectors, lengths = explorer.embed(asked.texts, asked.side)
        return EmbedAnswer(
            vectors=vectors.tolist(), norms=lengths.tolist(), fingerprint=explorer.index.stamp.fingerprint
        )

    @app.get("/explore")
    def explore(asked: Annotated[ExploreRequest, Query()]) -> ExploreAnswer:
        """Rank the whole index twice for one query: under gamma_d and by cosine."""
        if not asked.query.strip():
            raise UsageError("query is blank; type what to look for")
        length, trained, cosine = explorer.explore(asked.query, asked.gamma_d, asked.k)
        rows = [[RankedDocument(**vars(row)) for row in ranking] for ranking in (trained, cosine)]
        return ExploreAnswer(query_length=length, trained=rows[0], cosine=rows[1])

    @app.get("/documents")
    def document(id: Annotated[str, Query(max_length=MOST_QUERY, description="of the document")]) -> WholeDocument:
        """Give one document whole."""
        found = explorer.document(id)
        if found is None:
            raise HTTPException(404, f"the index has no document with the id {id!r}")
        return WholeDocument(**vars(found))

    def answer(asked: SearchRequest) -> SearchAnswer:
        similarity = _similarity(asked, explorer.similarity)
        hits = explorer.search(asked.query, asked.k, similarity, asked.filter)
        gamma_q, gamma_d = similarity.gammas
        found = [FoundDocument(**vars(hit)) for hit in hits]
        return SearchAnswer(similarity=similarity.name, gamma_q=gamma_q, gamma_d=gamma_d, hits=found)

    return app


def _similarity(asked: SearchRequest, own: Similarity) -> Similarity:
    if asked.gamma_d is None:
        return own if asked.similarity is None else Similarity.parse(asked.similarity)
    if asked.similarity is not None:
        raise UsageError("give similarity or gamma_d, not both")
    return Similarity(own.gammas[0], asked.gamma_d)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    """Each fault in a line, without the input that FastAPI would send back."""
    assert isinstance(error, RequestValidationError)
    faults = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"][1:]) or str(fault["loc"][0])
        faults.append(f"{where}: {fault['msg']}")
    return JSONResponse({"detail": "; ".join(faults[:10])}, 422)


async def _refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 422 if isinstance(error, UsageError) else 500)


async def _broken(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "the server failed; its terminal says where"}, 500)
