"""Serve a small Llama with vLLM, tensor-parallel over 2 hosts, plain and under three policies.

    make stacks STACK=vllm

No line of the server knows commpass: ``COMMPASS_POLICY`` is set, and vLLM loads the plugin. Exit
with 0 only if sites were compressed, the lossless ones give the tokens of the plain server, and the
perplexity with int8 is near the plain one. Two policies force their codec, so that nothing depends
on the network of the machine.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_llama import held_out, train

BUILD = Path(__file__).parents[2] / "build" / "stacks" / "vllm"
COMMAND = Path(__file__).parent / "vllm_command.py"


def free_port() -> int:
    """Return a port on which no other server answers."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


PORT = free_port()
READY_S = 500
NEW_TOKENS, PROMPTS, PROMPT = 32, 4, 64
SCORED = 512
IN_CHUNKS = ("--max-num-batched-tokens", "128")
"""A prompt of 512 tokens is four steps."""
NEAR = 0.01
"""Relative difference of perplexity that int8 may make."""
FORCED = 'name = "{codec}"\n[[rule]]\ncodec = "{codec}"\nforce = true\n'
COMPRESSED = re.compile(r"policy '(\w+)': (\d+) of (\d+) sites? compressed, ([\d,]+) instead")


@dataclass(frozen=True)
class Served:
    """What a server gave: greedy tokens of several prompts, the perplexity of held-out text, and
    its log."""

    tokens: list[list[int]]
    perplexity: float
    log: str

    @property
    def compressed(self) -> int:
        """How many sites are compressed, of all its graphs."""
        return sum(int(found[1]) for found in COMPRESSED.findall(self.log))


def ask(path: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read() or "{}")


@contextmanager
def server(
    model: Path, name: str, *options: str, ranks: int = 2, **environment: str
) -> Iterator[Path]:
    """Start ``vllm serve`` as on hosts of one rank, wait until it is ready, and yield the path of
    its log.

    On one host whose processor has AVX-512, its ranks would sum through shared memory.
    """
    many = str(ranks)
    command = [sys.executable, str(COMMAND), "serve", str(model), "--skip-tokenizer-init"]
    command += ["--tensor-parallel-size", many, "--nnodes", many]
    command += ["--max-model-len", "1024", "--dtype", "float32", *options]
    command += ["--master-port", str(free_port())]
    log = BUILD / f"{name}.log"
    with ExitStack() as hosts:
        answers = ["--node-rank", "0", "--port", str(PORT)]
        first = hosts.enter_context(_process([*command, *answers], log, environment))
        for number in range(1, ranks):
            other = [*command, "--node-rank", str(number), "--headless"]
            its_log = BUILD / f"{name}, host {number}.log"
            hosts.enter_context(_process(other, its_log, environment))
        wait_until_ready(first, log)
        yield log


@contextmanager
def _process(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of vLLM, and end it with all that it started."""
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(BUILD / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | variables | environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"vLLM ended before it was ready:\n{log.read_text()[-4000:]}")
        try:
            ask("/health")
            return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"vLLM was not ready in {READY_S} s:\n{log.read_text()[-4000:]}")


def serve(model: Path, name: str, *options: str, ranks: int = 2, **environment: str) -> Served:
    start = time.monotonic()
    with server(model, name, *options, ranks=ranks, **environment) as log:
        ready = time.monotonic() - start
        common = {"model": str(model), "temperature": 0, "return_token_ids": True}
        tokens = []
        for number in range(PROMPTS):
            answer = ask(
                "/v1/completions",
                prompt=held_out(model, PROMPT, number),
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                **common,
            )
            tokens.append(answer["choices"][0]["token_ids"])
        scored = ask(
            "/v1/completions",
            prompt=held_out(model, SCORED),
            max_tokens=1,
            prompt_logprobs=0,
            **common,
        )
        logprobs = [
            next(iter(each.values()))["logprob"]
            for each in scored["choices"][0]["prompt_logprobs"]
            if each
        ]
        perplexity = math.exp(-sum(logprobs) / len(logprobs))
        served = Served(tokens, perplexity, log.read_text())
    print(
        f"{name:16} ready in {ready:.0f} s, {served.compressed} sites compressed,"
        f" perplexity {perplexity:.4f}",
        flush=True,
    )
    return served


def check(holds: bool, what: str) -> None:
    print(("ok:     " if holds else "FAILED: ") + what, flush=True)
    if not holds:
        raise SystemExit(1)


def main() -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    model = train(BUILD / "llama")
    plain = serve(model, "plain")
    check(plain.compressed == 0 and "commpass" not in plain.log, "plain vLLM is left alone")
    simplified = serve(model, "lossless", COMMPASS_POLICY="lossless")
    check(simplified.tokens == plain.tokens, "the tokens under lossless are the plain ones")
    exact = serve(model, "exponent", COMMPASS_POLICY=forced("exponent"))
    check(exact.compressed > 0, "sites are compressed by codec exponent")
    check(exact.tokens == plain.tokens, "its tokens are the plain ones")
    check(exact.perplexity == plain.perplexity, "its perplexity is the plain one, to the bit")
    coded = serve(model, "int8", COMMPASS_POLICY=forced("int8"))
    check(coded.compressed > 0, "sites are compressed by codec int8")
    check("one graph for all numbers of tokens" in coded.log, "vLLM on CPUs has one graph")
    difference = abs(coded.perplexity / plain.perplexity - 1)
    check(difference < NEAR, f"its perplexity differs by {difference:.3%}")
    again = serve(model, "int8, again", COMMPASS_POLICY=forced("int8"))
    check(again.tokens == coded.tokens, "after a restart with warm caches its tokens are the same")
    of_four = serve(model, "int8, 4 ranks", *IN_CHUNKS, ranks=4, COMMPASS_POLICY=forced("int8"))
    check(of_four.compressed > 0, "on 4 ranks, with prefill in chunks, sites are compressed")
    difference = abs(of_four.perplexity / plain.perplexity - 1)
    check(difference < NEAR, f"there the perplexity differs by {difference:.3%}")
    option = json.dumps({"commpass": {"policy": forced("int8")}})
    by_option = serve(model, "int8, by option", "--additional-config", option)
    check(by_option.tokens == coded.tokens, "by the option of vLLM its tokens are the same")


def forced(codec: str) -> str:
    """Return the path of a policy that forces a codec."""
    path = BUILD / f"{codec}.toml"
    path.write_text(FORCED.format(codec=codec))
    return str(path)


if __name__ == "__main__":
    main()
