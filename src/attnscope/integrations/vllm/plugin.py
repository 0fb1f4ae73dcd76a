"""vLLM's plugin entry point: gives every worker the method that `attnscope.watch` calls.

vLLM loads this plugin in all its processes if attnscope is installed beside it. The method does
nothing until a client calls it. The attention backends of attnscope are registered only if
VLLM_PLUGINS names the plugin.
"""

from typing import Any

NAME = "attnscope"
"""The name of the plugin, and of the method of the workers."""


def register() -> None:
    """Add the method to vLLM's workers; vLLM calls this in each of its processes."""
    from vllm import envs
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, NAME, run)
    if NAME in (envs.VLLM_PLUGINS or ()):
        from attnscope.integrations.vllm import backends

        backends.register()


def run(worker: Any, command: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a command of `attnscope.watch` in a worker."""
    from attnscope.integrations.vllm import worker as commands

    return commands.run(getattr(worker, "worker", worker), command, options)
