#!/usr/bin/env bash
# `kvjax demo`, in an environment it makes itself. Arguments go to the command: `bash scripts/demo.sh --help`.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh plot
exec kvjax demo "$@"
