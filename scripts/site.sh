#!/usr/bin/env bash
# Builds the documentation site, or shows it while one writes.
#     bash scripts/site.sh              builds it in the folder `site`; any warning is an error
#     bash scripts/site.sh serve        serves it on port 8000, and builds a page again when it changes
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh docs

export NO_MKDOCS_2_WARNING=1 # a notice of mkdocs-material about another tool
command="${1:-build}"
if [ $# -gt 0 ]; then shift; fi
exec python -m mkdocs "$command" "$@"
