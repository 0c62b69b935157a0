# Sourced by the other scripts: makes .venv in the repository root and installs what they need. Not run by itself.
#
#   . "$(dirname "$0")/_env.sh"
#   prepare EXTRA...        # then "$venv_python" has torch, this package with those extras, and a CUDA compiler
#
# A second call does nothing, in well under a second. Variables that change what is done:
#   PYTHON=python3.12             the Python to make .venv from (3.10 to 3.13); default: python3, then newer ones
#   W8A8_SYSTEM_SITE_PACKAGES=1   let .venv use the packages of that Python, such as an image's own torch
#   W8A8_TORCH="torch==2.11.0"    what to ask pip for instead of the default torch; may hold pip options
#   CUTLASS_W8A8_NVCC, CUDA_HOME  which nvcc to use; one on PATH is found too
#   CXX                           the C++ compiler; default: g++, then c++

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repository/.venv
venv_python=$venv/bin/python

# With CUDA 13.0, the version this torch is built for, CUDA wheels of torch and of the compiler do not conflict.
torch_release=2.13.0

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        # Run it: a name on PATH may be a version manager's shim with nothing behind it.
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        fail "PYTHON=$PYTHON is not a Python from 3.10 to 3.13; set it to one, or unset it"
    fi
    fail "no Python from 3.10 to 3.13 was found; install one, or set PYTHON to its path"
}

make_venv() {
    if "$venv_python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python options=(--clear)
    python=$(find_python) || exit 1
    if [ -n "${W8A8_SYSTEM_SITE_PACKAGES:-}" ]; then
        options+=(--system-site-packages)
    elif "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
        say "note: $python has torch already; to use it rather than download another, remove .venv and set" \
            "W8A8_SYSTEM_SITE_PACKAGES=1"
    fi
    say "making $venv with $("$python" --version)"
    "$python" -m venv "${options[@]}" "$venv" ||
        fail "could not make $venv; on Debian and Ubuntu: apt-get install python3-venv"
}

pip_install() { "$venv_python" -m pip install -qq --disable-pip-version-check "$@"; }

has_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi --list-gpus >/dev/null 2>&1; }

install_torch() {
    if "$venv_python" -c 'import torch' 2>/dev/null; then
        return
    fi
    if [ -n "${W8A8_TORCH:-}" ]; then
        say "installing $W8A8_TORCH"
        # shellcheck disable=SC2086  # may hold several words
        pip_install $W8A8_TORCH || fail "pip could not install W8A8_TORCH=$W8A8_TORCH; see its message above"
        return
    fi
    if ! has_gpu; then
        # PyPI's own Linux build brings several GB of CUDA libraries, of no use here. The CPU build is not on PyPI
        # but may be in a local index; else it is in PyTorch's.
        say "no NVIDIA GPU: installing the CPU build of torch $torch_release"
        # Their errors would alarm for nothing: a third way is left.
        if pip_install "torch==$torch_release+cpu" 2>/dev/null ||
            pip_install "torch==$torch_release" --index-url https://download.pytorch.org/whl/cpu --retries 1 2>/dev/null; then
            return
        fi
        say "the CPU build could not be had (download.pytorch.org not reachable?); taking PyPI's, with CUDA"
    fi
    say "installing torch $torch_release with CUDA (several GB)"
    pip_install "torch==$torch_release" ||
        fail "pip could not install torch; check the network, or set W8A8_TORCH to a build that suits this machine"
}

install_compiler() {
    # The package's own search, so that what it will use is what is checked.
    local check='from cutlass_w8a8.arch import SM90
from cutlass_w8a8.dtypes import DType
from cutlass_w8a8.toolchain.discover import find_toolkit, require
require(find_toolkit(), SM90, DType.E4M3)'
    if "$venv_python" -c "$check" 2>/dev/null; then
        return
    fi
    say "no CUDA compiler: installing the one from PyPI (105 MB)"
    pip_install --editable "$repository[toolchain]" ||
        fail "pip could not install the CUDA compiler; install a CUDA toolkit and set CUDA_HOME"
    "$venv_python" -c "$check" 2>&1 | tail -n 1 >&2
    [ "${PIPESTATUS[0]}" -eq 0 ] || fail "the CUDA compiler is not usable; do as the line above says"
}

# For the stamp: what was asked for, and the files that say what that means.
fingerprint() {
    {
        echo "$*"
        cat "$repository/pyproject.toml" "${BASH_SOURCE[0]}"
    } | cksum | cut -d ' ' -f 1
}

# prepare EXTRA...: see the top of this file.
prepare() {
    local stamp extras
    stamp=$venv/ready-$(fingerprint "$@")
    if [ -e "$stamp" ] && "$venv_python" -c '' 2>/dev/null; then
        return
    fi
    if ! command -v "${CXX:-g++}" >/dev/null && ! { [ -z "${CXX:-}" ] && command -v c++ >/dev/null; }; then
        fail "no C++ compiler (${CXX:-g++}) was found; install g++ (Debian, Ubuntu: apt-get install g++), or set CXX"
    fi
    make_venv
    install_torch
    extras=$(IFS=, && echo "$*")
    say "installing cutlass_w8a8 and what it needs"
    pip_install --editable "$repository${extras:+[$extras]}" || fail "the installation failed; see pip's message above"
    install_compiler
    # Written last: an interrupted installation is taken up again.
    : >"$stamp"
}
