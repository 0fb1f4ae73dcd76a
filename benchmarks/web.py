"""The live page under use and under load: `python benchmarks/web.py [--only use long load]`.

Starts `attnscope serve` in a process of its own and asks it from this one: how long until the first
picture, how long a switch of head takes, how much memory it holds, and what many clients at once
get. Prints Markdown for docs/page.md.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import httpx

TEXT = "Tom has 12 apples. He buys 3 bags with 4 apples each. How many apples has Tom now? "


def memory(pid: int, what: str = "VmRSS") -> float:
    """MiB of a process now, or at most (`VmHWM`)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(what)).split()[1]) / 1024


def measured(client: httpx.Client, model: str, text: str) -> tuple[str, float, float]:
    """The view, seconds until something of it could be seen, and until all was measured."""
    began, first = time.perf_counter(), None
    body = {"model": model, "text": text, "beyond_positions": True}
    job = client.post("/api/views", json=body).json()["job"]
    while True:
        now = client.get(f"/api/jobs/{job}").json()
        if now["result"] and first is None:
            client.get(f"/api/views/{now['result']['view']}").raise_for_status()
            client.get(f"/api/views/{now['result']['view']}/token-values").raise_for_status()
            first = time.perf_counter() - began
        if now["state"] == "done":
            return str(now["result"]["view"]), float(first or 0), time.perf_counter() - began
        if now["state"] not in ("waiting", "running"):
            raise SystemExit(now["message"])
        time.sleep(0.01 if time.perf_counter() - began < 2 else 0.1)  # asking costs the server too


def row_seconds(client: httpx.Client, view: str, token: int, direction: str) -> float:
    """Seconds until the attention row or column of a token is available."""
    began = time.perf_counter()
    body = {"token": token, "layer": 1, "direction": direction}
    job = client.post(f"/api/views/{view}/attention-row", json=body).json()["job"]
    while client.get(f"/api/jobs/{job}").json()["state"] in ("waiting", "running"):
        time.sleep(0.01)
    return time.perf_counter() - began


def one_view(client: httpx.Client, pid: int, model: str, text: str) -> str:
    view, first, whole = measured(client, model, text)
    data = client.get(f"/api/views/{view}").json()
    switches = []
    for n in range(30):
        began = time.perf_counter()
        where = {"layer": data["layers"][n % len(data["layers"])], "head": n % data["heads"][0]}
        client.get(f"/api/views/{view}/token-values", params=where).raise_for_status()
        switches.append(1000 * (time.perf_counter() - began))
    rows = [row_seconds(client, view, data["read"] // 2, direction) for direction in ("to", "by")]
    return (
        f"| {model} | {len(data['tokens']):,} | {first:.1f} s | {whole:.1f} s | "
        f"{median(switches):.0f} ms ({max(switches):.0f} at most) | "
        f"{rows[0]:.2f} s / {rows[1]:.1f} s | {memory(pid, 'VmHWM'):.0f} MiB |"
    )


async def loaded(address: str, model: str, clients: int, seconds: float) -> dict[str, list[float]]:
    """Latencies of every kind of request; busy answers are counted on their own."""
    took: dict[str, list[float]] = {"measure": [], "slice": [], "busy": [], "error": []}
    end = time.perf_counter() + seconds

    async def person(client: httpx.AsyncClient, n: int) -> None:
        while time.perf_counter() < end:
            began = time.perf_counter()
            body = {"model": model, "text": TEXT + str(n)}
            answer = await client.post("/api/views", json=body)
            if answer.status_code == 429:
                took["busy"].append(time.perf_counter() - began)
                await asyncio.sleep(0.5)
                continue
            job, state = answer.json()["job"], {"state": "waiting"}
            while state["state"] in ("waiting", "running"):
                await asyncio.sleep(0.1)
                state = (await client.get(f"/api/jobs/{job}")).json()
            took["measure" if state["state"] == "done" else "error"].append(
                time.perf_counter() - began
            )
            for head in range(3):
                began = time.perf_counter()
                at = f"/api/views/{state['result']['view']}/token-values"
                answer = await client.get(at, params={"layer": 1, "head": head})
                # A view may have been forgotten: so many others were measured meanwhile.
                kind = "slice" if answer.status_code in (200, 404) else "error"
                took[kind].append(time.perf_counter() - began)

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
        await asyncio.gather(*(person(client, n) for n in range(clients)))
    return took


def under_load(address: str, pid: int, model: str, clients: int, seconds: float) -> None:
    before = memory(pid)
    took = asyncio.run(loaded(address, model, clients, seconds))
    print(
        f"\n{clients} clients for {seconds:.0f} s on {model}: {len(took['error'])} errors.\n\n"
        "| request | answered | median | 95 % | 99 % |\n" + "| --- " * 5 + "|"
    )
    for kind, times in took.items():
        if len(times) > 1:
            cuts = quantiles(times, n=100)
            shown = " | ".join(f"{1000 * t:.0f} ms" for t in (median(times), cuts[94], cuts[98]))
            print(f"| {kind} | {len(times)} | {shown} |")
    print(f"\nThe server's memory: {before:.0f} MiB before, {memory(pid):.0f} after.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["zoo:smollm2", "zoo:math-qwen2"])
    parser.add_argument("--only", nargs="*", default=["use", "long", "load"])
    parser.add_argument("--long", type=int, default=16_000, help="tokens, on the last model")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    given = parser.parse_args()
    command = [sys.executable, "-m", "attnscope", "serve", "--port", "0", "--no-open"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[3]
        with httpx.Client(base_url=address, timeout=600) as client:
            print(
                "| model | tokens | first picture | all layers | another head | "
                "row / column | peak memory |\n" + "| --- " * 7 + "|"
            )
            for model in given.models if "use" in given.only else ():
                measured(client, model, TEXT)  # loads it
                print(one_view(client, server.pid, model, TEXT), flush=True)
            measured(client, given.models[-1], TEXT)
            if "long" in given.only:
                long = TEXT * (given.long // 28)
                print(one_view(client, server.pid, given.models[-1], long), flush=True)
        if "load" in given.only:
            under_load(address, server.pid, given.models[-1], given.clients, given.seconds)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
