// The Python module: addresses and sizes as whole numbers. It trusts its caller, `backend.py`.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "threads.h"
#include "told.h"

namespace {

struct Known {
    const Kernels *kernels;
    bool runs;
};

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

const Known kKnown[] = {{&kernels_avx512_bf16, has_avx512() && __builtin_cpu_supports("avx512bf16")},
                        {&kernels_avx512, has_avx512()},
                        {&kernels_avx2, has_avx2()},
                        {&kernels_generic, true}};
#else
const Known kKnown[] = {{&kernels_generic, true}};
#endif

const Kernels *chosen = nullptr;

// What ENGINERY_CPU_ISA names, or the best; null with an ImportError where it names nothing that this CPU has.
const Kernels *choose() {
    const char *wanted = std::getenv("ENGINERY_CPU_ISA");
    for (const Known &each : kKnown) {
        if (each.runs && (wanted == nullptr || *wanted == 0 || std::strcmp(wanted, each.kernels->name) == 0)) return each.kernels;
    }
    PyErr_Format(PyExc_ImportError, "ENGINERY_CPU_ISA=%s is no instruction set of this CPU, or unknown; see `supported`", wanted);
    return nullptr;
}

// The arguments from `at` on as whole numbers. False, with an error set, where one is none.
bool read(PyObject *const *arguments, Py_ssize_t at, Py_ssize_t count, int64_t *numbers) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        numbers[i] = PyLong_AsLongLong(arguments[at + i]);
        if (numbers[i] == -1 && PyErr_Occurred() != nullptr) return false;
    }
    return true;
}

bool are(Py_ssize_t count, Py_ssize_t wanted, const char *what) {
    if (count == wanted) return true;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", what, wanted, count);
    return false;
}

template <typename T>
T *pointer(int64_t address) {
    return reinterpret_cast<T *>(static_cast<intptr_t>(address));
}

PyObject *attend(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    const Py_ssize_t of_batch = 8, of_layer = 10, of_rows = 8;
    int64_t b[of_batch], l[of_layer], r[of_rows];
    if (!are(count, of_batch + of_layer + of_rows + 2, "attend") || !read(arguments, 0, of_batch, b) ||
        !read(arguments, of_batch, of_layer, l) || !read(arguments, of_batch + of_layer, of_rows, r)) {
        return nullptr;
    }
    const double softcap = PyFloat_AsDouble(arguments[count - 2]), scale = PyFloat_AsDouble(arguments[count - 1]);
    if (PyErr_Occurred() != nullptr) return nullptr;
    const Layer layer{pointer<const void>(l[0]), pointer<const void>(l[1]), l[2], l[3], l[4], l[5], l[6], l[7], l[8], l[9],
                      static_cast<float>(softcap), static_cast<float>(scale), pointer<const float>(r[7])};
    const Batch batch{b[0], pointer<const int32_t>(b[1]), pointer<const int32_t>(b[2]), pointer<const int32_t>(b[3]), b[4],
                      nullptr, b[5], r[0], pointer<const void>(r[1]), r[2], r[3], pointer<void>(r[4]), r[5], r[6],
                      pointer<const uint8_t>(b[6]), b[7]};
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = ::attend(layer, batch, *chosen);
    Py_END_ALLOW_THREADS
    if (!done) {
        PyErr_Format(PyExc_IndexError, "the page table names a page that is not among the layer's %lld", static_cast<long long>(layer.pages));
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyObject *use(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (!are(count, 1, "use")) return nullptr;
    for (const Known &each : kKnown) {
        if (each.runs && PyUnicode_CompareWithASCIIString(arguments[0], each.kernels->name) == 0) {
            chosen = each.kernels;
            Py_RETURN_NONE;
        }
    }
    PyErr_Format(PyExc_ValueError, "%S is none of `supported`", arguments[0]);
    return nullptr;
}

PyMethodDef methods[] = {
    {"attend", TOLD(attend), METH_FASTCALL,
     "attend(requests, q_lens, kv_lens, page_table, table_stride, threads, trees, num_trees,\n"
     "keys, values, kv_type, pages, page_size, heads, kv_heads, dim, value_dim, window,\n"
     "type, q, q_row, q_head, out, out_row, out_head, sinks, softcap, scale): see native/attention.h. Types: 0 float32, 1 bfloat16."},
    {"use", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(use)), METH_FASTCALL,
     "use(name): compute with another of the `supported` instruction sets from now on; for tests and measurements."},
    {"record_calls", told::record, METH_O, "record_calls(list or None): append (function, arguments) of each call of this thread to it."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", "Attention over the pages of the KV pool.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() {
    chosen = choose();
    if (chosen == nullptr) return nullptr;
    PyObject *module = PyModule_Create(&definition), *supported = PyList_New(0);
    if (module == nullptr || supported == nullptr) return nullptr;
    for (const Known &each : kKnown) {
        PyObject *name = each.runs ? PyUnicode_FromString(each.kernels->name) : nullptr;
        if (name != nullptr) PyList_Append(supported, name);
        Py_XDECREF(name);
    }
    PyModule_AddObject(module, "supported", PyList_AsTuple(supported));
    Py_DECREF(supported);
    PyModule_AddStringConstant(module, "isa", chosen->name);
    PyModule_AddIntConstant(module, "max_dim", kMaxDim);
    return module;
}
