# Source this after setup_venv.sh. It installs the compilers for GPUs and TPUs that match the environment's JAX, and
# NVIDIA's assembler and disassembler: about 1.2 GB. They have a folder of their own, because in the environment itself
# JAX would look for the devices, and complain, each time it starts.

setup_compilers() {
    local folder=$PWD/.venv/compilers wanted
    wanted=$(
        python - <<'PYTHON'
import re
from importlib.metadata import requires

stated = dict(re.match(r"([\w-]+)([^;]*)", line).groups() for line in requires("jax") if re.search("cuda13-local|tpu", line))
plugin = stated["jax-cuda13-plugin"].strip()
print(f"jax-cuda13-plugin{plugin} jax-cuda13-pjrt{plugin} libtpu{stated['libtpu'].strip()} nvidia-cuda-nvcc>=13 nvidia-cuda-nvdisasm>=13")
PYTHON
    ) || return 1
    if [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing compilers for GPUs and TPUs in $folder." >&2
        rm -rf "$folder"
        # shellcheck disable=SC2086 # a list
        if ! python -m pip install -qq --disable-pip-version-check --no-deps --target "$folder" $wanted; then
            echo "They cannot be installed here; the tests marked aot are skipped." >&2
            return 0
        fi
        echo "$wanted" >"$folder/installed"
    fi
    export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"
}

setup_compilers
