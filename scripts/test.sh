#!/usr/bin/env bash
# All checks: lint, format, types, tests. Installs what they need into .venv, inplace-abn built from source where there is a compiler.
#   bash scripts/test.sh [--fast] [pytest arguments]        --fast leaves out the tests marked slow
set -euo pipefail
case "${1:-}" in -h | --help) sed -n '2,3s/^# //p' "$0"; exit 0 ;; esac
source "$(dirname "$0")/environment.sh"

install requirements-dev.txt
if [ "$PYTHON" = "$PWD/.venv/bin/python" ] && ! "$PYTHON" -c 'import torch, inplace_abn' 2>/dev/null; then
  if command -v c++ >/dev/null; then
    echo "building inplace-abn (a minute or two) ..."
    SETUPTOOLS_SCM_PRETEND_VERSION=1.1.0 "$PYTHON" -m pip install --quiet --disable-pip-version-check \
      --no-build-isolation inplace-abn==1.1.0 || echo "inplace-abn could not be built: its tests will be skipped"
  else
    echo "no compiler: inplace-abn is not built and its tests will be skipped"
  fi
fi

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
"$PYTHON" -m mypy
selection=()
if [ "${1:-}" = "--fast" ]; then
  selection=(-m "not slow")
  shift
fi
exec "$PYTHON" -m pytest -n "${TEST_WORKERS:-auto}" "${selection[@]}" "$@"
