"""Ranks as processes in the interpreter, after one import of Triton: `python .. WHICH ..`, each RANKS,AHEAD or `early`."""

from __future__ import annotations

import sys

import peer_ops_ranks
import quick_interpreter
import sent_rows_ranks

if __name__ == "__main__":
    quick_interpreter.install(peer_ops_ranks.INTERPRETER)
    for which in sys.argv[1:]:
        if which == "early":
            sent_rows_ranks.main()
        else:
            peer_ops_ranks.main(*map(int, which.split(",")))
        print(f"{which}: ranks agree", flush=True)
