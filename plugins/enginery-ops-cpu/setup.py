"""Builds the compiled kernels if there is a compiler. Without one the package installs as well, and runs in torch alone."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/enginery_ops_cpu/native")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
]

setup(
    ext_modules=[
        Extension(
            "enginery_ops_cpu._kernels",
            sources=sorted(map(str, NATIVE.glob("*.cpp"))),
            depends=sorted(map(str, [*NATIVE.glob("*.h"), *NATIVE.glob("*.inc")])),
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
