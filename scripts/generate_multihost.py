"""Generates on the devices of several hosts: the same command on each. docs/multihost.md shows it at work.

    python scripts/generate_multihost.py MODEL PROMPT [PROMPT ...] --data 2 --model 4
        --coordinator HOST:PORT --processes 2 --process 0     where nothing (Slurm, a TPU pod) tells JAX by itself

Every process prints the answers, as one line of JSON.
"""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np

import kvjax


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="MODEL", help="a folder or the name of a repository on the hub")
    parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="as many as a multiple of --data")
    parser.add_argument("--data", type=int, default=1, help="devices over which prompts are spread")
    parser.add_argument("--model", type=int, default=1, help="devices over which heads and MLP columns are spread")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where it is free to listen")
    parser.add_argument("--processes", type=int, help="how many there are")
    parser.add_argument("--process", type=int, help="which one this is, from 0")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    # Before anything asks what devices there are.
    jax.distributed.initialize(args.coordinator, num_processes=args.processes, process_id=args.process)
    mesh = kvjax.make_mesh(data=args.data, model=args.model)
    params, tokenizer = kvjax.load(args.checkpoint, mesh=mesh)
    out = kvjax.generate(
        params,
        args.prompts,
        policy=kvjax.policies.parse(args.policy),
        max_new_tokens=args.max_new_tokens,
        tokenizer=tokenizer,
        log_probs=True,
    )
    print(
        json.dumps(
            {
                "process": jax.process_index(),
                "local_devices": jax.local_device_count(),
                "devices": jax.device_count(),
                "tokens": out.tokens.tolist(),
                "lengths": out.lengths.tolist(),
                "log_probs": np.round(np.asarray(out.log_probs, float), 4).tolist(),
                "text": out.text,
            }
        )
    )


if __name__ == "__main__":
    main()
