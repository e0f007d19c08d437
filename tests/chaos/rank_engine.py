"""An engine of two ranks in a process of its own: `python rank_engine.py [OPTIONS, PROMPT_LEN, NUM_TOKENS]`, in JSON.

It says `ready`, waits for a line on stdin, and then answers prompts until it breaks: a line for each token, and how it ended.
"""

from __future__ import annotations

import json
import sys

from enginery import LLM
from enginery.contracts.request import SamplingParams
from enginery.errors import EnginError


def main() -> int:
    options, prompt_len, num_tokens = json.loads(sys.argv[1])
    try:
        llm = LLM(**options)
        print("ready", flush=True)
        sys.stdin.readline()
        print("begun", flush=True)
        while True:
            for delta in llm.stream([7] * prompt_len, SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)):
                print("token", delta.usage.num_output_tokens, flush=True)
    except EnginError as error:
        print(f"ended: {error}".replace("\n", " | "), flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
