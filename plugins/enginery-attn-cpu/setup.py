"""The compiled part, which is left out where there is no compiler: the plugin then says so and another backend decodes."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/enginery_attn_cpu/native")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-g0",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
]

setup(
    ext_modules=[
        Extension(
            "enginery_attn_cpu._kernels",
            sources=[str(path) for path in sorted(NATIVE.glob("*.cpp"))],
            depends=[str(path) for path in sorted([*NATIVE.glob("*.h"), *NATIVE.glob("*.inc")])],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
