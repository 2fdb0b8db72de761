"""Builds the pretend driver for the packages of this environment, and says how programs use it.

    python -m tests.pretend.build FOLDER                build it there
    . FOLDER/env.sh; python PROGRAM                     run a program on it

Libraries of torch and of vLLM ask for far more than what is written here; without a symbol they do
not load. So all others that they ask for are compiled as functions that do nothing and succeed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).parent
LIBRARIES: Final = (
    "libcudart.so.13",
    "libcuda.so.1",
    "libcublasLt.so.13",
    "libcublas.so.13",
    "libnvidia-ml.so.1",
    "libnccl.so.2",
)
"""In the order in which a program loads them before all others."""
ASKING: Final = (
    "torch/lib/*.so",
    "torchvision/*.so",
    "torchaudio/lib/*.so",
    "vllm/**/*.so",
    "nvidia/cu13/lib/libcusolver.so.*",
)
"""What may ask for symbols, in site-packages."""
STUBS: Final = {
    "cudart_stubs.inc": (r"(__)?cuda[A-Z]\w*", "cudart.c"),
    "cuda_stubs.inc": (r"cu[A-Z]\w*", "cuda.c"),
    "blas_stubs.inc": (r"cublas(?!Lt)\w+", "cublas.c"),
    "blaslt_stubs.inc": (r"cublasLt\w+", "cublas.c"),
    "nccl_stubs.inc": (r"nccl[A-Z]\w*", "nccl.c"),
}
"""Files of functions that do nothing: the names that they take, and the file that has others."""
API: Final = '__attribute__((visibility("default")))'


def site_packages() -> Path:
    """Where torch lies. Raises `RuntimeError` without it."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise RuntimeError("torch is not installed here: run `make gpu-dry`")
    return Path(found.origin).parents[1]


def undefined(libraries: Iterable[Path]) -> set[str]:
    """Symbols that these libraries take from others."""
    command = ["nm", "-D", "--undefined-only", *map(str, libraries)]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {match[1] for match in re.finditer(r"^ +U (\w+)", listed, re.MULTILINE)}


def stubs(symbols: Iterable[str], source: str) -> str:
    """C functions that succeed, for what `source` does not define."""
    return "".join(
        f"{API} int {name}() {{ return 0; }}\n"
        for name in sorted(symbols)
        if not re.search(rf"[ *]{name}\(", source)
    )


def build(folder: Path, site: Path) -> None:
    """Compile all libraries into `folder`, and write ``env.sh``. Raises `CalledProcessError`."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = undefined(sorted(path for pattern in ASKING for path in site.glob(pattern)))
    for name, (pattern, source) in STUBS.items():
        wanted = {symbol for symbol in asked if re.fullmatch(pattern, symbol)}
        (folder / name).write_text(stubs(wanted, (SOURCES / source).read_text()))
    (folder / "runtime_stubs.c").write_text('#include "cudart_stubs.inc"\n')
    runtime, driver, blas_lt, blas, nvml, nccl = LIBRARIES
    headers = [
        f"-I{site / place / 'include'}" for place in ("nvidia/cu13", "triton/backends/nvidia")
    ]
    compile_(folder, runtime, "cudart.c", "runtime_stubs.c", *headers, *versioned(folder, runtime))
    compile_(folder, driver, "cuda.c", f"./{runtime}", "-ldl")
    products = {blas: "blas_stubs.inc", blas_lt: "blaslt_stubs.inc"}
    for name, file in products.items():
        options = [f'-DSTUBS="{file}"', *versioned(folder, name)]
        compile_(folder, name, "cublas.c", *options, *(["-DLT"] if name == blas_lt else []))
    compile_(folder, nvml, "nvml.c")
    compile_(folder, nccl, "nccl.c", f"./{runtime}", f"./{driver}")
    (folder / "env.sh").write_text(environment(folder.resolve(), site))


def versioned(folder: Path, name: str) -> list[str]:
    """Options for symbols that carry the library's name as their version, as callers expect."""
    (folder / f"{name}.map").write_text(f"{name} {{ global: *; }};\n")
    return [f"-Wl,--version-script={name}.map"]


def compile_(folder: Path, name: str, *arguments: str) -> None:
    """One library. Files are those of the sources, or else of `folder`."""
    places = [str(SOURCES / one) if (SOURCES / one).is_file() else one for one in arguments]
    command = ["gcc", "-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-I.", f"-I{SOURCES}"]
    command += [*places, "-o", name, f"-Wl,-soname,{name}", "-lpthread"]
    subprocess.run(command, cwd=folder, check=True)


def environment(folder: Path, site: Path) -> str:
    """What a shell reads before a program. vLLM asks the compiler for the loaded libcuda."""
    preload = ":".join(str(folder / name) for name in LIBRARIES)
    nvidia = site / "nvidia" / "cu13" / "lib"
    return f"""# The pretend driver: . {folder}/env.sh
export LD_PRELOAD={preload}
export LD_LIBRARY_PATH={folder}:{nvidia}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
export TRITON_LIBCUDA_PATH={folder} VLLM_USE_FLASHINFER_SAMPLER=0 PRETEND=1
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
"""


if __name__ == "__main__":
    build(Path(sys.argv[1]), site_packages())
