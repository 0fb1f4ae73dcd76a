"""Attention statistics of models that vLLM runs.

    client (watch.py) ── collective_rpc ── worker.py: hooks ── recorder.py: sums per request
                                                     └── pages.py: keys, read from the KV cache

Only sums leave the worker. `docs/vllm.md` lists what is supported and what it costs.
"""
