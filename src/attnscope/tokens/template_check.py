"""Runs a chat template once in a separate process with limits, before attnscope uses it.

A template is a program that came with a model: it may loop for ever, or write gigabytes, and
nothing inside a process can stop that. The check renders the template almost as transformers
does and discards the text. A template that raises an error passes the check, because the same
error is raised again when the template is used.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.errors import InputError

# Seconds of processor time, which do not depend on the load of the machine; and seconds of the
# clock, for systems without a limit of processor time.
SECONDS, PATIENCE = 5, 60
MEMORY = 1 << 30
# Limit of written characters: a constant, and a factor for each character of the input.
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
"""Templates that passed the check."""


def check_ends(
    template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> None:
    """Refuse a template that exceeds a limit of time, memory or output. Each is run once."""
    if template in _ended:
        return
    written = json.dumps(dict(options) | {"messages": list(messages)}, default=str)
    most = BESIDE + FOR_EACH * len(written)
    task = {
        "template": template,
        "options": json.loads(written),
        "most": most,
        "seconds": SECONDS,
        "memory": MEMORY,
    }
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            input=json.dumps(task).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        ended = -1
    exceeded = {
        _TOO_LONG: ("characters", f"writes more than {most:,} characters for {len(written):,}"),
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
