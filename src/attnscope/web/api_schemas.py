"""Types and bounds of the requests that the server accepts, and of its responses."""

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from attnscope.prompts.filler import Filler
from attnscope.web.jobs import State

MAX_COMPLETION = 256
"""The most tokens that a model may generate."""
FillerKind = Literal["repeat", "word", "random-tokens", "sentence", "lorem"]
Position = Literal["between", "end", "random", "before-system"]
FILLERS, POSITIONS = get_args(FillerKind), get_args(Position)


def _check_unicode(text: str) -> str:
    """Refuse half of a surrogate pair, because no tokenizer can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("not valid text: it has half of a surrogate pair") from error
    return text


def _integer(value: Any) -> Any:
    """Accept 5.0 for 5, because JSON has one number type."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


INTEGER = BeforeValidator(_integer)
PageText = Annotated[str, Field(max_length=1_000_000), AfterValidator(_check_unicode)]
Name = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_check_unicode)]
TokenIndex = Annotated[int, Field(ge=0, le=10_000_000), INTEGER]
Index = Annotated[int, Field(ge=0, le=10_000), INTEGER]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FillerRequest(_Body):
    """A filler to insert into the prompt."""

    kind: FillerKind = "repeat"
    count: Annotated[int, Field(ge=0, le=4096), INTEGER] = 55
    unit: (
        Annotated[str, Field(min_length=1, max_length=40), AfterValidator(_check_unicode)] | None
    ) = None
    position: Position = "between"
    by: Literal["text", "ids"] = "text"
    """`text`: insert `count` units as text. `ids`: insert exactly `count` tokens."""
    seed: Annotated[int, Field(ge=0, le=2**31), INTEGER] = 0

    @property
    def filler(self) -> Filler:
        """The filler that this request describes."""
        return Filler(kind=self.kind, count=self.count, unit=self.unit, seed=self.seed)


class ViewRequest(_Body):
    """A prompt to measure."""

    model: Name
    text: PageText
    chat: bool = False
    system: PageText | None = None
    filler: FillerRequest | None = None
    completion: Annotated[int, Field(ge=0, le=MAX_COMPLETION), INTEGER] = 0
    """How many tokens the model generates at most."""
    beyond_positions: bool = False
    """Allow more tokens than the model has positions, if the model can compute them."""


class PictureRequest(_Body):
    """A picture and one or two questions about it."""

    model: Name
    image: Annotated[str, Field(max_length=2_000_000, pattern=r"^data:image/[a-z+.-]+;base64,")]
    """The file as a data URL."""
    questions: Annotated[list[PageText], Field(min_length=1, max_length=2)]
    system: PageText | None = None
    completion: Annotated[int, Field(ge=0, le=MAX_COMPLETION), INTEGER] = 0


class RowRequest(_Body):
    """A token whose attention row or column is requested."""

    token: TokenIndex
    layer: Index
    head: Index | None = None
    direction: Literal["to", "by"] = "to"
    """`to`: weights of this token on the others. `by`: weights of the others on this token."""


class HeadTypesRequest(_Body):
    """A model whose heads are classified."""

    model: Name
    needles: bool = False
    """Search for retrieval heads too, which takes most of the time."""


class KnockoutRequest(_Body):
    """Tokens that no later token may attend to."""

    first: TokenIndex
    last: TokenIndex
    layer: Index | None = None
    head: Index | None = None


class QueryRequest(_Body):
    """An SQL query over the tables of a run."""

    run: Name
    sql: Annotated[str, Field(min_length=1, max_length=20_000), AfterValidator(_check_unicode)]


class Ticket(BaseModel):
    """The id of a job that was accepted."""

    job: str


class Progress(BaseModel):
    """The state of a job."""

    state: State
    position: int
    """Position in the queue, from 1; 0 if the job is running or has ended."""
    message: str
    """What the job does now, or why it failed."""
    code: str | None = None
    """The code of the error, if the job failed."""
    done: int
    total: int
    """Finished steps and all steps; both 0 if unknown."""
    result: dict[str, Any] | None = None
