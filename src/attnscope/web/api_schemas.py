"""What may be sent to the page's address, and what comes back: types and bounds."""

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from attnscope.prompts.filler import Filler
from attnscope.web.jobs import State

ANSWER = 256
"""How many tokens a model may answer with."""
HeadType = Literal["repeat", "word", "random-tokens", "sentence", "lorem"]
Position = Literal["between", "end", "random", "before-system"]
FILLERS, POSITIONS = get_args(HeadType), get_args(Position)


def _sayable(text: str) -> str:
    """Refuses half a character: no tokenizer could read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("is not text: it has half of a surrogate pair") from error
    return text


def _whole(value: Any) -> Any:
    """JSON has no integers of its own: 5.0 is one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
PageText = Annotated[str, Field(max_length=1_000_000), AfterValidator(_sayable)]
Name = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_sayable)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Fill(_Body):
    """A filler."""

    kind: HeadType = "repeat"
    count: Annotated[int, Field(ge=0, le=4096), WHOLE] = 55
    unit: Annotated[str, Field(min_length=1, max_length=40), AfterValidator(_sayable)] | None = None
    position: Position = "between"
    by: Literal["text", "ids"] = "text"
    """As text, or as exactly so many tokens."""
    seed: Annotated[int, Field(ge=0, le=2**31), WHOLE] = 0

    @property
    def filler(self) -> Filler:
        """What is inserted."""
        return Filler(kind=self.kind, count=self.count, unit=self.unit, seed=self.seed)


class ViewRequest(_Body):
    """A prompt to measure."""

    model: Name
    text: PageText
    chat: bool = False
    system: PageText | None = None
    filler: Fill | None = None
    answer: Annotated[int, Field(ge=0, le=ANSWER), WHOLE] = 0
    """How many tokens the model may answer with."""
    beyond: bool = False
    """Allow more tokens than the model was made for, where it can compute them at all."""


class Followed(_Body):
    """A token whose gaze is followed."""

    token: Annotated[int, Field(ge=0, le=10_000_000), WHOLE]
    layer: Annotated[int, Field(ge=0, le=10_000), WHOLE]
    head: Annotated[int, Field(ge=0, le=10_000), WHOLE] | None = None
    way: Literal["to", "by"] = "to"
    """What it looks at, or who looks at it."""


class HeadTypesRequest(_Body):
    """A model whose heads are to be told apart."""

    model: Name
    needles: bool = False
    """Search for retrieval heads too: most of the time goes there."""


class Hidden(_Body):
    """Tokens that nobody may look at."""

    first: Annotated[int, Field(ge=0, le=10_000_000), WHOLE]
    last: Annotated[int, Field(ge=0, le=10_000_000), WHOLE]
    layer: Annotated[int, Field(ge=0, le=10_000), WHOLE] | None = None
    head: Annotated[int, Field(ge=0, le=10_000), WHOLE] | None = None


class Sql(_Body):
    """A question to a run."""

    run: Name
    sql: Annotated[str, Field(min_length=1, max_length=20_000), AfterValidator(_sayable)]


class Ticket(BaseModel):
    """Work that was taken on."""

    job: str


class Progress(BaseModel):
    """How it is doing."""

    state: State
    place: int
    """How many are in front, itself included; 0 when it is its turn."""
    said: str
    done: int
    of: int
    """Steps that are behind it, of how many; 0 of 0 where nobody knows."""
    result: dict[str, Any] | None = None
