"""``python kernel_compiler.py ARCHITECTURE OPTION...``: CUDA source on standard input, compiled.

The compiler's log goes to standard error, the machine code to standard output; the exit status is
1 if it does not compile. A process of its own: beside torch's libraries NVRTC ends the process.
"""

from __future__ import annotations

import sys

from cuda.bindings import nvrtc


def main(architecture: str, options: list[str]) -> int:
    _, program = nvrtc.nvrtcCreateProgram(sys.stdin.buffer.read(), b"kernel.cu", 0, [], [])
    arguments = [f"-arch={architecture}".encode(), *(option.encode() for option in options)]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    sys.stderr.write(log.rstrip(b"\0").decode())
    if code == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        binary = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, binary)
        sys.stdout.buffer.write(binary)
    return int(code != nvrtc.nvrtcResult.NVRTC_SUCCESS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
