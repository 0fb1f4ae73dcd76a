"""Ctrl-C, or a signal of the system, ends the page soon, whatever it is busy with."""

import json
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

# A server whose model never comes to an end of its pass, and a run that never opens.
BUSY = """
import sys, threading
from attnscope.web.runs import Runs
from attnscope.web.model_cache import Shelf

def stuck(*asked):
    print("busy", flush=True)
    threading.Event().wait()

Shelf.get = Runs.query = stuck
from attnscope.cli import main
sys.argv = ["attnscope", "serve", "--port", "0", "--no-open"]
main()
"""


ASKED = {
    "views": {"model": "zoo:math-qwen2", "text": "one"},
    "query": {"run": "one", "sql": "SELECT 1"},
}


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT])
def test_ends_soon_while_a_model_is_busy(ended_by: signal.Signals) -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address is not None
            people = []
            for where, body in ASKED.items():
                people.append(HTTPConnection(urlsplit(address[0]).netloc))
                headers = {"content-type": "application/json"}
                people[-1].request("POST", f"/api/{where}", json.dumps(body), headers)
                assert server.stdout.readline() == "busy\n"
            server.send_signal(ended_by)
            _, said = server.communicate(timeout=200)  # it waited for ever
            for person in people:
                person.close()
        finally:
            server.kill()
    assert server.returncode in (0, -ended_by)
    assert "Traceback" not in said
