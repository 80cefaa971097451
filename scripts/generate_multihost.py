"""Generates on the devices of several hosts. Run the same command on each host.

docs/guide/many_devices.md has examples.

    python -m scripts.generate_multihost MODEL PROMPT [PROMPT ...] --data 2 --model 4
        --coordinator HOST:PORT --processes 2 --process 0     where neither Slurm nor a TPU pod configures JAX

Every process prints the answers as one line of JSON.
"""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np

import kvjax


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="+", help="the number of prompts must be a multiple of --data"
    )
    parser.add_argument("--data", type=int, default=1, help="the number of devices that prompts are sharded over")
    parser.add_argument(
        "--model", type=int, default=1, help="the number of devices that heads and MLP columns are sharded over"
    )
    parser.add_argument("--policy", default="full")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="the host of process 0 and a free port on it")
    parser.add_argument("--processes", type=int, help="the number of processes")
    parser.add_argument("--process", type=int, help="the index of this process, from 0")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    # JAX must be initialized before the first use of its devices.
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
