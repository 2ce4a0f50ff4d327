# Sourced by the other scripts: goes to the project's folder and sets PYTHON to that of .venv.
#   install requirements.txt      makes .venv if there is none and installs, unless that was done with these very files
#   round_as_avx2                 limits PyTorch to AVX2, which old and new AMD processors round alike, unless the variables are set
# Set PYTHON beforehand to use an environment of your own; nothing is installed then.
called_from="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -n "${PYTHON:-}" ]; then
  install() { :; }
else
  PYTHON="$PWD/.venv/bin/python"
  install() {
    local stamp=".venv/.installed-$1"
    [ -x "$PYTHON" ] || python3 -m venv .venv
    if ! cat requirements*.txt | cmp -s - "$stamp"; then
      echo "installing $1 into .venv ..."
      "$PYTHON" -m pip install --quiet --disable-pip-version-check -r "$1"
      cat requirements*.txt >"$stamp"
    fi
  }
fi

round_as_avx2() {
  export ATEN_CPU_CAPABILITY="${ATEN_CPU_CAPABILITY:-avx2}" ONEDNN_MAX_CPU_ISA="${ONEDNN_MAX_CPU_ISA:-AVX2}"
  export MKL_ENABLE_INSTRUCTIONS="${MKL_ENABLE_INSTRUCTIONS:-AVX2}"
}
