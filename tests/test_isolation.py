"""The isolation that conftest.py gives every test, on any machine."""

import os
import socket
from pathlib import Path

import huggingface_hub.constants as hub
import pytest
import torch

import attnscope
from attnscope.loading import fetch
from local_only import NetworkError


def test_the_caches_of_the_user_are_not_used() -> None:
    home = Path(os.environ["HF_HOME"])
    assert home.parent.name.startswith("attnscope-tests-")
    for place in (hub.HF_HOME, hub.HF_HUB_CACHE, hub.HF_TOKEN_PATH):
        assert Path(place).is_relative_to(home)
    assert hub.HF_HUB_OFFLINE
    assert fetch.where("smollm2") is None


def test_a_model_is_not_looked_up_on_the_network() -> None:
    with pytest.raises(attnscope.errors.ModelError):
        attnscope.load("someone/no-such-model")


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "example.org", b"example.org"])
def test_other_machines_cannot_be_reached(host: str) -> None:
    with pytest.raises(NetworkError):
        socket.create_connection((host, 80), timeout=1)


def test_this_machine_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=60).close()


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"
