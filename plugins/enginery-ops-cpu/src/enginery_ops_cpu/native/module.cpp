// The module `_kernels`: chooses the instruction set when it is imported, takes addresses and sizes, shares the work among threads.
//
// Callers check dtypes, shapes and strides; only what would be read from tensors (ids, slots) is checked here, before anything is
// written. Python's limited API, so that one build serves every version from 3.11 on.

#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"
#include "told.h"

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_bf16;
#endif

namespace {

const int MOST_ARGUMENTS = 24;
const int64_t UNSHARED = 1 << 16;  // bytes that one thread reads in the time that it takes to wake another
const int64_t KEEPS_LOCK = 1 << 18;  // bytes; a call of less work keeps Python's lock, which costs less than to give it away

const Kernels *chosen;

// The sets that this CPU has, the best first.
int supported(const Kernels *found[4]) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found[count++] = &kernels_avx512_bf16;
    if (avx512) found[count++] = &kernels_avx512;
    if (avx2) found[count++] = &kernels_avx2;
#endif
    found[count++] = &kernels_generic;
    return count;
}

// Arguments as whole numbers; `eps`, if wanted, is the last and a float.
bool read(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int64_t *numbers, float *eps = nullptr) {
    if (given != wanted + (eps != nullptr)) {
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, was given %zd", wanted + (eps != nullptr), given);
        return false;
    }
    for (Py_ssize_t i = 0; i < wanted; i++) numbers[i] = PyLong_AsLongLong(args[i]);
    if (eps) *eps = (float)PyFloat_AsDouble(args[wanted]);
    return !PyErr_Occurred();
}

template <class T>
T *address(int64_t number) {
    return reinterpret_cast<T *>(static_cast<intptr_t>(number));
}

PyObject *unknown_dtype(int64_t dtype) {
    return PyErr_Format(PyExc_ValueError, "%s has no kernel for dtype %lld", chosen->name, (long long)dtype);
}

bool outside(const int64_t *places, int64_t count, int64_t end, const char *what) {
    for (int64_t i = 0; i < count; i++) {
        if (places[i] < 0 || places[i] >= end) {
            PyErr_Format(PyExc_IndexError, "%s %lld is not in 0..%lld", what, (long long)places[i], (long long)end - 1);
            return true;
        }
    }
    return false;
}

template <class Of>
struct Call {
    void (*kernel)(const Of &, int64_t, int64_t);
    Of of;
};

// Run the kernel over [0, total), which takes as long as to read `bytes` for each. Pieces of it are multiples of `least_piece`.
template <class Of>
void spread(const Call<Of> &call, int64_t total, int64_t bytes, int64_t least_piece = 1) {
    const int64_t useful = total * bytes / UNSHARED;
    const int count = useful < 2 ? 1 : useful < threads::most() ? (int)useful : threads::most();
    int64_t piece = count > 1 ? total / (count * 8) : total;
    if (piece * bytes < UNSHARED / 4) piece = UNSHARED / 4 / bytes;
    piece = (piece / least_piece + 1) * least_piece;
    auto work = [](void *given, int64_t begin, int64_t end) {
        const Call<Of> *own = static_cast<const Call<Of> *>(given);
        own->kernel(own->of, begin, end);
    };
    threads::run_pieces(count, total, piece, work, const_cast<Call<Of> *>(&call));
}

