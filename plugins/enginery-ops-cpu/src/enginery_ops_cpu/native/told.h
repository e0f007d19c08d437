// Tells the calls of a thread to whoever records a step and makes them again: `OpSpec.record_calls`, docs/write-an-op.md.
// Copied in enginery-attn-cpu: a plugin is compiled from its own files alone, with no header of the core or of another plugin.
#pragma once

#include <Python.h>

namespace told {

// The list that calls of this thread go to. Null: nobody records.
inline PyObject *&calls() {
    static thread_local PyObject *list = nullptr;
    return list;
}

// record_calls(list or None)
inline PyObject *record(PyObject *, PyObject *list) {
    if (list != Py_None && !PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "record_calls takes a list, or None");
        return nullptr;
    }
    PyObject *before = calls();
    calls() = list == Py_None ? nullptr : list;
    Py_XINCREF(calls());
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

// What a function of the module has returned; if it did not fail and somebody records, with (function, arguments) appended to the list.
inline PyObject *after(PyObject *result, PyObject *module, const char *name, PyObject *const *arguments, Py_ssize_t count) {
    if (!result || !calls()) return result;
    PyObject *function = PyObject_GetAttrString(module, name), *given = PyTuple_New(count), *call = PyTuple_New(2);
    if (given) {
        for (Py_ssize_t i = 0; i < count; i++) {
            Py_INCREF(arguments[i]);
            PyTuple_SetItem(given, i, arguments[i]);
        }
    }
    bool done = function && given && call;
    if (done) {
        PyTuple_SetItem(call, 0, function);
        PyTuple_SetItem(call, 1, given);
        done = PyList_Append(calls(), call) == 0;
    } else {
        Py_XDECREF(function);
        Py_XDECREF(given);
    }
    Py_XDECREF(call);
    if (done) return result;
    Py_DECREF(result);
    return nullptr;
}

}  // namespace told

// A function of the module as its table has it: it tells its calls.
#define TOLD(name)                                                                                              \
    (PyCFunction)(void *)+[](PyObject *module, PyObject *const *arguments, Py_ssize_t count) -> PyObject * {    \
        return told::after(name(module, arguments, count), module, #name, arguments, count);                    \
    }
