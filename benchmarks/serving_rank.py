"""One rank of vLLM for ``benchmarks/serving.py``, which starts it on each host."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "stacks"))
from small_llama import held_out, train  # noqa: E402

PROMPT, SHORT, NEW_TOKENS, WARM_UP = 512, 16, 33, 3


SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
}


def main() -> None:
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    # the emulated hosts share the memory of one machine, which real hosts do not
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
    result, repeats, dtype = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    model = train(ROOT / "build" / "stacks" / "vllm" / "llama")
    llm = LLM(
        str(model),
        tensor_parallel_size=int(os.environ["WORLD_SIZE"]),
        distributed_executor_backend="external_launcher",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=1024,
        dtype=dtype,
    )

    def timed(prompt: list[int], new_tokens: int) -> tuple[float, list[int]]:
        sampling = SamplingParams(
            max_tokens=new_tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        start = time.perf_counter()
        [answer] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - start, list(answer.outputs[0].token_ids)

    first, rates, tokens = [], [], []
    for number in range(WARM_UP + repeats):
        prefill, one = timed(held_out(model, PROMPT, number), 1)
        start, _ = timed(held_out(model, SHORT, number), 1)
        whole, many = timed(held_out(model, SHORT, number), NEW_TOKENS)
        tokens.append(one + many)
        if number >= WARM_UP:
            first.append(prefill * 1e3)
            rates.append((NEW_TOKENS - 1) / (whole - start))
    if os.environ["RANK"] == "0":
        result.write_text(json.dumps({"ttft_ms": first, "tokens_per_s": rates, "tokens": tokens}))


if __name__ == "__main__":
    main()
