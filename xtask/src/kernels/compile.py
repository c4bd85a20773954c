"""Calls NVRTC and nvFatbin, which come as shared libraries without a program of their own.

compile.py compile LIBRARY_DIR SOURCE OUTPUT OPTION...    one image of SOURCE; its headers lie beside it
compile.py pack LIBRARY_DIR NAME OUTPUT KIND:ARCH:FILE...   images to one fatbin; KIND is cubin or ptx

One version of NVRTC per process: two in one would share symbols.
"""

import ctypes
import pathlib
import sys


def load(folder, pattern):
    """The one library of this name, its symbols visible to the libraries that it loads."""
    found = sorted(pathlib.Path(folder).glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder}: expected one {pattern}, found {len(found)}")
    return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)


def strings(texts):
    return (ctypes.c_char_p * max(1, len(texts)))(*[text.encode() for text in texts])


def compile_image(folder, source, output, options):
    load(folder, "libnvrtc-builtins.so*")
    nvrtc = load(folder, "libnvrtc.so*")
    source = pathlib.Path(source)
    headers = sorted(source.parent.glob("*.h"))
    program = ctypes.c_void_p()

    def fetch(what):
        size = ctypes.c_size_t()
        check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"size of {what}")
        text = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, f"nvrtcGet{what}")(program, text), what)
        return text.raw

    def check(status, doing):
        if status:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            sys.exit(f"NVRTC, {doing}: {nvrtc.nvrtcGetErrorString(status).decode()}")

    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            source.read_bytes(),
            source.name.encode(),
            len(headers),
            (ctypes.c_char_p * len(headers))(*[header.read_bytes() for header in headers]),
            strings([header.name for header in headers]),
        ),
        "creating the program",
    )
    status = nvrtc.nvrtcCompileProgram(program, len(options), strings(options))
    log = fetch("ProgramLog").rstrip(b"\0 \n").decode()
    if log:
        print(log, file=sys.stderr)
    check(status, f"compiling {source.name} with {' '.join(options)}")
    kind = "CUBIN" if any(option.startswith("--gpu-architecture=sm_") for option in options) else "PTX"
    pathlib.Path(output).write_bytes(fetch(kind))


def pack(folder, name, output, images):
    nvfatbin = load(folder, "libnvfatbin.so*")
    handle = ctypes.c_void_p()

    def check(status, doing):
        if status:
            nvfatbin.nvFatbinGetErrorString.restype = ctypes.c_char_p
            sys.exit(f"nvFatbin, {doing}: {nvfatbin.nvFatbinGetErrorString(status).decode()}")

    # Not compressed: the project's tests read the PTX that is shipped.
    options = ["-cuda", "-64", "-compress=false"]
    check(nvfatbin.nvFatbinCreate(ctypes.byref(handle), strings(options), ctypes.c_size_t(len(options))), "create")
    for image in images:
        kind, arch, file = image.split(":", 2)
        code = pathlib.Path(file).read_bytes()
        text = ctypes.create_string_buffer(code, len(code))
        size = ctypes.c_size_t(len(code))
        if kind == "ptx":
            status = nvfatbin.nvFatbinAddPTX(handle, text, size, arch.encode(), name.encode(), b"")
        else:
            status = nvfatbin.nvFatbinAddCubin(handle, text, size, arch.encode(), name.encode())
        check(status, f"adding {file}")
    size = ctypes.c_size_t()
    check(nvfatbin.nvFatbinSize(handle, ctypes.byref(size)), "size")
    fatbin = ctypes.create_string_buffer(size.value)
    check(nvfatbin.nvFatbinGet(handle, fatbin), "get")
    pathlib.Path(output).write_bytes(fatbin.raw)


if __name__ == "__main__":
    if len(sys.argv) > 4 and sys.argv[1] == "compile":
        compile_image(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
    elif len(sys.argv) > 5 and sys.argv[1] == "pack":
        pack(sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        sys.exit(__doc__)
