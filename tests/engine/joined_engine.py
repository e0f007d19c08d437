"""An engine in a process of its own: `python joined_engine.py OPTIONS PROMPTS`, in JSON. It prints the tokens of each prompt.

With a third argument it says `ready` first, and ends when stdin does.
"""

from __future__ import annotations

import json
import sys

from enginery import LLM
from enginery.contracts.request import SamplingParams


def main() -> None:
    options, prompts = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    llm = LLM(**options)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    if len(sys.argv) > 3:
        print("ready", flush=True)
        sys.stdin.read()
    print(json.dumps([list(done.token_ids) for done in llm.generate(prompts, params)]), flush=True)
    llm.close()


if __name__ == "__main__":
    main()
