"""Does a chat template come to an end? Tried once, in a process of its own, before it is used.

A template is a program that came with a model: it may loop for ever, or write gigabytes, and
nothing inside a process can stop that. The trial is close to what transformers makes of a template,
and its text is thrown away: it answers one question. A template that fails in it is not judged
here; it fails again where its error is told.

Must not know tokens or regions.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.errors import InputError

# Of the processor, so that a busy machine changes nothing; and of the clock, where that is all
# there is to go by.
SECONDS, PATIENCE = 5, 60
MEMORY = 1 << 30
# Characters a template may write beside those it is given, and for each of those.
BESIDE, FOR_EACH = 1 << 20, 10

_TOO_LONG, _TOO_LARGE = 3, 4
_PROGRAM = f"""
import json, sys
given = json.load(sys.stdin)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
except (ImportError, OSError, ValueError):
    pass
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

class Generation(Extension):
    tags = {{"generation"}}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.Scope(body).set_lineno(line)

def refuse(message):
    raise TemplateError(message)

try:
    tried = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    tried.filters["tojson"] = lambda value, **how: json.dumps(value)
    tried.globals.update(raise_exception=refuse, strftime_now=lambda how: "now")
    length = 0
    for part in tried.from_string(given["template"]).generate(**given["options"]):
        length += len(part)
        if length > given["most"]:
            sys.exit({_TOO_LONG})
except MemoryError:
    sys.exit({_TOO_LARGE})
except Exception:
    pass
"""

_ended: set[str] = set()
"""Templates that were tried."""


def check_ends(
    template: str, messages: Sequence[Mapping[str, str]], options: Mapping[str, Any]
) -> None:
    """Refuse a template that does not end, or writes without end. Each is tried once."""
    if template in _ended:
        return
    said = json.dumps(dict(options) | {"messages": list(messages)}, default=str)
    most = BESIDE + FOR_EACH * len(said)
    given = {
        "template": template,
        "options": json.loads(said),
        "most": most,
        "seconds": SECONDS,
        "memory": MEMORY,
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            input=json.dumps(given).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        ended = -1
    exceeded = {
        _TOO_LONG: ("characters", f"writes more than {most:,} characters for {len(said):,}"),
        _TOO_LARGE: ("memory", f"needs more than {MEMORY >> 20:,} MiB of memory"),
    }.get(ended)
    if ended < 0:
        exceeded = "seconds", f"does not end within {SECONDS} seconds"
    if exceeded is not None:
        limit, what = exceeded
        raise InputError(
            f"the model's chat template {what}, so attnscope refuses it: it is damaged or hostile. "
            "Use the prompt as it is (chat: false, --no-chat), or set tokenizer.chat_template",
            code="chat-template-limit",
            limit=limit,
        )
    _ended.add(template)
