"""SIGINT and SIGTERM end `attnscope serve` soon, also while a job runs."""

import json
import re
import signal
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

# A server whose model never loads, and whose queries never end.
BUSY = """
import sys, threading
from attnscope.web.runs import Runs
from attnscope.web.model_cache import ModelCache

def stuck(*arguments):
    print("busy", flush=True)
    threading.Event().wait()

ModelCache.get = Runs.query = stuck
from attnscope.cli import main
sys.argv = ["attnscope", "serve", "--port", "0", "--no-open"]
main()
"""


REQUESTS = {
    "views": {"model": "zoo:math-qwen2", "text": "one"},
    "query": {"run": "one", "sql": "SELECT 1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_while_a_job_runs(ended_by: signal.Signals) -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address is not None
            connections = []
            for path, body in REQUESTS.items():
                connections.append(HTTPConnection(urlsplit(address[0]).netloc))
                headers = {"content-type": "application/json"}
                connections[-1].request("POST", f"/api/{path}", json.dumps(body), headers)
                assert server.stdout.readline() == "busy\n"
            server.send_signal(ended_by)
            _, errors = server.communicate(timeout=200)
            for connection in connections:
                connection.close()
        finally:
            server.kill()
    assert server.returncode in (0, -ended_by)
    assert "Traceback" not in errors