// Do `work`, without Python's lock if it takes long.
template <class Work>
PyObject *done(int64_t bytes, Work work) {
    if (bytes < KEEPS_LOCK) {
        work();
    } else {
        Py_BEGIN_ALLOW_THREADS
        work();
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

template <class Of>
PyObject *spread_and_return(const Call<Of> &call, int64_t total, int64_t bytes) {
    return done(total * bytes, [&] { spread(call, total, bytes); });
}

int64_t size_of(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

bool has(int64_t dtype) { return dtype >= 0 && dtype < NUM_DTYPES; }

// Memory of this thread, at least so large: it only grows, and is freed when the thread ends.
void *scratch(int64_t bytes) {
    struct Memory {
        void *at = nullptr;
        int64_t bytes = 0;
        ~Memory() { free(at); }
    };
    static thread_local Memory memory;
    if (memory.bytes < bytes) {
        free(memory.at);
        memory.bytes = (bytes + 4095) / 4096 * 4096;
        memory.at = aligned_alloc(64, memory.bytes);
        if (!memory.at) memory.bytes = 0;
    }
    return memory.at;
}

PyObject *linear(PyObject *, PyObject *const *args, Py_ssize_t given) {
    int64_t a[MOST_ARGUMENTS];
    if (!read(args, given, 9, a)) return nullptr;
    if (!has(a[0]) || !chosen->linear[a[0]]) return unknown_dtype(a[0]);
    const int64_t M = a[5], N = a[6], K = a[7];
    if (!M) Py_RETURN_NONE;
    void *packed = scratch(chosen->packed_bytes[a[0]](M, K));
    if (!packed) return PyErr_NoMemory();
    const Pack pack = {address<void>(a[1]), packed, M, K, a[8]};
    const Linear of = {packed, address<void>(a[2]), address<void>(a[3]), address<void>(a[4]), M, N, K};
    const int64_t bytes = K * size_of(a[0]), longer = M > 4 ? M / 4 : 1;  // more rows take longer than reading the weight
    return done(N * bytes * longer, [&] {
        spread(Call<Pack>{chosen->pack[a[0]], pack}, M, 2 * bytes, chosen->tile_rows);
        spread(Call<Linear>{chosen->linear[a[0]], of}, N, bytes * longer, M > 64 ? 64 : 8);
    });
}

PyObject *norm(PyObject *, PyObject *const *args, Py_ssize_t given) {
    int64_t a[MOST_ARGUMENTS];
    float eps;
    if (!read(args, given, 10, a, &eps)) return nullptr;
    if (!has(a[0]) || !chosen->norm[a[0]]) return unknown_dtype(a[0]);
    const Norm of = {address<void>(a[1]), address<void>(a[2]), address<void>(a[3]), address<void>(a[4]), a[6], a[7], a[8], a[9], eps};
    return spread_and_return(Call<Norm>{chosen->norm[a[0]], of}, a[5], of.C * 8);
}

PyObject *rotate(PyObject *, PyObject *const *args, Py_ssize_t given) {
    int64_t a[MOST_ARGUMENTS];
    float eps;
    if (!read(args, given, 20, a, &eps)) return nullptr;
    if (!has(a[0]) || !has(a[1]) || !chosen->rotate[a[0]][a[1]]) return unknown_dtype(a[has(a[0])]);
    const int64_t *slots = address<int64_t>(a[7]), num_slots = a[8], tokens = a[9];
    const Rotate of = {address<void>(a[2]), address<void>(a[3]), address<void>(a[4]), address<void>(a[5]), address<void>(a[6]), slots,
                       a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19], eps};
    if (of.keys && outside(slots, tokens, num_slots, "slot")) return nullptr;
    return spread_and_return(Call<Rotate>{chosen->rotate[a[0]][a[1]], of}, tokens, (of.rotated + of.kv) * of.D * 8);
}

PyObject *gate(PyObject *, PyObject *const *args, Py_ssize_t given) {
    int64_t a[MOST_ARGUMENTS];
    if (!read(args, given, 6, a)) return nullptr;
    if (!has(a[0]) || !chosen->gate[a[0]]) return unknown_dtype(a[0]);
    const Gate of = {address<void>(a[1]), address<void>(a[2]), a[4], a[5]};
    return spread_and_return(Call<Gate>{chosen->gate[a[0]], of}, a[3], of.C * 16);
}

PyObject *greedy(PyObject *, PyObject *const *args, Py_ssize_t given) {
    int64_t a[MOST_ARGUMENTS];
    if (!read(args, given, 6, a)) return nullptr;
    if (!has(a[0]) || !chosen->greedy[a[0]]) return unknown_dtype(a[0]);
    const Greedy of = {address<void>(a[1]), address<int64_t>(a[2]), a[4], a[5]};
    return spread_and_return(Call<Greedy>{chosen->greedy[a[0]], of}, a[3], of.N * size_of(a[0]));
}

struct Embed {
    const char *table;
    const int64_t *ids;
    char *out;
    int64_t bytes, stride;
};

PyObject *embed(PyObject *, PyObject *const *args, Py_ssize_t given) {
    int64_t a[MOST_ARGUMENTS];
    if (!read(args, given, 7, a)) return nullptr;
    const Embed of = {address<char>(a[0]), address<int64_t>(a[1]), address<char>(a[2]), a[5], a[6]};
    if (outside(of.ids, a[4], a[3], "row")) return nullptr;
    const auto copy = [](const Embed &own, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) memcpy(own.out + i * own.bytes, own.table + own.ids[i] * own.stride, own.bytes);
    };
    return spread_and_return(Call<Embed>{copy, of}, a[4], of.bytes * 2);
}

PyMethodDef methods[] = {
    {"linear", TOLD(linear), METH_FASTCALL, "linear(dtype, x, w, bias, out, M, N, K, x_stride)"},
    {"norm", TOLD(norm), METH_FASTCALL,
     "norm(dtype, x, residual, weight, out, rows, C, x_stride, residual_stride, num_weights, eps)"},
    {"rotate", TOLD(rotate), METH_FASTCALL,
     "rotate(dtype, kept_dtype, heads, weight, cos_sin, keys, values, slots, num_slots, tokens, rotated, kv, D, R, token_stride, "
     "head_stride, weight_stride, angle_stride, slot_stride, slot_head_stride, eps)"},
    {"gate", TOLD(gate), METH_FASTCALL, "gate(dtype, x, out, rows, C, x_stride)"},
    {"greedy", TOLD(greedy), METH_FASTCALL, "greedy(dtype, logits, ids, rows, N, stride)"},
    {"embed", TOLD(embed), METH_FASTCALL, "embed(table, ids, out, num_rows, num_ids, row_bytes, stride_bytes)"},
    {"record_calls", told::record, METH_O, "record_calls(list or None): append (function, arguments) of each call of this thread to it."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", "Compiled kernels: addresses and sizes in, nothing out.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__kernels(void) {
    const Kernels *found[4];
    const int count = supported(found);
    const char *asked = getenv("ENGINERY_CPU_ISA");
    PyObject *names = PyTuple_New(count);
    if (!names) return nullptr;
    for (int i = 0; i < count; i++) {
        PyTuple_SetItem(names, i, PyUnicode_FromString(found[i]->name));
        if (asked && !strcmp(asked, found[i]->name)) chosen = found[i];
    }
    if (!asked || !*asked) chosen = found[0];
    if (!chosen) {
        PyErr_Format(PyExc_ImportError, "ENGINERY_CPU_ISA=%s is none of what this CPU has: %R", asked, names);
        return nullptr;
    }
    PyObject *module = PyModule_Create(&definition);
    if (!module) return nullptr;
    PyModule_AddStringConstant(module, "isa", chosen->name);
    PyModule_AddObject(module, "supported", names);
    PyModule_AddIntConstant(module, "has_float16", chosen->linear[FLOAT16] != nullptr);
    PyModule_AddIntConstant(module, "has_threads", threads::runtime().found);
    return module;
}
